"""Not shapes but quality, on a small model of our own (small_model/train.py) that really retrieves.

Trained at 256 tokens. Its ramp is set to its size: beta_fast 32 would keep waves of up to 8 tokens only.
"""

from rope_ext.evals.needle import Needle
from rope_ext.evals.runner import run
from rope_ext.evals.text import NOISE

TEXT = " ".join(NOISE)
TRAINED = 256


def needle(small, length, samples=4):
    """(share of answers found, mean log-probability of the answer) over three depths."""
    rows = run(Needle(TEXT, [length], [10, 50, 90], samples=samples, control=False), *small)
    return [sum(row[name] for row in rows) / len(rows) for name in ("score", "answer_log_probability")]


def yarn(factor):
    return patched_small("yarn", factor=factor, beta_fast=4)


def test_inside_its_length_the_model_retrieves(small):
    assert needle(small, TRAINED) == [1.0, pytest.approx(0, abs=0.1)]
