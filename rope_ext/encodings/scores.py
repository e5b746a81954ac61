"""The scores seam: the score of a pair of tokens is computed from raw q, raw k and both positions.

Legend as in :mod:`rope_ext.encodings.rotary`; m position of the query, n of the key, q and k of one head.

Half of the methods are *zoned*: rotation as trained, but at other positions for pairs that are far apart, so that no
angle appears that training did not show. The others learn something.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_ext.config import FineTuning, flag, integer, number
from rope_ext.encodings.raw import Encoder, Factors, Host, Pairs, RawMethod, log_length, products, rotation, turned_by
from rope_ext.encodings.rotary import schedule

Moved = Callable[[Tensor], Tensor]
"""From positions in the text to positions of the rotation; whole or fractional."""

Zones = tuple[list[tuple[Moved, int]], list[Moved | None]]
"""(for each zone, the nearest first: where its queries are turned to, which form of the keys it reads;
the forms of the keys: where they are turned to, or None for as they are)."""


@dataclass(frozen=True, kw_only=True)
class ScoreMethod(RawMethod):
    """Base of the seam. A new method defines ``scores``; ``parameters`` if it learns something."""

    seam: ClassVar[str] = "scores"


@dataclass(frozen=True, kw_only=True)
class ZonedMethod(ScoreMethod):
    """Base of the methods that rotate at other positions from zone to zone of the pairs (m, n).

    A new method defines ``zones`` and ``edges``. Each zone takes one range of keys of a query.
    """

    fine_tuning: ClassVar[FineTuning] = "not needed"

    @abstractmethod
    def zones(self, host: Host) -> Zones:
        """The zones, and the forms in which they read the keys."""

    @abstractmethod
    def edges(self, m: Tensor, host: Host) -> list[Tensor]:
        """For each zone but the last: the first position of a key that belongs to it, or to a nearer one, shape of m;
        may be negative.
        """

    def sharpness(self, m: Tensor, host: Host) -> Tensor | None:
        """What scores of a query at m are multiplied with."""
        return None

    def query_factors(self, encoder: Encoder, m: Tensor, zone: int) -> Factors:
        """For queries at positions m (1 or batch, queries), as they look at keys of the zone."""
        return self._rotation(encoder, self.zones(encoder.host)[0][zone][0](m))

    def key_factors(self, encoder: Encoder, n: Tensor, form: int) -> Factors:
        """For keys at positions n (1 or batch, keys), in a form that is not None."""
        moved = self.zones(encoder.host)[1][form]
        assert moved is not None
        return self._rotation(encoder, moved(n))

    def _rotation(self, encoder: Encoder, positions: Tensor) -> Factors:
        rotary = encoder.host.rotary
        return rotation(positions, schedule(rotary.dim, rotary.base))

    def keys(self, encoder: Encoder, key: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        forms = self.zones(encoder.host)[1]
        return tuple(
            key if moved is None else turned_by(key, *self.key_factors(encoder, n, form))
            for form, moved in enumerate(forms)
        )

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        m, n, scale, seen = pairs
        sharper = self.sharpness(m, encoder.host)
        factor = scale if sharper is None else sharper[:, None, :, None] * scale
        beyond = [n[:, None, :] < edge[:, :, None] for edge in self.edges(m, encoder.host)]
        zone_of = torch.stack(beyond).sum(0)
        out = query.new_zeros(*query.shape[:3], keys[0].shape[2], dtype=torch.float32)
        for zone, (_, form) in enumerate(self.zones(encoder.host)[0]):
            here = (zone_of == zone)[:, None] & seen
            columns = torch.nonzero(here.flatten(0, -2).any(0)).flatten()
            if not len(columns):
                continue
            span = slice(int(columns[0]), int(columns[-1]) + 1)
            turned = turned_by(query.float(), *self.query_factors(encoder, m, zone)) * factor
            out[..., span] = torch.where(here[..., span], products(turned, keys[form][:, :, span]), out[..., span])
        return out


def _same(positions: Tensor) -> Tensor:
    return positions


@dataclass(frozen=True, kw_only=True)
class _Extending(ZonedMethod):
    """Exact positions up to a neighbor window, and whatever is beyond squeezed into the trained length."""

    factor: float = number(2.0, at_least=1, at_most=1e6)
    """Target length over trained length; the options below follow from it."""
    neighbor_window: int | None = integer(None)
    """Distances below it, in tokens, are exact; by default L0 / 4."""

    @property
    def extension(self) -> float:
        return self.factor

    def near(self, host: Host) -> int:
        """W in tokens."""
        return self.neighbor_window or max(1, host.rotary.trained_length // 4)

    def edges(self, m: Tensor, host: Host) -> list[Tensor]:
        return [m - self.near(host) + 1]

    def squeeze(self, host: Host) -> float:
        """How much distances beyond W have to shrink, so that the target length stays within 3/4 of the trained one."""
        trained, near = host.rotary.trained_length, self.near(host)
        return max(1.0, (trained * self.factor - near) / max(1, 3 * trained // 4 - near))


@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Extending):
    """Positions of far tokens are shared by groups; near ones keep theirs."""

    name: ClassVar[str] = "self_extend"
    formula: ClassVar[str] = "m - n < W: m - n; else floor(m/G) - floor(n/G) + W - floor(W/G)"
    source: ClassVar[str] = "Jin et al. 2024, arXiv:2401.01325"
    group_size: int | None = integer(None)
    """G in tokens; by default the smallest that keeps the target length within 3/4 of the trained one."""

    def group(self, host: Host) -> int:
        """G in tokens."""
        return self.group_size or math.ceil(self.squeeze(host))

    def zones(self, host: Host) -> Zones:
        near, group = self.near(host), self.group(host)

        def grouped(positions: Tensor) -> Tensor:
            return torch.div(positions, group, rounding_mode="floor")

        return [(_same, 0), (lambda m: grouped(m) + near - near // group, 1)], [_same, grouped]


@dataclass(frozen=True, kw_only=True)
class _Rectified(_Extending):
    """ReRoPE and its leaky form."""

    log_scale: bool = flag(False)
    """Multiply scores with max(1, ln(m + 1) / ln L0)."""

    def sharpness(self, m: Tensor, host: Host) -> Tensor | None:
        return log_length(self.reach(m), host.rotary.trained_length) if self.log_scale else None


@dataclass(frozen=True, kw_only=True)
class ReRope(_Rectified):
    """No distance is larger than a window: all far tokens are equally far."""

    name: ClassVar[str] = "rerope"
    formula: ClassVar[str] = "relative position min(m - n, W)"
    source: ClassVar[str] = "Su 2023 (Rectified Rotary Position Embeddings)"
    neighbor_window: int | None = integer(None)
    """W in tokens; by default L0 / 2."""

    def near(self, host: Host) -> int:
        return self.neighbor_window or max(1, host.rotary.trained_length // 2)

    def zones(self, host: Host) -> Zones:
        near = self.near(host)
        return [(_same, 0), (lambda m: torch.full_like(m, near), 1)], [_same, None]


@dataclass(frozen=True, kw_only=True)
class LeakyReRope(_Rectified):
    """Beyond a window distances go on growing, more slowly."""

    name: ClassVar[str] = "leaky_rerope"
    formula: ClassVar[str] = "m - n < W: m - n; else W + (m - n - W) / k"
    source: ClassVar[str] = "Su 2023 (Leaky ReRoPE)"
    leak: float | None = number(None, at_least=1, at_most=1e9)
    """k; by default the smallest that keeps the target length within 3/4 of the trained one."""

    def zones(self, host: Host) -> Zones:
        near, leak = self.near(host), self.leak or self.squeeze(host)
        return [(_same, 0), (lambda m: near + (m - near) / leak, 1)], [_same, lambda n: n / leak]


@dataclass(frozen=True, kw_only=True)
class DualChunk(ZonedMethod):
    """Dual chunk attention: positions restart in every chunk; queries look at earlier chunks from where these end."""

    name: ClassVar[str] = "dca"
    formula: ClassVar[str] = (
        "c = S - w; key n mod c; query m mod c, next chunk min(m mod c + c, S), later min(2c - 1, S)"
    )
    source: ClassVar[str] = "An et al. 2024, arXiv:2402.17463"
    factor: float = number(2.0, at_least=1, at_most=1e6)
    """Only states the length aimed at; chunks are the same for every length."""
    chunk_size: int | None = integer(None, at_least=2)
    """S in tokens; by default 3/4 L0."""
    local_window: int | None = integer(None)
    """w: exact distances across a chunk's edge, in tokens; by default L0 / 16."""

    @property
    def extension(self) -> float:
        return self.factor

    def sizes(self, host: Host) -> tuple[int, int]:
        """(S, c) in tokens."""
        trained = host.rotary.trained_length
        size = self.chunk_size or max(2, 3 * trained // 4)
        return size, size - (self.local_window or max(1, trained // 16))

    def check(self, host: Host) -> None:
        size, chunk = self.sizes(host)
        if chunk < 1:
            raise ValueError(
                f"dca: option `local_window`={size - chunk} must be smaller than `chunk_size`={size}; lower it."
            )

    def zones(self, host: Host) -> Zones:
        size, chunk = self.sizes(host)
        return [
            (lambda m: m % chunk, 0),
            (lambda m: (m % chunk + chunk).clamp(max=size), 0),
            (lambda m: torch.full_like(m, min(2 * chunk - 1, size)), 0),
        ], [lambda n: n % chunk]

    def edges(self, m: Tensor, host: Host) -> list[Tensor]:
        chunk = self.sizes(host)[1]
        return [m - m % chunk, m - m % chunk - chunk]


@dataclass(frozen=True, kw_only=True)
class _Learned(ScoreMethod):
    fine_tuning: ClassVar[FineTuning] = "required"

    @property
    def learns(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Shaw(_Learned):
    """A learned vector per clipped distance, beside the keys and, if wanted, beside the values; starts at zero."""

    name: ClassVar[str] = "shaw"
    formula: ClassVar[str] = "q.(k + R_clip(n - m, -K, K)) / sqrt(d)"
    source: ClassVar[str] = "Shaw et al. 2018, arXiv:1803.02155"
    causal_only: ClassVar[bool] = False
    max_distance: int = integer(16, at_most=65536)
    """K in tokens."""
    value_vectors: bool = flag(False)
    """Learn vectors that are added to the values as well."""

    def parameters(self, host: Host) -> dict[str, Tensor]:
        names = ["key_vectors", *["value_vectors"] * self.value_vectors]
        return {name: torch.zeros(host.layers, 2 * self.max_distance + 1, host.head_dim) for name in names}

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        m, n, scale, _ = pairs
        near = torch.matmul(query.float(), encoder.learned["key_vectors"].transpose(-1, -2))
        index = self._index(m, n)[:, None].expand(*query.shape[:3], -1)
        return (products(query, keys[0]) + near.gather(-1, index)) * scale

    def values(self, encoder: Encoder, weights: Tensor, m: Tensor, n: Tensor) -> Tensor | None:
        if not self.value_vectors:
            return None
        index = self._index(m, n)[:, None].expand_as(weights)
        shares = weights.new_zeros(*weights.shape[:3], 2 * self.max_distance + 1).scatter_add(-1, index, weights)
        return torch.matmul(shares, encoder.learned["value_vectors"])

    def _index(self, m: Tensor, n: Tensor) -> Tensor:
        distance = n[:, None, :] - m[:, :, None]
        return distance.clamp(-self.max_distance, self.max_distance) + self.max_distance


@dataclass(frozen=True, kw_only=True)
class TransformerXL(_Learned):
    """Content and position apart: a sinusoid of the distance, projected, beside the keys; u and v beside the queries.

    u, v and W_R start at zero, so that a patched host starts with content alone.
    """

    name: ClassVar[str] = "transformer_xl"
    formula: ClassVar[str] = "((q + u).k + (q + v).(W_R R_(m-n))) / sqrt(d)"
    source: ClassVar[str] = "Dai et al. 2019, arXiv:1901.02860, section 3.3"
    causal_only: ClassVar[bool] = False
    values_per_pair: ClassVar[int] = 5
    dim: int | None = integer(None, at_least=2, at_most=65536)
    """Channels of R; by default the width of the host, as in the paper."""

    def parameters(self, host: Host) -> dict[str, Tensor]:
        per_head = (host.layers, host.heads, host.head_dim)
        return {
            "u": torch.zeros(per_head),
            "v": torch.zeros(per_head),
            "projection": torch.zeros(*per_head, self.dim or host.width),
        }

    def prepare(self, encoder: Encoder, queries: int, low: int, high: int) -> Encoder:
        """Project the sinusoids of all distances once, unless there are so few queries that those are less work."""
        projection = encoder.learned["projection"]
        if queries < projection.shape[1]:
            return encoder
        distances = torch.arange(low, high + 1, device=projection.device)
        relative = torch.einsum("cr,hdr->hcd", sinusoids(distances, projection.shape[-1]), projection)
        parameters = {"u": encoder.learned["u"], "v": encoder.learned["v"], "relative": relative}
        return dataclasses.replace(encoder, parameters=parameters, low=low)

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        m, n, scale, _ = pairs
        learned = encoder.learned
        content = products(query + learned["u"][:, None], keys[0])
        asked = query.float() + learned["v"][:, None]
        distance = m[:, :, None] - n[:, None, :]
        low, high = int(distance.min()), int(distance.max())
        if "relative" in learned:
            by_distance = torch.matmul(
                asked, learned["relative"][:, low - encoder.low : high + 1 - encoder.low].transpose(-1, -2)
            )
        else:
            table = sinusoids(torch.arange(low, high + 1, device=query.device), learned["projection"].shape[-1])
            by_distance = torch.matmul(torch.matmul(asked, learned["projection"]), table.transpose(-1, -2))
        index = (distance - low)[:, None].expand(*query.shape[:3], -1)
        return (content + by_distance.gather(-1, index)) * scale


def sinusoids(positions: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Sine on even channels, cosine on odd ones, shape (\\*positions.shape, dim), fp32. Source: Vaswani et al. 2017."""
    pairs = (dim + 1) // 2
    exponents = torch.arange(pairs, dtype=torch.float64, device=positions.device) * 2 / dim
    angles = positions[..., None].double() * base**-exponents
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[..., :dim].float()


@dataclass(frozen=True, kw_only=True)
class CoPE(_Learned):
    """Contextual positions: a query counts the tokens back to a key by a gate of its own, and reads that position.

    Decoders only. Position vectors start at zero.
    """

    name: ClassVar[str] = "cope"
    formula: ClassVar[str] = "q.k / sqrt(d) + q.e[p], p = sum over t = n .. m of sigmoid(q.k_t / sqrt(d))"
    source: ClassVar[str] = "Golovneva et al. 2024, arXiv:2405.18719, section 4"
    values_per_pair: ClassVar[int] = 10
    max_positions: int = integer(64, at_least=2, at_most=65536)
    """The largest position that is told apart; further ones count as this one."""

    def parameters(self, host: Host) -> dict[str, Tensor]:
        return {"vectors": torch.zeros(host.layers, self.max_positions + 1, host.head_dim)}

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        content = products(query, keys[0]) * pairs.scale
        gates = torch.where(pairs.seen, content.sigmoid(), 0.0)
        position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.max_positions)
        at_each = torch.matmul(query.float(), encoder.learned["vectors"].transpose(-1, -2))
        below = position.floor().long()
        above = position.ceil().long()
        share = position - below
        return content + at_each.gather(-1, below) * (1 - share) + at_each.gather(-1, above) * share


METHODS: tuple[type[ScoreMethod], ...] = (SelfExtend, ReRope, LeakyReRope, DualChunk, Shaw, TransformerXL, CoPE)
