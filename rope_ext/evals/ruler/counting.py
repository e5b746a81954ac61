"""Counting: the words that come most often, in a list of words and in a text of code words."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice
from math import inf, isqrt, pi

from rope_ext.evals.questions import Question
from rope_ext.evals.ruler.sheet import CONSONANTS, Sheet, Wording, fresh
from rope_ext.evals.words import PAIRS, SINGLES, pairs, vocabulary

COMMON = Wording(
    "Below is a numbered list of words, some of which come again and again. Remember those that come most often.",
    "Which ten words come most often in the list above?",
    "The ten words that come most often are",
    120,
)
FREQUENT = Wording(
    "The text below is written in code words; the dots mean nothing. Keep track of how often each code word comes.",
    "Which three code words come most often in the text above, dots aside?",
    "The three code words that come most often are",
    50,
)

COMMON_WORDS = 10
TIMES = ((30, 3), (10, 1))
"""How often a common and another word come in cwe: the first that fits."""

FEWEST_CODED = 100
"""With fewer coded words the ranks 4 and 5 are hardly apart."""


def cwe(sheet: Sheet) -> Question:
    """Single words while there are enough of them, else pairs; the words of the example are others."""
    rng = sheet.rng
    singles, compounds = vocabulary(len(SINGLES), rng), pairs(PAIRS, rng)
    shown, singles = singles[: 2 * COMMON_WORDS], singles[2 * COMMON_WORDS :]
    example = shown[:COMMON_WORDS] * 3 + shown[COMMON_WORDS:]
    rng.shuffle(example)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(example, start=1))
    room = sheet.frame(COMMON, COMMON.worked(context, shown[:COMMON_WORDS]))
    numbers: list[list[int]] = []
    _, least = _listed(sheet, numbers, singles[: 2 * COMMON_WORDS], TIMES[-1])
    sheet.check(room, least)
    for times in TIMES:
        for words in (singles, compounds):
            pieces, _ = _listed(sheet, numbers, words, times, room)
            if len(pieces) < len(words):
                break
        else:
            raise sheet.used_up(f"there are {len(compounds)} distinct words")
        if len(pieces) >= 2 * COMMON_WORDS:
            break
    often, rarely = times
    order = [rank for rank in range(len(pieces)) for _ in range(often if rank < COMMON_WORDS else rarely)]
    rng.shuffle(order)
    ids = [token for number, rank in zip(numbers, order, strict=False) for token in (*number, *pieces[rank])]
    facts = {"words": len(pieces), "common_times": often, "other_times": rarely}
    return sheet.answered_by(ids, words[:COMMON_WORDS], **facts)


def _listed(
    sheet: Sheet, numbers: list[list[int]], words: Sequence[str], times: tuple[int, int], room: float = inf
) -> tuple[list[list[int]], int]:
    """(ids of the words that fit into a numbered list, tokens of the list of all words up to the first that does not).

    ``numbers`` holds the ids of the items' numbers and grows as needed.
    """
    pieces: list[list[int]] = []
    items, tokens = 0, 0
    for rank, word in enumerate(words):
        piece, more = sheet.encode(f" {word}"), times[rank >= COMMON_WORDS]
        for number in range(len(numbers) + 1, items + more + 1):
            numbers.append(sheet.encode(f" {number}." if number > 1 else "1."))
        tokens += more * len(piece) + sum(len(number) for number in numbers[items : items + more])
        items += more
        if tokens > room:
            break
        pieces.append(piece)
    return pieces, tokens


def fwe(sheet: Sheet) -> Question:
    """A word of rank r comes as often as total / zeta(2) / r^2 says, rounded down; rank 1 is the noise."""
    rng = sheet.rng
    room = sheet.frame(FREQUENT)
    ranks = len(_counts(max(2 * room, FEWEST_CODED)))
    coded = fresh(lambda: "".join(rng.choices(CONSONANTS, k=6)))
    words = ["...", *islice(coded, ranks)]
    pieces = [sheet.encode(f" {word}") for word in words]

    def tokens(total: int) -> int:
        return sum(count * len(piece) for count, piece in zip(_counts(total), pieces, strict=False))

    sheet.check(room, tokens(FEWEST_CODED))
    counts = _counts(bisect_right(range(2 * room), room, key=tokens) - 1)
    order = [rank for rank, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(order)
    ids = [token for rank in order for token in pieces[rank]]
    return sheet.answered_by(ids, words[1:4], words=len(order))


def _counts(total: int) -> list[int]:
    """How often the words of rank 1, 2 ... come, down to those that come once."""
    first = total * 6 / pi**2
    return [int(first / rank**2) for rank in range(1, isqrt(int(first)) + 1)]
