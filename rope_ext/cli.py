"""The command ``rope-ext``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from rope_ext.api import describe, methods, patch_model, patched
from rope_ext.checkpoint import export, take_record
from rope_ext.config import Method
from rope_ext.evals import memory, plots, results
from rope_ext.evals.needle import Needle
from rope_ext.evals.perplexity import Perplexity
from rope_ext.evals.runner import Row, Task, comparable, run
from rope_ext.evals.text import read_text
from rope_ext.models import SMOLLM2, build_empty, load, smollm2
from rope_ext.registry import find_method

console = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted.

    Errors are one line; ``ROPE_EXT_TRACEBACK=1`` shows where they come from.
    """
    options = _parser().parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except KeyboardInterrupt:
        kept = f" Finished rows are kept in {options.out}; the same command goes on from there."
        print(f"rope-ext: interrupted.{kept if options.resumes else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        if os.environ.get("ROPE_EXT_TRACEBACK"):
            raise
        refused = isinstance(error, (ValueError, TypeError, OSError, ImportError))
        message = " ".join(f"{'' if refused else type(error).__name__ + ': '}{error}".split())
        print(f"rope-ext: error: {message}", file=sys.stderr)
        return 1
    return 0


def _inspect(options: argparse.Namespace) -> None:
    encoding = _encoding(options)
    path = str(smollm2()) if options.model == SMOLLM2 else options.model
    config = AutoConfig.from_pretrained(path)
    saved = take_record(config, path) if getattr(config, "rope_ext", None) else None
    with torch.device("meta"):
        model = build_empty(config)
    if saved is not None:
        patch_model(model, saved)
    before = describe(model, length=options.length)
    console.print(str(before), highlight=False)
    descriptions = {"as loaded": before}
    if encoding is not None:
        with _patched(model, encoding):
            after = descriptions[options.method] = describe(model, length=options.length)
        console.print(str(after), highlight=False)
        descriptions["as loaded"] = describe(model, length=options.length or after.usable_length)
    table = Table("method", "formula", "fine-tuning", title="Methods that fit", title_justify="left")
    for name, info in methods(model).items():
        table.add_row(name, info.formula, info.fine_tuning)
    console.print(table)
    if options.plot:
        plots.save(plots.frequency_plot(descriptions), options.plot)
        console.print(f"wrote {options.plot}")


def _perplexity(options: argparse.Namespace) -> None:
    task = Perplexity(
        read_text(options.text),
        options.lengths,
        bins=options.bins,
        stride=options.stride,
        windows=options.windows,
        samples=options.limit,
    )
    rows = _run(task, options, results.perplexity_bins, plots.perplexity_plot)
    table = Table("length", "tokens", "perplexity", title=f"Perplexity, {rows[0]['label']}", title_justify="left")
    for row in rows:
        table.add_row(f"{row['length']:,}", f"{row['start']:,} - {row['end']:,}", f"{row['perplexity']:.3f}")
    console.print(table, f"wrote {options.out}/{task.name}.jsonl, .csv, .png")


def _needle(options: argparse.Namespace) -> None:
    task = Needle(
        read_text(options.text),
        options.lengths,
        options.depths,
        samples=options.limit,
        seed=options.seed,
        chat=options.chat,
    )
    cells = _run(task, options, results.needle_cells, plots.needle_heatmap)
    title = f"Needle, {cells[0]['label']}"
    table = Table("length", "depth %", "n", "score", "95 % interval", "log p", title=title, title_justify="left")
    for cell in cells:
        interval, log_p = f"{cell['low']:.2f} - {cell['high']:.2f}", f"{cell['answer_log_probability']:.2f}"
        row = f"{cell['length']:,}", str(cell["depth"]), str(cell["n"]), f"{cell['score']:.2f}", interval, log_p
        table.add_row(*row)
    console.print(table, f"wrote {options.out}/{task.name}.jsonl, .csv, .png")


def _export(options: argparse.Namespace) -> None:
    encoding = _encoding(options)
    model, tokenizer = load(options.model, options.dtype, options.device)
    with _patched(model, encoding, tokenizer=tokenizer):
        console.print(export(model, options.out, tokenizer, overwrite=options.overwrite).message)


def _demo(options: argparse.Namespace) -> None:
    from rope_ext.demo import demo

    options.out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(options.model, options.dtype, options.device)
    demo(model, tokenizer, options.out, options.quick, console)


def _run(
    task: Task,
    options: argparse.Namespace,
    tabulate: Callable[[Sequence[Row]], list[Row]],
    draw: Callable[[Sequence[Row], int | None], Figure],
) -> list[Row]:
    """Measure; write table and picture of all comparable rows in the folder; return this run's table."""
    encoding = _encoding(options)
    model, tokenizer = load(options.model, options.dtype, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    console.print(f"memory: {memory.check(model, max(options.lengths))}", highlight=False)
    with _patched(model, encoding):
        rows = run(task, model, tokenizer, options.out)
        every, trained = comparable(task, tokenizer, model, options.out), _trained_length(model)
    results.write_csv(options.out / f"{task.name}.csv", tabulate(every))
    plots.save(draw(every, trained), options.out / f"{task.name}.png")
    return tabulate(rows)


def _trained_length(model: PreTrainedModel) -> int | None:
    try:
        return describe(model).trained_length
    except ValueError:  # an architecture without rotary positions can be evaluated, too
        return None


def _encoding(options: argparse.Namespace) -> Method | None:
    """What --method, --factor and --option ask for; checked before any model is loaded."""
    given = dict(options.option or [])
    if options.factor is not None:
        if "factor" in given:
            raise ValueError(f"--factor {options.factor:g} and --option factor={given['factor']} are both given.")
        given["factor"] = options.factor
    if options.method is not None:
        return find_method(options.method).from_options(given)
    if given:
        raise ValueError(f"--factor and --option need a --method, got {given}.")
    return None


def _patched(model: PreTrainedModel, encoding: Method | None, **more: Any) -> Any:
    return nullcontext(model) if encoding is None else patched(model, encoding, **more)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rope-ext", description="Longer contexts for Hugging Face models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    method = argparse.ArgumentParser(add_help=False)
    method.add_argument("--method", help="position encoding, for example yarn; without it the model stays as it is")
    method.add_argument("--factor", type=float, help="target length over trained length")
    method.add_argument("--option", type=_option, action="append", metavar="K=V", help="another option of the method")

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default=SMOLLM2, help=f"folder, Hub id, or {SMOLLM2} (default), which needs no Hub")
    model.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    model.add_argument("--device", help="for example cuda:0; default: CUDA if there is one")

    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--text", default="builtin", help="builtin, noise, a file, a folder, or hf:NAME")
    task.add_argument("--lengths", type=_integers, default=[4096, 8192, 12288], help="tokens, comma-separated")
    task.add_argument("--limit", type=int, default=1, help="samples per cell")
    task.add_argument("--seed", type=int, default=0)
    task.add_argument("--out", type=Path, default=Path("rope-ext-results"), help="folder for rows, tables, pictures")

    inspect = _command(commands, "inspect", _inspect, "what positions a checkpoint has, and which methods fit", method)
    inspect.add_argument("model", metavar="MODEL", help=f"folder, Hub id, or {SMOLLM2}; weights are not loaded")
    inspect.add_argument("--length", type=int, help="tokens at which channels are judged; default: the usable length")
    inspect.add_argument("--plot", type=Path, metavar="PNG", help="draw the wavelength of each channel pair")

    perplexity = _command(commands, "perplexity", _perplexity, "perplexity of a long text", model, method, task)
    perplexity.add_argument("--bins", type=int, default=8, help="position bins of one forward")
    perplexity.add_argument("--stride", type=int, help="sliding windows of this stride instead of one forward")
    perplexity.add_argument("--windows", type=int, default=10, help="how many sliding windows")

    needle = _command(commands, "needle", _needle, "find one fact in a long text", model, method, task)
    needle.add_argument("--depths", type=_numbers, default=[0, 25, 50, 75, 100], help="percent, comma-separated")
    needle.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")

    exporter = _command(commands, "export", _export, "write a checkpoint for stock tools", model, method)
    exporter.add_argument("--out", type=Path, required=True, help="the folder to make")
    exporter.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")

    demo = _command(commands, "demo", _demo, "SmolLM2 past its trained length, unpatched and with YaRN", model)
    demo.add_argument("--quick", action="store_true", help="about two minutes instead of six")
    demo.add_argument("--out", type=Path, default=Path("rope-ext-demo"), help="folder for tables, pictures, index.html")
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], help_: str, *parents: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help_, description=help_, parents=list(parents))
    parser.set_defaults(command=run, resumes=name in ("perplexity", "needle", "demo"))
    return parser


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _integers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} holds a number below 1")
    return values


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of numbers") from None


if __name__ == "__main__":
    sys.exit(main())
