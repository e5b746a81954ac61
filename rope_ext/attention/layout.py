"""Who sees whom in one attention call, without the matrix that says so."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class Run:
    """Tokens that stand in a row and see only each other: queries and keys of some batch rows, all of them real."""

    rows: slice
    queries: slice
    keys: slice


class Layout(BlockMask):
    """What stands in the place of the attention mask in a model whose attention is computed here.

    It derives from BlockMask for one reason: transformers hands a prepared mask through unchanged if it is a tensor
    or a BlockMask of four dimensions. Nothing else of BlockMask is used.

    Attributes:
        batch: rows.
        q_length, kv_length: queries and keys of the call, in tokens.
        offset: index of the first query among the keys.
        causal: whether a query sees no key after itself.
        window: how many keys up to itself a query sees; None for all.
        documents: shape (batch, kv_length), int64: a query sees keys of its own document; -1 is padding, and they are
            numbered in their order. None: one document without padding.
        positions: shape (batch, kv_length), int64, where they are not the indices. None: they are.
        first: the position of key 0, one number or shape (batch, 1): what a sliding cache has let go came before it.
        mask: a mask of the caller's for all pairs, shape (batch or 1, heads or 1, q_length, kv_length): bool, or
            floats that are added to the scores.
    """

    def __init__(
        self,
        batch: int,
        q_length: int,
        kv_length: int,
        *,
        offset: int = 0,
        causal: bool,
        window: int | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        first: int | Tensor = 0,
        mask: Tensor | None = None,
    ) -> None:  # not BlockMask's: it would want blocks
        self.batch, self.q_length, self.kv_length = batch, q_length, kv_length
        self.offset, self.causal, self.window = offset, causal, window
        self.documents, self.positions, self.first, self.mask = documents, positions, first, mask
        self._runs: list[Run] | None = None
        self._seen: tuple[Tensor, Layout] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_length, self.kv_length

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.documents is None else self.documents.device

    def to(self, *args: Any, **kwargs: Any) -> Layout:
        """The layout follows the queries' device by itself."""
        return self

    def __repr__(self) -> str:
        return f"Layout(queries={self.q_length}, keys={self.kv_length}, offset={self.offset}, causal={self.causal})"

    @property
    def kind(self) -> str:
        """ "plain": no padding; "runs": padding or documents, each in one piece; "pairs": anything else."""
        if self.positions is not None or self.mask is not None:
            return "pairs"
        if self.documents is None:
            return "plain"
        return "runs" if self.runs() else "pairs"

    def runs(self) -> list[Run]:
        """The call as runs that need no mask beside the causal one; empty where it cannot be said that way."""
        if self._runs is None:
            self._runs = self._find_runs()
        return self._runs

    def _find_runs(self) -> list[Run]:
        everyone, queries = slice(0, self.batch), slice(0, self.q_length)
        if self.documents is None:
            return [Run(everyone, queries, slice(0, self.kv_length))]
        runs: list[Run] = []
        for row, ids in enumerate(self.documents.cpu()):
            edges = torch.nonzero(torch.diff(ids)).flatten().add(1).tolist()
            pieces = [(a, b) for a, b in zip([0, *edges], [*edges, len(ids)], strict=True) if ids[a] >= 0]
            if len({int(ids[a]) for a, _ in pieces}) < len(pieces) or (not self.causal and len(pieces) > 1):
                return []
            for start, stop in pieces:
                if self.causal:
                    first, last = max(start - self.offset, 0), min(stop - self.offset, self.q_length)
                    if first >= last:
                        continue
                    queries = slice(first, last)
                previous = runs[-1] if runs else None
                if (
                    previous
                    and previous.rows.stop == row
                    and (previous.queries, previous.keys)
                    == (
                        queries,
                        slice(start, stop),
                    )
                ):
                    runs[-1] = Run(slice(previous.rows.start, row + 1), queries, previous.keys)
                else:
                    runs.append(Run(slice(row, row + 1), queries, slice(start, stop)))
        return runs

    def visible(self, rows: slice, keys: int, device: torch.device) -> Tensor:
        """Which of the first keys some of the queries see: bool, shape (batch or 1, 1, queries, keys)."""
        index = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        key_index = torch.arange(keys, device=device)
        seen = torch.ones(1, len(index), keys, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (key_index <= index)
        if self.window is not None:
            seen = seen & (key_index > index - self.window)
        if self.documents is not None:
            documents = self.documents.to(device)
            others = documents[:, None, :keys]
            seen = seen & (others >= 0)
            if self.causal:
                own = documents[:, rows.start + self.offset : rows.stop + self.offset]
                seen = seen & (others == own[..., None])
        return seen[:, None]

    def with_positions(self, positions: Tensor) -> Layout:
        """The same call with key positions of shape (batch, kv_length)."""
        other = copy.copy(self)
        other.positions = positions.expand(self.batch, -1)
        return other

    def counted(self) -> Layout:
        """With positions that count real tokens only, as BLOOM has them; they differ where padding cuts a row."""
        if self.kind != "pairs" or self.documents is None:
            return self
        return self.with_positions(((self.documents >= 0).cumsum(-1) - 1).clamp(min=0))

    def at(self, position_ids: Tensor) -> Layout:
        """With the positions that the caller gave the queries, shape (1 or batch, q_length).

        Raises:
            ValueError: they jump, and the positions of cached keys are not known.
        """
        if self._seen is None or self._seen[0] is not position_ids:
            self._seen = position_ids, self._placed(position_ids)
        return self._seen[1]

    def _placed(self, position_ids: Tensor) -> Layout:
        if self.q_length == 1 or position_ids.dim() != 2 or position_ids.shape[1] != self.q_length:
            return self
        steps = torch.diff(position_ids, dim=1) == 1
        if self.documents is not None:
            own = self.documents[:, self.offset : self.offset + self.q_length].to(steps.device)
            steps = steps | (own[:, 1:] != own[:, :-1]) | (own[:, 1:] < 0)
        if bool(steps.all()):
            return self
        if self.q_length != self.kv_length:
            raise ValueError(
                "`position_ids` jump while keys are cached: the positions of the cached keys are not known. Pass "
                "consecutive positions, or the whole sequence without a cache."
            )
        return self.with_positions(position_ids)

    def key_positions(self, device: torch.device) -> Tensor:
        """Shape (batch or 1, kv_length): the given ones, else counted from the start of each document."""
        if self.positions is not None:
            return self.positions.to(device)
        index = torch.arange(self.kv_length, device=device)[None]
        first = self.first.to(device) if isinstance(self.first, Tensor) else self.first
        if self.documents is None:
            return index + first
        documents = self.documents.to(device)
        before = F.pad(documents.cummax(-1).values, (1, -1), value=-1)
        return index - torch.where(documents > before, index, 0).cummax(-1).values + first
