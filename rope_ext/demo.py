"""The main job on a real checkpoint: SmolLM2 past its trained length, as loaded and patched with YaRN."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedModel

from rope_ext.api import describe, patched
from rope_ext.evals.cells import labels, perplexity_bins, score_cells
from rope_ext.evals.memory import Holding
from rope_ext.evals.plots import frequency_plot, heatmap, perplexity_plot, save
from rope_ext.evals.reading import Advance, Limits, Reader
from rope_ext.evals.report import Page, code, picture, table
from rope_ext.evals.results import write_csv
from rope_ext.evals.runner import Row, Task, run
from rope_ext.evals.scoring import token_nll
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.perplexity import layers_advance
from rope_ext.evals.text import read_text
from rope_ext.registry import compat

FACTOR = 2.0
CALL = f'patch_model(model, "yarn", factor={FACTOR:g})'

BINS = 16
"""Position bins inside the trained length: narrow enough to show where a model breaks."""

PROBE = 256
"""Tokens that are read to learn how fast the machine is."""


class Reading(Needle):
    """Needle in a haystack, and from the same forward pass the perplexity of its prompt in bins of ``width`` tokens."""

    name: ClassVar[str] = "reading"

    def __init__(self, text: str, lengths: Sequence[int], depths: Sequence[float], width: int) -> None:
        super().__init__(text, lengths, depths, control=False)
        self.width = width

    def settings(self) -> Row:
        return {**super().settings(), "width": self.width}

    def holds(self, tokenizer: Any, rows: Sequence[Row], limits: Limits) -> Holding:
        longest = self.longest(tokenizer, rows)
        return Holding(forward=longest, cached=longest, longest=longest)

    def measure(
        self, model: PreTrainedModel, tokenizer: Any, rows: Sequence[Row], limits: Limits, advance: Advance
    ) -> Iterator[tuple[int, Row]]:
        for index, row in enumerate(rows):
            question = self.question(tokenizer, row)
            prompt = len(question.ids)
            ids = torch.tensor([question.ids + question.answer_ids], device=model.device)
            cache = DynamicCache(config=model.config)
            with layers_advance(model, ids.shape[1], partial(advance, index)):
                nll = token_nll(model, ids, cache=cache)
            cache.crop(prompt - 1 - ids.shape[1])
            asked = {compat().cache_argument(model): cache, "max_new_tokens": question.max_new_tokens}
            made = model.generate(ids[:, :prompt], do_sample=False, **asked)  # type: ignore[operator]
            generated = tokenizer.decode(made[0, prompt:], skip_special_tokens=True)
            parts = nll[: prompt - 1].split(self.width)
            yield (
                index,
                {
                    "tokens": prompt - 1,
                    **question.facts,
                    "answer": question.references[0],
                    "generated": generated,
                    "score": self.score(generated, question),
                    "answer_log_probability": round(-float(nll[prompt - 1 :].sum()), 5),
                    "perplexity": float(nll[: prompt - 1].double().mean().exp()),
                    "bin_edges": [0, *accumulate(map(len, parts))],
                    "bin_perplexity": [float(part.double().mean().exp()) for part in parts],
                },
            )


def demo(model: PreTrainedModel, tokenizer: Any, out: Path, quick: bool, console: Console) -> Path:
    """Measure, draw and write one page.

    Args:
        model: a checkpoint whose trained length the demo goes past.
        tokenizer: its tokenizer.
        out: folder for tables, pictures and ``index.html``; rows already there are not measured again.
        quick: a shorter text, one needle.
        console: where tables are printed.

    Returns:
        The path of the page.
    """
    started = time.monotonic()
    trained = describe(model).trained_length
    length, depths = (trained * 5 // 4, [50]) if quick else (trained * 3 // 2, [10, 50, 90])
    seconds = _forecast(model, length, depths)
    console.print(f"{length:,} tokens, {len(depths)} x 2 questions: about {seconds / 60:.1f} minutes on this machine")
    text = read_text()
    tasks: list[Task] = [Reading(text, [length], depths[:1], trained // BINS)]
    if depths[1:]:
        tasks.append(Needle(text, [length], depths[1:], control=False))
    needles = [row for task in tasks for row in run(task, model, tokenizer, out)]
    descriptions = {"unpatched": describe(model, length=length)}
    with patched(model, "yarn", factor=FACTOR):
        needles += [row for task in tasks for row in run(task, model, tokenizer, out)]
        descriptions[f"yarn x{FACTOR:g}"] = describe(model)

    readings = [row for row in needles if "bin_edges" in row]
    found, verdicts = _found(needles), _verdicts(readings, trained)
    told = [{**row, "label": f"{row['label']}: {found[row['label']]}"} for row in readings]
    pictures = {
        "perplexity": perplexity_plot(
            told, trained, f"Reading {length:,} tokens; {len(depths)} needles hidden in them"
        ),
        "needle": heatmap(needles, "depth", trained, f"Needle in a haystack of {length:,} tokens"),
        "frequencies": frequency_plot(descriptions),
    }
    for name, figure in pictures.items():
        save(figure, out / f"{name}.png")
    bins = perplexity_bins(readings)
    write_csv(out / "perplexity.csv", bins)
    write_csv(out / "needle.csv", score_cells(needles, ("length", "depth")))

    bin_table, needle_table = _by_bin(bins), _by_depth(needles)
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
        table(*bin_table, folded=True),
    )
    page.section(
        "Needle in a haystack",
        f"A five-digit number hidden in {length:,} tokens, greedy decoding; log p is the log-probability of the "
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
    for label, verdict in verdicts.items():
        console.print(f"{label}: {verdict}; {found[label]}", soft_wrap=True)
    console.print(f"done in {(time.monotonic() - started) / 60:.1f} min: {out / 'index.html'}", soft_wrap=True)
    return out / "index.html"


def _forecast(model: PreTrainedModel, length: int, depths: Sequence[int]) -> float:
    """Seconds that the demo will take: from the best of three trials, as the first does what is done once."""
    ids = torch.arange(PROBE, device=model.device)[None] % model.config.vocab_size
    times = []
    for _ in range(3):
        started = time.monotonic()
        token_nll(model, ids)
        times.append(time.monotonic() - started)
    trial, all_of_it = Reader(model, Limits()).usage, Reader(model, Limits()).usage
    trial.add(0, PROBE)
    for read in [0, 0, *depths[1:-1]][: len(depths)]:  # the second needle's prompt is shared by those behind it
        all_of_it.add(length * read // 100, length)
    return 2 * min(times) * all_of_it.read_operations / trial.read_operations


def _found(needles: Sequence[Row]) -> dict[str, str]:
    """By label."""
    scores = {label: [row["score"] for row in needles if row["label"] == label] for label in labels(needles)}
    return {label: f"needles found: {sum(each):g} of {len(each)}" for label, each in scores.items()}


def _verdicts(readings: Sequence[Row], trained: int) -> dict[str, str]:
    """By label: perplexity inside the trained length and at the end."""
    said = {}
    for label in labels(readings):
        bins = [row for row in perplexity_bins(readings) if row["label"] == label]
        inside = statistics.geometric_mean(row["perplexity"] for row in bins if row["end"] <= trained)
        said[label] = f"perplexity {inside:.1f} up to {trained:,} tokens, {bins[-1]['perplexity']:.1f} at the end"
    return said


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
