"""Who sees whom in one attention call, without the matrix that says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

Made = TypeVar("Made")

Shared = Callable[[Any, Callable[[], Made]], Made]
"""(name, how to make it) -> what was made."""

SHARED_BYTES = 128 * 2**20
"""What tables of one call, or of all its runs, may take while its layers share them."""


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
        separate: whether a query sees the keys of its own document only, as always in a decoder. In an encoder without
            packed documents, and in cross-attention, it sees all that is not padding.
        window: how many keys up to itself a query sees (in an encoder: also ahead); None for all.
        sinks: how many of the first keys of a document stay visible outside the window.
        global_tokens: positions that see everything and are seen by every query.
        documents: shape (batch, kv_length), int64, numbered in their order; -1 is padding. None: one document without
            padding.
        positions: shape (batch, kv_length), int64, where they are not counted from the start of a document.
        first: the position of key 0, one number or shape (batch, 1): what a sliding cache has let go came before it.
            With sinks, of the keys after them.
        gone: how many keys, padding included, a sliding cache has let go.
        mask: a mask of the caller's for all pairs, shape (batch or 1, heads or 1, q_length, kv_length): bool, or
            floats that are added to the scores.
    """

    batch: int
    q_length: int
    kv_length: int
    offset: int
    causal: bool
    window: int | None
    sinks: int
    global_tokens: tuple[int, ...]
    documents: Tensor | None
    positions: Tensor | None
    first: int | Tensor
    mask: Tensor | None

    def __init__(
        self,
        batch: int,
        q_length: int,
        kv_length: int,
        *,
        offset: int = 0,
        causal: bool,
        separate: bool | None = None,
        window: int | None = None,
        sinks: int = 0,
        global_tokens: tuple[int, ...] = (),
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        first: int | Tensor = 0,
        gone: int = 0,
        mask: Tensor | None = None,
    ) -> None:  # not BlockMask's: it would want blocks
        self.batch, self.q_length, self.kv_length = batch, q_length, kv_length
        self.offset, self.causal = offset, causal
        self.separate = causal if separate is None else separate
        self.window, self.sinks, self.global_tokens = window, sinks, global_tokens
        self.documents, self.positions, self.mask = documents, positions, mask
        self.first, self.gone = first, gone
        self._runs: list[Run] | None = None
        self._seen: tuple[Tensor, Layout] | None = None
        self._made: dict[Any, Any] = {}
        self._room = SHARED_BYTES

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
        if self.mask is not None or not self.steady:
            return "pairs"
        if self.documents is None:
            return "plain"
        return "runs" if self.runs() else "pairs"

    @property
    def steady(self) -> bool:
        """Whether positions go up by one from each key of a document to the next."""
        return self.positions is None or self.once("steady", self._is_steady)

    def _is_steady(self) -> bool:
        assert self.positions is not None
        steps = torch.diff(self.positions) == 1
        if self.documents is not None:
            documents = self.documents.to(steps.device)
            steps = steps | (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] < 0)
        return bool(steps.all())

    @property
    def in_a_row(self) -> bool:
        """Whether distances of positions are distances of indices, wherever a query sees a key."""
        return self.steady and (self.documents is None or bool(self.runs()))

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
            if len({int(ids[a]) for a, _ in pieces}) < len(pieces) or (not self.separate and len(pieces) > 1):
                return []
            for start, stop in pieces:
                if self.separate:
                    first, last = max(start - self.offset, 0), min(stop - self.offset, self.q_length)
                    if first >= last:
                        continue
                    queries = slice(first, last)
                previous = runs[-1] if runs else None
                if (
                    previous
                    and self.positions is None
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

    def visible(self, rows: slice, keys: int | Tensor, device: torch.device) -> Tensor:
        """Which keys some of the queries see: bool, shape (batch or 1, 1, queries, keys).

        ``keys``: how many of the first keys, or which.
        """
        index = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        key_index = torch.arange(keys, device=device) if isinstance(keys, int) else keys.to(device)
        seen = torch.ones(1, len(index), len(key_index), dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (key_index <= index)
        if self.window is not None:
            near = key_index > index - self.window
            if not self.causal:
                near = near & (key_index < index + self.window)
            seen = seen & (near | self._kept(rows, key_index) if self.sinks or self.global_tokens else near)
        if self.documents is not None:
            documents = self.documents.to(device)
            others = documents[:, None, key_index]
            seen = seen & (others >= 0)
            if self.separate:
                own = documents[:, rows.start + self.offset : rows.stop + self.offset]
                seen = seen & (others == own[..., None])
        return seen[:, None]

    def _kept(self, rows: slice, key_index: Tensor) -> Tensor:
        """What a pattern keeps outside the window: bool, shape (batch or 1, queries or 1, keys)."""
        places = self.key_positions(key_index.device)
        own = places[:, rows.start + self.offset : rows.stop + self.offset, None]
        places = places[:, None, key_index]
        kept = places < self.sinks
        for token in self.global_tokens:
            kept = kept | (places == token) | (own == token)
        return kept

    def columns(self, rows: slice) -> slice | Tensor:
        """The keys that some of the queries may see: a range of indices, or their numbers in order, shape (keys,)."""
        stop = min(self.offset + rows.stop, self.kv_length) if self.causal else self.kv_length
        if self.window is None or self.kind != "plain":
            return slice(0, stop)
        first, last = self.offset + rows.start, self.offset + rows.stop
        start = max(first - self.window + 1, 0)
        stop = stop if self.causal else min(last + self.window - 1, stop)
        if not self.sinks and not self.global_tokens:
            return slice(start, stop)
        if any(first <= token < last for token in self.global_tokens):
            return slice(0, self.kv_length if not self.causal else stop)
        kept = [*range(self.sinks), *self.global_tokens]
        end = stop if self.causal else self.kv_length
        outside = sorted({index for index in kept if 0 <= index < end and not start <= index < stop})
        before = [index for index in outside if index < start]
        after = [index for index in outside if index >= stop]
        if not outside:
            return slice(start, stop)
        return torch.tensor([*before, *range(start, stop), *after])

    def seen_from(self, own: Tensor, places: Tensor) -> Tensor:
        """The positions from which queries look at keys, shape (batch or 1, queries, keys).

        Their own ``own`` (batch or 1, queries), but for sinks among ``places`` (batch or 1, keys): no further away than
        window + sinks - 1, as if positions were counted among the keys that are kept.
        """
        own, places = own[:, :, None], places[:, None, :]
        if not self.sinks or self.window is None:
            return own.expand(-1, -1, places.shape[-1])
        return torch.where(places < self.sinks, own.clamp(max=self.window + self.sinks - 1), own)

    def once(self, name: Any, make: Callable[[], Made], keep: bool = True) -> Made:
        """What ``make`` gives, made for the first of the layers that share this layout; or for each, if not kept."""
        if not keep:
            return make()
        if name not in self._made:
            self._made[name] = make()
        found: Made = self._made[name]
        return found

    def sharing(self, owner: Any, size: int) -> Shared[Any]:
        """What gives tables of a method.

        They are made once for all layers that share this layout, where all of them together, ``size`` bytes, are small
        enough to be kept; else for each.
        """
        keep = size <= self._room
        return lambda name, make: self.once((owner, name), make, keep=keep)

    def _copy(self) -> Layout:
        other = copy.copy(self)
        other._runs, other._seen, other._made = None, None, {}
        return other

    def of_run(self, run: Run, of: int = 1) -> Layout:
        """A run, one ``of`` so many, as a call of its own: no padding, one document."""
        ends = ((each.start, each.stop) for each in (run.rows, run.queries, run.keys))
        return self.once(("run", *ends), lambda: self._of_run(run, of))

    def _of_run(self, run: Run, of: int) -> Layout:
        other, rows = self._copy(), run.rows
        other._room = self._room // of
        other.batch = rows.stop - rows.start
        other.q_length, other.kv_length = run.queries.stop - run.queries.start, run.keys.stop - run.keys.start
        other.offset = self.offset + run.queries.start - run.keys.start
        other.documents, other.separate = None, self.causal
        if self.positions is not None:
            other.positions = self.positions[rows, run.keys]
        if isinstance(self.first, Tensor):
            other.first = self.first[rows]
        if isinstance(other.first, Tensor) and bool((other.first == other.first[:1]).all()):
            other.first = int(other.first[0])
        return other

    def patterned(self, window: int | None, sinks: int, global_tokens: tuple[int, ...]) -> Layout:
        """With a method's pattern on top of the model's own window.

        Raises:
            ValueError: keys were let go of that the pattern keeps, or with padding beside them.
        """
        if window is None:
            return self
        return self.once(
            ("pattern", window, sinks, global_tokens), lambda: self._patterned(window, sinks, global_tokens)
        )

    def _patterned(self, window: int, sinks: int, global_tokens: tuple[int, ...]) -> Layout:
        other = self._copy()
        other.window = window if self.window is None else min(window, self.window)
        other.sinks, other.global_tokens = sinks, global_tokens
        gone = self.first if isinstance(self.first, int) else int(self.first.max())
        if gone and (global_tokens or (sinks and self.documents is not None)):
            raise ValueError(
                "the cache has let keys go that `global_tokens` or sinks of padded rows need: use the default cache."
            )
        if self.kv_length > other.window and (sinks or global_tokens) and not self._starts_at_zero():
            raise ValueError(
                "`position_ids` do not start at 0, where sinks and global tokens are counted from: let them start at 0 "
                "in each document, or patch without `sinks` and `global_tokens`."
            )
        return other

    def _starts_at_zero(self) -> bool:
        """Whether the first key of every document has position 0."""
        if self.positions is None:
            return True
        first = self._indices() == 0
        if self.documents is not None:
            first = first & (self.documents >= 0)
        return not bool(self.positions[first.to(self.positions.device).expand_as(self.positions)].any())

    def with_positions(self, positions: Tensor) -> Layout:
        """The same call with key positions of shape (batch, kv_length)."""
        other = self._copy()
        other.positions = positions.expand(self.batch, -1)
        return other

    def counted(self) -> Layout:
        """With positions that count real tokens only, as BLOOM has them; they differ where padding cuts a document."""
        if self.positions is not None or self.documents is None or self.kind != "pairs":
            return self
        return self.once("counted", self._counted)

    def _counted(self) -> Layout:
        assert self.documents is not None
        so_far = (self.documents >= 0).cumsum(-1) - 1
        return self.with_positions((so_far - self._at_start(so_far)).clamp(min=0))

    def at(self, position_ids: Tensor) -> Layout:
        """With the positions that a model gives its layers, shape (1 or batch, q_length): the caller's, or what it
        counted itself, padding and all, which says nothing.

        Raises:
            ValueError: see :meth:`placed`.
        """
        if self._seen is None or self._seen[0] is not position_ids:
            index = torch.arange(self.q_length, device=position_ids.device) + self.offset + self.gone
            counted = self.positions is None and bool((position_ids == index).all())
            self._seen = position_ids, self if counted else self.placed(position_ids)
        return self._seen[1]

    def placed(self, position_ids: Tensor) -> Layout:
        """With the positions that a caller gave the queries, shape (1 or batch, q_length).

        Raises:
            ValueError: they are not where the queries stand, and the positions of cached keys are not known.
        """
        if position_ids.dim() != 2 or position_ids.shape[1] != self.q_length:
            return self
        for each in (self, self.counted()):
            if each._has_queries_at(position_ids):
                return each
        if self.q_length != self.kv_length:
            raise ValueError(
                "`position_ids` jump while keys are cached: the positions of the cached keys are not known. Pass "
                "consecutive positions, or the whole sequence without a cache."
            )
        return self.with_positions(position_ids)

    def _has_queries_at(self, position_ids: Tensor) -> bool:
        """Whether all queries that are not padding have these positions."""
        same = self.query_positions(position_ids.device) == position_ids
        if self.documents is not None and self.causal:
            own = self.documents[:, self.offset : self.offset + self.q_length].to(same.device)
            same = same | (own < 0)
        return bool(same.all())

    def key_positions(self, device: torch.device) -> Tensor:
        """Shape (batch or 1, kv_length): the given ones, else counted from the start of each document."""
        return self.once(("positions", device), lambda: self._key_positions(device))

    def query_positions(self, device: torch.device) -> Tensor:
        """Shape (batch or 1, q_length)."""
        return self.key_positions(device)[:, self.offset : self.offset + self.q_length]

    def _key_positions(self, device: torch.device) -> Tensor:
        if self.positions is not None:
            return self.positions.to(device)
        index = torch.arange(self.kv_length, device=device)[None]
        first = self.first.to(device) if isinstance(self.first, Tensor) else self.first
        if self.documents is None and self.sinks:
            return index + torch.where(index < self.sinks, 0, first)  # a streaming cache: sinks, then the latest keys
        if self.documents is None:
            return index + first
        return index - self._at_start(index) + first

    def _indices(self) -> Tensor:
        """Keys counted from the start of their document, shape (batch or 1, kv_length)."""
        index = torch.arange(self.kv_length, device=self.device)[None]
        return index if self.documents is None else index - self._at_start(index)

    def _at_start(self, rising: Tensor) -> Tensor:
        """Of numbers that rise along the keys, the one at the start of each key's document."""
        assert self.documents is not None
        documents = self.documents.to(rising.device)
        before = F.pad(documents.cummax(-1).values, (1, -1), value=-1)
        return torch.where(documents > before, rising, 0).cummax(-1).values
