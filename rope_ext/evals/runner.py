"""Runs a task row by row: progress, resume, several processes. A task says what its rows are and measures them."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedModel

from rope_ext.api import patch_of, unwrap
from rope_ext.evals import memory
from rope_ext.evals.identity import digest, fingerprint, setup_label, tokenizer_digest, weights
from rope_ext.evals.memory import Holding
from rope_ext.evals.reading import Advance, Limits
from rope_ext.evals.store import Row, Store
from rope_ext.evals.usage import Usage


class Task(ABC):
    """One evaluation. Everything that can change a result is in ``settings`` or in the row."""

    name: ClassVar[str]
    usage: Usage | None = None
    """What the last run read, and what it would have had to read without shared beginnings."""

    @abstractmethod
    def settings(self) -> Row:
        """JSON values that all rows share (text, seed, templates ...)."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """What is to be measured, one JSON object each, all different."""

    @abstractmethod
    def holds(self, tokenizer: Any, rows: Sequence[Row], limits: Limits) -> Holding:
        """Tokens that measuring these rows has in memory at its fullest moment."""

    @abstractmethod
    def measure(
        self, model: PreTrainedModel, tokenizer: Any, rows: Sequence[Row], limits: Limits, advance: Advance
    ) -> Iterator[tuple[int, Row]]:
        """(index, results as JSON values) of every row, in whatever order they are finished."""

    def together(self, row: Row) -> Any:
        """Rows for which this is equal gain from being measured by one process."""
        return row.get("sample")


def run(
    task: Task,
    model: nn.Module,
    tokenizer: Any,
    out: Path | None = None,
    label: str | None = None,
    *,
    limits: Limits | None = None,
    max_memory: int | None = None,
    spread: bool = False,
    progress: bool = True,
    checkpoint: str | None = None,
) -> list[Row]:
    """Measure every row of the task; rows that ``out`` already holds for this very setup are not measured again.

    Args:
        task: what to measure.
        model: a language model, patched or not.
        tokenizer: its tokenizer.
        out: folder for ``<task>.jsonl``; every finished row is on disk before the next ones start.
        label: name of this setup in tables and plots; by default the method with its factor.
        limits: how much is held at once.
        max_memory: bytes that the run may take, weights included; by default what is free.
        spread: split the rows over the processes that ``torchrun`` or ``accelerate launch`` started; every process must
            call this, and each gets all rows back. Not for a model that is itself sharded.
        progress: show the memory estimate and a bar.
        checkpoint: the model's :func:`rope_ext.evals.identity.weights`, where they are known; else they are all read.

    Returns:
        The rows in the task's order: what was asked, the results, ``label``, ``method``, ``options`` and the setup.

    Raises:
        ValueError: it would not fit into memory or into the model's table of positions, or a row cannot be built as
            asked.
    """
    _refuse_prompt_learning(model)
    inner, limits = unwrap(model), limits or Limits()
    label = label or setup_label(inner)
    checkpoint = checkpoint or weights(inner)
    setup = {
        "task": task.name,
        "settings": task.settings(),
        "model": fingerprint(inner, checkpoint),
        "weights": checkpoint,
        "tokenizer": tokenizer_digest(tokenizer),
    }
    patch = patch_of(inner)
    origin = {
        "label": label,
        "model_name": inner.config._name_or_path,
        "method": patch.encoding.name if patch else None,
        "options": patch.encoding.options() if patch else {},
        "setup": setup,
    }
    rank, world = _processes() if spread else (0, 1)
    store = Store(None if out is None else Path(out), task.name, rank, _job() if world > 1 else "")
    rows = task.rows()
    keys = [digest({**setup, "row": row}) for row in rows]
    missing = _share([index for index, key in enumerate(keys) if key not in store.done], task, rows, rank, world)
    if world > 1:
        _wait()  # until every process knows what is missing; then the first may write
    if missing:
        asked = [rows[index] for index in missing]
        holding = task.holds(tokenizer, asked, limits)
        _check_positions(inner, holding.longest)
        needed = memory.check(inner, holding, max_memory)
        training = {module: module.training for module in inner.modules()}
        inner.eval()
        try:
            with _Bar(f"{task.name}: {label}", asked, f"memory: {needed}", shown=progress and rank == 0) as advance:
                for place, measured in task.measure(inner, tokenizer, asked, limits, advance):
                    row = {"task": task.name, **asked[place], **measured, **origin}
                    store.add(keys[missing[place]], row)
        finally:
            for module, flag in training.items():
                module.training = flag
    if world > 1:
        _merge(store, rank)
    return [{**store.done[key], "label": label} for key in keys]


def comparable(task: Task, tokenizer: Any, model: nn.Module, out: Path, checkpoint: str | None = None) -> list[Row]:
    """The rows in ``out`` of this task with the same settings and the same weights, under any encoding.

    Where one label stands for several setups, the model's own counts, or else the one that was measured last.
    """
    checkpoint = checkpoint or weights(unwrap(model))
    wanted = {"settings": task.settings(), "tokenizer": tokenizer_digest(tokenizer), "weights": checkpoint}
    rows = [row for row in Store(out, task.name).done.values() if wanted.items() <= row["setup"].items()]
    own = fingerprint(unwrap(model), checkpoint)
    counts = {row["label"]: row["setup"]["model"] for row in rows}
    counts |= {row["label"]: own for row in rows if row["setup"]["model"] == own}
    return [row for row in rows if row["setup"]["model"] == counts[row["label"]]]


def _refuse_prompt_learning(model: nn.Module) -> None:
    """Only weights are read here, not what a PEFT wrapper puts in front of the input."""
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"the model has a {config.peft_type.value} adapter, whose learned prompt would be left out; evaluate one "
            "that changes weights (LoRA)."
        )


def _check_positions(model: PreTrainedModel, longest: int) -> None:
    """A table with a vector per position (GPT-2, OPT) ends somewhere."""
    for name, module in model.named_modules():
        table = isinstance(module, nn.Embedding) and ("position" in name or name.endswith("wpe"))
        if table and module.num_embeddings < longest:
            raise ValueError(
                f"length {longest} is more than the {module.num_embeddings} positions of {name}; use shorter ones."
            )


def _processes() -> tuple[int, int]:
    """(number of this process, how many there are)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    from accelerate import PartialState

    state = PartialState()
    return state.process_index, state.num_processes


def _job() -> str:
    """A name that the processes of this run, and no others, have in common."""
    from accelerate.utils import broadcast_object_list

    name: str = broadcast_object_list([uuid.uuid4().hex[:8]])[0]
    return name


def _share(missing: Sequence[int], task: Task, rows: Sequence[Row], rank: int, world: int) -> list[int]:
    """The rows of this process: whole groups if there are enough of them."""
    groups: dict[str, list[int]] = {}
    for index in missing:
        groups.setdefault(digest(task.together(rows[index])), []).append(index)
    if len(groups) < world:
        return list(missing[rank::world])
    return [index for group in list(groups.values())[rank::world] for index in group]


def _merge(store: Store, rank: int) -> None:
    """Every process learns what the others measured; the files become one."""
    from accelerate.utils import gather_object

    for found in gather_object([store.done]):
        store.done.update(found)
    if rank == 0:
        store.absorb()
    _wait()


def _wait() -> None:
    from accelerate import PartialState

    PartialState().wait_for_everyone()


class _Bar:
    """A note, then a bar in which a row weighs as much as its tokens."""

    def __init__(self, title: str, rows: Sequence[Row], note: str, shown: bool) -> None:
        self._weights = [float(row.get("length", 1)) for row in rows]
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))
        self._progress = Progress(*columns, *times, disable=not shown)
        self._note = note
        self._bar = self._progress.add_task(title, total=sum(self._weights))

    def __enter__(self) -> Advance:
        self._progress.start()
        if not self._progress.disable:
            self._progress.print(self._note, highlight=False, soft_wrap=True)
        return lambda index, share: self._progress.advance(self._bar, self._weights[index] * share)

    def __exit__(self, failed: Any, *_: Any) -> None:
        if failed is None:
            self._progress.update(self._bar, completed=sum(self._weights))
        self._progress.stop()
