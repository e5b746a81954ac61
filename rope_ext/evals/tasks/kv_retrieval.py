"""Key-value retrieval: the value of one key of a long JSON object (Liu et al. 2023, "Lost in the Middle")."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from rope_ext.evals.checks import MOST, at_least_one, percentages, whole_numbers
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask, encode, frame
from rope_ext.evals.runner import Row

POSITIONS = (0, 25, 50, 75, 100)
"""Percent of the way from the first place to the last."""

TASK = "Below is a JSON object. Read out the value that belongs to one of its keys."
QUESTION = 'What is the value of the key "{key}"?'
ANSWER_PREFIX = 'The value of the key "{key}" is'


class KvRetrieval(QuestionTask):
    """Accuracy over the place of the asked pair. A position moves one pair, all others keep their order.

    Args:
        pairs: how many pairs of random UUIDs the object has.
        positions: percent of the way from the first pair (0) to the last (100).
        samples: prompts per number of pairs and position, each with other UUIDs.
        seed: of the UUIDs.
        query_first: ask the question before the object, too (the paper's query-aware contextualization).
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.
        max_new_tokens: how much may be generated; must hold a UUID in quotes.

    Raises:
        ValueError: a number or position is out of range, or (when a question is built) the answer takes more than
            ``max_new_tokens``.
    """

    name: ClassVar[str] = "kv_retrieval"

    def __init__(
        self,
        pairs: Sequence[int] = (75, 140, 300),
        positions: Sequence[float] | None = None,
        *,
        samples: int = 5,
        seed: int = 0,
        query_first: bool = False,
        chat: bool = False,
        max_new_tokens: int = 48,
    ) -> None:
        self.pairs = whole_numbers("pairs", pairs, MOST)
        self.positions = percentages("positions", POSITIONS if positions is None else positions)
        at_least_one(samples=samples, max_new_tokens=max_new_tokens)
        self.samples, self.seed, self.max_new_tokens = samples, seed, max_new_tokens
        self.query_first, self.chat = query_first, chat

    def settings(self) -> Row:
        return {
            "seed": self.seed,
            "query_first": self.query_first,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "wording": digest([TASK, QUESTION, ANSWER_PREFIX]),
        }

    def rows(self) -> list[Row]:
        return [
            {"pairs": count, "position": position, "sample": sample}
            for count in self.pairs
            for position in self.positions
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """The asked pair and the order of the others depend on the sample only; ``index`` counts from 0."""
        rng = random.Random(f"{self.seed}:{row['sample']}")
        key, value = random_uuid(rng), random_uuid(rng)
        others = [(random_uuid(rng), random_uuid(rng)) for _ in range(row["pairs"] - 1)]
        lines = [f'"{one}": "{other}"' for one, other in others]
        index = place(row["pairs"], row["position"])
        lines.insert(index, f'"{key}": "{value}"')
        asked = QUESTION.replace("{key}", key)
        before = f"{TASK} {asked}" if self.query_first else TASK
        prefix = ANSWER_PREFIX.replace("{key}", key)
        head, tail = frame(tokenizer, f"{before}\n\n", f"\n\n{asked}", prefix, self.chat)
        ids = encode(tokenizer, "{" + ",\n ".join(lines) + "}")
        answer = encode(tokenizer, f' "{value}"')
        if len(answer) > self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is too few: the answer takes {len(answer)} tokens.")
        return Question(head + ids + tail, (value,), answer, self.max_new_tokens, {"index": index})

    def longest(self, tokenizer: Any, rows: Sequence[Row]) -> int:
        fullest = {row["sample"]: row for row in sorted(rows, key=lambda row: row["pairs"])}
        questions = [self.question(tokenizer, row) for row in fullest.values()]
        return max(len(question.ids) + question.max_new_tokens for question in questions)


def place(count: int, position: float) -> int:
    """The index, of 0 .. count - 1, that is ``position`` percent of the way."""
    return round((count - 1) * position / 100)


def random_uuid(rng: random.Random) -> str:
    """A version 4 UUID, 36 characters."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
