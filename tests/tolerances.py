"""The only tolerances of the test suite; each says what it allows for."""

FREQUENCY = 2e-6
"""Relative, fp32 frequencies against float64: a handful of roundings of powf."""

LOGITS = 1e-4
"""Absolute, fp32 logits of size ~1 computed by another order of sums (cached against full, padded against alone)."""

ANGLE = 5e-3
"""Absolute, cos and sin at position 8191 from fp32 frequencies against float64."""

GRADIENT = 1e-5
"""Absolute, fp32 LoRA gradients with and without recomputation."""
