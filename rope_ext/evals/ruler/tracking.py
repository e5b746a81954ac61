"""Variable tracking: which variables are set to a number, be it by way of others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rope_ext.evals.haystack import SHORTEST, haystack, hide
from rope_ext.evals.questions import Question
from rope_ext.evals.ruler.sheet import CONSONANTS, Sheet, Wording, fresh
from rope_ext.evals.text import NOISE

TRACKING = Wording(
    "Some sentences of the text below set a variable, to a number or to another variable. Follow them.",
    "Which variables are set to {value} in the text above, be it by way of other variables?",
    "The five variables that are set to {value} are",
    30,
)


def vt(sheet: Sheet) -> Question:
    """One chain of four hops: the first variable is set to a number, each other one to the one before it."""
    rng = sheet.rng
    drawn = list(islice(fresh(lambda: "".join(rng.choices(CONSONANTS.upper(), k=5))), 10))
    value, other = (str(number) for number in rng.sample(range(10000, 100000), 2))
    names, shown = drawn[:5], drawn[5:]
    context = " ".join(" ".join(each) for each in zip(NOISE, _chain(shown, other), strict=True))
    room = sheet.frame(TRACKING, TRACKING.worked(context, shown, value=other), answers=names, value=value)
    statements = [sheet.encode(" " + statement) for statement in _chain(names, value)]
    room -= sum(len(statement) for statement in statements)
    sheet.check(room, SHORTEST)
    hay = haystack(sheet.tokenizer, NOISE, room, sheet.row["sample"])
    depths = sorted(rng.uniform(0, 100) for _ in statements)
    ids, true_depths = hide(hay, list(zip(depths, statements, strict=True)))
    return sheet.answered_by(ids, names, true_depths=true_depths)


def _chain(names: Sequence[str], value: str) -> list[str]:
    return [f"Set {name} to {before}." for name, before in zip(names, (value, *names), strict=False)]
