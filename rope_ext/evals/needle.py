"""Needle in a haystack: one fact hidden at a depth of a long text, asked for at the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from rope_ext.evals.decoding import Prompt
from rope_ext.evals.runner import Row, Task, digest, whole_numbers
from rope_ext.evals.text import endless, sentences

CITIES = tuple(
    "Paris London Berlin Madrid Rome Vienna Oslo Lisbon Athens Dublin Prague Warsaw Cairo Lima Tokyo Delhi Seoul Hanoi "
    "Quito Havana Bern Riga Sofia Tunis Accra Dakar Nairobi Kyoto Milan Geneva".split()
)


_HAYSTACK = "\0"
"""Stands for the haystack while a chat template is filled in; no tokenizer's template holds it."""


@dataclass(frozen=True)
class Wording:
    """The sentences around the haystack. ``{key}`` becomes a city, ``{value}`` a five-digit number."""

    task: str = "A special magic number is hidden in the text below. Remember it."
    needle: str = "The special magic number for {key} is {value}."
    question: str = "What is the special magic number for {key}?"
    answer_prefix: str = "The special magic number for {key} is"


@dataclass(frozen=True)
class NeedlePrompt:
    """One prompt in token ids, and where the needle really lies."""

    ids: list[int]
    answer: str
    answer_ids: list[int]
    depth: float | None
    """Share of the haystack's tokens before the needle, in percent; None without a needle."""


class Needle(Task):
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
        ValueError: a length or depth is out of range.
    """

    name: ClassVar[str] = "needle"
    LONGEST_PIECE: ClassVar[int] = 64
    SHORTEST_HAY: ClassVar[int] = 16

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
        self.depths = sorted({float(depth) for depth in depths})
        for depth in self.depths:
            if not 0 <= depth <= 100:
                raise ValueError(f"depths must be percentages from 0 to 100, got {depth:g}.")
        if not self.depths or samples < 1 or max_new_tokens < 1:
            raise ValueError("needle needs at least one depth, one sample and one new token.")
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

    def measure(self, model: PreTrainedModel, tokenizer: Any, row: Row) -> Row:
        prompt = self.prompt(tokenizer, row["length"], row["depth"], row["sample"])
        read = Prompt(model, torch.tensor([prompt.ids], device=model.device))
        generated = tokenizer.decode(read.greedy(self.max_new_tokens), skip_special_tokens=True)
        return {
            "tokens": len(prompt.ids),
            "true_depth": prompt.depth,
            "answer": prompt.answer,
            "generated": generated,
            "score": float(prompt.answer.lower() in generated.lower()),
            "answer_log_probability": round(read.log_probability(prompt.answer_ids), 5),
        }

    def prompt(self, tokenizer: Any, length: int, depth: float | None, sample: int = 0) -> NeedlePrompt:
        """Build one prompt in token ids; prompt and generation together take ``length`` tokens.

        Raises:
            ValueError: the length leaves no room for a haystack.
        """
        rng = random.Random(f"{self.seed}:{sample}")
        key, value = rng.choice(CITIES), str(rng.randint(10000, 99999))

        def encode(template: str) -> list[int]:
            filled = template.replace("{key}", key).replace("{value}", value)
            ids: list[int] = tokenizer.encode(filled, add_special_tokens=False)
            return ids

        head, tail = self._frame(tokenizer, encode)
        needle = encode(" " + self.wording.needle)
        budget = length - len(head) - len(tail) - len(needle) - self.max_new_tokens
        hay = self._haystack(tokenizer, budget, sample)
        if not hay:
            shortest = length - budget + self.SHORTEST_HAY
            raise ValueError(f"length {length} leaves no room for a haystack: the rest takes {shortest} tokens.")
        total = sum(map(len, hay))
        ids, true_depth = [token for part in hay for token in part], None
        if depth is not None:
            ends = [0]
            for part in hay:
                ends.append(ends[-1] + len(part))
            at = min(ends, key=lambda end: abs(end - total * depth / 100))
            ids, true_depth = ids[:at] + needle + ids[at:], round(100 * at / total, 2)
            assert ids[at : at + len(needle)] == needle
        ids = head + ids + tail
        assert len(ids) + self.max_new_tokens == length - (len(needle) if depth is None else 0)
        return NeedlePrompt(ids, value, encode(" {value}"), true_depth)

    def _frame(self, tokenizer: Any, encode: Any) -> tuple[list[int], list[int]]:
        """What stands before and after the haystack; exactly one BOS if the tokenizer has one."""
        words = self.wording
        if self.chat:
            user = {"role": "user", "content": f"{words.task}\n{_HAYSTACK}\n{words.question}"}
            shown = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
            before, _, after = shown.partition(_HAYSTACK)
            head, tail = encode(before), encode(after + words.answer_prefix)
        else:
            head, tail = encode(words.task + "\n"), encode(f"\n{words.question} {words.answer_prefix}")
        bos = tokenizer.bos_token_id
        return (head if bos is None or head[:1] == [bos] else [bos, *head]), tail

    @cached_property
    def _sentences(self) -> list[str]:
        parts = sentences(self.text)
        if not parts:
            raise ValueError("the haystack text has no sentences.")
        return parts

    def _haystack(self, tokenizer: Any, budget: int, sample: int) -> list[list[int]]:
        """Pieces that fill ``budget`` tokens: sentences, long ones in pieces, the last one cut to fit; [] if too small.

        Each sample starts elsewhere in the text.
        """
        if budget < self.SHORTEST_HAY:
            return []
        hay: list[list[int]] = []
        start = sample * 997  # a prime, so that samples do not start at the same few places
        for sentence in endless(self._sentences, start):
            ids = tokenizer.encode((" " if hay else "") + sentence, add_special_tokens=False, verbose=False)
            for at in range(0, len(ids), self.LONGEST_PIECE):
                piece = ids[at : at + self.LONGEST_PIECE][:budget]
                hay.append(piece)
                budget -= len(piece)
                if budget == 0:
                    return hay
        raise AssertionError("an endless text ended")
