"""A bias that depends on the distance alone, through stock SDPA: time of a masked call, memory of a few rows.

The bias of all pairs is a Toeplitz matrix: 2N - 1 numbers per head. Read with the queries in reverse order it is a
Hankel matrix, ``bias[r, j] = u[r + j]``, and that is a strided view of the numbers: nothing is copied, and the fused
kernel takes it as its mask. Causality and a window are -inf in the same numbers. Queries go in blocks, so that keys
that none of a block sees are not read.

Keys can also be left out that are seen in principle: where a head's bias has fallen so far below that of distance 0
that no key there, however well it fits, can change the result in fp32. For ALiBi that leaves steep heads a short
stretch each. It is also what keeps subnormal numbers out, with which CPUs are slow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention.layout import Layout
from rope_ext.attention.tables import hankel, table
from rope_ext.encodings.bias import Bias

BLOCK = 1024
"""Queries per kernel call; short stretches take fewer, down to a quarter."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float, prune: bool = True
) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; with a bias, key and value have as many heads as query.

    ``prune=False`` keeps the keys that cannot matter.
    """
    runs = layout.runs()
    parts = [
        _run(
            query[run.rows, :, run.queries],
            key[run.rows, :, run.keys],
            value[run.rows, :, run.keys],
            layout.offset + run.queries.start - run.keys.start,
            layout,
            bias,
            scale,
            prune,
        )
        for run in runs
    ]
    if len(parts) == 1 and parts[0].shape == query.shape:
        return parts[0]
    output = query.new_zeros(query.shape)
    for run, part in zip(runs, parts, strict=True):
        output[run.rows, :, run.queries] = part
    return output


def _run(
    query: Tensor, key: Tensor, value: Tensor, first: int, layout: Layout, bias: Bias | None, scale: float, prune: bool
) -> Tensor:
    """Tokens in a row; ``first`` is the index of the first query among the keys."""
    queries, keys = query.shape[2], key.shape[2]
    if bias is None and layout.window is None and (not layout.causal or (first == 0 and queries == keys)):
        return sdpa(query, key, value, is_causal=layout.causal, scale=scale, enable_gqa=True)
    low, high = -(first + queries - 1), keys - 1 - first
    numbers = table(bias, low, high, query.device).detach()
    hidden = torch.zeros(numbers.shape[1], dtype=torch.bool, device=query.device)
    if layout.causal:
        hidden[-low + 1 :] = True
    if layout.window is not None:
        hidden[: max(-low - layout.window + 1, 0)] = True
        if not layout.causal:
            hidden[-low + layout.window :] = True
    heads = query.shape[1]
    reach = [max(-low, high) + 1] * heads
    numbers = numbers.masked_fill(hidden, float("-inf")).contiguous()
    if bias is not None and prune and low <= 0 <= high:
        numbers, reach = _without_what_cannot_matter(numbers, low, query, key, first, scale)
    if layout.window is not None:
        reach = [min(stretch, layout.window) for stretch in reach]

    groups = []
    for start, stop, stretch in _alike(reach):
        size = min(BLOCK, max(BLOCK // 4, stretch))
        view = numbers[start:stop] if numbers.shape[0] > 1 else numbers
        q, k, v = query[:, start:stop], key[:, start:stop], value[:, start:stop]
        blocks = []
        for a in range(0, queries, size):
            b = min(a + size, queries)
            from_key = max(first + a - stretch + 1, 0)
            to_key = min(first + b + (0 if layout.causal else stretch - 1), keys)
            if to_key <= from_key:  # padding, out of reach of every real key
                blocks.append(torch.zeros_like(q[:, :, a:b]))
                continue
            mask = hankel(view, from_key - (first + b - 1) - low, b - a, to_key - from_key)
            seen_k, seen_v = k[:, :, from_key:to_key], v[:, :, from_key:to_key]
            turned = q[:, :, a:b].flip(2)
            blocks.append(sdpa(turned, seen_k, seen_v, attn_mask=mask, scale=scale, enable_gqa=True).flip(2))
        groups.append(torch.cat(blocks, 2) if len(blocks) > 1 else blocks[0])
    return torch.cat(groups, 1) if len(groups) > 1 else groups[0]


@torch.no_grad()
def _without_what_cannot_matter(
    numbers: Tensor, low: int, query: Tensor, key: Tensor, first: int, scale: float
) -> tuple[Tensor, list[int]]:
    """(numbers with -inf where no key can matter, distance from which that holds, per head).

    Each query sees its own key, with score a = scale * q.k and bias u_0. Any other key scores at most scale * |q| |k|
    (Cauchy-Schwarz). If u_d + scale |q| |k| < u_0 + a - margin for every query, all keys at distance d together weigh
    less than exp(-margin) * N of the whole; the margin makes that a quarter of the last bit of fp32.
    """
    start, stop = max(-first, 0), min(query.shape[2], key.shape[2] - first)  # beyond are queries of padding
    query, own = query[:, :, start:stop], key[:, :, first + start : first + stop]
    longest = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32).amax(-1, keepdim=True)
    best = torch.linalg.vector_norm(query, dim=-1, dtype=torch.float32) * longest * abs(scale)
    gap = (best - torch.einsum("bhnd,bhnd->bhn", query.float(), own.float()) * scale).amax((0, 2))
    margin = math.log(key.shape[2]) + 26 * math.log(2) + 1.0
    matters = numbers >= (numbers[:, -low, None] - gap[:, None] - margin)
    matters |= ~torch.isfinite(gap)[:, None]
    away = torch.arange(low, low + numbers.shape[1], device=numbers.device).abs()
    reach = torch.where(matters & (numbers > float("-inf")), away, 0).amax(-1) + 1
    kept = numbers.masked_fill(away >= reach[:, None], float("-inf"))
    return kept, reach.tolist()


def _alike(reach: list[int]) -> list[tuple[int, int, int]]:
    """(first head, last + 1, stretch): neighbouring heads whose stretch is about the same, so that they share calls."""
    classes = [max(7, math.ceil(math.log2(max(stretch, 1)))) for stretch in reach]
    starts = [head for head in range(len(reach)) if head == 0 or classes[head] != classes[head - 1]]
    return [(a, b, max(reach[a:b])) for a, b in zip(starts, [*starts[1:], len(reach)], strict=True)]
