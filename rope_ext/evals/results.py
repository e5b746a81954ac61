"""The rows of a task as a table, a data frame, a picture and files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext.evals.cells import AXES, perplexity_bins, score_cells
from rope_ext.evals.store import Row
from rope_ext.files import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """All rows or no file."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with whole_file(path) as scratch, scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
