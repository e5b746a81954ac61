"""Several setups of one loaded model on the same rows: how each does inside the trained length and beyond it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext.api import patch_of, patched, unwrap
from rope_ext.config import Method
from rope_ext.evals.cells import TITLES, labels, perplexity_bins, shown, tokens_of
from rope_ext.evals.identity import AS_IT_IS, method_label, setup_label, trained_length, weights
from rope_ext.evals.intervals import mean_difference, score_difference
from rope_ext.evals.report import Page, picture, table
from rope_ext.evals.results import Results
from rope_ext.evals.runner import Row, Task, run
from rope_ext.registry import find_method

HOLDS = 0.8
"""A needle score from which a length counts as held."""


def setups(methods: Sequence[str], factors: Sequence[float]) -> list[Method | None]:
    """Every method with every factor; None, the model as it is, comes first.

    Args:
        methods: names; "none" (or "unpatched") is the model as it is, which is always there.
        factors: given to each method that has a factor.

    Raises:
        ValueError: an unknown method, a factor that it does not take, or one that it needs and none is given.
    """
    if isinstance(methods, str):
        raise ValueError(f"`methods` must be a list of names, got {methods!r}.")
    found: list[Method | None] = [None]
    for name in methods:
        if name in AS_IT_IS:
            continue
        kind = find_method(name)
        takes = "factor" in kind.__dataclass_fields__
        made = [kind.from_options({"factor": factor}) for factor in factors] if takes and factors else []
        found += made or [kind.from_options({})]
    return list(dict.fromkeys(found))


def under(model: nn.Module, setup: Method | None, **more: Any) -> Any:
    """A context in which the model has that position encoding; None leaves it as it is."""
    return nullcontext(model) if setup is None else patched(model, setup, **more)


@dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        results: per task, the rows of all setups.
        trained_length: of the checkpoint, in tokens; None where it says nothing.
        baseline: label of the model as it was given, with which every other setup is compared.
    """

    results: dict[str, Results]
    trained_length: int | None
    baseline: str

    def summary(self) -> list[Row]:
        """One row per setup: each task inside the trained length and beyond, with the difference to the baseline.

        Differences are of the same rows: scores with Newcombe's interval for paired rates, perplexities as a ratio with
        a bootstrap interval over stretches of the text. ``holds_to`` is the longest length up to which the needle's
        score is at least 0.8.
        """
        names = list(dict.fromkeys(label for found in self.results.values() for label in labels(found.rows)))
        return [{"label": name, **self._of(name)} for name in names]

    def _of(self, label: str) -> Row:
        row: Row = {}
        for task, found in self.results.items():
            mine = [each for each in found.rows if each["label"] == label]
            base = [each for each in found.rows if each["label"] == self.baseline != label]
            compare = _perplexities if task == "perplexity" else _scores
            row |= {f"{task}, {side}": value for side, value in compare(mine, base, self.trained_length).items()}
            if task == "needle":
                row["holds_to"] = holds_to(mine)
        return row

    def write(self, out: Path | str, title: str, lead: str) -> Path:
        """Tables, pictures and one self-contained page, ``index.html``; returns its path."""
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        page = Page(title, lead)
        header, lines = summary_table(self.summary(), self.trained_length)
        page.section("At a glance", _READING, table(header, lines))
        for task, found in self.results.items():
            found.save(out)
            cells = found.cells()
            columns = [name for name in cells[0] if name != "label"]
            lines = [[cell["label"], *(shown(cell[name]) for name in columns)] for cell in cells]
            page.section(
                TITLES[task],
                _LEADS[task],
                picture(out / f"{task}.png", TITLES[task]),
                table(["setup", *(name.replace("_", " ") for name in columns)], lines, folded=len(lines) > 12),
            )
        page.write(out / "index.html")
        return out / "index.html"


def sweep(
    model: nn.Module,
    tokenizer: Any,
    setups: Sequence[Method | None],
    tasks: Sequence[Task],
    out: Path | None = None,
    **running: Any,
) -> Sweep:
    """Measure every setup on the same rows; the model is left as it was.

    Args:
        model: a language model.
        tokenizer: its tokenizer.
        setups: position encodings; None for the model as it is, first.
        tasks: what to measure.
        out: folder for finished rows; a sweep that was stopped goes on from there.
        running: passed to :func:`rope_ext.evals.runner.run`.

    Raises:
        ValueError: a setup does not fit the model, or two tasks are of one kind; nothing has been measured then.
    """
    twice = [task.name for place, task in enumerate(tasks) if task.name in (other.name for other in tasks[:place])]
    if twice:
        raise ValueError(f"`tasks` holds {twice[0]!r} twice; give it all its lengths at once, or call sweep again.")
    setups = _different(setups, model)
    for setup in setups:
        with under(model, setup):
            pass
    baseline, checkpoint = setup_label(model), weights(unwrap(model))
    rows: dict[str, list[Row]] = {task.name: [] for task in tasks}
    for setup in setups:
        label = baseline if setup is None else method_label(setup)
        with under(model, setup):
            for task in tasks:
                rows[task.name] += run(task, model, tokenizer, out, label, checkpoint=checkpoint, **running)
    trained = trained_length(model)
    return Sweep({name: Results(name, found, trained) for name, found in rows.items()}, trained, baseline)


def _different(setups: Sequence[Method | None], model: nn.Module) -> list[Method | None]:
    """Each setup once; what the model has already is the model as it is."""
    patch = patch_of(unwrap(model))
    return list(dict.fromkeys(None if patch is not None and setup == patch.encoding else setup for setup in setups))


def holds_to(rows: Sequence[Row]) -> int | None:
    """The longest length such that the mean score there and at all shorter ones is at least ``HOLDS``."""
    scores: dict[int, list[float]] = {}
    for row in rows:
        if row["depth"] is not None:
            scores.setdefault(row["length"], []).append(row["score"])
    held = None
    for length in sorted(scores):
        if sum(scores[length]) < HOLDS * len(scores[length]):
            break
        held = length
    return held


def summary_table(summary: Sequence[Row], trained: int | None) -> tuple[list[str], list[list[str]]]:
    """(header, lines) for people; differences to the baseline on a second line of a cell."""
    names = [name for name in dict.fromkeys(name for row in summary for name in row) if name != "label"]
    limit = "" if trained is None else f" {trained:,}"
    sides = {", inside": f", to{limit}" if limit else "", ", beyond": f", past{limit}"}

    def title(name: str) -> str:
        for side, limited in sides.items():
            name = name.replace(side, limited)
        return name.replace("_", " ").replace("holds to", "needle holds to")

    return ["setup", *map(title, names)], [
        [row["label"], *(_compared(row.get(name)) for name in names)] for row in summary
    ]


def _sides(rows: Sequence[Row], trained: int | None) -> dict[str, list[int]]:
    """Indices of the rows inside the trained length and beyond it."""
    sides: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        sides.setdefault("inside" if trained is None or tokens_of(row) <= trained else "beyond", []).append(index)
    return sides


def _scores(mine: Sequence[Row], base: Sequence[Row], trained: int | None) -> Row:
    mine, base = ([row for row in rows if row.get("depth", 0) is not None] for rows in (mine, base))
    found: Row = {}
    for side, members in _sides(mine, trained).items():
        after = [mine[index]["score"] for index in members]
        value: Row = {"value": sum(after) / len(after), "n": len(after)}
        if len(base) == len(mine):
            before = [base[index]["score"] for index in members]
            value["difference"], value["low"], value["high"] = score_difference(before, after)
        found[side] = value
    return found


def _perplexities(mine: Sequence[Row], base: Sequence[Row], trained: int | None) -> Row:
    """Bins that end inside the trained length, and bins that start where it ends or later."""
    ours, theirs = _logs(mine, trained), _logs(base, trained)
    found: Row = {}
    for side, after in ours.items():
        value: Row = {"value": math.exp(sum(after) / len(after)), "n": len(after)}
        if base:
            ratio = mean_difference(theirs[side], after)
            value["ratio"], value["low"], value["high"] = (math.exp(each) for each in ratio)
        found[side] = value
    return found


def _logs(rows: Sequence[Row], trained: int | None) -> dict[str, list[float]]:
    """ln perplexity of every stretch of the text on either side of the trained length.

    Stretches are the bins of the longest passages. All lengths read the same text, so that bins of several lengths that
    lie in one stretch are not several pieces of evidence: their mean, by tokens, is one. A bin across the trained
    length counts on neither side.
    """
    limit = math.inf if trained is None else trained
    bins = perplexity_bins(rows)
    span = {row["length"]: row["tokens"] for row in rows}
    longest = max(span, default=0)

    def place(bin_: Row, part: str) -> int:
        start: int = bin_["sample"] * span[bin_["length"]] + bin_[part]
        return start

    edges = sorted({place(bin_, "end") for bin_ in bins if bin_["length"] == longest})
    sides: dict[str, dict[int, list[tuple[float, int]]]] = {}
    for bin_ in bins:
        side = "inside" if bin_["end"] <= limit else "beyond" if bin_["start"] >= limit - 1 else None
        if side is not None:
            stretch = bisect_left(edges, (place(bin_, "start") + place(bin_, "end")) / 2)
            found = math.log(bin_["perplexity"]), bin_["end"] - bin_["start"]
            sides.setdefault(side, {}).setdefault(stretch, []).append(found)
    return {
        side: [sum(log * n for log, n in found) / sum(n for _, n in found) for _, found in sorted(stretches.items())]
        for side, stretches in sides.items()
    }


def _compared(value: Any) -> str:
    if not isinstance(value, dict):
        return shown(value)
    if "ratio" in value:
        interval = "" if math.isnan(value["low"]) else f" ({value['low']:.2f} to {value['high']:.2f})"
        return f"{value['value']:.2f}\nx{value['ratio']:.2f}{interval}"
    if "difference" in value:
        interval = f"{value['low']:+.2f} to {value['high']:+.2f}"
        return f"{value['value']:.2f}\n{value['difference']:+.2f} ({interval})"
    return f"{value['value']:.2f}"


_READING = (
    "Below each number: the difference to the model as loaded on the same prompts and passages, with its 95 % "
    "interval; for perplexity the ratio. A method that is worse inside the trained length costs short-context quality."
)

_LEADS = {
    "perplexity": "Lower is better; each point is a stretch of the text.",
    "needle": "A five-digit number hidden at a depth of a long text; log p is the log-probability of the right answer.",
    "passkey": "A pass key hidden in filler; right if the first number generated is the key.",
    "kv_retrieval": "The value of one of many random keys, by its place in the object.",
    "multi_doc_qa": "A question whose answer is in one of many documents, by its place.",
    "ruler": "Synthetic tasks: retrieval, variable tracking, common and frequent words.",
}
