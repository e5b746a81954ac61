"""Any bias, any mask, dropout and gradients of learned biases, a few queries at a time.

Memory is that of one block of queries against all keys. In training nothing of a block is kept: the backward pass
computes it again, with the same dropout.
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

BLOCK_BYTES = 32 * 2**20
"""What one block's bias may take; a block holds a handful of such tensors at a time."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float, dropout: float
) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; key and value have as many heads as query."""
    learned = tuple(bias.parameters.values()) if bias else ()
    output: Tensor = _Recomputed.apply(layout, bias, scale, dropout, query, key, value, *learned)
    return output


def blocks(query: Tensor, layout: Layout, bias: Bias | None) -> list[slice]:
    """The queries in blocks whose bias fits into BLOCK_BYTES."""
    per_pair = query.shape[1] + (bias.method.values_per_pair if bias else 0)
    size = max(1, BLOCK_BYTES // (4 * query.shape[0] * per_pair * layout.kv_length))
    return [slice(a, min(a + size, layout.q_length)) for a in range(0, layout.q_length, size)]


def _block(
    rows: slice, query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float, p: float
) -> Tensor:
    """Attention of one block; ``query`` holds its rows only, ``key`` and ``value`` all keys."""
    keys = min(layout.offset + rows.stop, layout.kv_length) if layout.causal else layout.kv_length
    mask = dense(bias, layout, rows, keys, query.device)
    dtype = query.dtype if query.device.type == "cpu" else torch.float32  # other kernels want one dtype for all
    q, k, v = (part.to(dtype) for part in (query, key[:, :, :keys], value[:, :, :keys]))
    return sdpa(q, k, v, attn_mask=mask, dropout_p=p, scale=scale).to(query.dtype)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        bias: Bias | None,
        scale: float,
        dropout: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *learned: Tensor,
    ) -> Tensor:
        ctx.layout, ctx.bias, ctx.scale, ctx.dropout = layout, bias, scale, dropout
        ctx.random = _random_state(query.device) if dropout else None
        ctx.save_for_backward(query, key, value, *learned)
        output = torch.empty_like(query)
        for rows in blocks(query, layout, bias):
            output[:, :, rows] = _block(rows, query[:, :, rows], key, value, layout, bias, scale, dropout)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *learned = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        totals = [torch.zeros_like(part, dtype=torch.float32) for part in (query, key, value, *learned)]
        with _random_state_of(ctx.random, query.device), torch.autocast(query.device.type, enabled=False):
            for rows in blocks(query, ctx.layout, ctx.bias):
                parts = [part.detach() for part in (query[:, :, rows], key, value, *learned)]
                wanted = [part.requires_grad_() for part, need in zip(parts, needed, strict=True) if need]
                q, k, v, *inside = parts
                with torch.enable_grad():
                    bias = ctx.bias.with_parameters(tuple(inside)) if ctx.bias else None
                    output = _block(rows, q, k, v, ctx.layout, bias, ctx.scale, ctx.dropout)
                found = torch.autograd.grad(output, wanted, gradients[0][:, :, rows], allow_unused=True)
                targets = [totals[0][:, :, rows], *totals[1:]]
                targets = [target for target, need in zip(targets, needed, strict=True) if need]
                for target, gradient in zip(targets, found, strict=True):
                    if gradient is not None:
                        target += gradient
        inputs = (query, key, value, *learned)
        done = [t.to(part.dtype) if need else None for t, part, need in zip(totals, inputs, needed, strict=True)]
        return (None, None, None, None, *done)


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
