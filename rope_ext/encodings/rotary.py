"""The rotary seam: methods that give every channel pair of q and k another rotation frequency.

Legend: d rotary dimension, i = 0 .. d/2 - 1 channel pair, b base (``rope_theta``), theta_i = b^(-2i/d) in radians per
token, s ``factor``, L0 the length in tokens that the checkpoint was trained at, r_i = L0 * theta_i / 2 pi the turns
that channel pair i makes within L0.

A method is a pure function of a :class:`Rotary`: ``frequencies`` gives theta'_i, ``attention_scaling`` the number that
cos and sin are multiplied with. Everything else (which module, which cache, which dtype) is the host's business.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_ext.config import FineTuning, Patterned, flag, integer, number, numbers


@dataclass(frozen=True)
class Rotary:
    """What a checkpoint was trained with.

    Attributes:
        dim: rotary dimension d (channels of a head that turn; even).
        base: b, ``rope_theta``.
        trained_length: L0 in tokens.
        parameters: the checkpoint's own ``rope_parameters``.
    """

    dim: int
    base: float
    trained_length: int
    parameters: Mapping[str, Any] = field(default_factory=dict)


def schedule(dim: int, base: float | Tensor) -> Tensor:
    """theta_i = b^(-2i/d), shape (dim / 2,), fp32, radians per token. Source: Su et al. 2021, section 3.2.2."""
    return 1.0 / _wavelength_over_2pi(dim, base)


def _wavelength_over_2pi(dim: int, base: float | Tensor) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
    powers: Tensor = base**exponents
    return powers


def turns(rotary: Rotary, frequencies: Tensor) -> Tensor:
    """r_i: full turns that each channel pair makes within the trained length."""
    return rotary.trained_length * frequencies / (2 * math.pi)


def ntk_base(rotary: Rotary, factor: float) -> float:
    """b * s^(d/(d-2)): the base under which the slowest channel turns s times slower. Source: bloc97 2023."""
    return float(rotary.base * factor ** (rotary.dim / (rotary.dim - 2)))


@dataclass(frozen=True, kw_only=True)
class RotaryMethod(Patterned):
    """Base of the seam. A new method defines ``frequencies``; ``attention_scaling`` and ``native`` if it has them."""

    seam: ClassVar[str] = "rotary"
    original_max_position_embeddings: int | None = integer(None, at_least=2)
    """L0, where the config does not tell or tells wrong."""

    @abstractmethod
    def frequencies(self, rotary: Rotary) -> Tensor:
        """theta'_i, shape (d / 2,), fp32, radians per token."""

    def attention_scaling(self, rotary: Rotary) -> float:
        """What cos and sin are multiplied with; attention logits grow with its square."""
        return 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        """The ``rope_parameters`` under which stock transformers computes the same, if it has a type for it."""
        return None

    @property
    def extension(self) -> float:
        """Usable length over trained length."""
        return 1.0


def divisor_lists(method: RotaryMethod, rotary: Rotary, divisors: Sequence[float]) -> dict[str, Any]:
    """Stock ``rope_parameters`` for theta_i / divisor_i: type longrope, short = long so that stock never switches."""
    return {
        "rope_type": "longrope",
        "short_factor": list(divisors),
        "long_factor": list(divisors),
        "factor": method.extension,
        "attention_factor": method.attention_scaling(rotary),
        "original_max_position_embeddings": rotary.trained_length,
    }


@dataclass(frozen=True, kw_only=True)
class _Scaled(RotaryMethod):
    """A method that is told how many times longer the context gets."""

    factor: float = number(at_least=1, at_most=1e6)
    """s: target length over trained length."""

    @property
    def extension(self) -> float:
        return self.factor


@dataclass(frozen=True, kw_only=True)
class Rope(RotaryMethod):
    """The unscaled encoding; takes a scaled checkpoint back to its trained frequencies."""

    name: ClassVar[str] = "rope"
    formula: ClassVar[str] = "theta_i = b^(-2i/d)"
    source: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864"
    fine_tuning: ClassVar[FineTuning] = "not needed"

    def frequencies(self, rotary: Rotary) -> Tensor:
        return schedule(rotary.dim, rotary.base)

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return {"rope_type": "default"}


@dataclass(frozen=True, kw_only=True)
class Linear(_Scaled):
    """Position interpolation: every channel slowed alike."""

    name: ClassVar[str] = "linear"
    formula: ClassVar[str] = "theta_i / s"
    source: ClassVar[str] = "Chen et al. 2023, arXiv:2306.15595"
    fine_tuning: ClassVar[FineTuning] = "recommended"

    def frequencies(self, rotary: Rotary) -> Tensor:
        return schedule(rotary.dim, rotary.base) / self.factor

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": self.factor}


@dataclass(frozen=True, kw_only=True)
class Ntk(_Scaled):
    """NTK-aware: a larger base, so that the slowest channel is slowed by s and the fastest not at all."""

    name: ClassVar[str] = "ntk"
    formula: ClassVar[str] = "b' = b * s^(d/(d-2))"
    source: ClassVar[str] = "bloc97 2023 (NTK-aware scaled RoPE)"
    fine_tuning: ClassVar[FineTuning] = "not needed"

    def frequencies(self, rotary: Rotary) -> Tensor:
        return schedule(rotary.dim, ntk_base(rotary, self.factor))

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": ntk_base(rotary, self.factor)}


@dataclass(frozen=True, kw_only=True)
class NtkByParts(_Scaled):
    """Interpolate channels that turn less than ``alpha`` times within L0, keep those that turn more than ``beta``."""

    name: ClassVar[str] = "ntk_by_parts"
    formula: ClassVar[str] = "g = clip((r_i - alpha)/(beta - alpha), 0, 1); (1-g) theta_i/s + g theta_i"
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3.2"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    alpha: float = number(1.0, at_least=0)
    beta: float = number(32.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha >= self.beta:
            raise ValueError(f"{self.name}: option `alpha`={self.alpha:g} must be below `beta`={self.beta:g}.")

    def frequencies(self, rotary: Rotary) -> Tensor:
        theta = schedule(rotary.dim, rotary.base)
        keep = ((turns(rotary, theta) - self.alpha) / (self.beta - self.alpha)).clamp(0, 1)
        return (1 - keep) * theta / self.factor + keep * theta


@dataclass(frozen=True, kw_only=True)
class Yarn(_Scaled):
    """NTK-by-parts with a ramp over the channel index, and an attention temperature."""

    name: ClassVar[str] = "yarn"
    formula: ClassVar[str] = "ramp between dim(beta_fast) and dim(beta_slow); cos, sin times 0.1 ln s + 1"
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    beta_fast: float = number(32.0, above=0)
    """Channels that turn more often than this within L0 keep their frequency."""
    beta_slow: float = number(1.0, above=0)
    """Channels that turn less often than this within L0 are fully interpolated."""
    attention_factor: float | None = number(None, above=0)
    """Replaces 0.1 ln s + 1."""
    mscale: float | None = number(None, above=0)
    mscale_all_dim: float | None = number(None, above=0)
    truncate: bool = flag(True)
    """Round the ends of the ramp to whole channels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_slow > self.beta_fast:
            raise ValueError(
                f"{self.name}: option `beta_slow`={self.beta_slow:g} must not exceed `beta_fast`={self.beta_fast:g}."
            )

    def frequencies(self, rotary: Rotary) -> Tensor:
        wavelengths = _wavelength_over_2pi(rotary.dim, rotary.base)
        kept, interpolated = 1.0 / wavelengths, 1.0 / (self.factor * wavelengths)
        low, high = self._channel(rotary, self.beta_fast), self._channel(rotary, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        if low == high:
            high += 0.001
        channels = torch.arange(rotary.dim // 2, dtype=torch.float32, device="cpu")
        keep = 1 - ((channels - low) / (high - low)).clamp(0, 1)
        return interpolated * (1 - keep) + kept * keep

    @staticmethod
    def _channel(rotary: Rotary, rotations: float) -> float:
        """The (fractional) channel pair that makes this many turns within L0."""
        return rotary.dim * math.log(rotary.trained_length / (rotations * 2 * math.pi)) / (2 * math.log(rotary.base))

    def attention_scaling(self, rotary: Rotary) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def native(self, rotary: Rotary) -> dict[str, Any]:
        entries = ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        given = {name: value for name, value in self.options().items() if name in entries}
        return {"rope_type": "yarn", "original_max_position_embeddings": rotary.trained_length, **given}


@dataclass(frozen=True, kw_only=True)
class LongRope(_Scaled):
    """A searched divisor per channel. One list is chosen from the target length and kept for every input, so cached
    keys never meet another list; stock transformers switches lists when an input crosses L0.
    """

    name: ClassVar[str] = "longrope"
    formula: ClassVar[str] = "theta_i / lambda_i; cos, sin times sqrt(1 + ln s / ln L0)"
    source: ClassVar[str] = "Ding et al. 2024, arXiv:2402.13753"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    long_factor: tuple[float, ...] | None = numbers(None)
    """lambda_i for a target length beyond L0; by default the checkpoint's own list."""
    short_factor: tuple[float, ...] | None = numbers(None)
    """lambda_i for factor 1; by default the checkpoint's own list."""
    attention_factor: float | None = number(None, above=0)
    """Replaces sqrt(1 + ln s / ln L0)."""

    def divisors(self, rotary: Rotary) -> tuple[float, ...]:
        """The list in use: long for ``factor`` > 1, else short."""
        name = "long_factor" if self.factor > 1 else "short_factor"
        given = getattr(self, name)
        chosen = rotary.parameters.get(name) if given is None else given
        if chosen is None:
            raise ValueError(
                f"longrope: option `{name}` is required, a list of {rotary.dim // 2} positive numbers: "
                "this checkpoint's config has none."
            )
        if len(chosen) != rotary.dim // 2:
            raise ValueError(
                f"longrope: option `{name}` has {len(chosen)} numbers, this checkpoint has {rotary.dim // 2} "
                f"channel pairs (rotary dimension {rotary.dim})."
            )
        return tuple(float(number) for number in chosen)

    def frequencies(self, rotary: Rotary) -> Tensor:
        divisors = torch.tensor(self.divisors(rotary), dtype=torch.float32, device="cpu")
        return 1.0 / (divisors * _wavelength_over_2pi(rotary.dim, rotary.base))

    def attention_scaling(self, rotary: Rotary) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1 + math.log(self.factor) / math.log(rotary.trained_length))

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return divisor_lists(self, rotary, self.divisors(rotary))


@dataclass(frozen=True, kw_only=True)
class Llama3(_Scaled):
    """By wavelength: long waves are slowed by s, short ones kept, a smooth blend between."""

    name: ClassVar[str] = "llama3"
    formula: ClassVar[str] = (
        "w_i = 2 pi/theta_i; g = clip((L0/w_i - low)/(high - low), 0, 1); (1-g) theta_i/s + g theta_i"
    )
    source: ClassVar[str] = "Llama 3.1 model code, Meta 2024"
    fine_tuning: ClassVar[FineTuning] = "recommended"
    low_freq_factor: float = number(1.0, above=0)
    high_freq_factor: float = number(4.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"{self.name}: option `low_freq_factor`={self.low_freq_factor:g} must be below "
                f"`high_freq_factor`={self.high_freq_factor:g}."
            )

    def frequencies(self, rotary: Rotary) -> Tensor:
        theta = schedule(rotary.dim, rotary.base)
        wavelength = 2 * math.pi / theta
        low, high = self.low_freq_factor, self.high_freq_factor
        blend = (rotary.trained_length / wavelength - low) / (high - low)
        blended = (1 - blend) * theta / self.factor + blend * theta
        is_long, is_short = wavelength > rotary.trained_length / low, wavelength < rotary.trained_length / high
        return torch.where(is_long, theta / self.factor, torch.where(is_short, theta, blended))

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": self.factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": rotary.trained_length,
        }


@dataclass(frozen=True, kw_only=True)
class Abf(RotaryMethod):
    """Adjusted base frequency: the same schedule with a new base."""

    name: ClassVar[str] = "abf"
    formula: ClassVar[str] = "b' = base"
    source: ClassVar[str] = "Xiong et al. 2023, arXiv:2309.16039"
    fine_tuning: ClassVar[FineTuning] = "recommended"
    base: float | None = number(None, above=1, at_most=1e18)
    """b'; by default 50 times the checkpoint's own, the paper's ratio (10,000 to 500,000)."""
    factor: float = number(1.0, at_least=1, at_most=1e6)
    """Only states the length aimed at; the frequencies follow from ``base``."""

    @property
    def extension(self) -> float:
        return self.factor

    def _base(self, rotary: Rotary) -> float:
        return 50.0 * rotary.base if self.base is None else self.base

    def frequencies(self, rotary: Rotary) -> Tensor:
        return schedule(rotary.dim, self._base(rotary))

    def native(self, rotary: Rotary) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self._base(rotary)}


@dataclass(frozen=True, kw_only=True)
class LRope(RotaryMethod):
    """ "Linear RoPE": frequencies linear in the channel index, the first one zero."""

    name: ClassVar[str] = "lrope"
    formula: ClassVar[str] = "theta_i = (i/d) * 2 pi * base"
    source: ClassVar[str] = "described in survey articles; no paper found under this name"
    fine_tuning: ClassVar[FineTuning] = "required"
    base: float = number(1 / math.pi, above=0, at_most=1e6)
    """Turns per token; the default lets the fastest channel turn about 1 radian per token."""

    def frequencies(self, rotary: Rotary) -> Tensor:
        return torch.arange(rotary.dim // 2, dtype=torch.float32, device="cpu") / rotary.dim * (2 * math.pi * self.base)


@dataclass(frozen=True, kw_only=True)
class Pient(_Scaled):
    """ "Position interpolation enhanced NTK": linear interpolation for waves longer than L0, NTK for the others."""

    name: ClassVar[str] = "pient"
    formula: ClassVar[str] = "r_i < 1: theta_i / s; else the ntk schedule"
    source: ClassVar[str] = "described in survey articles; no paper found under this name"
    fine_tuning: ClassVar[FineTuning] = "recommended"

    def frequencies(self, rotary: Rotary) -> Tensor:
        theta = schedule(rotary.dim, rotary.base)
        return torch.where(
            turns(rotary, theta) < 1, theta / self.factor, schedule(rotary.dim, ntk_base(rotary, self.factor))
        )


@dataclass(frozen=True, kw_only=True)
class NoPE(RotaryMethod):
    """No position encoding: nothing turns, no bias; a decoder still knows order from its causal mask."""

    name: ClassVar[str] = "nope"
    formula: ClassVar[str] = "theta_i = 0"
    source: ClassVar[str] = "Kazemnejad et al. 2023, arXiv:2305.19466"
    fine_tuning: ClassVar[FineTuning] = "required"

    def frequencies(self, rotary: Rotary) -> Tensor:
        return torch.zeros(rotary.dim // 2, device="cpu")


METHODS: tuple[type[RotaryMethod], ...] = (
    Rope,
    Linear,
    Ntk,
    NtkByParts,
    Yarn,
    LongRope,
    Llama3,
    Abf,
    LRope,
    Pient,
    NoPE,
)
