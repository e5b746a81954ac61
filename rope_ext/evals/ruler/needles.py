"""Needles in a haystack: single, among others, with several values, several at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rope_ext.evals.haystack import SHORTEST, haystack, hide
from rope_ext.evals.questions import Question
from rope_ext.evals.ruler.sheet import Sheet, Wording, fresh
from rope_ext.evals.tasks.kv_retrieval import random_uuid
from rope_ext.evals.text import NOISE
from rope_ext.evals.words import PAIRS, pairs


@dataclass(frozen=True)
class Niah:
    """A task with needles in a haystack."""

    hay: str = "text"
    """"text", "noise", or "needles": nothing but needles with other keys."""
    keys: str = "words"
    """"words" (two, with a hyphen) or "uuids"."""
    values: str = "numbers"
    """"numbers" (of seven digits) or "uuids"."""
    hidden: int = 1
    """Keys that are put into the haystack."""
    each: int = 1
    """Values per key."""
    asked: int = 1


NIAH = {
    "niah_single_1": Niah(hay="noise"),
    "niah_single_2": Niah(),
    "niah_single_3": Niah(values="uuids"),
    "niah_multikey_1": Niah(hidden=4),
    "niah_multikey_2": Niah(hay="needles"),
    "niah_multikey_3": Niah(hay="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Niah(each=4),
    "niah_multiquery": Niah(hidden=4, asked=4),
}

NEEDLE = "One of the secret codes of {key} is {value}."

ONE = Wording(
    "Secret codes stand somewhere in the text below. Remember them: you will be asked for them.",
    "What is the secret code of {keys} in the text above?",
    "The secret code of {keys} in the text is",
    128,
)
SEVERAL = Wording(
    ONE.task,
    "What are all the secret codes of {keys} in the text above?",
    "The secret codes of {keys} in the text are",
    128,
)


def niah(sheet: Sheet, kind: Niah, essay: Sequence[str]) -> Question:
    rng = sheet.rng
    keys = _strings(kind.keys, rng, PAIRS if kind.hay == "needles" else kind.hidden)
    values = _strings(kind.values, rng)
    hidden = [(key, next(values)) for key in islice(keys, kind.hidden) for _ in range(kind.each)]
    depths = [rng.uniform(0, 100) for _ in hidden]
    if kind.each > 1:
        depths.sort()  # the values of one key are asked for in the order of the text
    asked = hidden[: kind.asked * kind.each]
    wording = ONE if len(asked) == 1 else SEVERAL
    answers = [value for _, value in asked]
    room = sheet.frame(wording, answers=answers, keys=", ".join(dict.fromkeys(key for key, _ in asked)))
    needles = [sheet.encode(" " + NEEDLE.format(key=key, value=value)) for key, value in hidden]
    room -= sum(len(needle) for needle in needles)
    if kind.hay == "needles":
        hay = _needles(sheet, keys, values, room)
    else:
        sheet.check(room, SHORTEST)
        hay = haystack(sheet.tokenizer, NOISE if kind.hay == "noise" else essay, room, sheet.row["sample"])
    ids, true_depths = hide(hay, list(zip(depths, needles, strict=True)))
    return sheet.answered_by(ids, answers, true_depths=true_depths[: len(asked)])


def _needles(sheet: Sheet, keys: Iterator[str], values: Iterator[str], room: int) -> list[list[int]]:
    """As many needles as fit, at least one."""
    hay: list[list[int]] = []
    for key in keys:
        piece = sheet.encode(" " + NEEDLE.format(key=key, value=next(values)))
        if not hay:
            sheet.check(room, len(piece))
        room -= len(piece)
        if room < 0:
            return hay
        hay.append(piece)
    raise sheet.used_up(f"there are {len(hay)} distinct keys")


def _strings(kind: str, rng: random.Random, count: int = 0) -> Iterator[str]:
    """Distinct keys or values; ``count`` is how many words there will be."""
    if kind == "words":
        return iter(pairs(count, rng))
    return fresh(lambda: random_uuid(rng) if kind == "uuids" else str(rng.randint(10**6, 10**7 - 1)))
