"""Moving cached keys to other positions, without reading their tokens again.

Rotations add up, R(a) R(b) = R(a + b): a cached key that is turned by ``delta`` tokens' worth of its frequencies is the
key of a token that stands ``delta`` later. That is exact, whatever the table, and leaves the length of a key alone
(``attention_scaling`` is not applied again). What no rotation changes: from the second layer on, keys and values have
*seen* the tokens that stood before theirs when they were computed, and go on carrying that.

Which channels turn, and by which table, is asked of the model: for keys of single tokens at two positions. A token that
is alone attends to itself only, so the two differ by the rotation and by nothing else. Every call therefore costs a
forward pass over a few such tokens (not on BLOOM and MPT, and not where keys are cached unrotated).

Sources: Su et al. 2021, section 3.2.2; positions counted in the cache: Xiao et al. 2023, arXiv:2309.17453; segments
that are cached apart: Ma et al. 2024, arXiv:2409.15355.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rope_ext.api import patch_of, unwrap
from rope_ext.attention.mapped_cache import MappedLayer
from rope_ext.registry import compat

MOVABLE = (DynamicLayer, DynamicSlidingWindowLayer, MappedLayer)
"""Layers of a cache that hold keys and values as they come, and nothing else that outlives their replacement."""

ASKED, FAR = 9, 997
"""Tokens that a model is asked about, and the second position that each is given, in tokens."""


def shift(
    model: nn.Module, cache: DynamicCache, delta: int, *, start: int = 0, stop: int | None = None
) -> DynamicCache:
    """Move the cached keys of some tokens, as if the tokens had stood ``delta`` positions later; in place.

    Where keys are cached unrotated and positions are counted in the cache (qk and scores methods), nothing changes.

    Args:
        model: the model (or a wrapper) that filled the cache, with the method it had then, in eval mode.
        cache: keys of shape (batch, kv_heads, length, head_dim) in each layer.
        delta: in tokens; negative for earlier.
        start: first token of every row that moves, as an index into the cache.
        stop: the one behind the last; by default all from ``start`` move.

    Returns:
        The same ``cache``; its tensors are new ones.

    Raises:
        ValueError: an index out of range, a model whose cached keys are not turned by their positions (or not by them
            alone), or a cache whose keys cannot be moved. The cache is untouched then.
        TypeError: something that is not a cache or not a whole number.
    """
    stop = _check(cache, delta, start, stop)
    for layer, turn in _layers(cache, _turns(model)):
        moved = turn(layer.keys[:, :, start:stop], delta)
        layer.keys = torch.cat((layer.keys[:, :, :start], moved, layer.keys[:, :, stop:]), dim=2)
    return cache


def drop(model: nn.Module, cache: DynamicCache, start: int, stop: int) -> DynamicCache:
    """Take the tokens ``start`` .. ``stop`` - 1 out of the cache and move the later ones up to them; in place.

    Positions are 0 .. n-1 again, and ``forward`` and ``generate`` go on as if they had been counted without the dropped
    tokens. The keys and values of later tokens have *seen* the dropped ones, though, and keep what they took from them:
    this is not the cache of a prompt that never had them. Each dropped index counts as one position in every row, so
    do not drop padding.

    Args, returns and raises as :func:`shift`.
    """
    _check(cache, 0, start, stop)
    for layer, turn in _layers(cache, _turns(model)):
        layer.keys = torch.cat((layer.keys[:, :, :start], turn(layer.keys[:, :, stop:], start - stop)), dim=2)
        layer.values = torch.cat((layer.values[:, :, :start], layer.values[:, :, stop:]), dim=2)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = layer.keys.shape[2]
    return cache


def concat(model: nn.Module, caches: Sequence[DynamicCache]) -> DynamicCache:
    """One cache of several segments, each computed on its own from position 0 and moved behind those before it.

    No segment has seen another: its keys and values are those of a model that reads it alone, at its new positions.

    Args:
        model: as for :func:`shift`.
        caches: with equal batch sizes; empty ones are passed over. They stay as they are.

    Returns:
        A new cache with copies, in layers as the model makes them: sliding ones keep what their window can see.

    Raises:
        ValueError: as :func:`shift`; also no caches at all, and layers that differ in number, shape or dtype.
        TypeError: as :func:`shift`.
    """
    if not caches:
        raise ValueError("`caches` is empty; give at least one cache.")
    lengths, turns = [_length(cache) for cache in caches], _turns(model)
    starts = accumulate(lengths[:-1], initial=0)
    segments = [(_layers(cache, turns), start) for cache, start in zip(caches, starts, strict=True)]
    filled = [(layers, start) for layers, start in segments if layers]
    joined = DynamicCache(config=unwrap(model).config)
    for index, turn in enumerate(turns if filled else ()):
        parts = [(layers[index][0], start) for layers, start in filled]
        kinds = {(*layer.keys[:, :, 0].shape, layer.keys.dtype) for layer, _ in parts}
        if len(kinds) > 1:
            raise ValueError(f"`caches` differ in layer {index}: (batch, kv_heads, head_dim, dtype) are {kinds}.")
        keys = torch.cat([turn(layer.keys, start) for layer, start in parts], dim=2)
        joined.update(keys, torch.cat([layer.values for layer, _ in parts], dim=2), index)
    return joined


class _Turn(NamedTuple):
    """The channels of a layer's keys that turn: ``keys[..., first]`` with ``keys[..., second]``, pair by pair.

    ``frequencies`` has shape (pairs,), in radians per token.
    """

    first: slice
    second: slice
    frequencies: Tensor

    def __call__(self, keys: Tensor, delta: int) -> Tensor:
        """Keys (..., head_dim) as they are ``delta`` tokens later; in fp32 or better, whatever their dtype."""
        if not (delta and self.frequencies.any()):
            return keys
        dtype, angles = torch.promote_types(keys.dtype, torch.float32), delta * self.frequencies.double()
        cos, sin = (part.to(dtype).to(keys.device) for part in (angles.cos(), angles.sin()))
        turned = keys.to(dtype, copy=True)
        a, b = keys[..., self.first].to(dtype), keys[..., self.second].to(dtype)
        turned[..., self.first], turned[..., self.second] = a * cos - b * sin, b * cos + a * sin
        return turned.to(keys.dtype)


_STILL = _Turn(slice(0), slice(0), torch.zeros(0))


def _ways(table: Tensor) -> Iterator[_Turn]:
    """How a table may turn the first channels of a head: pairs from the two halves, or neighbours; either way round."""
    pairs = len(table)
    for frequencies in (table, -table):
        yield _Turn(slice(pairs), slice(pairs, 2 * pairs), frequencies)
        yield _Turn(slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2), frequencies)


def _turns(model: nn.Module) -> list[_Turn]:
    """How each layer's keys turn with their positions; ValueError where they do not, or that is not all."""
    inner = unwrap(model)
    patch, kind = patch_of(inner), inner.config.model_type
    if getattr(inner.config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder; keys can be moved in the cache of a single stack only.")
    if patch is not None and patch.encoding.seam in ("qk", "scores"):
        if any(table.any() for table in _tables(inner)):  # dynamic as stock has it: turned, by a table for each call
            raise ValueError(f"{kind}: cached keys depend on the length of the input ({patch.encoding.name}).")
        return [_STILL] * inner.config.get_text_config(decoder=True).num_hidden_layers
    if patch is not None and patch.encoding.seam != "rotary":
        raise ValueError(f"{patch.encoding.name} is no rotary method: there is no rotation to move cached keys with.")
    rotations: list[Any] = [module.rotation for module in inner.modules() if "rotation" in module.__dict__]
    if rotations:  # BLOOM, MPT: what turns their keys is ours
        return [next(_ways(each.frequencies.cpu())) if each else _STILL for each in rotations]
    return _asked(inner)


def _asked(model: PreTrainedModel) -> list[_Turn]:
    """For each layer, the way in which one of the model's tables explains what positions do to its keys."""
    kind, base, tables = model.config.model_type, model.base_model, _tables(model)
    if model.training:
        raise ValueError(f"{kind} is in training mode, where dropout hides what positions do; call `model.eval()`.")
    if not tables or "position_ids" not in inspect.signature(type(base).forward).parameters:
        raise ValueError(f"{kind} has no rotary module with `inv_freq`: there is no rotation to move cached keys with.")
    cache, size = DynamicCache(config=model.config), model.config.get_text_config(decoder=True).vocab_size
    tokens = torch.arange(1, ASKED + 1, device=model.device) * size // (ASKED + 1)
    positions = torch.cat((torch.zeros_like(tokens), torch.full_like(tokens, FAR)))
    with torch.no_grad():
        given: dict[str, Any] = {compat().cache_argument(base): cache, "use_cache": True}
        base(input_ids=tokens.repeat(2)[:, None], position_ids=positions[:, None], **given)
    _length(cache)
    ways = [_STILL, *(way for table in tables for way in _ways(table))]
    turns: list[_Turn] = []
    layer: Any
    for layer in cache.layers:
        near, far = layer.keys.chunk(2)
        fitting = [way for way in ways if 2 * len(way.frequencies) <= far.shape[-1]]
        error, index = min((_error(way(near, FAR), far), index) for index, way in enumerate(fitting))
        if not max(error, _error(*layer.values.chunk(2))) < 1e-3 + 4 * torch.finfo(far.dtype).eps:
            raise ValueError(
                f"{kind}: in layer {len(turns)}, what positions do to the cache is not a rotation of the keys by a "
                "table of the model; they cannot be moved."
            )
        turns.append(fitting[index])
    if all(turn is _STILL for turn in turns) and any(table.max() * FAR > 0.1 for table in tables):  # not "nope" then
        raise ValueError(f"{kind} does not turn its keys: its rotary module is not used.")
    return turns


def _error(one: Tensor, other: Tensor) -> float:
    """The median over tokens of the relative difference: experts may take a token otherwise after another rounding."""
    off, size = (each.float().flatten(1).norm(dim=1) for each in (one - other, other))
    return float((off / size).median())


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """The frequencies of all rotary modules; ValueError where they depend on more than a position in tokens."""
    kind, tables = model.config.model_type, []
    for module in model.modules():
        named = module.named_buffers(recurse=False)
        own = [table.cpu() for name, table in named if name.endswith("inv_freq") and "original" not in name]
        if not own:
            continue
        types = getattr(module, "rope_type", None)
        stretched = {"dynamic", "longrope"} & set(types.values() if isinstance(types, dict) else [types])
        if stretched:
            raise ValueError(f"{kind}: cached keys depend on the length of the input (rope_type {stretched.pop()!r}).")
        if getattr(module, "mrope_section", None):
            raise ValueError(f"{kind}: positions have several axes and are not counted in tokens.")
        tables += own
    return tables


def _layers(cache: DynamicCache, turns: list[_Turn]) -> list[tuple[Any, _Turn]]:
    """(layer, its turn) for every layer; none for an empty cache."""
    if not _length(cache):
        return []
    if len(cache.layers) != len(turns):
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model {len(turns)}: it is another model's.")
    return list(zip(cache.layers, turns, strict=True))


def _check(cache: DynamicCache, delta: int, start: int, stop: int | None) -> int:
    """``stop`` as a number; what is wrong with the arguments is raised."""
    length = _length(cache)
    stop = length if stop is None else stop
    for name, value in {"delta": delta, "start": start, "stop": stop}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"`{name}` must be a whole number of tokens, got {value!r}.")
    if not 0 <= start <= stop <= length:
        raise ValueError(f"0 <= start <= stop <= {length} (cached tokens) must hold; `start`={start}, `stop`={stop}.")
    return stop


def _length(cache: DynamicCache) -> int:
    """Tokens in the cache; ValueError unless every layer holds all of them, as they are."""
    if not isinstance(cache, Cache):
        raise TypeError(f"`cache` must be a DynamicCache, got {type(cache).__name__}.")
    if not isinstance(cache, DynamicCache) or cache.offloading:
        raise ValueError(f"keys can be moved in a DynamicCache without offloading, not in this {type(cache).__name__}.")
    lengths = set() if cache.layers else {0}
    layer: Any
    for index, layer in enumerate(cache.layers):
        if type(layer) not in MOVABLE:
            raise ValueError(f"layer {index} of the cache is a {type(layer).__name__}, whose keys cannot be moved.")
        held, seen = layer.keys.shape[2] if layer.is_initialized else 0, layer.get_seq_length()
        if held != seen:
            raise ValueError(
                f"layer {index} of the cache slides and holds the last {held} of {seen} tokens: what it has let go "
                "cannot be moved or come back. Fill a `DynamicCache()` made without a config: it keeps everything."
            )
        lengths.add(seen)
    if len(lengths) > 1:
        raise ValueError(f"the layers of the cache hold different numbers of tokens: {sorted(lengths)}.")
    return lengths.pop()
