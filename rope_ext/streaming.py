"""A cache that stays bounded: the keys that a pattern of window and sinks can still see, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from rope_ext.api import patch_of, unwrap


class StreamingLayer(DynamicLayer):
    """Holds the first ``sinks`` tokens and the last ``window`` - 1; memory O(sinks + window) however long the text.

    Keys and values have shape (batch, kv_heads, kept, head_dim).
    """

    window: int
    sinks: int
    cumulative_length: int

    is_sliding = True
    is_croppable = False

    def __init__(self, window: int, sinks: int) -> None:
        super().__init__()
        self.window, self.sinks, self.cumulative_length = window, sinks, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All that is kept and the new tokens; afterwards what the next token can see is kept."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[-2]
        if keys.shape[-2] > self.sinks + self.window - 1:
            self.keys, self.values = self._kept(keys), self._kept(values)
        return keys, values

    def _kept(self, states: Tensor) -> Tensor:
        last = states.shape[-2] - (self.window - 1)
        return torch.cat((states[..., : self.sinks, :], states[..., last:, :]), -2)

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys of the coming call, how many tokens were let go before it)."""
        kept = 0 if self.keys is None else self.keys.shape[-2]
        return kept + query_length, self.cumulative_length - kept

    def get_max_length(self) -> int:
        """What it holds at most, in tokens."""
        return self.sinks + self.window - 1


def streaming_cache(model: nn.Module) -> Cache:
    """An empty bounded cache for a model whose method has a ``window``; pass it to ``generate`` or ``forward``.

    What comes out is what the default cache gives: keys that are let go are those that the pattern hides. For one text
    per row, without padding.

    Raises:
        ValueError: the model is not patched, its method has no window, or it has global tokens, which see everything.
    """
    inner = unwrap(model)
    patch = patch_of(inner)
    window, sinks, tokens = getattr(patch.encoding, "pattern", (None, 0, ())) if patch else (None, 0, ())
    if patch is None or window is None:
        raise ValueError(
            "streaming_cache needs a model patched with a window, for example "
            'patch_model(model, "rope", window=1024, sinks=4).'
        )
    if tokens:
        raise ValueError(f"{patch.encoding.name}: `global_tokens` see every key, so none can be let go.")
    if inner.config.is_encoder_decoder:
        raise ValueError(f"{inner.config.model_type} is an encoder-decoder; streaming needs a single stack.")
    layers = inner.config.get_text_config(decoder=True).num_hidden_layers
    return Cache(layers=[StreamingLayer(window, sinks) for _ in range(layers)])
