"""Any method, any mask or pattern, dropout and gradients of what is learned, a few queries at a time.

Memory is that of one block of queries against the keys they may see. In training nothing of a block is kept: the
backward pass computes it again, with the same dropout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention.layout import Layout
from rope_ext.attention.tables import dense
from rope_ext.encodings.bias import Bias
from rope_ext.encodings.raw import Encoder, Pairs, weighted

BLOCK_BYTES = 32 * 2**20
"""What one block's bias may take; a block holds a handful of such tensors at a time."""

Keys = tuple[Tensor, ...]
"""The keys in the forms that a method reads; without a method of the scores seam: the keys."""


def attend(
    query: Tensor,
    keys: Keys,
    value: Tensor,
    layout: Layout,
    method: Bias | Encoder | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; with an Encoder, keys and values may have fewer heads than query."""
    learned = tuple(method.parameters.values()) if method else ()
    given = (layout, method, scale, dropout, len(keys))
    output: Tensor = _Recomputed.apply(given, query, value, *keys, *learned)
    return output


def blocks(query: Tensor, layout: Layout, method: Bias | Encoder | None) -> list[slice]:
    """The queries in blocks whose numbers per pair fit into BLOCK_BYTES."""
    heads, per_pair, budget = query.shape[1], query.shape[1], BLOCK_BYTES
    if isinstance(method, Bias):
        per_pair += method.method.values_per_pair
    elif method is not None:
        per_pair, budget = heads * method.method.values_per_pair, 4 * BLOCK_BYTES
    keys = layout.kv_length if layout.window is None else min(layout.kv_length, 2 * layout.window)
    size = max(1, budget // (4 * query.shape[0] * per_pair * keys))
    if layout.window is not None:
        size = min(size, max(layout.window, 16))
    return [slice(a, min(a + size, layout.q_length)) for a in range(0, layout.q_length, size)]


def _block(
    rows: slice,
    query: Tensor,
    keys: Keys,
    value: Tensor,
    layout: Layout,
    method: Bias | Encoder | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attention of one block; ``query`` holds its rows only, ``keys`` and ``value`` all keys."""
    columns = layout.columns(rows)
    # a range that starts at a later key is given by its numbers as well
    which = columns.stop if isinstance(columns, slice) and columns.start == 0 else columns
    if isinstance(which, slice):
        which = torch.arange(which.start, which.stop)
    seen_keys, value = tuple(form[:, :, columns] for form in keys), value[:, :, columns]
    if isinstance(method, Encoder):
        weights = encoded_weights(rows, which, query, seen_keys, layout, method, scale)
        dropped = torch.dropout(weights, dropout, train=dropout > 0)
        output = weighted(dropped, value)
        extra = method.method.values(method, dropped, *_positions(layout, rows, which, query.device))
        return (output if extra is None else output + extra).to(query.dtype)
    mask = dense(method, layout, rows, which, query.device)
    dtype = query.dtype if query.device.type == "cpu" else torch.float32  # other kernels want one dtype for all
    q, k, v = (part.to(dtype) for part in (query, seen_keys[0], value))
    output = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return output.to(query.dtype)


def encoded_weights(
    rows: slice, which: int | Tensor, query: Tensor, keys: Keys, layout: Layout, encoder: Encoder, scale: float
) -> Tensor:
    """Attention weights of some queries to some keys (the first, or these): (batch, heads, queries, keys), fp32."""
    m, n = _positions(layout, rows, which, query.device)
    mask = dense(None, layout, rows, which, query.device)
    pairs = Pairs(m, n, scale, mask > torch.finfo(mask.dtype).min / 2)
    scores = encoder.method.scores(encoder, query, keys, pairs)
    sinks = torch.nonzero((n < layout.sinks).any(0)).flatten()
    if len(sinks) and layout.window is not None:
        last = int(sinks[-1]) + 1
        capped = Pairs(m.clamp(max=layout.window + layout.sinks - 1), n[:, :last], scale, pairs.seen[..., :last])
        to_sinks = encoder.method.scores(encoder, query, tuple(form[:, :, :last] for form in keys), capped)
        to_first = torch.where((n[:, :last] < layout.sinks)[:, None, None], to_sinks, scores[..., :last])
        scores = torch.cat((to_first, scores[..., last:]), -1)
    return torch.softmax(scores + mask, -1)


def _positions(layout: Layout, rows: slice, which: int | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    places = layout.key_positions(device)
    own = places[:, rows.start + layout.offset : rows.stop + layout.offset]
    return own, places[:, :which] if isinstance(which, int) else places[:, which]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        given: tuple[Layout, Bias | Encoder | None, float, float, int],
        query: Tensor,
        value: Tensor,
        *others: Tensor,
    ) -> Tensor:
        layout, method, _, dropout, forms = given
        ctx.given = given
        ctx.random = _random_state(query.device) if dropout else None
        ctx.save_for_backward(query, value, *others)
        output = torch.empty_like(query)
        for rows in blocks(query, layout, method):
            output[:, :, rows] = _block(rows, query[:, :, rows], others[:forms], value, *given[:4])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        layout, method, scale, dropout, forms = ctx.given
        needed = ctx.needs_input_grad[1:]
        query = inputs[0]
        totals = [torch.zeros_like(part, dtype=torch.float32) for part in inputs]
        with _random_state_of(ctx.random, query.device), torch.autocast(query.device.type, enabled=False):
            for rows in blocks(query, layout, method):
                parts = [part.detach() for part in (query[:, :, rows], *inputs[1:])]
                wanted = [part.requires_grad_() for part, need in zip(parts, needed, strict=True) if need]
                q, v, *others = parts
                with torch.enable_grad():
                    inside = method.with_parameters(tuple(others[forms:])) if method else None
                    output = _block(rows, q, tuple(others[:forms]), v, layout, inside, scale, dropout)
                found = torch.autograd.grad(output, wanted, gradients[0][:, :, rows], allow_unused=True)
                targets = [totals[0][:, :, rows], *totals[1:]]
                targets = [target for target, need in zip(targets, needed, strict=True) if need]
                for target, gradient in zip(targets, found, strict=True):
                    if gradient is not None:
                        target += gradient
        done = [t.to(part.dtype) if need else None for t, part, need in zip(totals, inputs, needed, strict=True)]
        return (None, *done)


RandomState = tuple[Tensor, Tensor | None]


def _random_state(device: torch.device) -> RandomState:
    """The generators that dropout draws from."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
    return torch.get_rng_state(), own


def _set_random_state(state: RandomState, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextmanager
def _random_state_of(state: RandomState | None, device: torch.device) -> Iterator[None]:
    """Draw what was drawn from ``state`` once more, and leave no trace of it."""
    if state is None:
        yield
        return
    before = _random_state(device)
    _set_random_state(state, device)
    try:
        yield
    finally:
        _set_random_state(before, device)
