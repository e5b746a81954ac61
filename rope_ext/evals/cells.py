"""From the rows of a task to the cells of its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rope_ext.evals.intervals import wilson
from rope_ext.evals.store import Row

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


def labels(rows: Iterable[Row]) -> list[str]:
    """The setups in the rows, in order of appearance."""
    return list(dict.fromkeys(row["label"] for row in rows))
