"""Tasks that ask a question and read a short answer: how prompts are framed, read, decoded and scored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from transformers import PreTrainedModel

from rope_ext.evals.memory import Holding
from rope_ext.evals.reading import TOGETHER, Advance, Limits, Prompt, reader
from rope_ext.evals.runner import Row, Task

_CONTEXT = "\0"
"""Stands for the context while a chat template is filled in; no tokenizer's template holds it."""


@dataclass(frozen=True)
class Question:
    """One prompt in token ids and what counts as its answer."""

    ids: list[int]
    references: tuple[str, ...]
    """The strings to be found in what the model generates."""
    answer_ids: list[int]
    """The answer whose log-probability is measured, as it would follow the prompt."""
    max_new_tokens: int
    facts: Row = field(default_factory=dict)
    """What else goes into the row: the true depth, for example."""


class QuestionTask(Task):
    """A task whose rows are questions. A subclass says how one is built and how an answer is scored."""

    chat: bool = False

    @abstractmethod
    def question(self, tokenizer: Any, row: Row) -> Question:
        """Build one prompt in token ids.

        Raises:
            ValueError: it cannot be built as asked (too short a length, for example).
        """

    def score(self, generated: str, question: Question) -> float:
        """From 0 to 1: the share of the references that the generated text contains, whatever the case."""
        lowered = generated.lower()
        return sum(reference.lower() in lowered for reference in question.references) / len(question.references)

    def longest(self, tokenizer: Any, rows: Sequence[Row]) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(row["length"] for row in rows)

    def holds(self, tokenizer: Any, rows: Sequence[Row], limits: Limits) -> Holding:
        longest = self.longest(tokenizer, rows)
        together = min(TOGETHER, max(1, limits.batch_tokens // longest))
        # the shared beginning, a branch, one on top of it; if several are decoded together, those and their stack
        cached = longest * ((3 if limits.reuse else 1) + (2 * together if together > 1 else 0))
        return Holding(forward=min(longest, limits.chunk), cached=cached, longest=longest)

    def together(self, row: Row) -> tuple[str, int]:
        """Rows that share their beginning."""
        return str(row.get("subtask", "")), row["sample"]

    def measure(
        self, model: PreTrainedModel, tokenizer: Any, rows: Sequence[Row], limits: Limits, advance: Advance
    ) -> Iterator[tuple[int, Row]]:
        asked: dict[int, Question] = {}

        def groups() -> Iterator[list[tuple[int, Prompt]]]:
            order = sorted(range(len(rows)), key=lambda index: self.together(rows[index]))
            for _, members in groupby(order, key=lambda index: self.together(rows[index])):
                questions = {index: self.question(tokenizer, rows[index]) for index in members}
                asked.update(questions)
                yield [(index, Prompt(one.ids, one.answer_ids, one.max_new_tokens)) for index, one in questions.items()]

        read = reader(model, limits)
        self.usage = read.usage
        for index, answered in read(groups(), advance):
            question = asked.pop(index)
            generated = tokenizer.decode(answered.generated, skip_special_tokens=True)
            measured = {
                "tokens": len(question.ids),
                **question.facts,
                "answer": ", ".join(question.references),
                "generated": generated,
                "score": self.score(generated, question),
                "answer_log_probability": round(answered.log_probability, 5),
            }
            yield index, measured


def frame(tokenizer: Any, before: str, after: str, answer_prefix: str, chat: bool) -> tuple[list[int], list[int]]:
    """(ids before the context, ids behind it), with exactly one BOS if the tokenizer has one.

    Args:
        before: the instruction, ending in whatever separates it from the context.
        after: the question.
        answer_prefix: the beginning of the answer; with ``chat`` it goes behind the assistant header.
        chat: use the tokenizer's chat template.

    Raises:
        ValueError: ``chat`` without a chat template, or with one that changes what a user says.
    """
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("chat=True needs a tokenizer with a chat template; this one has none.")
        user = {"role": "user", "content": f"{before}{_CONTEXT}{after}"}
        shown = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        if shown.count(_CONTEXT) != 1:
            raise ValueError("chat=True: the tokenizer's chat template does not show a user's text once, as it is.")
        start, _, end = shown.partition(_CONTEXT)
        if any(token in f"{before}\n{after}\n{answer_prefix}" for token in tokenizer.all_special_tokens):
            head = _with_said(tokenizer, start, before)
            tail = _with_said(tokenizer, end, after) + encode(tokenizer, answer_prefix)
        else:
            head = _ids(tokenizer, start, special=True)
            tail = encode(tokenizer, end + answer_prefix, special=True)
    else:
        head, tail = _ids(tokenizer, before), encode(tokenizer, f"{after} {answer_prefix}")
    bos = tokenizer.bos_token_id
    return (head if bos is None or head[:1] == [bos] else [bos, *head]), tail


def _with_said(tokenizer: Any, shown: str, said: str) -> list[int]:
    """Ids of a part of a filled-in template, where what a user said is text even if it spells a special token."""
    before, _, after = shown.partition(said) if said else (shown, "", "")
    return _ids(tokenizer, before, special=True) + encode(tokenizer, said) + encode(tokenizer, after, special=True)


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Token ids of text that something stands before; no special tokens are added.

    Args:
        special: special tokens written in the text (``<s>``) become those tokens; else they are text.
    """
    ids = _ids(tokenizer, text, special)
    if not _marks_the_start(tokenizer):
        return ids
    before, whole = _ids(tokenizer, "="), _ids(tokenizer, f"={text}", special)
    return whole[len(before) :] if whole[: len(before)] == before else ids


def _ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not special, verbose=False)
    return ids


@lru_cache(maxsize=8)
def _marks_the_start(tokenizer: Any) -> bool:
    """Whether a text's first word gets a space before it, as SentencePiece models do."""
    (first, *_) = tokenizer.convert_ids_to_tokens(_ids(tokenizer, "a"))
    return str(first).startswith("\u2581")
