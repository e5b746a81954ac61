"""Architectures whose attention modules have no place for another encoding: their own are replaced (BLOOM, T5)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig

from rope_ext.attention import NAME, Kept, Layout, attend
from rope_ext.attention.computing import attend_with_weights
from rope_ext.attention.mapped_cache import keep_mapped
from rope_ext.attention.registered import applied
from rope_ext.checkpoint import PATCHED_ENTRIES
from rope_ext.config import FineTuning, Method
from rope_ext.encodings.bias import Bias, BiasMethod
from rope_ext.encodings.embedding import EmbeddingMethod
from rope_ext.encodings.qk import Dynamic, QkMethod
from rope_ext.encodings.raw import Encoder, Host, RawMethod, rotation, turned_by
from rope_ext.encodings.rotary import Rotary, RotaryMethod
from rope_ext.encodings.scores import ZonedMethod
from rope_ext.registry import find_method

from . import arguments
from .base import Adapter, Channels, Patch, State, Swap, copy_configs
from .positions import (
    AddVectors,
    Positions,
    Source,
    VectorPositions,
    additions,
    attention_note,
    keeps_mapped,
    raw_form,
    with_scale,
)
from .rope_config import UNSTOCKABLE
from .rotary import SEAMS, checked_table

PLUGIN_NEEDED: dict[str, Any] = {
    "experts_implementation": UNSTOCKABLE,
    "quantization_config": {"quant_method": UNSTOCKABLE},
}
"""Entries of a config that stock transformers would load without its encoding, silently. It checks the first for every
model, of experts or not, so loading fails and says what to do; the second survives where a config is loaded and saved
alone, and gives at least a warning that says so."""

BASE = 10000.0
"""b of the rotary frequencies on a host that had none."""


class Rotation:
    """Rotary frequencies on a host without a rotary module: (d / 2,) in radians per token, factor of cos and sin."""

    frequencies: Tensor
    scaling: float

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        self.frequencies, self.scaling = frequencies, scaling

    def __call__(self, query: Tensor, key: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Turn q and k of shape (batch, heads, length, d); channel pairs are (i, i + d/2)."""
        factors = rotation(layout.query_positions(query.device), self.frequencies, self.scaling)
        return turned_by(query, *factors), turned_by(key, *factors)


EncodingSource = Callable[[bool], Bias | Encoder | Kept]
"""Called with whether the host is a decoder, gives what one layer's attention needs."""


class HostedAttention(nn.Module):
    """Stands in for an attention module and has its children, so that parameters keep their names.

    Attributes:
        source: gives the encoding that attention computes, or None.
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
        self.source: EncodingSource | None = None
        self.rotation = rotation

    def core(
        self, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, dropout: float, weigh: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(output (batch, q_length, heads * head_dim), weights if asked for); keys come turned, from the cache."""
        given = self.source(getattr(self, "is_decoder", True)) if self.source is not None else None
        layout, method = applied(given, layout)
        if weigh:
            output, seen = attend_with_weights(query, key, value, layout, method, scale, dropout)
        else:
            output, seen = attend(query, key, value, layout, method, scale, dropout), None
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
    """Hosts every seam by replacing attention modules; an architecture says where they are."""

    seams: ClassVar[frozenset[str]] = SEAMS
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

    refused: ClassVar[dict[str, str]] = {}
    """Arguments of its forward that cannot be honoured here -> why."""

    counts: ClassVar[bool] = False
    """Whether its positions count real tokens only, where padding cuts a text."""

    def attributes(self) -> list[tuple[nn.Module, str, Any]]:
        """(module, name, value): what its modules carry while patched."""
        return []

    def other_swaps(self) -> list[Swap]:
        """Modules beside attention whose memory would otherwise be what limits the length."""
        return []

    def native_entries(self, encoding: BiasMethod) -> dict[str, Any] | None:
        """The config entries under which stock transformers computes this variant of the native method, or None."""
        return None if any(name in encoding.options() for name in ("factor", "interpolate")) else {}

    def native_biases(self, encoding: BiasMethod, attentions: list[HostedAttention]) -> list[EncodingSource] | None:
        """Where the checkpoint itself has the bias's parameters: what gives the bias of each of these modules."""
        return None

    def refusal(self, method: type[Method]) -> str | None:
        if getattr(method, "causal_only", False):
            attentions = [place.module for stack in self.stacks() for place in stack.places if place.is_self]
            if not all(getattr(attention, "is_decoder", True) for attention in attentions):
                kind = self.model.config.model_type
                return f"{kind}: {method.name} is defined for decoders, and its encoder reads both ways"
        return super().refusal(method)

    def plan(self, encoding: Method) -> Patch:
        length = self._trained_length(encoding)
        if isinstance(encoding, Dynamic) and not encoding.exact:
            raise ValueError(
                "dynamic: option `exact`=False needs a rotary module, which this model has not; leave it out."
            )
        if isinstance(encoding, EmbeddingMethod):
            encoding = with_scale(encoding, self.model)
        rotation = self._rotation(encoding, length)
        swaps, added, hooks = self._replacements(encoding, rotation, length)
        entries = (
            self.native_entries(encoding) if isinstance(encoding, self.native) and encoding.window is None else None
        )
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
            attention=attention_note(encoding, self.model, True),
        )
        told = arguments.Told(reads=False, counts=self.counts, refused=self.refused)
        before = arguments.hooks(self.model, [stack.root for stack in self.stacks()], told)
        return Patch(
            self.model, encoding, state, swaps, configs, self.attributes(), additions=added, hooks=[*before, *hooks]
        )

    def _replacements(
        self, encoding: Method, rotation: Rotation | None, length: int
    ) -> tuple[list[Swap], list[tuple[nn.Module, str, nn.Module]], list[tuple[nn.Module, Any]]]:
        """(modules in place of the model's, modules that are added for what is learned, hooks before a first layer)."""
        swaps = self.other_swaps()
        added: list[tuple[nn.Module, str, nn.Module]] = []
        hooks: list[tuple[nn.Module, Any]] = []
        for stack in self.stacks():
            made = [self.stand_in(place.module, rotation if place.is_self else None) for place in stack.places]
            pairs = list(zip(stack.places, made, strict=True))
            swaps += [Swap(place.parent, place.name, place.module, new, hand_back) for place, new in pairs]
            own = [new for place, new in pairs if place.is_self]
            like, host = next(own[0].parameters()), self._host(length, len(own))
            if isinstance(encoding, EmbeddingMethod):
                module: Positions = VectorPositions(encoding, host, like)
                added += additions(stack.root, module)
                hooks.append((self.first_layer(stack), AddVectors(stack.root, module)))
                continue
            form = raw_form(encoding)
            sources = self.native_biases(encoding, own) if isinstance(encoding, self.native) else None
            if isinstance(form, Kept):
                sources = [form] * len(own) if form.method.window is not None else []
            elif sources is None:
                if isinstance(form, RawMethod):
                    form.check(host)
                module = Positions(form, host, like)
                hooks += [(stack.root, keep_mapped)] * keeps_mapped(form)
                added += additions(stack.root, module)
                sources = [Source(stack.root, module, layer) for layer in range(len(own))]
            for stand_in, source in zip(own, sources):  # noqa: B905 - a rotation without a pattern has no sources
                stand_in.__dict__["source"] = source  # past nn.Module: what it holds has its place in the tree already
        return swaps, added, hooks

    def first_layer(self, stack: Stack) -> nn.Module:
        """The module whose input is the token embeddings."""
        return self.model.base_model.get_submodule(f"{self.blocks}.0")

    def _host(self, length: int, layers: int) -> Host:
        config = self.model.config
        heads, width = int(config.num_attention_heads), int(config.hidden_size)
        head_dim = int(getattr(config, "d_kv", None) or width // heads)
        return Host(Rotary(head_dim, BASE, length), layers, heads, head_dim, width)

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
        if not isinstance(encoding, (RotaryMethod, QkMethod, ZonedMethod)):
            return None
        rotary, kind = self._host(length, 1).rotary, self.model.config.model_type
        if rotary.dim % 2 or rotary.dim < 4:
            raise ValueError(f"{kind}: heads of {rotary.dim} channels cannot be rotated in pairs.")
        if not isinstance(encoding, RotaryMethod) or not isinstance(raw_form(encoding), Kept):
            return None  # attention turns raw keys
        frequencies, scaling = checked_table(encoding, rotary)
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
