"""How sure a rate is, and how two setups differ on the same rows."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a rate, shares of 1. Source: Wilson 1927.

    Args:
        successes: how many of ``n`` succeeded; parts of one count as such.
        n: at least 1.
        z: normal quantile.
    """
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def score_difference(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """(after - before, low, high): the difference of two rates on the same rows, with its 95 % interval.

    Both rates' Wilson intervals, joined with the correlation of the pairs. Source: Newcombe 1998, Statistics in
    Medicine 17:2635, method 10; for scores between 0 and 1 its counts are sums.

    Args:
        before, after: scores from 0 to 1, one per row, in the same order.
    """
    n = len(before)
    one, two = sum(before) / n, sum(after) / n
    (low1, high1), (low2, high2) = wilson(sum(before), n), wilson(sum(after), n)
    together = n * sum(a * b for a, b in zip(before, after, strict=True)) - sum(before) * sum(after)
    together = max(0.0, together - n / 2) if together > 0 else together
    spread = statistics.pstdev(before) * statistics.pstdev(after)
    correlation = together / (n * n * spread) if spread else 0.0
    difference = two - one
    down = (two - low2) ** 2 + (high1 - one) ** 2 - 2 * correlation * (two - low2) * (high1 - one)
    up = (high2 - two) ** 2 + (one - low1) ** 2 - 2 * correlation * (high2 - two) * (one - low1)
    return difference, difference - math.sqrt(max(0.0, down)), difference + math.sqrt(max(0.0, up))


def mean_difference(before: Sequence[float], after: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """(mean of after - before, low, high): the 95 % interval by 2,000 bootstrap draws of the pairs.

    One pair has no interval: low and high are nan.
    """
    pairs = [b - a for a, b in zip(before, after, strict=True)]
    mean = statistics.fmean(pairs)
    if len(pairs) == 1:
        return mean, math.nan, math.nan
    rng = random.Random(seed)
    draws = sorted(statistics.fmean(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return mean, draws[49], draws[1949]
