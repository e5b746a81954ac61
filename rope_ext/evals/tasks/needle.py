"""Needle in a haystack: one fact hidden at a depth of a long text, asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

from rope_ext.evals.checks import at_least_one, percentages, whole_numbers
from rope_ext.evals.haystack import SHORTEST, haystack, hide
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask, encode, frame
from rope_ext.evals.runner import Row
from rope_ext.evals.text import sentences

CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Warsaw Cairo Lima Tokyo Delhi Seoul Hanoi "
    "Quito Havana Bern Riga Sofia Tunis Accra Dakar Nairobi Kyoto Milan Geneva".split()
)


@dataclass(frozen=True)
class Wording:
    """The sentences around the haystack. ``{key}`` becomes a city, ``{value}`` a five-digit number."""

    task: str = "A special magic number is hidden in the text below. Remember it."
    needle: str = "The special magic number for {key} is {value}."
    question: str = "What is the special magic number for {key}?"
    answer_prefix: str = "The special magic number for {key} is"

    def __post_init__(self) -> None:
        if "{value}" not in self.needle:
            raise ValueError(f"`needle` must hold {{value}}, or nobody can find it, got {self.needle!r}.")


class Needle(QuestionTask):
    """The length x depth grid.

    Args:
        text: the haystack; its sentences are repeated where it is too short.
        lengths: tokens that prompt and answer take together.
        depths: percent of the haystack before the needle; it goes to the nearest sentence end (inside a sentence of
            more than 64 tokens: to the nearest 64th token).
        samples: prompts per cell, each with another city, number and part of the text.
        seed: of the cities and numbers.
        max_new_tokens: how much may be generated.
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.
        control: one more prompt per length and sample without the needle, to show guessing.

    Raises:
        ValueError: a length or depth is out of range, or (when a question is built) a length is too short or the answer
            takes more than ``max_new_tokens``.
    """

    name: ClassVar[str] = "needle"

    def __init__(
        self,
        text: str,
        lengths: Sequence[int],
        depths: Sequence[float] = (0, 25, 50, 75, 100),
        *,
        samples: int = 1,
        seed: int = 0,
        max_new_tokens: int = 12,
        chat: bool = False,
        control: bool = True,
        wording: Wording | None = None,
    ) -> None:
        self.lengths = whole_numbers("lengths", lengths)
        self.depths = percentages("depths", depths)
        at_least_one(samples=samples, max_new_tokens=max_new_tokens)
        self.text = text
        self.samples, self.seed, self.max_new_tokens = samples, seed, max_new_tokens
        self.chat, self.control, self.wording = chat, control, wording or Wording()

    def settings(self) -> Row:
        return {
            "text": digest(self.text),
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "wording": asdict(self.wording),
        }

    def rows(self) -> list[Row]:
        depths = [*self.depths, *([None] if self.control else [])]
        return [
            {"length": length, "depth": depth, "sample": sample}
            for length in self.lengths
            for depth in depths
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """Prompt and generation together take ``length`` tokens."""
        rng = random.Random(f"{self.seed}:{row['sample']}")
        key, value = rng.choice(CITIES), str(rng.randint(10000, 99999))

        def filled(template: str) -> str:
            return template.replace("{key}", key).replace("{value}", value)

        words = self.wording
        head, tail = frame(
            tokenizer, f"{words.task}\n", f"\n{filled(words.question)}", filled(words.answer_prefix), self.chat
        )
        needle = encode(tokenizer, " " + filled(words.needle))
        length, rest = row["length"], len(head) + len(tail) + len(needle) + self.max_new_tokens
        if length < rest + SHORTEST:
            raise ValueError(f"length {length} leaves no room for a haystack: the rest takes {rest + SHORTEST} tokens.")
        answer = encode(tokenizer, f" {value}")
        if len(answer) > self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is too few: the answer takes {len(answer)} tokens.")
        hay = haystack(tokenizer, self._sentences, length - rest, row["sample"])
        absent = row["depth"] is None
        ids, depths = hide(hay, [] if absent else [(row["depth"], needle)])
        facts = {"true_depth": None if absent else depths[0]}
        return Question(head + ids + tail, (value,), answer, self.max_new_tokens, facts)

    @cached_property
    def _sentences(self) -> list[str]:
        return sentences(self.text)
