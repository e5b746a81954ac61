"""Arguments of tasks: what is wrong is named, with its value."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any


def whole_numbers(name: str, values: Any) -> list[int]:
    """Sorted, each once; an error that names the argument if it is not a list of whole numbers >= 1."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed or any(isinstance(value, bool) or not isinstance(value, Integral) or value < 1 for value in listed):
        raise ValueError(f"`{name}` must be a list of whole numbers >= 1, got {values!r}.")
    return sorted({int(value) for value in listed})


def percentages(name: str, values: Any) -> list[float]:
    """Sorted, each once; an error that names the argument if it is not a list of numbers from 0 to 100."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
    if not listed or any(not isinstance(value, Real) or not 0 <= float(value) <= 100 for value in listed):
        raise ValueError(f"`{name}` must be a list of percentages from 0 to 100, got {values!r}.")
    return sorted({float(value) for value in listed})


def at_least_one(**values: Any) -> None:
    """An error that names the argument unless each is a whole number >= 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"`{name}` must be a whole number >= 1, got {value!r}.")
