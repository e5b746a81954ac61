"""Llama and the checkpoints that share its ``model_type``: SmolLM2, Vicuna, TinyLlama, Yi, DeepSeek-LLM ..."""

from typing import ClassVar

from .rotary import SEAMS, RotaryAdapter


class LlamaAdapter(RotaryAdapter):
    """One rotary module at model level, grouped-query attention, channel pairs in halves."""

    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    seams: ClassVar[frozenset[str]] = SEAMS
