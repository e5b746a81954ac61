"""Cached keys that stay mapped from one decoding step to the next, beside the raw ones.

While queries stay in one stage of a qk method, and always with a zoned one, a step has to map its own keys only. Mapped
keys live in the cache layer and are worth what its raw keys are worth: whoever replaces those (beams, crops, another
prompt) has dropped them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from rope_ext.registry import compat

HOLDER = "_rope_ext_holder"
"""The attribute of a key tensor that refers to the cache layer it comes from."""


@dataclass
class _Form:
    """Keys as one stage maps them: the first ``done``, in room for more."""

    stage: Any
    done: int
    keys: Tensor


class MappedLayer(DynamicLayer):
    """A growing cache layer, as transformers has it, that can also hold its keys as a stage of a method maps them."""

    def __init__(self) -> None:
        super().__init__()
        self._known: Tensor | None = None
        self._forms: dict[int, _Form] = {}

    @classmethod
    def taking_over(cls, layer: DynamicLayer) -> MappedLayer:
        """The same cache layer, with what it holds."""
        made = cls()
        made.__dict__.update(layer.__dict__)
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers' own; the keys that it gives know where they are kept."""
        if self.keys is not self._known:
            self._forms.clear()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._known = keys
        setattr(keys, HOLDER, weakref.ref(self))
        return keys, values

    def mapped(self, form: int, stage: Any, keys: Tensor, turn: Callable[[int], Tensor]) -> Tensor:
        """All keys in one of the forms that queries of ``stage`` see; ``turn(start)`` maps those from ``start`` on."""
        length = keys.shape[2]
        held = self._forms.get(form)
        if held is None or held.stage != stage or held.done > length:
            held = self._forms[form] = _Form(stage, 0, keys[:, :, :0])
        if held.keys.shape[2] < length:
            room = keys.new_empty(*keys.shape[:2], length + max(64, length // 8), keys.shape[3])
            room[:, :, : held.done] = held.keys[:, :, : held.done]
            held.keys = room
        if held.done < length:
            held.keys[:, :, held.done : length] = turn(held.done)
            held.done = length
        return held.keys[:, :, :length]


def holder_of(keys: Tensor) -> MappedLayer | None:
    """The cache layer that these keys come from, all of them, if it can hold mapped ones."""
    found = getattr(keys, HOLDER, None)
    layer = found() if found is not None else None
    return layer if layer is not None and layer.keys is keys and not torch.is_grad_enabled() else None


def keep_mapped(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a model's forward: growing layers of the cache it is given become MappedLayers."""
    cache = kwargs.get(compat().cache_argument(model))
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if isinstance(cache, DynamicCache):
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = MappedLayer
        layers: list[Any] = cache.layers
        layers[:] = [MappedLayer.taking_over(each) if type(each) is DynamicLayer else each for each in layers]
