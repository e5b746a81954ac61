"""One prompt of RULER in the making, and what its tasks share."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rope_ext.evals.questions import Question, encode, frame
from rope_ext.evals.store import Row

CONSONANTS = "bcdfghjklmnpqrstvwxz"
"""Made-up names consist of these, so that they are no words."""


@dataclass(frozen=True)
class Wording:
    """The sentences around the context, and how much may be generated."""

    task: str
    question: str
    answer_prefix: str
    new_tokens: int

    def frame(self, tokenizer: Any, chat: bool, example: str = "", **values: str) -> tuple[list[int], list[int]]:
        asked, prefix = self.question.format(**values), self.answer_prefix.format(**values)
        return frame(tokenizer, f"{example}{self.task}\n", f"\n{asked}", prefix, chat)

    def worked(self, context: str, answers: Sequence[str], **values: str) -> str:
        """An example with its answer, to go before the task."""
        asked, prefix = self.question.format(**values), self.answer_prefix.format(**values)
        return f"{self.task}\n{context}\n{asked} {prefix} {', '.join(answers)}\n\n"


class Sheet:
    """One prompt in the making."""

    def __init__(self, tokenizer: Any, row: Row, rng: random.Random, chat: bool) -> None:
        self.tokenizer, self.row, self.rng, self.chat = tokenizer, row, rng, chat

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def frame(self, wording: Wording, example: str = "", answers: Sequence[str] = (), **values: str) -> int:
        """Tokens that are left for the context; more than the paper's may be generated where the answers take more."""
        self.head, self.tail = wording.frame(self.tokenizer, self.chat, example, **values)
        self.new_tokens = max(wording.new_tokens, len(self.encode(_listing(answers))))
        room: int = self.row["length"] - len(self.head) - len(self.tail) - self.new_tokens
        return room

    def answered_by(self, ids: list[int], references: Sequence[str], **facts: Any) -> Question:
        answer = self.encode(_listing(references))
        if len(answer) > self.new_tokens:
            taken, task = f"{len(answer)} tokens of {self.new_tokens}", self.row["subtask"]
            raise ValueError(f"{task} cannot be measured with this tokenizer: the answer takes {taken}.")
        return Question(self.head + ids + self.tail, tuple(references), answer, self.new_tokens, facts)

    def check(self, room: int, needed: int) -> None:
        length, task = self.row["length"], self.row["subtask"]
        if room < needed:
            raise ValueError(f"length {length} is too short for {task}: it takes at least {length + needed - room}.")

    def used_up(self, what: str) -> ValueError:
        return ValueError(
            f"length {self.row['length']} is too long for {self.row['subtask']}: {what}; use shorter ones."
        )


def _listing(answers: Sequence[str]) -> str:
    return " " + ", ".join(answers)


def fresh(draw: Callable[[], str]) -> Iterator[str]:
    """What ``draw`` returns, again and again, without what came before."""
    seen = set()
    while True:
        drawn = draw()
        if drawn not in seen:
            seen.add(drawn)
            yield drawn
