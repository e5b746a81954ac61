"""The bias seam: methods that add one number per head and pair of tokens to the attention scores.

Legend: H heads, m position of the query, n of the key, d = n - m the signed distance in tokens (d <= 0 in a decoder),
s ``factor``. Biases are added after the scores were scaled, in fp32.

A method is a pure function of distances (FIRE: and of positions). What it learns, if anything, is a dict of tensors
that it starts (``parameters``) and is handed back; which module holds them is the host's business.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rope_ext.config import FineTuning, Patterned, choice, flag, integer, number

LONGEST = 2**40
"""Tokens; no option that is a length goes beyond."""


@dataclass(frozen=True, kw_only=True)
class BiasMethod(Patterned):
    """Base of the seam. A new method defines ``bias``; ``parameters`` if it learns something."""

    seam: ClassVar[str] = "bias"
    toeplitz: ClassVar[bool] = True
    """Whether the bias depends on the distance alone."""
    values_per_pair: ClassVar[int] = 0
    """Numbers held per pair of tokens while the bias is computed, beside one per head."""

    original_max_position_embeddings: int | None = integer(None, at_least=2, at_most=LONGEST)
    """L0, where the config does not tell or tells wrong."""

    @abstractmethod
    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        """The bias, shape (heads, \\*distances.shape), fp32.

        Args:
            distances: n - m in tokens, whole numbers, any shape.
            heads: H.
            parameters: what :meth:`parameters` gave, trained meanwhile.
            causal: whether the host is a decoder; its keys ahead are masked elsewhere.
            queries: m, of a shape that broadcasts to ``distances``; only methods that are not ``toeplitz`` read it.
        """

    def parameters(self, heads: int) -> dict[str, Tensor]:
        """The learned tensors as they start, fp32; the same on every call."""
        return {}

    @property
    def learns(self) -> bool:
        return bool(self.parameters(1))

    @property
    def extension(self) -> float:
        """Usable length over trained length."""
        return 1.0


@dataclass(frozen=True)
class Bias:
    """A method on a host: everything that turns distances into numbers.

    Attributes:
        method: the encoding.
        heads: H.
        causal: whether the host is a decoder.
        parameters: the learned tensors, of any floating dtype.
    """

    method: BiasMethod
    heads: int
    causal: bool
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def __call__(self, distances: Tensor, queries: Tensor | None = None) -> Tensor:
        """Shape (heads, \\*distances.shape), fp32."""
        parameters = {name: value.float() for name, value in self.parameters.items()}
        return self.method.bias(distances, self.heads, parameters, self.causal, queries)

    def with_parameters(self, values: tuple[Tensor, ...]) -> Bias:
        """The same bias computed from other tensors, in the order of ``parameters``."""
        return dataclasses.replace(self, parameters=dict(zip(self.parameters, values, strict=True)))

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient has to reach the learned tensors."""
        return torch.is_grad_enabled() and any(value.requires_grad for value in self.parameters.values())


def alibi_slopes(heads: int) -> Tensor:
    """Shape (heads,), fp32: 2^(-8k/p), k = 1..p, p the power of two <= heads; then every other one of 2p's."""
    power = 2 ** math.floor(math.log2(heads))
    exponents = [-8 * k / power for k in range(1, power + 1)]
    exponents += [-4 * k / power for k in range(1, 2 * (heads - power), 2)]
    return torch.tensor([2.0**exponent for exponent in exponents])


@dataclass(frozen=True, kw_only=True)
class Alibi(BiasMethod):
    """Attention with linear biases: a penalty per token of distance, steeper in some heads than in others.

    Symmetric in encoders. ``factor`` divides distances (interpolated ALiBi), so that none is larger than in training.
    """

    name: ClassVar[str] = "alibi"
    formula: ClassVar[str] = "-slope_h * |d| / s"
    source: ClassVar[str] = "Press et al. 2021, arXiv:2108.12409, section 3"
    fine_tuning: ClassVar[FineTuning] = "required"
    factor: float = number(1.0, at_least=1.0, at_most=1e6)
    """s; 1 is the published method."""

    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        return -torch.einsum("h,...->h...", self.slopes(heads).to(distances.device), distances.abs().float())

    def slopes(self, heads: int) -> Tensor:
        """The penalty per token, shape (heads,), fp32."""
        return alibi_slopes(heads) / self.factor

    @property
    def extension(self) -> float:
        return self.factor


@dataclass(frozen=True, kw_only=True)
class T5Bias(BiasMethod):
    """A learned number per head and bucket of distances: near ones exact, far ones in logarithmic bins.

    On T5 the checkpoint's own table is used. Elsewhere a new one starts at zero: attention without positions.
    """

    name: ClassVar[str] = "t5_bias"
    formula: ClassVar[str] = "table_h[bucket(d)], max_distance * s"
    source: ClassVar[str] = "Raffel et al. 2020, arXiv:1910.10683, section 2.1"
    fine_tuning: ClassVar[FineTuning] = "required"
    factor: float = number(1.0, at_least=1.0, at_most=1e6)
    """s multiplies ``max_distance``, the distance from which all share the last bucket."""
    interpolate: bool = flag(False)
    """Divide distances by s instead."""
    num_buckets: int | None = integer(None, at_least=4, at_most=4096)
    """By default the checkpoint's, else 32. Encoders use half of them for each direction."""
    max_distance: int | None = integer(None, at_least=2, at_most=LONGEST)
    """In tokens; by default the checkpoint's, else 128."""

    def __post_init__(self) -> None:
        super().__post_init__()
        exact, reach = (self.num_buckets or 32) // 2, self.max_distance or 128
        if reach <= exact:
            raise ValueError(
                f"t5_bias: option `max_distance`={reach} must be larger than the {exact} distances that have a bucket "
                f"of their own (num_buckets={self.num_buckets or 32}); raise it or take fewer buckets."
            )

    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        table = parameters["table"]
        return F.embedding(self.buckets(distances, causal), table).movedim(-1, 0)

    def parameters(self, heads: int) -> dict[str, Tensor]:
        return {"table": torch.zeros(self.num_buckets or 32, heads)}

    def buckets(self, distances: Tensor, causal: bool) -> Tensor:
        """The bucket of each distance, int64: with both directions, keys ahead use the upper half."""
        buckets, reach = self.num_buckets or 32, self.max_distance or 128
        if self.interpolate:
            distances = torch.div(distances, self.factor, rounding_mode="trunc").long()
        else:
            reach = round(reach * self.factor)
        offset = torch.zeros_like(distances)
        if not causal:
            buckets //= 2
            offset = (distances > 0).long() * buckets
        exact = buckets // 2
        away = (-distances).clamp(min=0) if causal else distances.abs()
        # fp32 and in this order of operations: distances on the edge of two buckets fall as they did in training
        log = torch.log(away.clamp(min=1).float() / exact) / math.log(reach / exact) * (buckets - exact)
        far = (exact + log.long()).clamp(max=buckets - 1)
        return offset + torch.where(away < exact, away, far)

    @property
    def extension(self) -> float:
        return self.factor


@dataclass(frozen=True, kw_only=True)
class Kerple(BiasMethod):
    """A learned kernel of the distance per head: logarithmic, or a power.

    The two positive numbers per head start spread evenly over the ranges that the paper draws them from.
    """

    name: ClassVar[str] = "kerple"
    formula: ClassVar[str] = "-r1_h * log(1 + r2_h * |d|), or -r1_h * |d|^r2_h"
    source: ClassVar[str] = "Chi et al. 2022, arXiv:2205.09921, section 4"
    fine_tuning: ClassVar[FineTuning] = "required"
    kernel: str = choice("log", ("log", "power"))

    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        per_head = (heads, *[1] * distances.dim())
        r1 = _kept_within(parameters["r1"], 0.01, math.inf).view(per_head)
        r2 = _kept_within(parameters["r2"], 0.01, math.inf if self.kernel == "log" else 2.0).view(per_head)
        away = distances.abs().float()
        if self.kernel == "log":
            return -r1 * torch.log1p(r2 * away)
        # the slope of 0^r2 is not finite; distance 0 has no bias whatever r2 is
        return torch.where(away > 0, -r1 * away.clamp(min=1) ** r2, 0.0)

    def parameters(self, heads: int) -> dict[str, Tensor]:
        spread = (torch.arange(heads) + 0.5) / heads
        if self.kernel == "log":
            return {"r1": 2 * spread, "r2": spread.flip(0)}
        return {"r1": spread.flip(0), "r2": 2 * spread}


def _kept_within(values: Tensor, low: float, high: float) -> Tensor:
    """Clamped, with the gradient of what was not: a parameter that left the range can come back."""
    return values + (values.clamp(low, high) - values).detach()


@dataclass(frozen=True, kw_only=True)
class Fire(BiasMethod):
    """A small network of the distance relative to the query's position: what is far is so in proportion.

    In encoders, "position" is the larger of the two.
    """

    name: ClassVar[str] = "fire"
    formula: ClassVar[str] = "mlp_h(log(1 + c |d|) / log(1 + c max(L, m)))"
    source: ClassVar[str] = "Li et al. 2023, arXiv:2310.04418, section 3"
    fine_tuning: ClassVar[FineTuning] = "required"
    toeplitz: ClassVar[bool] = False
    values_per_pair: ClassVar[int] = 64
    width: int = integer(32, at_most=4096)
    """Hidden units of the network."""
    threshold: int = integer(512, at_most=LONGEST)
    """L as it starts, in tokens: shorter contexts are not stretched."""

    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        if queries is None:
            raise ValueError("fire depends on the positions of the queries; pass `queries`.")
        away, c = distances.abs().float(), parameters["c"].abs()
        position = torch.maximum(queries, queries + distances).float()
        limit = torch.maximum(position, (parameters["threshold"] * self.threshold).abs())
        relative = torch.log1p(c * away) / (torch.log1p(c * limit) + 1e-6)  # also where c or L is trained to zero
        hidden = torch.relu(relative[..., None] * parameters["in_weight"] + parameters["in_bias"])
        return F.linear(hidden, parameters["out_weight"], parameters["out_bias"]).movedim(-1, 0)

    def parameters(self, heads: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(0)

        def uniform(*shape: int, fan_in: int) -> Tensor:
            return (2 * torch.rand(*shape, generator=drawn) - 1) / math.sqrt(fan_in)

        return {
            "c": torch.tensor(0.1),
            "threshold": torch.tensor(1.0),
            "in_weight": uniform(self.width, fan_in=1),
            "in_bias": uniform(self.width, fan_in=1),
            "out_weight": uniform(heads, self.width, fan_in=self.width),
            "out_bias": uniform(heads, fan_in=self.width),
        }


@dataclass(frozen=True, kw_only=True)
class Sandwich(BiasMethod):
    """The inner product of two sinusoidal encodings, flatter from head to head."""

    name: ClassVar[str] = "sandwich"
    formula: ClassVar[str] = "sum_i cos(d * 10000^(-2i/dim)) * H / (8 (h + 1))"
    source: ClassVar[str] = "Chi et al. 2023, arXiv:2212.10356, section 5"
    fine_tuning: ClassVar[FineTuning] = "required"
    dim: int = integer(128, at_least=2, at_most=4096)
    """Channels of the sinusoidal encoding."""

    def bias(
        self,
        distances: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        causal: bool,
        queries: Tensor | None = None,
    ) -> Tensor:
        # float64: in fp32 the angle of a distance of a million is off by a twentieth of a radian
        frequencies = 10000.0 ** (
            -torch.arange(0, self.dim, 2, dtype=torch.float64, device=distances.device) / self.dim
        )
        total = torch.zeros_like(distances, dtype=torch.float64)
        for frequency in frequencies:
            total += torch.cos(distances * frequency)
        ratio = torch.arange(1, heads + 1, dtype=torch.float64, device=distances.device) * 8 / heads
        return torch.einsum("h,...->h...", 1 / ratio, total).float()


METHODS: tuple[type[BiasMethod], ...] = (Alibi, T5Bias, Kerple, Fire, Sandwich)
