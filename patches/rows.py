"""What the arguments of one call say of its rows: where their tokens stand, and which documents they hold."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext.attention import Layout, documents

SEQUENCES = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
"""What says which documents a row holds, whatever the positions."""


class Row:
    """The arguments of one call that say where tokens stand and which documents they belong to.

    Attributes:
        mask: the attention mask, or None.
        positions: int64, shape (batch, length), or None.
        documents: shape (batch, length), numbered; None where every row holds one.
    """

    def __init__(self, kind: str, batch: int, length: int, given: dict[str, Any]) -> None:
        self.kind, self.batch, self.length, self.given = kind, batch, length, given
        self.mask: Tensor | None = given.get("attention_mask")
        self.positions = self._positions(given.get("position_ids"))
        self.documents = self._documents()

    @cached_property
    def past(self) -> int:
        """Tokens in the cache."""
        held = self.given.get("cache", self.given.get("past_key_values"))
        return 0 if held is None else int(held.get_seq_length())

    @property
    def says_nothing(self) -> bool:
        return self.positions is None and self.documents is None

    def _positions(self, given: Tensor | None) -> Tensor | None:
        if given is None or given.dim() != 2 or given.shape[1] != self.length:
            return None  # several axes of positions, or a wrong shape: the model's own business
        return given.expand(self.batch, -1)

    @property
    def _real(self) -> Tensor | None:
        """Which of the tokens are not padding, by a mask with one entry for each."""
        mask = self.mask
        return None if mask is None or mask.dim() != 2 else mask[:, -self.length :] > 0

    def _documents(self) -> Tensor | None:
        told, real = self._told(), self._real
        if told is None and self.length > 1 and (self.mask is None or real is not None):
            told = self._read(real)
        if told is None or not bool((told > 0).any()):
            return None
        return told if real is None else told.masked_fill(~real, -1)

    def _read(self, real: Tensor | None) -> Tensor | None:
        """The documents that a mask numbers, or positions show."""
        if real is not None and self.mask is not None and not self.mask.is_floating_point():
            numbers = self.mask[:, -self.length :].long()
            if bool((numbers > 1).any()):
                return documents.of_indices(numbers, self.batch, self.length)
        if self.positions is None:
            return None
        if real is None and self.past:
            real = torch.ones_like(self.positions, dtype=torch.bool)
        return documents.of_positions(self.positions, real)

    def _told(self) -> Tensor | None:
        """The documents that ``SEQUENCES`` name."""
        index, *lengths = (self.given.get(name) for name in SEQUENCES)
        found = [] if index is None else [documents.of_indices(index, self.batch, self.length)]
        sides = [each for each in lengths if each is not None]
        if len(sides) == 1 or (sides and not torch.equal(*sides)):
            raise ValueError("`cu_seq_lens_q` and `cu_seq_lens_k` must both be given, and be the same.")
        if sides:
            found.append(documents.of_lengths(sides[0], self.batch, self.length))
        if len(found) == 2 and not torch.equal(*found):
            raise ValueError("`seq_idx` and `cu_seq_lens_q` disagree about where documents start.")
        return found[0] if found else None

    def refuse_cache(self) -> None:
        """ValueError where a packed row shall be cached: whatever came next would see all of its documents."""
        if self.past or self.given.get("use_cache") or "cache" in self.given or "past_key_values" in self.given:
            raise ValueError(
                "documents packed in a row with a cache: what comes next would see them all. Pass use_cache=False and "
                "no cache; to generate, give each row one document, padded."
            )
        if self.mask is not None and self.mask.dim() != 2:
            raise ValueError("documents packed in a row beside a mask of all pairs: give one of them only.")

    def left_to_stock(self, implementation: str) -> dict[str, Any]:
        """What makes the model's own masks keep documents apart: positions that start again, and no mask."""
        assert self.documents is not None
        if self.mask is not None or (
            self.positions is not None and not torch.equal(documents.of_positions(self.positions, None), self.documents)
        ):
            raise ValueError(
                f"documents packed in a row: under {implementation!r} attention {self.kind} keeps them apart by "
                "positions that start again and no `attention_mask`; pass them so, or leave `position_ids` out."
            )
        return {}

    def layout(
        self, causal: bool, packed: Tensor | None = None, cached: bool = False, kind: type[Layout] = Layout
    ) -> Layout:
        """Of this call."""
        past = self.past if cached else 0
        where = {"offset": past, "causal": causal, "separate": causal or packed is not None}
        if packed is None and self.mask is not None and not bool(self.mask.all()):
            packed = (self.mask > 0).long() - 1
        return kind(self.batch, self.length, past + self.length, **where, documents=packed)  # type: ignore[arg-type]


def flash_lengths(packed: Tensor) -> dict[str, Any]:
    """What flash attention takes: padding is documents of its own."""
    starts = nn.functional.pad(torch.diff(packed) != 0, (1, 0), value=True).flatten()
    edges = torch.nonzero(starts).flatten()
    cumulative = torch.cat((edges, edges.new_tensor([starts.numel()]))).to(torch.int32)
    longest = int(cumulative.diff().max())
    sides = {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": longest, "max_length_k": longest}
    return {**sides, "attention_mask": None}
