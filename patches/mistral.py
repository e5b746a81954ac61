"""Mistral, Mistral-Nemo and derivatives, with or without a sliding window."""

from typing import ClassVar

from .rotary import SEAMS, RotaryAdapter


class MistralAdapter(RotaryAdapter):
    """As Llama; Nemo has its own ``head_dim``, 7B v0.1 a sliding window."""

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)
    seams: ClassVar[frozenset[str]] = SEAMS
