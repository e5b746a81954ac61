"""The qk seam: q and the raw keys are mapped by their positions, then attention is the usual one.

Legend as in :mod:`rope_ext.encodings.rotary`; m position of the query, n of the key, L the length so far: m + 1 in a
decoder (with a window, no more than what the query sees), the whole text in an encoder.

Queries of one *stage* share one map, so attention is computed stage by stage: the keys that they see are mapped, and an
unmodified kernel does the rest. That also makes a stage a function of the query's own position: a token decoded with a
cache gets what one forward over the whole text gives it.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rope_ext.config import FineTuning, flag, integer, number, numbers
from rope_ext.encodings.raw import Encoder, Factors, Host, Pairs, RawMethod, products, rotation, turned_by
from rope_ext.encodings.rotary import LongRope, Rotary, RotaryMethod, Yarn, schedule


@dataclass(frozen=True, kw_only=True)
class QkMethod(RawMethod):
    """Base of the seam: each channel pair (i, i + d/2), as a complex number, is multiplied with a factor.

    A new method defines ``query_factors`` and ``key_factors``; ``stages`` if they change on the way.
    """

    seam: ClassVar[str] = "qk"

    def stages(self, positions: Tensor, host: Host) -> Tensor:
        """A number for each position, int64, shape of ``positions``: queries with the same number share their keys."""
        return torch.zeros_like(positions)

    @abstractmethod
    def query_factors(self, encoder: Encoder, m: Tensor, stage: int) -> Factors:
        """For queries at positions m (1 or batch, queries)."""

    @abstractmethod
    def key_factors(self, encoder: Encoder, n: Tensor, stage: int) -> Factors:
        """For keys at positions n (1 or batch, keys), as queries of ``stage`` see them."""

    def stages_of(self, encoder: Encoder, m: Tensor, n: Tensor) -> Tensor:
        """The stage of each query: by its own position, in an encoder by the last position of the text."""
        positions = m if encoder.causal else n.amax(-1, keepdim=True).expand_as(m)
        return self.stages(positions, encoder.host)

    def scores(self, encoder: Encoder, query: Tensor, keys: tuple[Tensor, ...], pairs: Pairs) -> Tensor:
        m, n, scale, seen = pairs
        batch = len(query)
        real = torch.where(seen.any(2)[:, 0], n, 0)  # padding has a position, but is none of the text
        stages = self.stages_of(encoder, m.expand(len(real), -1), real)
        alike = bool((stages == stages[:1]).all())
        rows = [slice(0, batch)] if alike else [slice(row, row + 1) for row in range(batch)]
        parts = []
        for index, row in enumerate(rows):
            m_row, n_row = m if alike or len(m) == 1 else m[row], n if alike or len(n) == 1 else n[row]
            out = query.new_empty(*query[row].shape[:3], keys[0].shape[2], dtype=torch.float32)
            for stage in stages[index].unique().tolist():
                own = torch.nonzero(stages[index] == stage).flatten()
                q = turned_by(query[row][:, :, own].float(), *self.query_factors(encoder, m_row[:, own], stage))
                k = turned_by(keys[0][row].float(), *self.key_factors(encoder, n_row, stage))
                out[:, :, own] = products(q, k) * scale
            parts.append(out)
        return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, kw_only=True)
class Turning(QkMethod):
    """Rotation by a table that may differ from stage to stage."""

    causal_only: ClassVar[bool] = False
    starts_from: ClassVar[tuple[str, ...]] = ("default", "dynamic")
    """The ``rope_type`` of checkpoints whose own table it has inside the trained length."""

    @abstractmethod
    def table(self, rotary: Rotary, stage: int) -> tuple[Tensor, float]:
        """(frequencies of shape (d / 2,) in radians per token, factor of cos and sin)."""

    def query_factors(self, encoder: Encoder, m: Tensor, stage: int) -> Factors:
        return rotation(m, *self.table(encoder.host.rotary, stage))

    def key_factors(self, encoder: Encoder, n: Tensor, stage: int) -> Factors:
        return rotation(n, *self.table(encoder.host.rotary, stage))


@dataclass(frozen=True, kw_only=True)
class StaticTable(Turning):
    """A rotary method whose keys are cached raw: what a pattern with sinks makes of one."""

    name: ClassVar[str] = "static"
    of: RotaryMethod = dataclasses.field()

    def table(self, rotary: Rotary, stage: int) -> tuple[Tensor, float]:
        return self.of.frequencies(rotary), self.of.attention_scaling(rotary)


@dataclass(frozen=True, kw_only=True)
class _Growing(Turning):
    """A table that follows the length so far, in steps, from L0 on."""

    factor: float = number(1.0, at_least=1, at_most=1e6)
    step: int | None = integer(None)
    """Tokens between two tables; by default L0 / 64. A length is rounded up to the end of its step."""

    @property
    def extension(self) -> float:
        return self.factor

    def stages(self, positions: Tensor, host: Host) -> Tensor:
        """The length that a query's table is for: L0 inside, then L0 plus whole steps."""
        trained = host.rotary.trained_length
        step = self.step or max(1, trained // 64)
        beyond = (self.reach(positions) + 1 - trained).clamp(min=0)
        return trained + torch.div(beyond + step - 1, step, rounding_mode="floor") * step


@dataclass(frozen=True, kw_only=True)
class Dynamic(_Growing):
    """Dynamic NTK: the base grows with the length so far; inside the trained length nothing changes."""

    name: ClassVar[str] = "dynamic"
    formula: ClassVar[str] = "b' = b * (s L/L0 - (s - 1))^(d/(d-2)) for L > L0"
    source: ClassVar[str] = "emozilla 2023 (dynamically scaled RoPE)"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    exact: bool = flag(True)
    """False: what stock transformers does, one table per call; cached keys keep the tables they were turned with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.exact and (self.window is not None or self.step is not None):
            raise ValueError(
                "dynamic: option `exact`=False is what stock transformers does, which has no `window` and no `step`; "
                "leave them out."
            )

    def table(self, rotary: Rotary, stage: int) -> tuple[Tensor, float]:
        if stage <= rotary.trained_length:
            return schedule(rotary.dim, rotary.base), 1.0
        # in fp32 and in this order of operations, as stock transformers: the same bits
        grown = self.factor * torch.tensor(stage) / rotary.trained_length - (self.factor - 1)
        return schedule(rotary.dim, rotary.base * grown ** (rotary.dim / (rotary.dim - 2))), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        """How stock transformers is told to do what ``exact=False`` does."""
        return None if self.exact else {"rope_type": "dynamic", "factor": self.factor}


@dataclass(frozen=True, kw_only=True)
class DynamicYarn(_Growing):
    """YaRN whose factor is the length so far over the trained length."""

    name: ClassVar[str] = "dynamic_yarn"
    formula: ClassVar[str] = "yarn with s = max(1, L/L0)"
    source: ClassVar[str] = "Peng et al. 2023, arXiv:2309.00071, section 3.3 (dynamic scaling)"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    factor: float = number(1.0, at_least=1, at_most=1e6)
    """Only states the length aimed at; the tables follow from the length so far."""
    beta_fast: float = number(32.0, above=0)
    beta_slow: float = number(1.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        Yarn(factor=1, beta_fast=self.beta_fast, beta_slow=self.beta_slow)

    def table(self, rotary: Rotary, stage: int) -> tuple[Tensor, float]:
        yarn = Yarn(factor=stage / rotary.trained_length, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        return yarn.frequencies(rotary), yarn.attention_scaling(rotary)


@dataclass(frozen=True, kw_only=True)
class DynamicLongRope(Turning):
    """LongRoPE that takes the short list for lengths up to L0 and the long list beyond, for cached keys, too."""

    name: ClassVar[str] = "dynamic_longrope"
    formula: ClassVar[str] = "longrope with the short list for L <= L0, the long one for L > L0"
    source: ClassVar[str] = "Ding et al. 2024, arXiv:2402.13753"
    fine_tuning: ClassVar[FineTuning] = "not needed"
    starts_from: ClassVar[tuple[str, ...]] = ("default", "dynamic", "longrope")
    factor: float = number(at_least=1, at_most=1e6)
    """s: target length over trained length."""
    long_factor: tuple[float, ...] | None = numbers(None)
    """lambda_i beyond L0; by default the checkpoint's own list."""
    short_factor: tuple[float, ...] | None = numbers(None)
    """lambda_i up to L0; by default the checkpoint's own list, else ones: nothing changes."""
    attention_factor: float | None = number(None, above=0)
    """Replaces sqrt(1 + ln s / ln L0)."""

    @property
    def extension(self) -> float:
        return self.factor

    def stages(self, positions: Tensor, host: Host) -> Tensor:
        return (self.reach(positions) >= host.rotary.trained_length).long()

    def table(self, rotary: Rotary, stage: int) -> tuple[Tensor, float]:
        short = self.short_factor or rotary.parameters.get("short_factor") or (1.0,) * (rotary.dim // 2)
        factor = max(self.factor, 1 + 1e-9) if stage else 1  # which of the lists it reads
        chosen = LongRope(factor=factor, long_factor=self.long_factor, short_factor=tuple(short))
        scaling = LongRope(factor=self.factor, attention_factor=self.attention_factor).attention_scaling(rotary)
        return chosen.frequencies(rotary), scaling

    def check(self, host: Host) -> None:
        self.table(host.rotary, 0)
        self.table(host.rotary, 1)


@dataclass(frozen=True, kw_only=True)
class XPos(QkMethod):
    """Rotation and a decay: the fastest channels forget soonest. Decoders only.

    The two halves of the decay would overflow or vanish at long distances, so that both are taken relative to the
    start of the query's stretch of ``scale_base`` tokens; their product is the same.
    """

    name: ClassVar[str] = "xpos"
    formula: ClassVar[str] = "rope; q_i zeta_i^(m/512), k_i zeta_i^(-n/512), zeta_i = (2i/d + 0.4) / 1.4"
    source: ClassVar[str] = "Sun et al. 2022, arXiv:2212.10554, section 2.2"
    fine_tuning: ClassVar[FineTuning] = "required"
    scale_base: int = integer(512)
    """Tokens over which a channel decays by its zeta."""

    def stages(self, positions: Tensor, host: Host) -> Tensor:
        return torch.div(positions, self.scale_base, rounding_mode="floor")

    def query_factors(self, encoder: Encoder, m: Tensor, stage: int) -> Factors:
        return self._factors(encoder, m, m - stage * self.scale_base)

    def key_factors(self, encoder: Encoder, n: Tensor, stage: int) -> Factors:
        # keys beyond the stretch are not seen; their decay must not overflow meanwhile
        return self._factors(encoder, n, (stage * self.scale_base - n).clamp(min=-self.scale_base))

    def _factors(self, encoder: Encoder, positions: Tensor, power: Tensor) -> Factors:
        rotary = encoder.host.rotary
        zeta = (torch.arange(0, rotary.dim, 2, device=positions.device) / rotary.dim + 0.4) / 1.4
        return rotation(
            positions, schedule(rotary.dim, rotary.base), zeta ** (power[:, None, :, None] / self.scale_base)
        )


@dataclass(frozen=True, kw_only=True)
class CoMay(QkMethod):
    """Rotation with a learned frequency and phase per channel pair; starts as ``rope``."""

    name: ClassVar[str] = "comay"
    formula: ClassVar[str] = "q_i exp(j (m w_i + phi_i)), k_i exp(j n w_i), w and phi learned"
    source: ClassVar[str] = "described in survey articles; no paper found under this name (compare Wang et al. 2020)"
    fine_tuning: ClassVar[FineTuning] = "recommended"
    causal_only: ClassVar[bool] = False

    @property
    def learns(self) -> bool:
        return True

    def parameters(self, host: Host) -> dict[str, Tensor]:
        pairs = host.rotary.dim // 2
        # as a ratio to theta_i, so that one learning rate suits frequencies that span five orders of magnitude
        return {"frequency": torch.ones(host.layers, pairs), "phase": torch.zeros(host.layers, pairs)}

    def query_factors(self, encoder: Encoder, m: Tensor, stage: int) -> Factors:
        return rotation(m, self._frequencies(encoder), phase=encoder.learned["phase"])

    def key_factors(self, encoder: Encoder, n: Tensor, stage: int) -> Factors:
        return rotation(n, self._frequencies(encoder))

    @staticmethod
    def _frequencies(encoder: Encoder) -> Tensor:
        rotary, ratio = encoder.host.rotary, encoder.learned["frequency"]
        return schedule(rotary.dim, rotary.base).to(ratio.device) * ratio


METHODS: tuple[type[QkMethod], ...] = (Dynamic, DynamicYarn, DynamicLongRope, XPos, CoMay)
