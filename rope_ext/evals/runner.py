"""Runs a task row by row: progress, resume, JSON lines. A task says what its rows are and measures one."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
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
        The rows in the task's order: what was asked, the results, ``label``, ``method``, ``options`` and the setup.
    """
    inner = unwrap(model)
    label = label or setup_label(inner)
    setup = {
        "task": task.name,
        "settings": task.settings(),
        "model": fingerprint(inner),
        "tokenizer": _digest_of(tokenizer),
    }
    patch = patch_of(inner)
    origin = {
        "label": label,
        "model_name": inner.config._name_or_path,
        "method": patch.encoding.name if patch else None,
        "options": patch.encoding.options() if patch else {},
        "setup": setup,
    }
    store = _Store(None if out is None else Path(out) / f"{task.name}.jsonl")
    rows = task.rows()
    results = []
    training = {module: module.training for module in inner.modules()}
    inner.eval()
    try:
        with _progress() as progress:
            bar = progress.add_task(f"{task.name}: {label}", total=sum(row["length"] for row in rows))
            for row in rows:
                key = digest({**setup, "row": row})
                if key not in store.done:
                    with _layers_advance(inner, progress, bar, row["length"]):
                        measured = task.measure(inner, tokenizer, row)
                    store.add(key, {"task": task.name, **row, **measured, **origin})
                results.append({**store.done[key], "label": label})
                progress.update(bar, completed=sum(row["length"] for row in rows[: len(results)]))
    finally:
        for module, flag in training.items():
            module.training = flag
    return results


def comparable(task: Task, tokenizer: Any, model: nn.Module, out: Path) -> list[Row]:
    """The rows in ``out`` of this task, with the same settings and a checkpoint of the same name, patched or not.

    Where a row was measured more than once under one label (the checkpoint changed on disk), the latest counts.
    """
    wanted = task.settings(), _digest_of(tokenizer), unwrap(model).config._name_or_path
    names = ("label", *task.rows()[0])
    latest = {}
    for row in _Store(out / f"{task.name}.jsonl").done.values():
        if (row["setup"]["settings"], row["setup"]["tokenizer"], row["model_name"]) == wanted:
            latest[tuple(row[name] for name in names)] = row
    return list(latest.values())


def setup_label(model: nn.Module) -> str:
    """A short name for how the model's positions stand: "unpatched", "yarn x2", "yarn x2 beta_fast=4"."""
    patch = patch_of(unwrap(model))
    if patch is None:
        return "unpatched"
    parts = [patch.encoding.name]
    for name, value in patch.encoding.options().items():
        shown = digest(value)[:4] if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else value
        parts.append(f"x{shown}" if name == "factor" else f"{name}={shown}")
    return " ".join(parts)


def fingerprint(model: PreTrainedModel) -> str:
    """Changes when the config (with the patch), the weights or the active adapters change; samples each tensor."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    record = dict(config.pop("rope_ext", None) or {})
    sample = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.flatten()[:: max(1, tensor.numel() // 8)].tolist())
        for name, tensor in model.named_parameters()
    ]
    adapters = [
        (name, module.disable_adapters, module.active_adapters, module.scaling)
        for name, module in model.named_modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "scaling")
    ]
    return digest([config, record.get("method"), record.get("options"), sample, adapters])


_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest_of(tokenizer: Any) -> str:
    """Of what decides about ids: the tokenizer's rules (not the padding of the last call), template, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": sorted(tokenizer.get_vocab().items())}
    for changing in ("padding", "truncation"):
        rules.pop(changing, None)
    return digest([rules, tokenizer.chat_template, tokenizer.bos_token_id, tokenizer.eos_token_id])


def whole_numbers(name: str, values: Any) -> list[int]:
    """Sorted, each once; an error that names the argument if it is not a list of whole numbers >= 1."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed or any(isinstance(value, bool) or not isinstance(value, Integral) or value < 1 for value in listed):
        raise ValueError(f"`{name}` must be a list of whole numbers >= 1, got {values!r}.")
    return sorted({int(value) for value in listed})


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
