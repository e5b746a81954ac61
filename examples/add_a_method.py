"""A new rotary method is one class: its options, and its frequencies as a function of what the model was trained with.

Everything else follows: patching every hosted architecture, describe, undo, saving for stock transformers.

    python examples/add_a_method.py [MODEL]
"""

import sys
from dataclasses import dataclass

import torch

import rope_ext
from rope_ext.config import number
from rope_ext.encodings.rotary import Rotary, RotaryMethod, schedule, turns
from rope_ext.models import load


@rope_ext.register_method
@dataclass(frozen=True, kw_only=True)
class HardCut(RotaryMethod):
    """Interpolate the channel pairs that never finish a turn within the trained length, keep all others."""

    name = "hard_cut"
    formula = "r_i < 1: theta_i / s; else theta_i"
    source = "examples/add_a_method.py"
    fine_tuning = "recommended"
    factor: float = number(at_least=1)

    @property
    def extension(self) -> float:
        return self.factor

    def frequencies(self, rotary: Rotary) -> torch.Tensor:
        theta = schedule(rotary.dim, rotary.base)
        return torch.where(turns(rotary, theta) < 1, theta / self.factor, theta)


model, _ = load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
print(rope_ext.describe(rope_ext.patch_model(model, "hard_cut", factor=4)))
