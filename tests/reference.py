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


def nope(d, b, n):
    return [0.0] * (d // 2), 1.0


# Biases: (query position m, key position n, head h, heads H) -> a number. Decoder unless said otherwise.


def alibi(m, n, h, heads, factor=1.0):
    power = 1
    while 2 * power <= heads:
        power *= 2
    exponent = (h + 1) / power if h < power else (2 * (h - power) + 1) / (2 * power)
    return -(2 ** (-8 * exponent)) * abs(m - n) / factor


def t5_bucket(m, n, causal=True, buckets=32, max_distance=128, factor=1.0, interpolate=False):
    behind = m - n
    if interpolate:
        behind = int(behind / factor)
    else:
        max_distance = round(max_distance * factor)
    bucket = 0
    if not causal:
        buckets //= 2
        if behind < 0:
            bucket, behind = buckets, -behind
    behind = max(behind, 0)
    exact = buckets // 2
    if behind < exact:
        return bucket + behind
    share = math.log(behind / exact) / math.log(max_distance / exact)
    # a distance on the edge of two buckets falls into the upper one, whatever the last bit of the logarithm
    return bucket + min(exact + int(share * (buckets - exact) + 1e-9), buckets - 1)


def t5_bias(m, n, h, heads, table, causal=True, **options):
    return table[t5_bucket(m, n, causal, **options)][h]


def kerple(m, n, h, heads, r1, r2, kernel="log"):
    away = abs(m - n)
    if kernel == "log":
        return -r1[h] * math.log(1 + r2[h] * away)
    return -r1[h] * away ** min(r2[h], 2.0)


def fire(m, n, h, heads, c, threshold, in_weight, in_bias, out_weight, out_bias, start=512):
    def squeeze(x):
        return math.log(1 + abs(c) * x)

    relative = squeeze(abs(m - n)) / squeeze(max(abs(threshold * start), m, n))
    hidden = [max(w * relative + b, 0.0) for w, b in zip(in_weight, in_bias, strict=True)]
    return sum(w * x for w, x in zip(out_weight[h], hidden, strict=True)) + out_bias[h]


def sandwich(m, n, h, heads, dim=128):
    ratio = (h + 1) * 8 / heads
    return sum(math.cos((m - n) / 10000 ** (2 * i / dim)) for i in range(dim // 2)) / ratio
