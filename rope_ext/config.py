"""The options of a method: one frozen dataclass per method, checked when it is made, stored in ``config.json``.

A method declares its options as fields made with :func:`number`, :func:`integer`, :func:`flag`,
:func:`choice`, :func:`numbers` or :func:`integers`.
Every value is checked and normalised on construction, so an encoding that exists is valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from importlib.metadata import version
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeVar

FineTuning = Literal["not needed", "recommended", "required"]
M = TypeVar("M", bound="Method")


@dataclass(frozen=True)
class Method:
    """Base of every position encoding: what describes it, and its options as fields."""

    name: ClassVar[str]
    """The name given to ``patch_model``."""
    seam: ClassVar[str]
    """Where position enters: "embedding", "rotary", "qk", "bias" or "scores"."""
    formula: ClassVar[str]
    """One line, for tables."""
    source: ClassVar[str]
    """Where the formula comes from."""
    fine_tuning: ClassVar[FineTuning]
    """Whether a checkpoint needs training after the switch."""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, check = getattr(self, spec.name), spec.metadata.get("check")
            if check is not None and (value is not None or spec.default is not None):
                object.__setattr__(self, spec.name, check(f"{self.name}: option `{spec.name}`", value))

    @classmethod
    def from_options(cls: type[M], options: Mapping[str, Any]) -> M:
        """Build from keyword options.

        Raises:
            ValueError: an option is unknown, missing or out of range.
            TypeError: an option has the wrong type.
        """
        allowed = {spec.name: spec for spec in dataclasses.fields(cls)}
        for name, value in options.items():
            if name not in allowed:
                close = difflib.get_close_matches(name, allowed, n=1)
                hint = f"; did you mean `{close[0]}`?" if close else ""
                listed = ", ".join(f"`{option}`" for option in allowed) or "none"
                raise ValueError(f"{cls.name}: unknown option `{name}`={value!r}{hint} Its options: {listed}.")
        for name, spec in allowed.items():
            if spec.default is MISSING and name not in options:
                raise ValueError(f"{cls.name}: option `{name}` is required, for example `{name}=4`.")
        return cls(**options)

    @property
    def learns(self) -> bool:
        """Whether the encoding has parameters of its own."""
        return False

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain JSON values."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        defaults = {spec.name: spec.default for spec in dataclasses.fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value != defaults[name]}

    def to_dict(self) -> dict[str, Any]:
        """``{"method", "options", "version"}``: what ``config.json`` records."""
        return {"method": self.name, "options": self.options(), "version": version("rope_ext")}


def record_of(config: Any) -> dict[str, Any] | None:
    """What a config records of a patch: :meth:`Method.to_dict`, the ``original`` entries, the names of those ``added``.

    Raises:
        ValueError: the record is not what a patch writes: damaged, edited, or somebody else's.
    """
    record: Any = getattr(config, "rope_ext", None)
    if not record:
        return None
    try:
        original = record["original"]
        lengths = [value for name, value in original.items() if "max_position_embeddings" in name and value is not None]
        right = (
            names_a_method(record)
            and re.match(r"\d+\.\d+", record["version"]) is not None
            and isinstance(original.get("rope_parameters", {}), dict | None)
            and all(type(length) is int and 0 < length <= LARGEST for length in lengths)
            and all(_is_entry(config, name) for name in (*original, *record.get("added", ())))
        )
    except (KeyError, TypeError, AttributeError):
        right = False
    if not right:
        raise ValueError(
            f"the config's entry `rope_ext` is not what a patch writes, got {str(record)[:200]}; remove the entry, or "
            "load the model from where it was saved."
        )
    return dict(record)


def names_a_method(record: Any) -> bool:
    """Whether this is of the form that :meth:`Method.to_dict` has, be the method known or not."""
    return isinstance(record["method"], str) and isinstance(record["options"], dict)


def _is_entry(config: Any, name: Any) -> bool:
    """Whether a config may have an entry of that name: no method, nothing private."""
    own = getattr(type(config), name, None)
    return not (name.startswith("_") or callable(own) or isinstance(own, property))


def number(
    default: Any = MISSING, *, at_least: float = -math.inf, above: float = -math.inf, at_most: float = math.inf
) -> Any:
    """An option that takes a finite number. A default of ``None`` means "decided by the method"."""
    bounds = [f">= {at_least:g}"] if at_least > -math.inf else [f"> {above:g}"] if above > -math.inf else []
    bounds += [f"<= {at_most:g}"] if at_most < math.inf else []
    allowed = "a finite number" + (f" {' and '.join(bounds)}" if bounds else "")

    def check(label: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{label} must be {allowed}, got {value!r} of type {type(value).__name__}.")
        converted = _finite(value)
        if converted is None or not (at_least <= converted <= at_most and above < converted):
            raise ValueError(f"{label} must be {allowed}, got {value!r}.")
        return converted

    return _option(default, check)


LARGEST = 10**12
"""Of whole numbers: no text has so many tokens, and tensors can count so far."""


def integer(default: Any = MISSING, *, at_least: int = 1, at_most: int = LARGEST) -> Any:
    """An option that takes a whole number."""

    def check(label: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{label} must be a whole number, got {value!r} of type {type(value).__name__}.")
        if not at_least <= int(value) <= at_most:
            most = f" and <= {at_most}" if at_most < LARGEST or int(value) > at_most else ""
            raise ValueError(f"{label} must be a whole number >= {at_least}{most}, got {value!r}.")
        return int(value)

    return _option(default, check)


def flag(default: bool) -> Any:
    """An option that is True or False."""

    def check(label: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(f"{label} must be True or False, got {value!r}.")
        return value

    return _option(default, check)


def choice(default: str, allowed: tuple[str, ...]) -> Any:
    """An option that takes one of a few words."""

    def check(label: str, value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"{label} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
        return str(value)

    return _option(default, check)


def numbers(default: Any = MISSING) -> Any:
    """An option that takes a list of positive finite numbers; kept as a tuple."""

    def check(label: str, value: Any) -> tuple[float, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise TypeError(f"{label} must be a list of positive numbers, got {value!r}.")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Real):
                raise TypeError(f"{label} must hold numbers only, got {item!r}.")
            if (_finite(item) or 0) <= 0:
                raise ValueError(f"{label} must hold positive finite numbers only, got {item!r}.")
        return tuple(float(item) for item in value)

    return _option(default, check)


def integers(default: Any = MISSING) -> Any:
    """An option that takes a list of whole numbers >= 0; kept as a tuple, in order."""

    def check(label: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not value:
            raise TypeError(f"{label} must be a list of whole numbers, got {value!r}.")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Integral):
                raise TypeError(f"{label} must hold whole numbers only, got {item!r}.")
            if not 0 <= int(item) <= LARGEST:
                raise ValueError(f"{label} must hold numbers >= 0 and <= {LARGEST} only, got {item!r}.")
        return tuple(sorted({int(item) for item in value}))

    return _option(default, check)


def _finite(value: Any) -> float | None:
    try:
        converted = float(value)
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class Patterned(Method):
    """A method that comes into attention pair by pair, so that pairs can be left out: a sparsity pattern.

    A query sees the last ``window`` keys up to itself, the first ``sinks`` keys, and ``global_tokens``, which see every
    key in turn. Sinks that have fallen out of the window are scored as from the position min(m, window + sinks - 1): as
    if positions were counted among the kept keys, so that no distance grows beyond that.

    Sources: Beltagy et al. 2020, arXiv:2004.05150 (window, global tokens); Xiao et al. 2023, arXiv:2309.17453 (sinks);
    Han et al. 2023, arXiv:2308.16137 (the capped distance).
    """

    window: int | None = integer(None)
    """In tokens; the query's own is one of them. In encoders, as many on either side."""
    sinks: int = integer(0, at_least=0, at_most=10**6)
    """How many of the first keys of a text stay visible."""
    global_tokens: tuple[int, ...] | None = integers(None)
    """Positions that see everything and are seen by every query (in a decoder: after them)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sinks", "global_tokens"):
            if getattr(self, name) and self.window is None:
                raise ValueError(
                    f"{self.name}: option `{name}`={getattr(self, name)!r} keeps keys outside a window; "
                    "give `window` as well."
                )

    def reach(self, positions: Any) -> Any:
        """How far back queries at these positions see, in tokens: their positions, but for a window."""
        return positions if self.window is None else positions.clamp(max=self.window + self.sinks - 1)

    @property
    def pattern(self) -> tuple[int | None, int, tuple[int, ...]]:
        """(window, sinks, global tokens)."""
        return self.window, self.sinks, self.global_tokens or ()
