"""Passkey retrieval: a number hidden at a random depth of a long text (Mohtashami and Jaggi 2023)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from rope_ext.evals.checks import at_least_one, percentages, whole_numbers
from rope_ext.evals.haystack import SHORTEST, haystack, hide
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask, encode, frame
from rope_ext.evals.runner import Row
from rope_ext.evals.text import sentences

LARGEST = 50000
"""Pass keys are whole numbers from 1 to this."""

PASSES = 0.8
"""The accuracy up to which a length counts as part of the passkey context."""

TASK = "A pass key is hidden in a long text that does not matter. Find it and remember it: you will be asked for it."
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key?"
ANSWER_PREFIX = "The pass key is"


class Passkey(QuestionTask):
    """Right is an answer whose first whole number is the pass key.

    Args:
        text: the filler; its sentences are repeated where it is too short. The paper's is ``read_text("noise")``.
        lengths: tokens that prompt and answer take together.
        depths: percent of the filler before the pass key; by default each sample has one at random, the same at all
            lengths. The pass key goes to the sentence end nearest to it.
        samples: prompts per length (and depth), each with another pass key and part of the text.
        seed: of the pass keys and depths.
        max_new_tokens: how much may be generated.
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.

    Raises:
        ValueError: a length or depth is out of range, or (when a question is built) a length is too short.
    """

    name: ClassVar[str] = "passkey"

    def __init__(
        self,
        text: str,
        lengths: Sequence[int],
        *,
        depths: Sequence[float] | None = None,
        samples: int = 10,
        seed: int = 0,
        max_new_tokens: int = 8,
        chat: bool = False,
    ) -> None:
        self.lengths = whole_numbers("lengths", lengths)
        self.depths = None if depths is None else percentages("depths", depths)
        at_least_one(samples=samples, max_new_tokens=max_new_tokens)
        self.text = text
        self.samples, self.seed, self.max_new_tokens, self.chat = samples, seed, max_new_tokens, chat

    def settings(self) -> Row:
        return {
            "text": digest(self.text),
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "wording": digest([TASK, NEEDLE, QUESTION, ANSWER_PREFIX]),
        }

    def rows(self) -> list[Row]:
        """``depth`` is in them only if depths were given."""
        asked: list[Row] = [{}] if self.depths is None else [{"depth": depth} for depth in self.depths]
        return [
            {"length": length, **depth, "sample": sample}
            for length in self.lengths
            for depth in asked
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """Prompt and generation together take ``length`` tokens."""
        rng = random.Random(f"{self.seed}:{row['sample']}")
        key, anywhere = str(rng.randint(1, LARGEST)), rng.uniform(0, 100)
        head, tail = frame(tokenizer, f"{TASK}\n", f"\n{QUESTION}", ANSWER_PREFIX, self.chat)
        needle = encode(tokenizer, " " + NEEDLE.replace("{key}", key))
        length, rest = row["length"], len(head) + len(tail) + len(needle) + self.max_new_tokens
        if length < rest + SHORTEST:
            raise ValueError(f"length {length} leaves no room for a filler: the rest takes {rest + SHORTEST} tokens.")
        hay = haystack(tokenizer, self._sentences, length - rest, row["sample"])
        ids, (depth,) = hide(hay, [(row.get("depth", anywhere), needle)])
        answer = encode(tokenizer, f" {key}")
        if len(answer) > self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is too few: the answer takes {len(answer)} tokens.")
        return Question(head + ids + tail, (key,), answer, self.max_new_tokens, {"true_depth": depth})

    def score(self, generated: str, question: Question) -> float:
        """1 if the first whole number in the generated text is the pass key, else 0."""
        found = re.search("[0-9]+", generated)
        return float(found is not None and found.group().lstrip("0") == question.references[0])

    @cached_property
    def _sentences(self) -> list[str]:
        return sentences(self.text)


def passkey_context(rows: Sequence[Row]) -> int | None:
    """The largest length with an accuracy of at least 80 %, None if there is none.

    Args:
        rows: of one setup, with ``length`` and ``score``; where a row stands for several (a cell), with their number
            as ``n``.
    """
    right: dict[int, float] = {}
    total: dict[int, int] = {}
    for row in rows:
        n = row.get("n", 1)
        right[row["length"]] = right.get(row["length"], 0) + n * row["score"]
        total[row["length"]] = total.get(row["length"], 0) + n
    return max((length for length in total if round(right[length] / total[length], 9) >= PASSES), default=None)
