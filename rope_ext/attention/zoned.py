"""Zoned methods by fused kernels: each zone of the pairs in tiles, joined by the logarithms of their sums.

A zone's keys are one range for every query, so it falls into tiles that need no mask (:mod:`rope_ext.attention.tiles`).
A kernel gives each tile's output and log-sum-exp; with those, outputs of different keys add up exactly, and with those
of all keys together each tile's backward pass gives its part of the gradients. The work is that of plain causal
attention. Kernels that give the log-sum-exp are taken on the CPU only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext.attention.layout import Layout, Shared
from rope_ext.attention.mapped_cache import mapped_of
from rope_ext.attention.tiles import Tile, tiles
from rope_ext.encodings.raw import Encoder, Factors, turned_by
from rope_ext.encodings.scores import ZonedMethod

SMALLEST = 32
"""Tokens: where zones are cut smaller than that on average, fused kernels gain nothing."""


class Plan(NamedTuple):
    """How a call is computed.

    Attributes:
        parts: (a tile, the zone that its queries are turned for, the form of the keys that it reads).
        zones, forms: those that occur.
    """

    parts: list[tuple[Tile, int, int]]
    zones: list[int]
    forms: list[int]


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def plan(query: Tensor, value: Tensor, layout: Layout, encoder: Encoder, dropout: float) -> Plan | None:
    """How to compute a call by fused kernels; None where that cannot be done, or gains nothing.

    The layout is "plain", without sinks or global tokens, and all its rows have the same positions.
    """
    method = encoder.method
    if not isinstance(method, ZonedMethod) or dropout or query.device.type != "cpu" or not layout.causal:
        return None
    if query.shape[-1] != value.shape[-1]:
        return None
    found = layout.once((method, "plan"), lambda: _plan(layout, encoder))
    return found if (len(found.parts) - 8) * SMALLEST <= layout.q_length else None


def _plan(layout: Layout, encoder: Encoder) -> Plan:
    method = encoder.method
    assert isinstance(method, ZonedMethod)
    device = torch.device("cpu")
    first = int(layout.key_positions(device)[0, 0])
    last = torch.arange(layout.offset, layout.offset + layout.q_length) + 1
    seen = torch.zeros_like(last) if layout.window is None else (last - layout.window).clamp(min=0)
    parts: list[tuple[Tile, int, int]] = []
    high = last
    edges = [edge[0] - first for edge in method.edges(layout.query_positions(device), encoder.host)]
    for zone, edge in enumerate([*edges, seen]):
        low = torch.minimum(torch.maximum(edge, seen), high)
        form = method.zones(encoder.host)[0][zone][1]
        parts += [(tile, zone, form) for tile in tiles(low, high)]
        high = low
    return Plan(parts, sorted({zone for _, zone, _ in parts}), sorted({form for _, _, form in parts}))


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, encoder: Encoder, scale: float, plan: Plan
) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; ``plan`` is that of the call."""
    method = encoder.method
    assert isinstance(method, ZonedMethod)
    own, places = layout.query_positions(query.device), layout.key_positions(query.device)
    forms = method.zones(encoder.host)[1]
    size = 8 * (len(plan.zones) + len(plan.forms)) * layout.kv_length * encoder.host.rotary.dim
    shared: Shared[Factors] = layout.sharing(method, size)
    kept = mapped_of(key)

    def keys(form: int) -> Tensor:
        def turned(start: int) -> Tensor:
            make = lambda: method.key_factors(encoder, places[:, start:], form)  # noqa: E731
            return turned_by(key[:, :, start:], *shared(("keys", form, start), make))

        if forms[form] is None:
            return key
        return turned(0) if kept is None else kept(form, method, key, turned)

    def queries(zone: int) -> Tensor:
        factors = shared(("queries", zone), lambda: method.query_factors(encoder, own, zone))
        return turned_by(query.float() if sharper is None else query.float() * sharper, *factors).to(query.dtype)

    sharper = method.sharpness(own, encoder.host)
    sharper = None if sharper is None else sharper[:, None, :, None]
    output: Tensor = _Joined.apply((plan, scale), value, *map(queries, plan.zones), *map(keys, plan.forms))
    return output


def _part(x: Tensor, where: slice, heads: int, tile: Tile) -> Tensor:
    """Queries, keys or values of a tile, or what belongs to queries: a "full" tile's in groups of heads that share
    keys, the others' for every head, and turned round if the tile is "upper", which makes it a "lower" one.
    """
    x = x[:, :, where]
    if tile.shape == "full":
        return x.reshape(x.shape[0], heads, -1, *x.shape[3:])
    x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.flip(2) if tile.shape == "upper" else x


def _whole(x: Tensor, like: Tensor, tile: Tile) -> Tensor:
    """What :func:`_part` made of something of the shape of ``like``, back in its place; sums over heads that share."""
    if tile.shape == "full":
        return x.reshape(like.shape)
    x = x.flip(2) if tile.shape == "upper" else x
    return x.unflatten(1, (like.shape[1], -1)).sum(2) if x.shape[1] != like.shape[1] else x


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: tuple[Plan, float], value: Tensor, *turned: Tensor) -> Tensor:
        (plan, scale), query = given, turned[0]
        precise = torch.promote_types(query.dtype, torch.float32)
        total = torch.zeros_like(query, dtype=precise)
        logsum = torch.full(query.shape[:3], -torch.inf, dtype=precise)
        for tile, q, k, v, _ in _tiles_of(plan, query.shape[1], value, turned):
            output, own = _forward(q, k, v, 0.0, tile.shape != "full", scale=scale)
            so_far, sums = total[:, :, tile.rows], logsum[:, :, tile.rows]
            output, own = _whole(output, so_far, tile), _whole(own, sums, tile)
            both = torch.logaddexp(sums, own)
            so_far.mul_((sums - both).exp_()[..., None]).addcmul_(output, (own - both).exp_()[..., None])
            sums.copy_(both)
        total = total.to(query.dtype)
        ctx.given = given
        ctx.save_for_backward(total, logsum, value, *turned)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale = ctx.given
        total, logsum, value, *turned = ctx.saved_tensors
        sums = [torch.zeros_like(x, dtype=logsum.dtype) for x in (value, *turned)]
        for tile, q, k, v, (zone, form) in _tiles_of(plan, total.shape[1], value, turned):
            out, log, up = (_part(x, tile.rows, k.shape[1], tile) for x in (total, logsum, gradients[0]))
            found = _backward(up, q, k, v, out, log, 0.0, tile.shape != "full", scale=scale)
            places = (sums[1 + zone], tile.rows), (sums[1 + form], tile.columns), (sums[0], tile.columns)
            for gradient, (target, where) in zip(found, places, strict=True):
                part = target[:, :, where]
                part += _whole(gradient, part, tile)
        return (None, *(s.to(x.dtype) for s, x in zip(sums, (value, *turned), strict=True)))


def _tiles_of(
    plan: Plan, heads: int, value: Tensor, turned: Sequence[Tensor]
) -> Iterator[tuple[Tile, Tensor, Tensor, Tensor, tuple[int, int]]]:
    """(a tile, its queries, keys and values, which of ``turned`` the first two are part of)."""
    for tile, zone, form in plan.parts:
        which = plan.zones.index(zone), len(plan.zones) + plan.forms.index(form)
        groups = value.shape[1] if tile.shape == "full" else heads
        places = (turned[which[0]], tile.rows), (turned[which[1]], tile.columns), (value, tile.columns)
        q, k, v = (_part(x, where, groups, tile) for x, where in places)
        yield tile, q, k, v, which
