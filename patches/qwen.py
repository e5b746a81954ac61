"""Qwen2, Qwen2.5, Qwen3 and their mixtures of experts."""

from typing import ClassVar

from .rotary import SEAMS, RotaryAdapter


class QwenAdapter(RotaryAdapter):
    """As Llama; Qwen3 has its own ``head_dim`` and normalises q and k before they are rotated."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    seams: ClassVar[frozenset[str]] = SEAMS
