"""Every difference between the supported transformers versions (5.17 up to the newest 5.x) is dealt with here."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this model's ``forward`` takes a KV cache; ``past_key_values`` became ``cache`` in 5.x."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
