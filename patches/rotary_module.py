"""The module that stands in for a host's rotary module, and how a host's module is built and understood."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

Tables = dict[str | None, tuple[Tensor, float]]
"""(frequencies of shape (d / 2,) in radians per token, factor of cos and sin) by layer type; None: one for all."""

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda angles: torch.cat((angles, angles), dim=-1),
    "interleaved": lambda angles: torch.repeat_interleave(angles, 2, dim=-1),
    "single": lambda angles: angles,
}
"""How cos and sin are laid out over the channels of a head."""


class PatchedRotary(nn.Module):
    """A host's rotary module with other frequencies.

    ``forward(x, position_ids, layer_type=None)`` returns what the host's own module returns: in the usual layouts cos
    and sin of shape (batch, length, rotary_dim), a pure function of ``position_ids`` in tokens; otherwise (complex,
    multi-axis) the host's own forward is called. Tables are fp32 and come back after every cast, move or ``to_empty``.
    """

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        # transformers' length-dependent updates write into the module during forward; nothing here depends on length
        kinds = dict.fromkeys(layer_types(host), "default")
        host.rope_type = "default" if None in kinds else kinds  # type: ignore[assignment]
        self._layout, self._output_dtype = _probe(host)
        self._tables = {name: table.detach().cpu().float().clone() for name, table in host.named_buffers()}
        for name in self._tables:
            self.register_buffer(name, None, persistent=False)
        # in a tuple, outside the module tree: transformers re-initialises rotary modules that it finds by their class
        self._host = (host,)
        self._place(torch.device("cpu"))

    def _place(self, device: torch.device) -> None:
        for name, table in self._tables.items():
            placed = table.to(device)
            setattr(self, name, placed)
            setattr(self._host[0], name, placed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PatchedRotary:
        super()._apply(fn, recurse)
        self._place(next(self.buffers()).device)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what else the model reads from its rotary module
            if "_host" not in self.__dict__:
                raise
            return getattr(self._host[0], name)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if self._layout is None:
            return self._host[0](x, position_ids=position_ids, **({"layer_type": layer_type} if layer_type else {}))
        return self._laid_out(x, position_ids, *table_of(self, layer_type))

    def _laid_out(self, x: Tensor, position_ids: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        # elementwise: a matmul here would be rounded by autocast and by set_float32_matmul_precision
        angles = LAYOUTS[str(self._layout)](position_ids[..., None].float() * frequencies.to(x.device))
        dtype = self._output_dtype or x.dtype
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


class GrowingRotary(PatchedRotary):
    """A table for each call, as stock ``dynamic`` scaling has it, but a function of the call alone."""

    def __init__(self, host: nn.Module, table: Callable[[int], tuple[Tensor, float]], trained_length: int) -> None:
        super().__init__(host)
        self._table, self._trained_length = table, trained_length

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        if self._layout is None:
            raise ValueError("dynamic: option `exact`=False is not supported by this rotary module; leave it out.")
        frequencies, scaling = self._table(max(self._trained_length, int(position_ids.max()) + 1))
        return self._laid_out(x, position_ids, frequencies, scaling)


def hand_back(original: nn.Module, stand_in: nn.Module) -> None:
    """Bring a module that was set aside to where its stand-in went meanwhile (device; real storage from meta)."""
    if any(table.is_meta for table in original.buffers()):
        fresh = build(type(original), original.config)  # type: ignore[arg-type]
        for name, table in fresh.named_buffers():
            setattr(original, name, table)
    original.to(next(stand_in.buffers()).device)


def build(kind: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """A rotary module of the host's class on the CPU, as transformers builds it from this config."""
    with torch.device("cpu"):
        return kind(config)


_QUIET = threading.Lock()


def build_as_stock(kind: type[nn.Module], config: PreTrainedConfig) -> nn.Module | None:
    """What a process without rope_ext builds after loading this config from disk; None if it cannot."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    with _QUIET:
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            return build(kind, type(config).from_dict(config.to_dict()))
        except Exception:  # whatever stock raises, it cannot load this config
            return None
        finally:
            logger.setLevel(level)


def layer_types(host: nn.Module) -> list[str | None]:
    """The layer types that have a table of their own; [None] where one table serves all."""
    names = [name.removesuffix("inv_freq") for name, _ in host.named_buffers() if name.endswith("inv_freq")]
    return [name.rstrip("_") or None for name in names if not name.endswith("original_")]


def table_of(host: nn.Module, layer_type: str | None) -> tuple[Tensor, float]:
    """(frequencies, factor of cos and sin) as the module holds them."""
    inv_freq, attention_scaling = _attributes(layer_type)
    return getattr(host, inv_freq), getattr(host, attention_scaling)


def set_table(host: nn.Module, layer_type: str | None, frequencies: Tensor, scaling: float) -> None:
    """Write one table into a host's module."""
    inv_freq, attention_scaling = _attributes(layer_type)
    setattr(host, inv_freq, frequencies)
    setattr(host, attention_scaling, scaling)


def holds(host: nn.Module | None, tables: Tables) -> bool:
    """Whether the module holds these tables, up to the last bits of fp32."""
    if host is None:
        return False
    for layer_type, (frequencies, scaling) in tables.items():
        found, factor = table_of(host, layer_type)
        if found.shape != frequencies.shape or not torch.allclose(found, frequencies, rtol=1e-6, atol=1e-20):
            return False
        if abs(factor - scaling) > 1e-12 * scaling:
            return False
    return True


def same(one: tuple[Tensor, float], other: tuple[Tensor, float]) -> bool:
    """Whether two tables are the same; on the meta device, whether they could be."""
    (first, factor), (second, scaling) = one, other
    if first.is_meta or second.is_meta:
        return first.shape == second.shape
    return torch.equal(first.to(second.device), second) and factor == scaling


def _attributes(layer_type: str | None) -> tuple[str, str]:
    prefix = f"{layer_type}_" if layer_type else ""
    return f"{prefix}inv_freq", f"{prefix}attention_scaling"


def _probe(host: nn.Module) -> tuple[str | None, torch.dtype | None]:
    """(layout, output dtype or None if it follows the input); layout None: the host's own forward has to be called.

    Raises ValueError where the host's output does not follow its frequencies and factor.
    """
    layer_type = layer_types(host)[0]
    positions = torch.arange(8, device="cpu")[None]
    multi_axis = hasattr(host, "mrope_section")

    def call(dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        x = torch.zeros(1, 1, 1, dtype=dtype, device="cpu")
        given = positions.expand(3, 1, 8) if multi_axis else positions
        output = host(x, position_ids=given, **({"layer_type": layer_type} if layer_type else {}))
        return output if isinstance(output, tuple) else (output,)

    try:
        frequencies, scaling = table_of(host, layer_type)
        output = call()
        fixed = [part.dtype for part in call(torch.bfloat16) if part.dtype != torch.bfloat16]
        set_table(host, layer_type, torch.zeros_like(frequencies), 2.0)
        standing = call()
        set_table(host, layer_type, frequencies, scaling)
    except Exception as error:
        raise ValueError(f"{type(host).__name__} cannot be called with positions alone: {error!r}.") from error
    if any(part.abs().max() not in (0, 2) for part in standing):
        raise ValueError(f"{type(host).__name__} does not compute its output from `inv_freq` and `attention_scaling`.")
    angles = positions[..., None].float() * frequencies
    for name, layout in LAYOUTS.items():
        wanted = (layout(angles).cos() * scaling, layout(angles).sin() * scaling)
        same_shape = [part.shape for part in output] == [part.shape for part in wanted]
        if same_shape and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(output, wanted, strict=True)):
            return (None if multi_axis else name), (fixed[0] if fixed else None)
    return None, None
