"""Arguments of tasks: what is wrong is named, with its value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MOST = 10**6
"""Of what is made one by one: more would not come to an end."""


def whole_numbers(name: str, values: Any, at_most: int = 10**9) -> list[int]:
    """Sorted, each once; an error that names the argument if it is not a list of whole numbers in that range."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed or not all(_whole(value, at_most) for value in listed):
        raise ValueError(f"`{name}` must be a list of whole numbers >= 1 (and <= {at_most:,}), got {values!r}.")
    return sorted({int(value) for value in listed})


def percentages(name: str, values: Any) -> list[float]:
    """Sorted, each once; an error that names the argument if it is not a list of numbers from 0 to 100."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed or any(not isinstance(value, Real) or not 0 <= float(value) <= 100 for value in listed):
        raise ValueError(f"`{name}` must be a list of percentages from 0 to 100, got {values!r}.")
    return sorted({float(value) for value in listed})


def at_least_one(at_most: int = MOST, **values: Any) -> None:
    """An error that names the argument unless each is a whole number in that range."""
    for name, value in values.items():
        if not _whole(value, at_most):
            raise ValueError(f"`{name}` must be a whole number >= 1 (and <= {at_most:,}), got {value!r}.")


def _whole(value: Any, at_most: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= at_most
