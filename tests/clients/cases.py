"""What a case is, and the models and texts that all of them use."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conftest import SMALL_MODEL, build, options
from tolerances import LOGITS
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from rope_ext import patch_model

LONG = " ".join(f"The key {number} opens door {number * number}." for number in range(8))
SHORT = "The key opens one door."
"""Texts beyond and within the trained length, in the small model's tokens."""

METHODS = {
    "llama": ("yarn", "dynamic", "alibi", "self_extend", "sinusoidal"),
    "bloom": ("alibi", "yarn", "self_extend"),
    "t5": ("t5_bias", "yarn"),
}
"""One method per seam where the family hosts it."""


@dataclass(frozen=True)
class Compared:
    """What a client gave, what the patched model gives by itself, and what a client's likeliest mistake would give."""

    found: Tensor
    wanted: Tensor
    mistaken: Tensor

    @property
    def outcome(self) -> str:
        apart, twin = _apart(self.found, self.wanted), _apart(self.mistaken, self.wanted)
        if not twin > 10 * LOGITS:
            return f"blind: a mistake would be {twin:.1e} apart"
        return "equal" if apart < LOGITS else f"wrong: {apart:.1e} apart"


@dataclass(frozen=True)
class Case:
    """One client with one method on one family.

    Attributes:
        run: called with (family, method); ValueError where something refuses.
        expected: a pattern that the outcome must match from its start.
        package: what has to be installed.
    """

    client: str
    run: Callable[[str, str], Compared]
    family: str
    method: str
    expected: str = "equal$"
    package: str = "transformers"

    def outcome(self) -> str:
        """The outcome in words, after "warned: " where rope_ext warned about a keyword."""
        with warnings.catch_warnings(record=True) as said, _quiet():
            warnings.simplefilter("always")
            try:
                found = self.run(self.family, self.method).outcome
            except ValueError as error:
                found = "refused: " + " ".join(str(error).split())
        unread = sorted({str(each.message) for each in said if "is not read by" in str(each.message)})
        return f"warned: {unread[0]} {found}" if unread else found

    def as_expected(self, outcome: str) -> bool:
        return re.match(self.expected, outcome) is not None


def cases(
    client: str,
    run: Callable[[str, str], Compared],
    families: tuple[str, ...] = ("llama", "bloom"),
    package: str = "transformers",
    **unequal: str,
) -> list[Case]:
    """A case for each method of ``METHODS``; ``unequal`` names those that end otherwise: family_method or family."""
    return [
        Case(client, run, family, method, unequal.get(f"{family}_{method}", unequal.get(family, "equal$")), package)
        for family in families
        for method in METHODS[family]
    ]


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SMALL_MODEL, padding_side="left")


def unpatched(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny random model with the vocabulary of the small model's tokenizer."""
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return build(family, seed, vocab_size=512, **special, **({"dropout_rate": 0.0} if family == "t5" else {}))


def patched(family: str, method: str) -> PreTrainedModel:
    model = unpatched(family)
    return patch_model(model, method, **options(method, model))


def words(*texts: str) -> list[Tensor]:
    """Each text's ids, shape (1, length)."""
    return [tokenizer()(text, return_tensors="pt")["input_ids"] for text in texts]


def _apart(one: Tensor, other: Tensor) -> float:
    return float("inf") if one.shape != other.shape else float((one.double() - other.double()).abs().max())


@contextmanager
def _quiet() -> Any:
    """Without what the clients log."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
