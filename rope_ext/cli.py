"""The command ``rope-ext``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from rope_ext import conformance
from rope_ext.api import describe, methods, patch_model, unwrap
from rope_ext.checkpoint import SAFE, export, take_record
from rope_ext.command import Parser, method_option, one_line
from rope_ext.config import Method
from rope_ext.evals import options as evaluations
from rope_ext.evals import plots
from rope_ext.evals.cells import labels, shown, tokens_of
from rope_ext.evals.identity import AS_IT_IS, trained_length, weights
from rope_ext.evals.reading import Limits
from rope_ext.evals.results import Results
from rope_ext.evals.runner import Task, comparable, run
from rope_ext.evals.sweeping import setups, summary_table, sweep, under
from rope_ext.models import SMOLLM2, build_empty, load, smollm2
from rope_ext.registry import METHODS, find_method

console: Console = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed, 2 what was asked for is refused, 130 interrupted.

    Errors are one line; ``ROPE_EXT_TRACEBACK=1`` shows where they come from.
    """
    options = _parser().parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except KeyboardInterrupt:
        kept = options.resumes and any(options.out.glob("*.jsonl"))
        told = f" Finished rows are kept in {options.out}; the same command goes on from there." if kept else ""
        print(f"rope-ext: interrupted.{told}", file=sys.stderr)
        return 130
    except Exception as error:
        print(f"rope-ext: error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, TypeError)) else 1
    return 0


def _inspect(options: argparse.Namespace) -> None:
    encoding = _encoding(options)
    path = str(smollm2()) if options.model == SMOLLM2 else options.model
    config = AutoConfig.from_pretrained(path, **SAFE)
    saved = take_record(config, path) if getattr(config, "rope_ext", None) else None
    with torch.device("meta"):
        model = build_empty(config)
    if saved is not None:
        patch_model(model, saved)
    before = describe(model, length=options.length)
    console.print(str(before), highlight=False)
    descriptions = {"as loaded": before}
    if encoding is not None:
        with under(model, encoding):
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


def _methods(options: argparse.Namespace) -> None:
    if not options.matrix:
        table = Table("method", "seam", "formula", "fine-tuning", "source")
        for name, info in methods().items():
            table.add_row(name, info.seam, info.formula, info.fine_tuning, info.source)
        console.print(table)
        return
    names = options.methods or list(METHODS)
    for name in names:
        find_method(name)
    architectures = options.architectures or list(conformance.ARCHITECTURES)
    cells = []
    for cell in conformance.matrix(architectures, names):
        cells.append(cell)
        print(f"{cell.architecture} {cell.method}: {cell}", file=sys.stderr)
    text = conformance.as_markdown(cells)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    failed = [f"{cell.method} on {cell.architecture}: {cell.failed[0]}" for cell in cells if cell.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cells)} pairs failed; the first: {failed[0]}")


def _eval(options: argparse.Namespace) -> None:
    kinds = evaluations.kinds()
    names = list(kinds) if options.task == "all" else [options.task]
    tasks = [kinds[name].make(options) for name in names]
    encoding = _encoding(options)
    _make_folder(options.out)
    model, tokenizer = load(options.model, options.dtype, _device(options))
    checkpoint = weights(unwrap(model))
    with under(model, encoding):
        for task in tasks:
            if task.name == "perplexity" and options.task == "all" and model.config.is_encoder_decoder:
                console.print("perplexity: left out, it needs a causal language model")
                continue
            rows = run(task, model, tokenizer, options.out, checkpoint=checkpoint, **_running(options))
            if _first():
                every = comparable(task, tokenizer, model, options.out, checkpoint)
                Results(task.name, every, trained_length(model)).save(options.out)
                _show(Results(task.name, rows), task)
                console.print(f"wrote {options.out}/{task.name}.jsonl, .csv, .png", highlight=False, soft_wrap=True)


def _show(results: Results, task: Task) -> None:
    cells = results.cells()
    columns = [name for name in cells[0] if name not in ("label", "low", "high")]
    header = [*columns, "95 % interval"] if "low" in cells[0] else columns
    titled = [name.replace("_", " ").replace("answer log probability", "log p") for name in header]
    table = Table(*titled, title=f"{task.name}, {cells[0]['label']}", title_justify="left")
    for cell in cells:
        interval = [f"{cell['low']:.2f} - {cell['high']:.2f}"] if "low" in cell else []
        table.add_row(*(shown(cell[name]) for name in columns), *interval)
    console.print(table)
    if task.usage is not None:
        console.print(str(task.usage), highlight=False, soft_wrap=True)


def _sweep(options: argparse.Namespace) -> None:
    kinds = evaluations.kinds()
    unknown = [name for name in options.tasks if name not in kinds]
    if unknown:
        raise ValueError(f"--tasks: unknown task {unknown[0]!r}; there are {', '.join(kinds)}.")
    wanted = setups(options.methods, options.factor)
    tasks = [kinds[name].make(options) for name in dict.fromkeys(options.tasks)]
    _make_folder(options.out)
    model, tokenizer = load(options.model, options.dtype, _device(options))
    made = sweep(model, tokenizer, wanted, tasks, options.out, **_running(options))
    if not _first():
        return
    header, lines = summary_table(made.summary(), made.trained_length)
    table = Table(*header, title=f"{len(lines)} setups of {options.model}", title_justify="left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    lead = f"{options.model}: " + "; ".join(f"{name} over {_span(found)}" for name, found in made.results.items()) + "."
    page = made.write(options.out, "Which encoding holds up", lead)
    console.print(f"wrote {page} and, per task, .jsonl, .csv, .png", highlight=False, soft_wrap=True)


def _make_folder(out: Path) -> None:
    """Before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a zero byte in a name is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--out {out} cannot be a folder for results: {reason}.") from error


def _span(found: Results) -> str:
    tokens = [tokens_of(row) for row in found.rows]
    return f"{len(tokens) // len(labels(found.rows))} rows of {min(tokens):,} to {max(tokens):,} tokens"


def _running(options: argparse.Namespace) -> dict[str, Any]:
    """What :func:`rope_ext.evals.runner.run` is told beside the task."""
    limits = Limits(chunk=options.chunk, batch_tokens=options.batch_tokens, reuse=not options.no_reuse)
    return {"limits": limits, "max_memory": options.max_memory, "spread": True}


def _first() -> bool:
    """Whether this is the process that writes and prints, of those that torchrun or accelerate launch started."""
    return int(os.environ.get("RANK", "0")) == 0


def _device(options: argparse.Namespace) -> str | None:
    """Each process on a GPU of its own."""
    if options.device is None and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    return options.device


def _export(options: argparse.Namespace) -> None:
    encoding = _encoding(options)
    model, tokenizer = load(options.model, options.dtype, options.device)
    with under(model, encoding, tokenizer=tokenizer):
        console.print(export(model, options.out, tokenizer, overwrite=options.overwrite).message)


def _demo(options: argparse.Namespace) -> None:
    from rope_ext.demo import demo

    _make_folder(options.out)
    model, tokenizer = load(options.model, options.dtype, options.device)
    demo(model, tokenizer, options.out, options.quick, console)


def _encoding(options: argparse.Namespace) -> Method | None:
    """What --method, --factor and --option ask for; checked before any model is loaded. None: leave the model."""
    given = dict(options.option or [])
    if options.factor is not None:
        if "factor" in given:
            raise ValueError(f"--factor {options.factor:g} and --option factor={given['factor']} are both given.")
        given["factor"] = options.factor
    if options.method not in (None, *AS_IT_IS):
        return find_method(options.method).from_options(given)
    if given:
        raise ValueError(f"--factor and --option need a --method, got {given}.")
    return None


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="rope-ext", description="Longer contexts for Hugging Face models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    method = argparse.ArgumentParser(add_help=False)
    method.add_argument("--method", help="position encoding, for example yarn; without it the model stays as it is")
    method.add_argument("--factor", type=float, help="target length over trained length")
    method.add_argument(
        "--option", type=method_option, action="append", metavar="NAME=VALUE", help="another option of the method"
    )

    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", default=SMOLLM2, help=f"folder, Hub id, or {SMOLLM2} (default), which needs no Hub")
    model.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    model.add_argument("--device", help="for example cuda:0; default: CUDA if there is one")

    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--text", default="builtin", help="builtin, noise, a file, a folder, or hf:NAME")
    task.add_argument("--lengths", type=evaluations.whole_numbers, default=[4096, 8192, 12288], help="tokens, a,b,c")
    task.add_argument("--limit", type=_positive, default=1, help="samples per cell")
    task.add_argument("--seed", type=int, default=0)
    task.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    task.add_argument("--out", type=Path, default=Path("rope-ext-results"), help="folder for rows, tables, pictures")
    task.add_argument(
        "--max-memory", type=_gigabytes, metavar="GB", help="refuse what would take more, weights included"
    )
    task.add_argument("--chunk", type=_positive, default=Limits.chunk, help="tokens a forward pass reads of a prompt")
    task.add_argument(
        "--batch-tokens", type=_positive, default=Limits.batch_tokens, help="cached tokens decoded together"
    )
    task.add_argument("--no-reuse", action="store_true", help="read beginnings that prompts share again for each")

    inspect = _command(commands, "inspect", _inspect, "what positions a checkpoint has, and which methods fit", method)
    inspect.add_argument("model", metavar="MODEL", help=f"folder, Hub id, or {SMOLLM2}; weights are not loaded")
    inspect.add_argument("--length", type=int, help="tokens at which channels are judged; default: the usable length")
    inspect.add_argument("--plot", type=Path, metavar="PNG", help="draw the wavelength of each channel pair")

    lister = _command(commands, "methods", _methods, "the methods there are; on which architectures they run")
    lister.add_argument("--matrix", action="store_true", help="run every method on every architecture; takes minutes")
    lister.add_argument("--methods", type=evaluations.names, help="a,b,c; default: all")
    lister.add_argument("--architectures", type=evaluations.names, help=", ".join(conformance.ARCHITECTURES))
    lister.add_argument("--out", type=Path, metavar="MD", help="write the matrix to a Markdown file")

    kinds = evaluations.kinds()
    evaluate: Any = commands.add_parser("eval", help="one long-context task, or all", description="Long-context tasks.")
    tasks = evaluate.add_subparsers(required=True, metavar="TASK")
    for name, kind in kinds.items():
        places = [tasks, commands] if name in ("perplexity", "needle") else [tasks]
        for place in places:
            parser_of = _command(place, name, _eval, kind.help, model, method, task)
            parser_of.set_defaults(task=name)
            kind.add(parser_of)
    everything = _command(tasks, "all", _eval, "every task", model, method, task)
    everything.set_defaults(task="all")
    sweeper = _command(commands, "sweep", _sweep, "several methods on the same rows, one report", model, task)
    sweeper.add_argument("--methods", type=evaluations.names, required=True, help="a,b,c; none is the model as it is")
    sweeper.add_argument("--factor", type=evaluations.numbers, default=[], help="a,b: each method with each of them")
    sweeper.add_argument("--tasks", type=evaluations.names, default=["perplexity", "needle"], help=", ".join(kinds))
    for kind in kinds.values():
        kind.add(everything)
        kind.add(sweeper)

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
    parser.set_defaults(command=run, resumes=run in (_eval, _sweep, _demo))
    return parser


def _gigabytes(text: str) -> int:
    """In bytes."""
    try:
        return _positive(str(int(1e9 * float(text))))
    except (ValueError, OverflowError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes above 0") from None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)
