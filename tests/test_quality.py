"""Not shapes but quality, on a small model of our own (small_model/train.py) that really retrieves.

It was trained at 256 tokens. YaRN's beta_fast is set to that: the default 32 would keep waves of up to 8 tokens only.
"""

import pytest
import torch

from rope_ext import patched
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.text import NOISE

TEXT = " ".join(NOISE)
TRAINED = 256


def needle(small, length):
    """(share of 24 answers found, mean log-probability of the answer)."""
    rows = run(Needle(TEXT, [length], [10, 50, 90], samples=8, control=False), *small)
    return tuple(sum(row[name] for row in rows) / len(rows) for name in ("score", "answer_log_probability"))


@pytest.fixture(scope="module")
def unpatched(small):
    return {length: needle(small, length) for length in (TRAINED, 4 * TRAINED, 8 * TRAINED)}


def test_unpatched_it_retrieves_inside_its_length_and_fails_beyond(unpatched):
    assert unpatched[TRAINED] == (1.0, pytest.approx(0, abs=0.05))
    assert unpatched[4 * TRAINED][0] < 0.6
    assert unpatched[4 * TRAINED][1] < -4
    assert unpatched[8 * TRAINED][0] < 0.15


def test_without_a_needle_it_does_not_guess(small):
    rows = run(Needle(TEXT, [TRAINED], [50], samples=8), *small)
    without = [row for row in rows if row["depth"] is None]
    assert len(without) == 8
    assert sum(row["score"] for row in without) == 0


@pytest.mark.parametrize(("method", "options"), [("yarn", {"beta_fast": 4}), ("llama3", {}), ("ntk", {})])
def test_scaled_twofold_it_retrieves_inside_and_at_twice_its_length(small, method, options):
    with patched(small[0], method, factor=2, **options):
        for length in (TRAINED, 2 * TRAINED):
            score, log_probability = needle(small, length)
            assert score >= 0.9
            assert log_probability > -0.5


def test_yarn_retrieves_at_four_times_its_length(small, unpatched):
    with patched(small[0], "yarn", factor=4, beta_fast=4):
        score, log_probability = needle(small, 4 * TRAINED)
    assert score >= 0.9
    assert log_probability > unpatched[4 * TRAINED][1] + 4


def test_linear_needs_fine_tuning_as_it_says(small):
    with patched(small[0], "linear", factor=2):
        assert needle(small, TRAINED)[0] < 0.2


def test_a_planted_fault_destroys_it(small):
    """Twin: an inverted ramp (the fast channels interpolated, the slow ones kept) loses the needle inside, too."""
    with patched(small[0], "yarn", factor=2, beta_fast=4) as model:
        rotary = model.model.rotary_emb
        right = rotary.inv_freq.clone()
        plain = 10000.0 ** (-torch.arange(len(right)) / len(right))
        rotary.inv_freq = plain / 2 + plain - right
        score, _ = needle(small, TRAINED)
    assert score < 0.2
