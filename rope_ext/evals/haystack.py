"""A haystack in token ids, and needles put into it at sentence ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rope_ext.evals.questions import encode
from rope_ext.evals.text import endless

LONGEST_PIECE = 64
"""A sentence of more tokens is cut into pieces of this many, between which a needle may go, too."""

SHORTEST = 16
"""Fewer tokens are no haystack."""


STRIDE = 997
"""Sentences between the haystacks of two samples: a prime, so that they do not start at the same few places."""


def haystack(tokenizer: Any, sentences: Sequence[str], budget: int, sample: int = 0) -> list[list[int]]:
    """Pieces that fill ``budget`` tokens: sentences, from another one on for each sample, the last one cut to fit.

    A larger budget gives the same pieces and more, so that prompts of several lengths share their beginning.

    Raises:
        ValueError: no sentences, or a budget below ``SHORTEST``.
    """
    if not sentences:
        raise ValueError("the haystack text has no sentences.")
    if budget < SHORTEST:
        raise ValueError(f"the haystack gets {budget} tokens, it needs {SHORTEST}.")
    hay: list[list[int]] = []
    for sentence in endless(list(sentences), sample * STRIDE):
        ids = encode(tokenizer, f" {sentence}")  # so that a needle may go before the first one, too
        for at in range(0, len(ids), LONGEST_PIECE):
            piece = ids[at : at + LONGEST_PIECE][:budget]
            hay.append(piece)
            budget -= len(piece)
            if budget == 0:
                return hay
    raise AssertionError("an endless text ended")


def hide(hay: Sequence[Sequence[int]], needles: Sequence[tuple[float, Sequence[int]]]) -> tuple[list[int], list[float]]:
    """The haystack with needles in it, and where each really is.

    Args:
        hay: pieces of token ids.
        needles: (depth in percent of the haystack's tokens, token ids); each goes to the piece's end nearest its depth.

    Returns:
        The ids, and per needle the share of the haystack's tokens before it, in percent.
    """
    ends = [0]
    for piece in hay:
        ends.append(ends[-1] + len(piece))
    total = ends[-1]
    places = [min(range(len(ends)), key=lambda index: abs(ends[index] - total * depth / 100)) for depth, _ in needles]
    ids: list[int] = []
    for index in range(len(ends)):
        ids += hay[index - 1] if index else []
        for place, (_, needle) in zip(places, needles, strict=True):
            ids += needle if place == index else []
    return ids, [round(100 * ends[place] / total, 2) for place in places]
