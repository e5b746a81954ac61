"""Cached keys that stay mapped from one decoding step to the next, beside the raw ones.

While queries stay in one stage of a qk method, and always with a zoned one, a step has to map its own keys only. Mapped
keys belong to the tensor of raw keys and live as long as it does: whoever replaces that (beams, crops, another prompt,
a copy) has dropped them, and who changes it in place as well. Rows that are padded are kept each for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from rope_ext.registry import compat


@dataclass
class _Form:
    """Keys as one stage maps them: the first ``done``, in room for more; ``read``: in this step."""

    stage: Any
    done: int
    keys: Tensor
    read: bool = True


@dataclass
class Mapped:
    """What raw keys have been mapped to."""

    version: int | None
    forms: dict[int, _Form] = field(default_factory=dict)
    parts: dict[tuple[int, int, int], Mapped] = field(default_factory=dict)
    """Of rows that count for themselves: (first row, end of the rows, first key) -> theirs."""

    def __call__(self, form: int, stage: Any, keys: Tensor, turn: Callable[[int], Tensor]) -> Tensor:
        """All keys in one of the forms that queries of ``stage`` see; ``turn(start)`` maps those from ``start`` on."""
        length = keys.shape[2]
        held = self.forms.get(form)
        if held is None or held.stage != stage or held.done > length or _is_frozen(held.keys):
            held = self.forms[form] = _Form(stage, 0, keys[:, :, :0])
        if held.keys.shape[2] < length:
            room = keys.new_empty(*keys.shape[:2], length + max(64, length // 8), keys.shape[3])
            room[:, :, : held.done] = held.keys[:, :, : held.done]
            held.keys = room
        if held.done < length:
            held.keys[:, :, held.done : length] = turn(held.done)
            held.done = length
        held.read = True
        return held.keys[:, :, :length]

    def taken_over(self, version: int | None) -> Mapped:
        """For longer keys that take the place of these: what was read since the last time."""
        forms = {name: form for name, form in self.forms.items() if form.read}
        for form in forms.values():
            form.read = False
        parts = {place: part.taken_over(version) for place, part in self.parts.items()}
        return Mapped(version, forms, {place: part for place, part in parts.items() if part.forms})


_mapped: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Raw keys -> Mapped."""


def _is_frozen(keys: Tensor) -> bool:
    """Whether they were made in an inference mode that has ended."""
    return keys.is_inference() and not torch.is_inference_mode_enabled()


def _version(keys: Tensor) -> int | None:
    """Changes with the numbers; tensors of an inference mode do not count."""
    return None if keys.is_inference() else keys._version


class MappedLayer(DynamicLayer):
    """A growing cache layer, as transformers has it, whose keys take what they were mapped to along as they grow."""

    @classmethod
    def taking_over(cls, layer: DynamicLayer) -> MappedLayer:
        """The same cache layer, with what it holds."""
        made = cls()
        made.__dict__.update(layer.__dict__)
        return made

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As transformers' own."""
        before = getattr(self, "keys", None)
        held: Mapped | None = None
        if isinstance(before, Tensor) and before in _mapped:
            held = _mapped.pop(before)
            held = held if held.version == _version(before) else None
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        _mapped[keys] = Mapped(_version(keys)) if held is None else held.taken_over(_version(keys))
        return keys, values


def mapped_of(keys: Tensor) -> Mapped | None:
    """What is kept with these keys, all of those that a cache layer holds; None where nothing can be."""
    return None if torch.is_grad_enabled() else _mapped.get(keys)


def part_of(keys: Tensor, rows: slice, columns: slice) -> Tensor:
    """The keys of some rows, ``keys[rows, :, columns]``, for which :func:`mapped_of` finds what is kept of theirs."""
    part, held = keys[rows, :, columns], mapped_of(keys)
    if held is not None:
        _mapped[part] = held.parts.setdefault((rows.start, rows.stop, columns.start), Mapped(held.version))
    return part


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
