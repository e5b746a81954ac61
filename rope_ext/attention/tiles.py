"""A range of keys for every query, cut into tiles that fused kernels compute without a mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tile(NamedTuple):
    """Some queries against some keys, by their indices.

    Attributes:
        shape: "full": every query sees every key; "lower": query i sees keys up to the i-th; "upper": from the i-th on.
            The last two are squares.
    """

    rows: slice
    columns: slice
    shape: str


def tiles(low: Tensor, high: Tensor) -> list[Tile]:
    """The pairs (i, j) with low[i] <= j < high[i], each in one tile; ``low`` and ``high`` are int64, (queries,)."""
    found: list[Tile] = []
    for rows, rising in _pieces(low, high):
        start, stop = int(low[rows.start]), int(high[rows.start])
        height = rows.stop - rows.start
        size = max(stop - start - 1, 1) if rising == (1, 1) else height  # a square at either end must fit in
        for a in range(rows.start, rows.stop, size):
            b, moved = min(a + size, rows.stop), a - rows.start
            found += _tiles(slice(a, b), start + rising[0] * moved, stop + rising[1] * moved, *rising)
    return found


def _tiles(rows: slice, start: int, stop: int, low_rises: int, high_rises: int) -> list[Tile]:
    """Of queries whose ranges begin as start .. stop and whose edges move on with every query or stand still."""
    found, height = [], rows.stop - rows.start
    if height > 1 and low_rises:
        found.append(Tile(rows, slice(start, start + height), "upper"))
        start += height
    if height > 1 and high_rises:
        found.append(Tile(rows, slice(stop - 1, stop - 1 + height), "lower"))
        stop -= 1
    return [*found, Tile(rows, slice(start, stop), "full")] if start < stop else found


def _pieces(low: Tensor, high: Tensor) -> list[tuple[slice, tuple[int, int]]]:
    """(neighbouring queries that see something, by how much their two edges move from one to the next: 0 or 1)."""
    seeing, count = low < high, len(low)
    left, right = low.diff(), high.diff()
    regular = (left >= 0) & (left <= 1) & (right >= 0) & (right <= 1) & seeing[1:] & seeing[:-1]
    kinds, lengths = torch.unique_consecutive(torch.where(regular, 2 * left + right, -1), return_counts=True)
    found: list[tuple[slice, tuple[int, int]]] = []
    start = at = 0  # the first query without a piece; the first of this stretch
    for kind, length in zip(kinds.tolist(), lengths.tolist(), strict=True):
        at += length
        if kind >= 0:
            found.append((slice(start, at + 1), (kind // 2, kind % 2)))
            start = at + 1
        else:
            found += [(slice(row, row + 1), (0, 0)) for row in range(start, at) if seeing[row]]
            start = max(start, at)
    return found + [(slice(row, row + 1), (0, 0)) for row in range(start, count) if seeing[row]]
