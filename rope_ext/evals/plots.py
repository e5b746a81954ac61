"""Pictures of results. Every function returns a figure (no pyplot, no global state); ``save`` writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from rope_ext.api import Description
from rope_ext.evals.cells import AXES, TITLES, labels, perplexity_bins, score_cells
from rope_ext.evals.store import Row
from rope_ext.files import whole_file

SCORE_COLOURS = LinearSegmentedColormap.from_list("score", ["#b2182b", "#f4a582", "#f7f7f7", "#92c5de", "#2166ac"])
"""Red to blue: told apart by colour-blind readers too."""

LINE_COLOURS = (
    *("#b2182b", "#2166ac", "#e08214", "#1b7837", "#762a83", "#4d4d4d"),
    *("#17a2b8", "#c51b7d", "#8c6d31", "#9aa800"),
)

FEW = 3
"""So many lines can carry intervals and numbers."""

PANELS = 2
"""Heatmaps side by side: more could not be read on a phone."""


def of_task(task: str, rows: Sequence[Row], trained_length: int | None = None) -> Figure:
    """The picture that fits a task, by its name.

    Raises:
        ValueError: there is nothing to draw.
    """
    if all(row.get("depth", 0) is None for row in rows):
        raise ValueError(f"{task}: there is no row to draw (controls are not drawn).")
    if task == "perplexity":
        return perplexity_plot(rows, trained_length)
    if task in ("needle", "ruler"):
        return heatmap(rows, AXES[task][1], trained_length, TITLES[task])
    across, *groups = reversed(AXES[task])
    return score_curves(rows, across, groups[0] if groups else None, TITLES[task])


def heatmap(
    rows: Sequence[Row], down: str = "depth", trained_length: int | None = None, title: str = TITLES["needle"]
) -> Figure:
    """One panel per setup: length across, depth or subtask down, the score as colour and number, log-probability
    below it.
    """
    cells = [cell for cell in score_cells(rows, ("length", down)) if cell[down] != "no needle"]
    names = labels(cells)
    lengths = sorted({cell["length"] for cell in cells})
    places = list(dict.fromkeys(cell[down] for cell in cells))
    if down == "depth":
        places.sort()
    wide = min(PANELS, len(names))
    high = math.ceil(len(names) / wide)
    width = 1.7 + wide * max(2.6, 0.95 * len(lengths) + 0.6)
    figure = Figure(figsize=(width, 0.5 + high * (1.4 + 0.55 * len(places))), layout="constrained")
    axes = figure.subplots(high, wide, sharey=True, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        found = {(cell["length"], cell[down]): cell for cell in cells if cell["label"] == name}
        grid = [[found.get((length, place), {}).get("score", math.nan) for length in lengths] for place in places]
        image = axis.imshow(grid, cmap=SCORE_COLOURS, vmin=0, vmax=1, aspect="auto")
        for (length, place), cell in found.items():
            _annotate(axis, lengths.index(length), places.index(place), cell)
        _mark_trained_length(axis, lengths, trained_length)
        axis.set_title(name, fontsize=11, fontweight="bold")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_yticks(range(len(places)), [f"{place:g} %" if down == "depth" else place for place in places])
        axis.set_xlabel("length (tokens)")
        axis.set_xticks([edge + 0.5 for edge in range(len(lengths) - 1)], minor=True)
        axis.set_yticks([edge + 0.5 for edge in range(len(places) - 1)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1.5)
        axis.tick_params(which="both", length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("depth of the needle" if down == "depth" else "")
    bar = figure.colorbar(image, ax=axes, label="answers found", shrink=0.9, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0 %", "50 %", "100 %"])
    bar.outline.set_visible(False)
    figure.suptitle(title, fontsize=12)
    return figure


def score_curves(rows: Sequence[Row], across: str, group: str | None, title: str) -> Figure:
    """Score over a place or a length: one line per setup, one panel per value of ``group``; with up to ``FEW`` setups
    the 95 % intervals, too.

    Rows without a number there (closed book, oracle, remedy) are horizontal lines, in their panel, or if it has no
    curve (0 documents, 1 document) in every panel.
    """
    cells = score_cells(rows, (across, group) if group else (across,))
    curves = [cell for cell in cells if not isinstance(cell[across], str)]
    kinds = dict.fromkeys(cell[across] for cell in cells if isinstance(cell[across], str))
    styles = dict(zip(kinds, ("--", ":", "-."), strict=False))
    panels = sorted({cell[group] for cell in curves or cells}) if group else [None]
    names = labels(cells)
    figure = Figure(figsize=(1.2 + 4.2 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for (colour, line), name in zip(_lines(), names, strict=False):
            mine = [cell for cell in cells if cell["label"] == name]
            here = [cell for cell in mine if group is None or cell[group] == panel or cell[group] not in panels]
            curve = sorted((c for c in here if not isinstance(c[across], str)), key=lambda cell: cell[across])
            places = [cell[across] for cell in curve]
            axis.plot(places, [cell["score"] for cell in curve], marker="o", ls=line, color=colour, lw=2, label=name)
            low, high = [cell["low"] for cell in curve], [cell["high"] for cell in curve]
            if len(names) <= FEW:
                axis.fill_between(places, low, high, color=colour, alpha=0.12, linewidth=0)
            for cell in here:
                if cell[across] in styles:
                    caption = f"{name}, {cell[across]}" if len(names) > 1 else cell[across]
                    axis.axhline(cell["score"], color=colour, ls=styles[cell[across]], linewidth=1.3, label=caption)
        if group:
            axis.set_title(f"{panel:,} {group}", fontsize=11)
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("length (tokens)" if across == "length" else "position of the answer (%)")
        if across == "length":
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axis.grid(True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share of right answers")
    _legend_below(figure, axes[0])
    figure.suptitle(title, fontsize=12)
    return figure


def perplexity_plot(
    rows: Sequence[Row], trained_length: int | None = None, title: str = TITLES["perplexity"]
) -> Figure:
    """Perplexity of each position bin on a logarithmic scale: one line per setup, of its longest forward."""
    bins = [row for row in perplexity_bins(rows) if row["sample"] == 0]
    names = labels(bins)
    figure = Figure(figsize=(7.6, 4.2 + 0.2 * (len(names) // 3)), layout="constrained")
    axis = figure.subplots()
    for (colour, line), name in zip(_lines(), names, strict=False):
        mine = [row for row in bins if row["label"] == name]
        mine = [row for row in mine if row["length"] == max(row["length"] for row in mine)]
        middles = [(row["start"] + row["end"]) / 2 for row in mine]
        values = [row["perplexity"] for row in mine]
        axis.plot(middles, values, marker="o", ls=line, color=colour, linewidth=2, markersize=5, label=name)
        if len(names) <= FEW:
            axis.annotate(f"{values[-1]:.3g}", (middles[-1], values[-1]), xytext=(7, -3), textcoords="offset points")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if trained_length:
        axis.axvline(trained_length, color="#777777", linestyle=":", linewidth=1.2)
        axis.text(
            trained_length, 0.98, " trained length", transform=axis.get_xaxis_transform(), va="top", color="#777777"
        )
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_xlabel("position in the text (tokens)")
    axis.set_ylabel("perplexity")
    axis.grid(True, which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    _legend_below(figure, axis)
    axis.set_title(title, fontsize=12)
    return figure


def frequency_plot(descriptions: Mapping[str, Description], title: str = "Wavelength of each channel pair") -> Figure:
    """Tokens per turn against channel pair, with trained and usable length as lines."""
    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axis = figure.subplots()
    for colour, (name, description) in zip(LINE_COLOURS * 9, descriptions.items(), strict=False):
        for layer_type, waves in description.wavelengths.items():
            finite = [(pair, wave) for pair, wave in enumerate(waves) if math.isfinite(wave)]
            outside = set(description.outside_trained_range[layer_type])
            caption = name if layer_type == "all" else f"{name} ({layer_type})"
            axis.plot(*zip(*finite, strict=True), "-", color=colour, linewidth=1.8, label=caption)
            marked = [(pair, wave) for pair, wave in finite if pair in outside]
            if marked:
                axis.plot(
                    *zip(*marked, strict=True), "x", color=colour, markersize=7, label=f"{caption}: leaves its range"
                )
    first = next(iter(descriptions.values()))
    reach = max(description.usable_length for description in descriptions.values())
    for length, caption in ((first.trained_length, "trained length"), (reach, "usable length")):
        axis.axhline(length, color="#777777", linestyle=":", linewidth=1.2)
        axis.text(0, length, f"{caption} {length:,}", va="bottom", color="#777777", fontsize=9)
    axis.set_yscale("log")
    axis.set_xlabel("channel pair")
    axis.set_ylabel("wavelength (tokens per turn)")
    axis.grid(True, which="major", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(title, fontsize=12)
    return figure


def _lines() -> list[tuple[str, str]]:
    """(colour, line style), all different."""
    return [(colour, style) for style in ("-", "--", ":", "-.") for colour in LINE_COLOURS]


def _legend_below(figure: Figure, axis: Axes) -> None:
    handles, captions = axis.get_legend_handles_labels()
    figure.legend(handles, captions, loc="outside lower center", ncols=min(4, len(captions)), frameon=False, fontsize=9)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    with whole_file(path) as scratch:
        figure.savefig(scratch, dpi=150, format="png")


def _annotate(axis: Axes, x: int, y: int, cell: Row) -> None:
    colour = "white" if abs(cell["score"] - 0.5) > 0.3 else "#222222"
    axis.text(
        x, y - 0.1, f"{cell['score']:.0%}", ha="center", va="center", color=colour, fontweight="bold", fontsize=10
    )
    note = f"log p {cell['answer_log_probability']:.1f}"
    axis.text(x, y + 0.24, note, ha="center", va="center", color=colour, fontsize=7)


def _mark_trained_length(axis: Axes, lengths: Sequence[int], trained_length: int | None) -> None:
    """A line between the last length inside the trained range and the first outside."""
    inside = sum(length <= (trained_length or 0) for length in lengths)
    if 0 < inside < len(lengths):
        axis.axvline(inside - 0.5, color="#222222", linestyle=":", linewidth=1.6)
