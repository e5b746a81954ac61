"""RULER: thirteen tasks of retrieval, tracing and counting at growing lengths (Hsieh et al. 2024, arXiv 2404.06654)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rope_ext.evals.checks import at_least_one, whole_numbers
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask
from rope_ext.evals.ruler.counting import COMMON, FREQUENT, cwe, fwe
from rope_ext.evals.ruler.documents import ANSWERING, AnyOf, qa_prompt
from rope_ext.evals.ruler.needles import NEEDLE, NIAH, ONE, SEVERAL, niah
from rope_ext.evals.ruler.sheet import Sheet
from rope_ext.evals.ruler.tracking import TRACKING, vt
from rope_ext.evals.runner import Row
from rope_ext.evals.tasks.multi_doc_qa import read_entries
from rope_ext.evals.text import NOISE, sentences
from rope_ext.evals.words import ADJECTIVES, NOUNS

INSTRUCT = 85.6
"""Percent that an instruction-tuned model must exceed: Llama-2-7B-chat at 4096 tokens in the paper."""

BASE = 79.4
"""Percent that a base model must exceed: Llama-2-7B at 4096 tokens in the paper."""

SUBTASKS = (*NIAH, "vt", "cwe", "fwe")
"""The tasks that need no file."""


class Ruler(QuestionTask):
    """Each task at each length, as full as it can be.

    Args:
        text: the essay haystack; its sentences are repeated where it is too short.
        lengths: tokens that prompt and answer take together.
        subtasks: names from ``SUBTASKS``; all by default.
        qa: files of questions, see :func:`rope_ext.evals.tasks.multi_doc_qa.read_entries`; they add the tasks "qa_1",
            "qa_2" ... Sample s asks line s; the other lines' documents fill the prompt.
        samples: prompts per length and task.
        seed: of keys, values, places and words.
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.

    Raises:
        ValueError: a length or task is not there, a file is too small or not in its form, or (when a question is built)
            a length is too short for a task, or so long that its words run out.
    """

    name: ClassVar[str] = "ruler"

    def __init__(
        self,
        text: str,
        lengths: Sequence[int],
        *,
        subtasks: Sequence[str] | None = None,
        qa: str | Path | Sequence[str | Path] | None = None,
        samples: int = 5,
        seed: int = 0,
        chat: bool = False,
    ) -> None:
        self.lengths = whole_numbers("lengths", lengths)
        at_least_one(samples=samples)
        files = [] if qa is None else [qa] if isinstance(qa, (str, Path)) else list(qa)
        self._entries = {f"qa_{number}": read_entries(file) for number, file in enumerate(files, start=1)}
        known = (*SUBTASKS, *self._entries)
        given = [subtasks] if isinstance(subtasks, str) else SUBTASKS if subtasks is None else subtasks
        wanted = (*given, *self._entries)
        if not wanted or not set(wanted) <= set(known):
            listed = ", ".join(known)
            raise ValueError(f"`subtasks` must be from {listed}, got {subtasks!r} (qa_1 needs a file as `qa`).")
        for task, entries in self._entries.items():
            if samples > len(entries):
                raise ValueError(f"samples={samples} is more than the {len(entries)} questions of {task}.")
        self.subtasks = tuple(dict.fromkeys(wanted))
        self.text, self.samples, self.seed, self.chat = text, samples, seed, chat

    def settings(self) -> Row:
        wording = [vars(each) for each in (ONE, SEVERAL, TRACKING, COMMON, FREQUENT, ANSWERING)]
        return {
            "text": digest(self.text),
            "qa": {task: digest([repr(entry) for entry in entries]) for task, entries in self._entries.items()},
            "seed": self.seed,
            "chat": self.chat,
            "words": digest([ADJECTIVES, NOUNS, NOISE]),
            "wording": digest([NEEDLE, *wording]),
        }

    def rows(self) -> list[Row]:
        return [
            {"length": length, "subtask": task, "sample": sample}
            for length in self.lengths
            for task in self.subtasks
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """Prompt and generation together take at most ``length`` tokens, and nearly as many."""
        task = row["subtask"]
        sheet = Sheet(tokenizer, row, random.Random(f"{self.seed}:{task}:{row['sample']}"), self.chat)
        if task in NIAH:
            return niah(sheet, NIAH[task], self._sentences)
        if task in self._entries:
            return qa_prompt(sheet, self._entries[task])
        return {"vt": vt, "cwe": cwe, "fwe": fwe}[task](sheet)

    def score(self, generated: str, question: Question) -> float:
        """The share of the references in the generated text; of a qa task's references one is enough."""
        share = super().score(generated, question)
        return float(share > 0) if isinstance(question, AnyOf) else share

    @cached_property
    def _sentences(self) -> list[str]:
        return sentences(self.text)


def effective_length(rows: Sequence[Row], threshold: float) -> int | None:
    """The largest length whose mean over the tasks exceeds ``threshold`` percent, None if there is none.

    Args:
        rows: of one setup, with ``length``, ``subtask`` and ``score``.
        threshold: ``INSTRUCT`` or ``BASE``.

    Raises:
        ValueError: a length lacks a task that another one has, so that the means do not compare.
    """
    scores: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        scores.setdefault(row["length"], {}).setdefault(row["subtask"], []).append(row["score"])
    tasks = {row["subtask"] for row in rows}
    passed = []
    for length, found in scores.items():
        if missing := tasks - set(found):
            raise ValueError(f"length {length} has no rows of {', '.join(sorted(missing))}, which other lengths have.")
        means = [sum(values) / len(values) for values in found.values()]
        if 100 * sum(means) / len(means) > threshold:
            passed.append(length)
    return max(passed, default=None)
