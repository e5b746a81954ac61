"""From rows to cells, tables, data frames and CSV; and how two setups differ on the same rows."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext.evals.files import whole_file
from rope_ext.evals.runner import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {
    "needle": ("length", "depth"),
    "passkey": ("length",),
    "kv_retrieval": ("pairs", "position"),
    "multi_doc_qa": ("documents", "position"),
    "ruler": ("length", "subtask"),
}
"""What the cells of a task's table are: all samples with the same values here."""

TITLES = {
    "perplexity": "Perplexity by position",
    "needle": "Needle in a haystack",
    "passkey": "Passkey",
    "kv_retrieval": "Key-value retrieval",
    "multi_doc_qa": "Multi-document question answering",
    "ruler": "RULER",
}
"""Of pictures and sections."""


@dataclass(frozen=True)
class Results:
    """The rows of one task, of one setup or several.

    Attributes:
        task: its name.
        rows: one dictionary per prompt or passage: what was asked, what was found, the setup.
        trained_length: of the checkpoint, in tokens; None where it says nothing.
    """

    task: str
    rows: list[Row]
    trained_length: int | None = None

    def cells(self) -> list[Row]:
        """The table of the task: n, score, Wilson interval, mean log-probability per cell; perplexity per bin."""
        return perplexity_bins(self.rows) if self.task == "perplexity" else score_cells(self.rows, AXES[self.task])

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one line per row; lists and the setup's digests are left out.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        plain = [
            {name: value for name, value in row.items() if not isinstance(value, (dict, list))} for row in self.rows
        ]
        return pandas.DataFrame(plain)

    def plot(self) -> Figure:
        """The picture of the task: a heatmap, or curves."""
        from rope_ext.evals import plots

        return plots.of_task(self.task, self.rows, self.trained_length)

    def save(self, folder: Path) -> None:
        """Write ``<task>.csv`` and ``<task>.png``."""
        from rope_ext.evals import plots

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(folder / f"{self.task}.csv", self.cells())
        plots.save(self.plot(), folder / f"{self.task}.png")


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate, shares of 1. Source: Wilson 1927.

    Args:
        successes: how many of ``n`` succeeded; parts of one count as such.
        n: at least 1.
        z: normal quantile.
    """
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def score_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(after - before, low, high): the difference of two rates on the same rows, with its 95 % interval.

    Both rates' Wilson intervals, joined with the correlation of the pairs. Source: Newcombe 1998, Statistics in
    Medicine 17:2635, method 10; for scores between 0 and 1 its counts are sums.

    Args:
        before, after: scores from 0 to 1, one per row, in the same order.
    """
    n = len(before)
    one, two = sum(before) / n, sum(after) / n
    (low1, high1), (low2, high2) = wilson(sum(before), n), wilson(sum(after), n)
    together = n * sum(a * b for a, b in zip(before, after, strict=True)) - sum(before) * sum(after)
    together = max(0.0, together - n / 2) if together > 0 else together
    spread = statistics.pstdev(before) * statistics.pstdev(after)
    correlation = together / (n * n * spread) if spread else 0.0
    difference = two - one
    down = (two - low2) ** 2 + (high1 - one) ** 2 - 2 * correlation * (two - low2) * (high1 - one)
    up = (high2 - two) ** 2 + (one - low1) ** 2 - 2 * correlation * (high2 - two) * (one - low1)
    return difference, difference - math.sqrt(max(0.0, down)), difference + math.sqrt(max(0.0, up))


def mean_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """(mean of after - before, low, high): the 95 % interval by 2,000 bootstrap draws of the pairs.

    One pair has no interval: low and high are nan.
    """
    pairs = [b - a for a, b in zip(before, after, strict=True)]
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return mean, math.nan, math.nan
    rng = random.Random(seed)
    draws = sorted(statistics.fmean(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return mean, draws[49], draws[1949]


def score_cells(rows: Sequence[Row], axes: Sequence[str]) -> list[Row]:
    """One row per label and axes: n, score, its Wilson interval, mean answer log-probability (nats)."""
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["label"], *(row[axis] for axis in axes)), []).append(row)
    table = []
    for (label, *place), members in cells.items():
        n, hits = len(members), sum(row["score"] for row in members)
        low, high = wilson(hits, n)
        table.append(
            {
                "label": label,
                **{axis: "no needle" if value is None else value for axis, value in zip(axes, place, strict=True)},
                "n": n,
                "score": hits / n,
                "low": round(low, 4),
                "high": round(high, 4),
                "answer_log_probability": round(sum(row["answer_log_probability"] for row in members) / n, 4),
            }
        )
    return table


def perplexity_bins(rows: Sequence[Row]) -> list[Row]:
    """One row per label, length, sample and position bin: scored tokens ``start`` .. ``end`` - 1, the first being 0."""
    table = []
    for row in rows:
        edges = row.get("bin_edges", [0, row["tokens"]])
        values = row.get("bin_perplexity", [row["perplexity"]])
        for start, end, value in zip(edges[:-1], edges[1:], values, strict=True):
            same = {name: row[name] for name in ("label", "length", "sample")}
            table.append({**same, "start": start, "end": end, "perplexity": value})
    return table


def tokens_of(row: Row) -> int:
    """The length that was asked for, or where none was, that of the prompt."""
    length: int = row["length"] if "length" in row else row["tokens"]
    return length


def shown(value: Any) -> str:
    """A cell of a table, for people."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,.3f}" if value % 1 else f"{value:,.0f}"


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows or no file."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with whole_file(path) as scratch, scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def labels(rows: Iterable[Row]) -> list[str]:
    """The setups in the rows, in order of appearance."""
    return list(dict.fromkeys(row["label"] for row in rows))
