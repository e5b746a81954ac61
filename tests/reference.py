"""Frequencies in plain Python floats, written from the papers and independent of the library.

Each function returns (frequencies, factor of cos and sin). d rotary dimension, b base, n trained length, s factor.
"""

import math


def rope(d, b, n):
    return [b ** (-2 * i / d) for i in range(d // 2)], 1.0


def linear(d, b, n, s):
    return [theta / s for theta in rope(d, b, n)[0]], 1.0


def ntk(d, b, n, s):
    return rope(d, b * s ** (d / (d - 2)), n)


def ntk_by_parts(d, b, n, s, alpha=1.0, beta=32.0):
    out = []
    for theta in rope(d, b, n)[0]:
        wavelength = 2 * math.pi / theta
        rotations = n / wavelength
        if rotations < alpha:
            gamma = 0.0
        elif rotations > beta:
            gamma = 1.0
        else:
            gamma = (rotations - alpha) / (beta - alpha)
        out.append((1 - gamma) * theta / s + gamma * theta)
    return out, 1.0


def yarn(d, b, n, s, beta_fast=32.0, beta_slow=1.0, attention_factor=None, truncate=True):
    def dim(rotations):
        return d / (2 * math.log(b)) * math.log(n / (2 * math.pi * rotations))

    low, high = dim(beta_fast), dim(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    out = []
    for i, theta in enumerate(rope(d, b, n)[0]):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)  # 0: extrapolate, 1: interpolate
        out.append(ramp * theta / s + (1 - ramp) * theta)
    if attention_factor is None:
        attention_factor = 1.0 if s <= 1 else 0.1 * math.log(s) + 1.0
    return out, attention_factor


def longrope(d, b, n, s, long_factor):
    thetas = rope(d, b, n)[0]
    return [theta / f for theta, f in zip(thetas, long_factor, strict=True)], math.sqrt(1 + math.log(s) / math.log(n))


def llama3(d, b, n, s, low_freq_factor=1.0, high_freq_factor=4.0):
    out = []
    for theta in rope(d, b, n)[0]:
        wavelength = 2 * math.pi / theta
        if wavelength < n / high_freq_factor:
            out.append(theta)
        elif wavelength > n / low_freq_factor:
            out.append(theta / s)
        else:
            smooth = (n / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            out.append((1 - smooth) * theta / s + smooth * theta)
    return out, 1.0


def abf(d, b, n, base=None):
    return rope(d, 50 * b if base is None else base, n)


def lrope(d, b, n, base=1 / math.pi):
    return [i / d * 2 * math.pi * base for i in range(d // 2)], 1.0


def pient(d, b, n, s):
    plain, fast = rope(d, b, n)[0], ntk(d, b, n, s)[0]
    return [t / s if n * t / (2 * math.pi) < 1 else f for t, f in zip(plain, fast, strict=True)], 1.0


def none(d, b, n):
    return [0.0] * (d // 2), 1.0
