"""The embedding seam: a vector per position, added to what the first layer reads; attention has no positions.

A method is a pure function of positions. What it learns, if anything, is a dict of tensors that it starts
(``parameters``) and is handed back; which module holds them is the host's business.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rope_ext.config import FineTuning, Method, integer, number
from rope_ext.encodings.scores import sinusoids


@dataclass(frozen=True, kw_only=True)
class EmbeddingMethod(Method):
    """Base of the seam. A new method defines ``vectors``; ``parameters`` if it learns something."""

    seam: ClassVar[str] = "embedding"
    fine_tuning: ClassVar[FineTuning] = "required"
    original_max_position_embeddings: int | None = integer(None, at_least=2)
    """L0, where the config does not tell or tells wrong."""
    scale: float | None = number(None, above=0)
    """What vectors are multiplied with (a learned method: what it starts with); 1 is the published method. By default
    vectors get the root mean square of the host's token embeddings, so that neither drowns the other."""

    extension: ClassVar[float] = 1.0

    @abstractmethod
    def vectors(self, positions: Tensor, width: int, parameters: Mapping[str, Tensor]) -> Tensor:
        """The vector of each position (tokens, any shape): shape (\\*positions.shape, width), fp32."""

    def parameters(self, width: int, trained_length: int) -> dict[str, Tensor]:
        """The learned tensors as they start, fp32; the same on every call."""
        return {}

    def default_scale(self, token_rms: float) -> float:
        """The scale for token embeddings of that root mean square."""
        return token_rms * math.sqrt(2)  # sines and cosines have a mean square of a half


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(EmbeddingMethod):
    """Sines and cosines of wavelengths from 2 pi to 20,000 pi tokens."""

    name: ClassVar[str] = "sinusoidal"
    formula: ClassVar[str] = "x += scale [sin(m 10000^(-2i/D)), cos(m 10000^(-2i/D))]"
    source: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"

    def vectors(self, positions: Tensor, width: int, parameters: Mapping[str, Tensor]) -> Tensor:
        return sinusoids(positions, width) * (self.scale or 1.0)


@dataclass(frozen=True, kw_only=True)
class Learned(EmbeddingMethod):
    """A learned vector for each position up to a limit; starts as small noise."""

    name: ClassVar[str] = "learned"
    formula: ClassVar[str] = "x += table[m]"
    source: ClassVar[str] = "Gehring et al. 2017, arXiv:1705.03122; Devlin et al. 2018, arXiv:1810.04805"
    max_positions: int | None = integer(None, at_most=2**24)
    """Rows of the table; by default L0. A position beyond is an error."""

    @property
    def learns(self) -> bool:
        return True

    def parameters(self, width: int, trained_length: int) -> dict[str, Tensor]:
        noise = torch.Generator().manual_seed(0)
        rows = self.max_positions or trained_length
        return {"table": torch.randn(rows, width, generator=noise) * (self.scale or 1.0)}

    def vectors(self, positions: Tensor, width: int, parameters: Mapping[str, Tensor]) -> Tensor:
        table = parameters["table"]
        if int(positions.max()) >= len(table):
            raise ValueError(
                f"learned: position {int(positions.max())} has no vector: the table ends after `max_positions`="
                f"{len(table)} positions. Shorten the input, or patch with a larger `max_positions` and train it."
            )
        return table[positions]

    def default_scale(self, token_rms: float) -> float:
        return token_rms / 10  # at the size of a token's own vector, untrained noise would drown it


@dataclass(frozen=True, kw_only=True)
class Fourier(EmbeddingMethod):
    """Cosines and sines of random frequencies: the nearness of two positions becomes a Gaussian of their distance."""

    name: ClassVar[str] = "fourier"
    formula: ClassVar[str] = "x += scale [cos(w m), sin(w m)], w ~ N(0, sigma^2), scale learned"
    source: ClassVar[str] = "Rahimi and Recht 2007 (random features)"
    sigma: float = number(0.1, above=0)
    """Standard deviation of the frequencies, radians per token: positions within about 1 / sigma are near."""
    seed: int = integer(0, at_least=0, at_most=2**31)

    @property
    def learns(self) -> bool:
        return True

    def parameters(self, width: int, trained_length: int) -> dict[str, Tensor]:
        return {"scale": torch.tensor(self.scale or 1.0)}

    def frequencies(self, width: int) -> Tensor:
        """w, shape (ceil(width / 2),), float64, radians per token."""
        drawn = torch.Generator().manual_seed(self.seed)
        return torch.randn((width + 1) // 2, generator=drawn, dtype=torch.float64) * self.sigma

    def vectors(self, positions: Tensor, width: int, parameters: Mapping[str, Tensor]) -> Tensor:
        angles = positions[..., None].double() * self.frequencies(width).to(positions.device)
        both = torch.cat((angles.cos(), angles.sin()), -1)[..., :width].float()
        return both * parameters["scale"]


METHODS: tuple[type[EmbeddingMethod], ...] = (Sinusoidal, Learned, Fourier)
