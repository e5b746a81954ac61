"""From rows to cells, tables and CSV."""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from rope_ext.evals.runner import Row


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate, shares of 1. Source: Wilson 1927.

    Args:
        successes: how many of ``n`` succeeded.
        n: at least 1.
        z: normal quantile.
    """
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def needle_cells(rows: Sequence[Row]) -> list[Row]:
    """One row per label, length and depth: n, score, its Wilson interval, mean answer log-probability (nats)."""
    cells: dict[tuple[str, int, float | None], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["label"], row["length"], row["depth"]), []).append(row)
    table = []
    for (label, length, depth), members in cells.items():
        n, hits = len(members), sum(row["score"] for row in members)
        low, high = wilson(hits, n)
        table.append(
            {
                "label": label,
                "length": length,
                "depth": "no needle" if depth is None else depth,
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


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows or no file."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with tempfile.NamedTemporaryFile("w", newline="", dir=path.parent, delete=False) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def labels(rows: Iterable[Row]) -> list[str]:
    """The setups in the rows, in order of appearance."""
    return list(dict.fromkeys(row["label"] for row in rows))
