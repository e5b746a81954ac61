"""Caches of prompts: room from the start, so that nothing is copied; cut, copied and stacked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


class _Layer(DynamicLayer):
    """Keys and values in one buffer, so that a step copies nothing that is there; a cut costs nothing."""

    def __init__(self, room: int = 0) -> None:
        super().__init__()
        self._room = room

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers: list[Tensor] = []
        used = self.get_seq_length()
        end = used + key_states.shape[-2]
        new = (key_states, value_states)
        if not self._buffers or end > self._buffers[0].shape[-2]:
            old = self._buffers
            self._buffers = [each.new_empty(*each.shape[:2], max(end, self._room), each.shape[3]) for each in new]
            for buffer, before in zip(self._buffers, old, strict=False):
                buffer[:, :, :used] = before[:, :, :used]
            self._room = 2 * end
        for buffer, states in zip(self._buffers, new, strict=True):
            buffer[:, :, used:end] = states
        self.keys, self.values = (buffer[:, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]


def new_cache(room: int) -> Any:
    """An empty cache for so many tokens. Sliding layers keep all keys, too: it can be cut, and masks do the rest."""
    return Cache(layer_class_to_replicate=partial(_Layer, room))  # type: ignore[arg-type]


def cut(cache: Any, length: int) -> None:
    for layer in cache.layers:
        layer.cut(length)


def beginning(cache: Any, length: int, room: int) -> Any:
    """Another cache that begins with the first ``length`` tokens of this one."""
    return stack([cache], room, length)


def stack(caches: Sequence[Any], room: int, length: int | None = None) -> Any:
    """One cache of several, the shorter ones padded on the left."""
    made = new_cache(room)
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = _Layer(room)
        if layers[0].is_initialized:
            layer.update(*(_pad([getattr(each, name)[:, :, :length] for each in layers]) for name in _STATES))
        made.layers.append(layer)
    return made


_STATES = ("keys", "values")


def _pad(states: Sequence[Tensor]) -> Tensor:
    longest = max(each.shape[2] for each in states)
    return torch.cat([F.pad(each, (0, 0, longest - each.shape[2], 0)) for each in states])


def can_be_cut(model: PreTrainedModel) -> bool:
    """Whether all layers keep keys and values of each token, so that a cache can be cut anywhere."""
    layers = DynamicCache(config=model.config).layers
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
