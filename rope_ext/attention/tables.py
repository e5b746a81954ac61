"""Biases laid out for a kernel: one number per head and distance, or the numbers of a few queries against all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext.attention.layout import Layout
from rope_ext.encodings.bias import Bias


def table(bias: Bias | None, low: int, high: int, device: torch.device) -> Tensor:
    """The bias of the distances low .. high (both included), shape (heads or 1, high - low + 1), fp32."""
    distances = torch.arange(low, high + 1, device=device)
    return torch.zeros(1, len(distances), device=device) if bias is None else bias(distances)


def hankel(values: Tensor, first: int, rows: int, keys: int) -> Tensor:
    """Rows in reverse order read from a table without copying: out[h, r, j] = values[h, first + r + j].

    ``values`` has shape (heads, distances), contiguous; the result (1, heads, rows, keys).
    """
    offset = values.storage_offset() + first * values.stride(1)
    return values.as_strided((1, values.shape[0], rows, keys), (0, *values.stride()[:1], 1, 1), offset)


def dense(bias: Bias | None, layout: Layout, rows: slice, keys: int | Tensor, device: torch.device) -> Tensor:
    """The additive mask of some queries against some keys: the first of them (how many), or these (which).

    fp32, shape (batch or 1, heads or 1, queries, keys), -inf where a query that sees some key does not see this one.
    """
    seen = layout.visible(rows, keys, device)
    which = slice(0, keys) if isinstance(keys, int) else keys
    if bias is None:
        numbers = torch.zeros_like(seen, dtype=torch.float32)
    elif isinstance(keys, int) and layout.in_a_row and not layout.sinks and bias.method.toeplitz:
        low, high = -(layout.offset + rows.stop - 1), keys - 1 - layout.offset - rows.start
        values = table(bias, low, high, device).contiguous()
        numbers = hankel(values, 0, rows.stop - rows.start, keys).flip(2)
    else:
        places = layout.key_positions(device)
        own = layout.seen_from(places[:, rows.start + layout.offset : rows.stop + layout.offset], places[:, which])
        distances = places[:, None, which] - own
        if bias.method.toeplitz:
            low, high = int(distances.min()), int(distances.max())
            numbers = table(bias, low, high, device)[:, distances - low].movedim(0, 1)
        else:
            numbers = bias(distances, own).movedim(0, 1)
    if layout.mask is not None:
        given = layout.mask[:, :, rows][..., which].to(device)
        if given.dtype == torch.bool:
            seen = seen & given
        else:
            numbers = numbers + given
    # a query of padding that sees nothing sees everything instead: -inf alone would turn its gradient into nan
    return numbers.masked_fill(~seen & seen.any(-1, keepdim=True), float("-inf"))
