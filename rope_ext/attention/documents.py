"""Which documents a packed row holds, from what callers say of it.

Three ways are in use: a sequence index per token (``seq_idx``), the cumulative lengths that flash attention takes
(``cu_seq_lens_q`` and ``cu_seq_lens_k``), and positions that start again. The first two say it whatever the positions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def of_indices(seq_idx: Tensor, batch: int, length: int) -> Tensor:
    """From the index of each token's document, shape (batch, length), any integers.

    Returns:
        Documents numbered from 0 in each row, int64, shape (batch, length).

    Raises:
        ValueError: another shape, or a document that goes on after another one.
    """
    if seq_idx.shape != (batch, length):
        raise ValueError(
            f"`seq_idx` has shape {tuple(seq_idx.shape)}; it takes one number per token, {(batch, length)}."
        )
    changes = F.pad(torch.diff(seq_idx) != 0, (1, 0))
    found = changes.long().cumsum(-1)
    for row, pieces in zip(seq_idx.tolist(), found[:, -1].tolist(), strict=True):
        if len(set(row)) <= pieces:
            raise ValueError("`seq_idx` comes back to a document after another one: keep the tokens of each together.")
    return found


def of_lengths(cumulative: Tensor, batch: int, length: int) -> Tensor:
    """From cumulative lengths over the rows laid end to end: 0, the end of each document, last batch * length.

    Raises:
        ValueError: they do not rise from 0 to the number of tokens, or a document crosses from one row into the next.
    """
    total = batch * length
    edges = cumulative.flatten().tolist()
    rises = all(a < b for a, b in pairwise(edges))
    if cumulative.dim() != 1 or cumulative.is_floating_point() or edges[:1] != [0] or edges[-1] != total or not rises:
        raise ValueError(
            f"`cu_seq_lens_q` must rise from 0 to {total}, the number of tokens ({batch} x {length}), by the length of "
            f"each document; got {edges if len(edges) < 10 else [*edges[:4], '...', *edges[-4:]]}."
        )
    if not set(range(0, total, length)) <= set(edges):
        raise ValueError(
            "`cu_seq_lens_q` has a document that crosses from one row into the next: pack documents within rows."
        )
    starts = torch.zeros(total, dtype=torch.int64, device=cumulative.device)
    starts[cumulative[:-1].long()] = 1
    numbers = starts.view(batch, length).cumsum(-1)
    return numbers - 1


def of_positions(position_ids: Tensor, real: Tensor | None) -> Tensor:
    """From positions, shape (batch, length).

    Without a padding mask a document starts wherever positions do not go up by one, as transformers has it. With one,
    positions of a text may jump ahead (skip-wise training): a document starts where they do not rise.

    Args:
        position_ids: in tokens.
        real: bool, shape (batch, length), False where a token is padding; None: there is no padding mask.
    """
    steps = torch.diff(position_ids)
    if real is None:
        return F.pad(steps != 1, (1, 0)).long().cumsum(-1)
    starts = F.pad((steps <= 0) & real[:, 1:] & real[:, :-1], (1, 0))
    return starts.long().cumsum(-1)


def counted(documents: Tensor) -> Tensor:
    """Positions from 0 in each document, shape (batch, length)."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = F.pad(torch.diff(documents) != 0, (1, 0), value=True)
    return index - torch.where(starts, index, 0).cummax(-1).values
