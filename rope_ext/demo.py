"""The main job on a real checkpoint: SmolLM2 past its trained length, as loaded and patched with YaRN."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from rope_ext.api import describe, patched
from rope_ext.evals.cells import labels, perplexity_bins, score_cells
from rope_ext.evals.plots import frequency_plot, heatmap, perplexity_plot, save
from rope_ext.evals.report import Page, code, picture, table
from rope_ext.evals.results import write_csv
from rope_ext.evals.runner import Row, run
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import read_text

FACTOR = 2.0
CALL = f'patch_model(model, "yarn", factor={FACTOR:g})'


def demo(model: PreTrainedModel, tokenizer: Any, out: Path, quick: bool, console: Console) -> Path:
    """Measure, draw and write one page.

    Args:
        model: a checkpoint whose trained length the demo goes past.
        tokenizer: its tokenizer.
        out: folder for tables, pictures and ``index.html``; rows already there are not measured again.
        quick: shorter texts, one needle.
        console: where tables are printed.

    Returns:
        The path of the page.
    """
    started = time.monotonic()
    trained = describe(model).trained_length
    length, needle_length, depths = trained * 2, trained * 3 // 2, [10, 50, 90]
    if quick:
        length, needle_length, depths = trained * 5 // 4, trained * 5 // 4, [50]
    text = read_text()
    tasks = (
        Perplexity(text, [length], bins=10 if quick else 8),
        Needle(text, [needle_length], depths, control=False),
    )
    rows: dict[str, list[Row]] = {task.name: run(task, model, tokenizer, out) for task in tasks}
    descriptions = {"unpatched": describe(model, length=length)}
    with patched(model, "yarn", factor=FACTOR):
        for task in tasks:
            rows[task.name] += run(task, model, tokenizer, out)
        descriptions[f"yarn x{FACTOR:g}"] = describe(model)

    pictures = {
        "frequencies": frequency_plot(descriptions),
        "perplexity": perplexity_plot(rows["perplexity"], trained, f"Perplexity by position, {length:,} tokens"),
        "needle": heatmap(rows["needle"], "depth", trained, f"Needle in a haystack of {needle_length:,} tokens"),
    }
    for name, figure in pictures.items():
        save(figure, out / f"{name}.png")
    bins, cells = perplexity_bins(rows["perplexity"]), score_cells(rows["needle"], ("length", "depth"))
    write_csv(out / "perplexity.csv", bins)
    write_csv(out / "needle.csv", cells)

    bin_table, needle_table = _by_bin(bins), _by_depth(rows["needle"])
    for title, (header, lines) in {"Perplexity by position": bin_table, "Needle": needle_table}.items():
        shown = Table(*header, title=title, title_justify="left")
        for line in lines:
            shown.add_row(*line)
        console.print(shown)

    page = Page(
        "A longer context with one call",
        f"A {model.config.model_type} checkpoint, trained at {trained:,} tokens, reads past that length: as it is, and "
        f"after {CALL}. No fine-tuning. Text: the language reference that ships inside CPython.",
    )
    page.section(
        "Perplexity by position",
        f"One forward over {length:,} tokens; lower is better.",
        picture(out / "perplexity.png", "perplexity by position"),
        table(*bin_table),
    )
    page.section(
        "Needle in a haystack",
        f"A five-digit number hidden in {needle_length:,} tokens, greedy decoding; log p is the log-probability of the "
        "right answer.",
        picture(out / "needle.png", "needle heatmap"),
        table(*needle_table),
    )
    page.section(
        "Why",
        "Channel pairs marked with a cross reach angles that training never showed the model. YaRN slows them by the "
        "factor, the fast pairs not at all, and those between in part.",
        picture(out / "frequencies.png", "wavelength per channel pair"),
        code("\n\n".join(str(description) for description in descriptions.values())),
    )
    page.write(out / "index.html")
    console.print(f"done in {(time.monotonic() - started) / 60:.1f} min: {out / 'index.html'}")
    return out / "index.html"


def _by_bin(bins: list[Row]) -> tuple[list[str], list[list[str]]]:
    names = labels(bins)
    lines: dict[str, list[str]] = {}
    for row in bins:
        lines.setdefault(f"{row['start']:,} - {row['end']:,}", []).append(f"{row['perplexity']:.2f}")
    return ["tokens", *names], [[span, *values] for span, values in lines.items()]


def _by_depth(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    header = ["setup", "depth", "hidden", "generated", "found", "log p"]
    lines = [
        [
            row["label"],
            f"{row['true_depth']:.0f} %",
            row["answer"],
            row["generated"].strip().split("\n")[0][:40],
            "yes" if row["score"] else "no",
            f"{row['answer_log_probability']:.1f}",
        ]
        for row in rows
    ]
    return header, lines
