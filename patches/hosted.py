"""Architectures whose attention modules have no place for another encoding: their own are replaced (BLOOM, T5)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rope_ext.attention import NAME, Layout, attend
from rope_ext.attention.computing import attend_with_weights
from rope_ext.checkpoint import PATCHED_ENTRIES
from rope_ext.config import FineTuning, Method
from rope_ext.encodings.bias import BiasMethod
from rope_ext.encodings.rotary import Rotary, RotaryMethod
from rope_ext.registry import find_method

from .base import Adapter, Channels, Patch, State, Swap, copy_configs
from .position_bias import BiasSource, PositionBias, attention_note, place_in
from .rope_config import UNSTOCKABLE
from .rotary import checked_table

PLUGIN_NEEDED = {"experts_implementation": UNSTOCKABLE, "quantization_config": {"quant_method": UNSTOCKABLE}}
"""Entries of a config that stock transformers would load without its encoding, silently. It checks the first for every
model, of experts or not, so loading fails and says what to do; the second survives where a config is loaded and saved
alone, and gives at least a warning that says so."""

BASE = 10000.0
"""b of the rotary frequencies on a host that had none."""


class Rotation:
    """Rotary frequencies on a host without a rotary module: (d / 2,) in radians per token, factor of cos and sin."""

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        self.frequencies, self.scaling = frequencies, scaling

    def __call__(self, query: Tensor, key: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Turn q and k of shape (batch, heads, length, d); channel pairs are (i, i + d/2)."""
        positions = layout.key_positions(query.device)[:, layout.offset : layout.offset + query.shape[2]]
        angles = positions[:, None, :, None].float() * self.frequencies.to(query.device)
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return _turn(query, cos, sin), _turn(key, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class HostedAttention(nn.Module):
    """Stands in for an attention module and has its children, so that parameters keep their names.

    Attributes:
        bias: gives the bias, or None.
        rotation: turns q and k, or None.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What the original had: projections, sizes, the index of the layer."""

    def __init__(self, original: nn.Module, rotation: Rotation | None) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in original.__dict__.items() if not name.startswith("_")})
        for name, child in original.named_children():
            self.add_module(name, child)
        self.bias: BiasSource | None = None
        self.rotation = rotation

    def core(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, dropout: float, weigh: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(output (batch, q_length, heads * head_dim), weights if asked for); keys come turned, from the cache."""
        bias = self.bias(getattr(self, "is_decoder", True)) if self.bias is not None else None
        if weigh:
            output, seen = attend_with_weights(query, key, value, layout, bias, scale, dropout)
        else:
            output, seen = attend(query, key, value, layout, bias, scale, dropout), None
        return output.transpose(1, 2).flatten(2), seen


def hand_back(original: nn.Module, stand_in: nn.Module) -> None:
    """Give the original the children back: they may have been wrapped (LoRA) or replaced meanwhile."""
    for name, child in stand_in.named_children():
        original.add_module(name, child)
    original.training = stand_in.training


@dataclass(frozen=True)
class Place:
    """An attention module and where it is: ``parent.name``."""

    parent: nn.Module
    name: str
    module: nn.Module
    is_self: bool = True
    """False for cross-attention, which has no positions."""


@dataclass(frozen=True)
class Stack:
    """Layers that share a bias, under one ``root``."""

    root: nn.Module
    places: list[Place]


class HostedAdapter(Adapter):
    """Hosts the bias and the rotary seam by replacing attention modules; an architecture says where they are."""

    seams = frozenset({"bias", "rotary"})
    native: ClassVar[type[BiasMethod]]
    """The method that its checkpoints were trained with."""
    stand_in: ClassVar[type[HostedAttention]]
    length_name: ClassVar[str]
    """The config entry that holds the trained length, in checkpoints that have one."""
    usual_length: ClassVar[int]
    """In tokens, where the config does not say."""

    blocks: ClassVar[str]
    """The base model's list of layers ..."""
    attention: ClassVar[str]
    """... and the attention module of each."""

    def stacks(self) -> list[Stack]:
        """Where attention is: by default, one module in each layer of the base model."""
        root = self.model.base_model
        layers = root.get_submodule(self.blocks).children()
        return [Stack(root, [Place(layer, self.attention, layer.get_submodule(self.attention)) for layer in layers])]

    def other_swaps(self) -> list[Swap]:
        """Modules beside attention whose memory would otherwise be what limits the length."""
        return []

    def native_entries(self, encoding: BiasMethod) -> dict[str, Any] | None:
        """The config entries under which stock transformers computes this variant of the native method, or None."""
        return None if any(name in encoding.options() for name in ("factor", "interpolate")) else {}

    def native_biases(self, encoding: BiasMethod, attentions: list[HostedAttention]) -> list[BiasSource] | None:
        """Where the checkpoint itself has the bias's parameters: what gives the bias of each of these modules."""
        return None

    def plan(self, encoding: Method) -> Patch:
        length = self._trained_length(encoding)
        rotation = self._rotation(encoding, length)
        swaps, additions = self._replacements(encoding, rotation)
        entries = self.native_entries(encoding) if isinstance(encoding, self.native) else None
        usable = round(length * encoding.extension)  # type: ignore[attr-defined]
        written: dict[str, Any] = {**(entries or {}), "_attn_implementation": NAME}
        if hasattr(self.model.config, self.length_name) and usable != length:
            written[self.length_name] = usable
        if entries is None:
            quantized = getattr(self.model.config, "quantization_config", None) is not None
            written |= {
                name: value for name, value in PLUGIN_NEEDED.items() if not (quantized and name.startswith("q"))
            }
        configs = copy_configs(self.model)
        for old, new in configs:
            for name, value in written.items():
                setattr(new, name, copy.deepcopy(value))
            if old is self.model.config:
                new.rope_ext = {**encoding.to_dict(), **self._original(old, written)}
        state = State(
            method=encoding.name,
            trained_length=length,
            usable_length=usable,
            attention_scaling=rotation.scaling if rotation else 1.0,
            channels=(Channels(None, rotation.frequencies, rotation.frequencies),) if rotation else (),
            fine_tuning=self._fine_tuning(encoding),
            stock=encoding.name if entries is not None else "",
            notes=self._notes(),
            attention=attention_note(encoding if isinstance(encoding, BiasMethod) else None, self.model, True),
        )
        return Patch(self.model, encoding, state, swaps, configs, additions=additions)

    def _replacements(
        self, encoding: Method, rotation: Rotation | None
    ) -> tuple[list[Swap], list[tuple[nn.Module, str, nn.Module]]]:
        """(modules in place of the model's, modules that are added for what the bias learns)."""
        swaps = self.other_swaps()
        additions: list[tuple[nn.Module, str, nn.Module]] = []
        for stack in self.stacks():
            made = [self.stand_in(place.module, rotation if place.is_self else None) for place in stack.places]
            pairs = list(zip(stack.places, made, strict=True))
            swaps += [Swap(place.parent, place.name, place.module, new, hand_back) for place, new in pairs]
            if not isinstance(encoding, BiasMethod):
                continue
            own = [new for place, new in pairs if place.is_self]
            sources = self.native_biases(encoding, own) if isinstance(encoding, self.native) else None
            if sources is None:
                shared = PositionBias(encoding, int(self.model.config.num_attention_heads), next(own[0].parameters()))
                source, added = place_in(stack.root, shared)
                sources = [source] * len(own)
                additions += added
            for stand_in, source in zip(own, sources, strict=True):
                stand_in.__dict__["bias"] = source  # past nn.Module: the bias has its place in the tree already
        return swaps, additions

    def state(self) -> State:
        length = self._trained_length(None)
        record = getattr(self.model.config, "rope_ext", None)
        method = find_method(record["method"]) if record else self.native
        notes = (f"saved by rope_ext under {method.name}; load_patched makes it a patch that can be undone",)
        return State(
            method=method.name,
            trained_length=length,
            usable_length=max(length, int(getattr(self.model.config, self.length_name, length))),
            attention_scaling=1.0,
            channels=(),
            fine_tuning="not needed",
            stock=method.name,
            notes=self._notes() + (notes if record else ()),
        )

    def _rotation(self, encoding: Method, length: int) -> Rotation | None:
        if not isinstance(encoding, RotaryMethod):
            return None
        config = self.model.config
        dim = int(getattr(config, "d_kv", None) or config.hidden_size // config.num_attention_heads)
        if dim % 2 or dim < 4:
            raise ValueError(f"{config.model_type}: heads of {dim} channels cannot be rotated in pairs.")
        frequencies, scaling = checked_table(encoding, Rotary(dim, BASE, length))
        return Rotation(frequencies, scaling) if frequencies.any() else None

    def _fine_tuning(self, encoding: Method) -> FineTuning:
        if not isinstance(encoding, self.native):
            return "required"
        return "recommended" if encoding.options() else "not needed"

    def _trained_length(self, encoding: Method | None) -> int:
        config = self.model.config
        record = getattr(config, "rope_ext", None) or {"original": {}, "options": {}}
        given = getattr(encoding, "original_max_position_embeddings", None)
        return int(
            given
            or record["options"].get("original_max_position_embeddings")
            or record["original"].get(self.length_name)
            or getattr(config, self.length_name, self.usual_length)
        )

    def _notes(self) -> tuple[str, ...]:
        if hasattr(self.model.config, self.length_name):
            return ()
        return (f"the config does not say the trained length; {self.usual_length} is what this family usually has",)

    def _original(self, config: PreTrainedConfig, written: dict[str, Any]) -> dict[str, Any]:
        record = getattr(config, "rope_ext", None)
        if record:
            return {"original": record["original"], "added": record.get("added", [])}
        names = [name for name in (*PATCHED_ENTRIES, *written) if not name.startswith("_")]
        present = {name: getattr(config, name) for name in names if hasattr(config, name)}
        return {"original": present, "added": [name for name in names if name in written and name not in present]}
