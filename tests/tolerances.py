"""The only tolerances of the test suite; each says what it allows for."""

FREQUENCY = 2e-6
"""Relative, fp32 frequencies against float64: a handful of roundings of powf."""

LOGITS = 1e-4
"""Absolute, fp32 logits of size ~1 computed by another order of sums (cached against full, padded against alone)."""

ANGLE = 5e-3
"""Absolute, cos and sin at position 8191 from fp32 frequencies against float64."""

GRADIENT = 1e-5
"""Absolute, fp32 LoRA gradients with and without recomputation."""

BIAS = 1e-5
"""Relative to the largest, fp32 biases against float64: a few roundings of a product or a logarithm."""

OUTPUT = 1e-5
"""Absolute, fp32 attention outputs of size ~1 against float64."""

TWICE = 2.0
"""Low precision: the error may be this many times that of the plain computation in the same precision."""
