"""Every difference between the supported transformers versions (5.17 up to the newest 5.x) is dealt with here."""

from __future__ import annotations

import inspect

from transformers import PreTrainedConfig, PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this model's ``forward`` takes a KV cache; ``past_key_values`` became ``cache`` in 5.x."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def scales_decoder_output(config: PreTrainedConfig) -> bool:
    """Whether a T5-like model scales what its head is given by d_model^-0.5; UMT5 had no entry for it before 5.24."""
    return bool(getattr(config, "scale_decoder_outputs", config.tie_word_embeddings))
