"""Runs a task row by row: progress, resume, JSON lines. A task says what its rows are and measures one."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from transformers import PreTrainedModel

from rope_ext.api import patch_of, unwrap

Row = dict[str, Any]


class Task(ABC):
    """One evaluation. Everything that can change a result is in ``settings`` or in the row."""

    name: ClassVar[str]

    @abstractmethod
    def settings(self) -> Row:
        """JSON values that all rows share (text, seed, templates ...)."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """What is to be measured, one JSON object each; ``length`` (tokens) drives the time estimate."""

    @abstractmethod
    def measure(self, model: PreTrainedModel, tokenizer: Any, row: Row) -> Row:
        """The results of one row, JSON values."""


def run(task: Task, model: nn.Module, tokenizer: Any, out: Path | None = None, label: str | None = None) -> list[Row]:
    """Measure every row of the task; rows that ``out`` already holds for this very setup are not measured again.

    Args:
        task: what to measure.
        model: a causal language model, patched or not.
        tokenizer: its tokenizer.
        out: folder for ``<task>.jsonl``; every finished row is on disk before the next one starts.
        label: name of this setup in tables and plots; by default the method with its factor.

    Returns:
        The rows in the task's order: its settings for that row, ``label``, and the results.
    """
    inner = unwrap(model)
    label = label or setup_label(inner)
    setup = {
        "task": task.name,
        "settings": task.settings(),
        "model": fingerprint(inner),
        "tokenizer": _digest_of(tokenizer),
    }
    store = _Store(None if out is None else out / f"{task.name}.jsonl")
    rows = task.rows()
    results = []
    was_training = inner.training
    inner.eval()
    try:
        with _progress() as progress:
            bar = progress.add_task(f"{task.name}: {label}", total=sum(row["length"] for row in rows))
            for row in rows:
                key = digest({**setup, "row": row})
                if key not in store.done:
                    with _layers_advance(inner, progress, bar, row["length"]):
                        measured = task.measure(inner, tokenizer, row)
                    store.add(key, {"task": task.name, **row, **measured})
                results.append({**store.done[key], "label": label})
                progress.update(bar, completed=sum(row["length"] for row in rows[: len(results)]))
    finally:
        inner.train(was_training)
    return results


def setup_label(model: nn.Module) -> str:
    """A short name for how the model's positions stand: "unpatched", "yarn x2"."""
    patch = patch_of(unwrap(model))
    if patch is None:
        return "unpatched"
    factor = patch.encoding.options().get("factor")
    return patch.encoding.name + (f" x{factor:g}" if factor else "")


def fingerprint(model: PreTrainedModel) -> str:
    """Changes when the config (with the patch) or the weights change; reads a sample of each tensor only."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    record = dict(config.pop("rope_ext", None) or {})
    sample = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.flatten()[:: max(1, tensor.numel() // 8)].tolist())
        for name, tensor in model.named_parameters()
    ]
    return digest([config, record.get("method"), record.get("options"), sample])


_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest_of(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return digest(backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()))


class _Store:
    """Finished rows in a JSON-lines file. A line that was cut off by a crash is dropped, and its row measured again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.done: dict[str, Row] = {}
        if path is not None and path.exists():
            whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            for line in whole:
                entry = _parse(line)
                if entry is not None:
                    self.done[entry.pop("key")] = entry
            os.truncate(path, sum(map(len, whole)))

    def add(self, key: str, row: Row) -> None:
        self.done[key] = row
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, **row}) + "\n")
                file.flush()
                os.fsync(file.fileno())


def _parse(line: bytes) -> Row | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("key"), str) else None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True))


@contextmanager
def _layers_advance(model: PreTrainedModel, progress: Progress, bar: TaskID, tokens: int) -> Iterator[None]:
    """Move the bar while one long forward is under way: a step per layer of the first pass."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    left = len(layers)

    def advance(*_: Any) -> None:
        nonlocal left
        if left > 0:
            left -= 1
            progress.advance(bar, tokens / len(layers))

    handles = [layer.register_forward_hook(advance) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
