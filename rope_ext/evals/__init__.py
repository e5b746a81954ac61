"""Long-context evaluations.

Each function measures one task and returns :class:`Results`::

    from rope_ext.evals import needle

    results = needle(model, tokenizer, lengths=[4096, 8192], samples=5)
    results.to_dataframe(), results.plot(), results.save("out")

All take the same keyword arguments beside their task's own (see the task's class):

- ``text``: where the text comes from: "builtin", "noise", a file, a folder, "hf:NAME"; see :mod:`rope_ext.evals.text`.
- ``out``: folder for finished rows; the same call with the same model goes on from there.
- ``label``: name of this setup in tables and plots; by default the method with its factor.
- ``limits``: how much is held at once (:class:`Limits`).
- ``max_memory``: bytes that the run may take, weights included; by default what is free.
- ``progress``: show the memory estimate and a bar.
- ``spread``: split the rows over the processes of ``torchrun`` or ``accelerate launch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext.evals.identity import trained_length
from rope_ext.evals.reading import Limits
from rope_ext.evals.results import Results
from rope_ext.evals.runner import Task, run
from rope_ext.evals.sweeping import setups, sweep
from rope_ext.evals.tasks.kv_retrieval import KvRetrieval
from rope_ext.evals.tasks.multi_doc_qa import MultiDocQa
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.passkey import Passkey
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.tasks.ruler import Ruler
from rope_ext.evals.text import read_text

__all__ = [
    "Limits",
    "Results",
    "evaluate",
    "kv_retrieval",
    "multi_doc_qa",
    "needle",
    "passkey",
    "perplexity",
    "ruler",
    "setups",
    "sweep",
]


def needle(model: nn.Module, tokenizer: Any, *, lengths: Sequence[int], text: str = "builtin", **more: Any) -> Results:
    """A fact hidden at a depth of a long text: the length x depth grid. Options: :class:`Needle`."""
    return _measure(Needle, model, tokenizer, more, read_text(text), lengths)


def passkey(model: nn.Module, tokenizer: Any, *, lengths: Sequence[int], text: str = "noise", **more: Any) -> Results:
    """A pass key hidden in filler (landmark attention). Options: :class:`Passkey`."""
    return _measure(Passkey, model, tokenizer, more, read_text(text), lengths)


def kv_retrieval(model: nn.Module, tokenizer: Any, **more: Any) -> Results:
    """The value of one key of a long JSON object, by its place. Options: :class:`KvRetrieval`."""
    return _measure(KvRetrieval, model, tokenizer, more)


def multi_doc_qa(model: nn.Module, tokenizer: Any, **more: Any) -> Results:
    """A question about one of many documents, by its place. Options: :class:`MultiDocQa`."""
    return _measure(MultiDocQa, model, tokenizer, more)


def ruler(model: nn.Module, tokenizer: Any, *, lengths: Sequence[int], text: str = "builtin", **more: Any) -> Results:
    """Eleven synthetic tasks (Hsieh et al. 2024). Options: :class:`Ruler`."""
    return _measure(Ruler, model, tokenizer, more, read_text(text), lengths)


def perplexity(
    model: nn.Module, tokenizer: Any, *, lengths: Sequence[int], text: str = "builtin", **more: Any
) -> Results:
    """Perplexity by position, or with a sliding window. Options: :class:`Perplexity`."""
    return _measure(Perplexity, model, tokenizer, more, read_text(text), lengths)


def evaluate(task: Task, model: nn.Module, tokenizer: Any, out: Path | str | None = None, **more: Any) -> Results:
    """Measure any task: :func:`rope_ext.evals.runner.run`, with the rows as :class:`Results`."""
    rows = run(task, model, tokenizer, None if out is None else Path(out), **more)
    return Results(task.name, rows, trained_length(model))


_RUN = ("out", "label", "limits", "max_memory", "progress", "spread")


def _measure(kind: type[Task], model: nn.Module, tokenizer: Any, more: dict[str, Any], *given: Any) -> Results:
    running = {name: more.pop(name) for name in _RUN if name in more}
    return evaluate(kind(*given, **more), model, tokenizer, **running)
