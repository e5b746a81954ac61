"""Llama and the checkpoints that share its ``model_type``: SmolLM2, Vicuna, TinyLlama, Yi, DeepSeek-LLM ..."""

from .rotary import SEAMS, RotaryAdapter


class LlamaAdapter(RotaryAdapter):
    """One rotary module at model level, grouped-query attention, channel pairs in halves."""

    model_types = ("llama",)
    seams = SEAMS
