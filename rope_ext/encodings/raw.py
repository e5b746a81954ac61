"""What the qk and the scores seam share: keys are cached as they come, and meet their positions in attention.

A method is a pure function of q, of the raw k and of both positions. What it learns, if anything, is a dict of tensors
whose first dimension is the layer; it starts them (``parameters``) and is handed one layer's back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rope_ext.config import Patterned, integer
from rope_ext.encodings.rotary import Rotary


class Pairs(NamedTuple):
    """Some queries and some keys.

    Attributes:
        m, n: positions in tokens, whole numbers, (1 or batch, queries) and (1 or batch, keys).
        scale: what the host multiplies q.k with.
        seen: bool, (1 or batch, 1, queries, keys), what the mask will leave.
    """

    m: Tensor
    n: Tensor
    scale: float
    seen: Tensor


@dataclass(frozen=True)
class Host:
    """The attention that a method comes into.

    Attributes:
        rotary: d, b and L0; b is 10,000 on a host that had no rotation.
        layers, heads: how many; heads of queries.
        head_dim: channels of a head.
        width: channels of the hidden states.
    """

    rotary: Rotary
    layers: int
    heads: int
    head_dim: int
    width: int


@dataclass(frozen=True, kw_only=True)
class RawMethod(Patterned):
    """Base of both seams."""

    causal_only: ClassVar[bool] = True
    """Whether the method is defined for decoders only."""
    values_per_pair: ClassVar[int] = 3
    """Numbers held per head and pair of tokens while scores are computed block by block."""

    original_max_position_embeddings: int | None = integer(None, at_least=2)
    """L0, where the config does not tell or tells wrong."""

    def parameters(self, host: Host) -> dict[str, Tensor]:
        """The learned tensors as they start, fp32, shape (layers, ...); the same on every call."""
        return {}

    @property
    def extension(self) -> float:
        """Usable length over trained length."""
        return 1.0

    def check(self, host: Host) -> None:
        """ValueError where the options do not fit the host."""

    def prepare(self, encoder: Encoder, queries: int, low: int, high: int) -> Encoder:
        """The encoder for a call of that many queries, whose distances m - n are within low .. high; called once."""
        return encoder

    def keys(self, encoder: Encoder, key: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        """The raw keys in the forms that ``scores`` reads, each (batch, kv_heads, keys, channels)."""
        return (key,)

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        """Attention scores of some queries against some keys, shape (batch, heads, queries, keys), fp32.

        Args:
            encoder: the method's host and learned tensors.
            query: (batch, heads, queries, head_dim), raw.
            keys: what :meth:`keys` gave, a part of it.
            pairs: where they stand.
        """
        raise NotImplementedError

    def values(self, encoder: Encoder, weights: Tensor, m: Tensor, n: Tensor) -> Tensor | None:
        """What is added to the weighted values, shape (batch, heads, queries, head_dim); None for nothing."""
        return None


@dataclass(frozen=True)
class Encoder:
    """A method on one layer of a host: everything that attention needs of it.

    Attributes:
        method, host: see there.
        causal: whether this attention sees no keys ahead.
        parameters: one layer's learned tensors, of any floating dtype, and what ``prepare`` made of them.
        low: the distance m - n at which tables that ``prepare`` made begin.
    """

    method: RawMethod
    host: Host
    causal: bool
    parameters: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    low: int = 0

    @cached_property
    def learned(self) -> dict[str, Tensor]:
        """The learned tensors in fp32."""
        return {name: value.float() for name, value in self.parameters.items()}

    def with_parameters(self, values: tuple[Tensor, ...]) -> Encoder:
        """The same computed from other tensors, in the order of ``parameters``."""
        return dataclasses.replace(self, parameters=dict(zip(self.parameters, values, strict=True)))


Factors = tuple[Tensor, Tensor]
"""What channel pairs (i, i + d/2) are multiplied with, as complex numbers; each (1 or batch, 1, length, d), fp32.

The real parts, for either channel of a pair; the imaginary parts, negative for the first channel.
"""


def rotation(
    positions: Tensor, frequencies: Tensor, scaling: float | Tensor = 1.0, phase: Tensor | float = 0.0
) -> Factors:
    """Factors that turn by position * frequency + phase and multiply with ``scaling``.

    Args:
        positions: (1 or batch, length) in tokens, whole or fractional.
        frequencies: (d / 2,), radians per token.
    """
    angles = positions[:, None, :, None].float() * frequencies.to(positions.device) + phase
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turned_by(x: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """x (..., channels) with its first d channels times factors of shape (..., d), in fp32; dtype of x."""
    dim = real.shape[-1]
    turning = x[..., :dim].float()
    others = turning.unflatten(-1, (2, dim // 2)).flip(-2).flatten(-2)
    turned = (turning * real).addcmul_(others, imaginary).to(x.dtype)
    return torch.cat((turned, x[..., dim:]), -1) if dim < x.shape[-1] else turned


def products(query: Tensor, key: Tensor) -> Tensor:
    """q.k in fp32: (batch, heads, queries, keys) from heads that share keys in groups, without copying keys."""
    batch, heads, queries, channels = query.shape
    groups = key.shape[1]
    grouped = query.float().reshape(batch, groups, heads // groups * queries, channels)
    return torch.matmul(grouped, key.float().transpose(-1, -2)).view(batch, heads, queries, key.shape[2])


def weighted(weights: Tensor, value: Tensor) -> Tensor:
    """sum_n weights_mn v_n: (batch, heads, queries, head_dim) from heads that share values in groups."""
    batch, heads, queries, keys = weights.shape
    groups = value.shape[1]
    grouped = weights.reshape(batch, groups, heads // groups * queries, keys)
    return torch.matmul(grouped, value.float()).view(batch, heads, queries, value.shape[3])


def log_length(m: Tensor, trained: int) -> Tensor:
    """max(1, ln(m + 1) / ln L0) of query positions: what keeps attention as sharp over more keys than in training."""
    return ((m + 1).float().log() / math.log(trained)).clamp(min=1)
