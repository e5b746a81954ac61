"""The rotary seam on any architecture that computes cos and sin in a rotary module of its own.

The patched module holds one of the host's own class, built from the patched config, so whatever the host returns
(halves, interleaved, per layer type, complex, multi-axis ...) stays what it was: only frequencies change.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_ext.attention import NAME, Kept
from rope_ext.attention.mapped_cache import keep_mapped
from rope_ext.attention.registered import SOURCE
from rope_ext.checkpoint import rope_configs
from rope_ext.config import Method
from rope_ext.encodings.bias import BiasMethod
from rope_ext.encodings.embedding import EmbeddingMethod
from rope_ext.encodings.qk import Dynamic, Turning
from rope_ext.encodings.raw import Host, RawMethod
from rope_ext.encodings.rotary import Rotary, RotaryMethod, schedule
from rope_ext.registry import METHODS

from . import arguments
from .base import Adapter, Channels, Patch, State, Swap, copy_configs
from .positions import (
    AddVectors,
    GuardedRotary,
    Positions,
    Source,
    VectorPositions,
    additions,
    attention_modules,
    attention_note,
    keeps_mapped,
    raw_form,
    with_scale,
)
from .rope_config import SLIDING, UNSTOCKABLE, CheckpointRope, expressions, text_config, write_patch
from .rotary_found import Found, find, geometry
from .rotary_module import (
    GrowingRotary,
    PatchedRotary,
    Tables,
    build,
    build_as_stock,
    hand_back,
    holds,
    set_table,
    table_of,
)
from .score_scale import READ, may_scale_scores, rescaled, score_scales

SEAMS = frozenset({"rotary", "qk", "bias", "scores", "embedding"})
"""Every seam: what an architecture hosts whose attention goes through transformers' attention interface."""


class RotaryAdapter(Adapter):
    """Hosts the rotary seam on every architecture whose rotary module it can rebuild and check."""

    seams: ClassVar[frozenset[str]] = frozenset({"rotary"})

    def refusal(self, method: type[Method]) -> str | None:
        reason = super().refusal(method)
        try:
            rope, modules = find(self.model)
            geometry(rope, modules, rope.max_length)
        except ValueError as error:
            reason = reason or str(error)
        return reason

    def plan(self, encoding: Method) -> Patch:
        if isinstance(encoding, Turning):
            self._check_growth(encoding)
        if isinstance(encoding, Dynamic) and not encoding.exact:
            return self._plan_dynamic_as_stock(encoding)
        if isinstance(encoding, RotaryMethod) and encoding.window is None:
            return self._plan_rotary(encoding)
        if isinstance(encoding, EmbeddingMethod):
            return self._plan_embedding(encoding)
        return self._plan_attention(encoding)

    def _check_growth(self, encoding: Turning) -> None:
        for section in find(self.model)[0].sections.values():
            rope_type = section.get("rope_type", "default")
            if rope_type not in encoding.starts_from:
                raise ValueError(
                    f"{encoding.name}: this checkpoint comes scaled ({rope_type!r}, factor {section.get('factor')}), "
                    "and a method that grows with the length would drop its table inside the trained length, too. Take "
                    "a static method (yarn, ntk ...), or load it with rope_parameters of rope_type 'default'."
                )

    def _plan_rotary(self, encoding: RotaryMethod) -> Patch:
        """The rotary modules turn otherwise; nothing else changes."""
        rope, modules = find(self.model)
        trained = geometry(rope, modules, encoding.original_max_position_embeddings)
        tables = {key: checked_table(encoding, rotary) for key, rotary in trained.items()}
        length = next(iter(trained.values())).trained_length
        usable = round(length * encoding.extension)

        stock, parameters = "", rope.with_sections({key: {"rope_type": UNSTOCKABLE} for key in trained})
        scales: dict[nn.Module, float] | None = None
        for rope_type, sections in expressions(encoding, trained):
            candidate = rope.config()
            write_patch(candidate, rope.with_sections(sections), usable, length)
            found = self._score_scales(rope, candidate.rope_parameters)
            scales = found if scales is None else scales  # as under the method's own type, the first
            if found == scales and holds(build_as_stock(type(modules[0].module), candidate), tables):
                stock, parameters = rope_type, candidate.rope_parameters
                break

        configs = self._configs(encoding, rope, parameters, usable, length)
        swaps = self._swaps(rope, modules, configs, tables, follows_config=bool(stock), scales=scales)
        state = self._state_of(encoding, rope, trained, usable, tables, stock=stock)
        return Patch(self.model, encoding, state, swaps, configs, hooks=self._told())

    def _plan_dynamic_as_stock(self, encoding: Dynamic) -> Patch:
        """A table for each call, from its last position; cached keys keep theirs."""
        rope, modules = find(self.model)
        trained = geometry(rope, modules, encoding.original_max_position_embeddings)
        length = next(iter(trained.values())).trained_length
        if None not in trained:
            raise ValueError("dynamic: option `exact`=False needs one rotary table for all layers; leave it out.")
        parameters = rope.with_sections({None: encoding.native(trained[None]) or {}})
        # stock reads L0 from max_position_embeddings
        configs = self._configs(encoding, rope, parameters, length, length)
        tables = {key: encoding.table(rotary, length) for key, rotary in trained.items()}
        grown = partial(GrowingRotary, table=partial(encoding.table, trained[None]), trained_length=length)
        swaps = self._swaps(rope, modules, configs, tables, follows_config=True, kind=grown)
        usable = round(length * encoding.extension)
        at_usable = {key: encoding.table(rotary, usable) for key, rotary in trained.items()}
        state = self._state_of(encoding, rope, trained, usable, at_usable, stock="dynamic")
        return Patch(self.model, encoding, state, swaps, configs, hooks=self._told())

    def _plan_attention(self, encoding: Method) -> Patch:
        """Attention is computed by rope_ext; what the rotary modules are left to turn follows from the method."""
        if "bias" not in self.seams:  # a rotary method with a pattern; others were refused
            raise ValueError(
                f"{self.model.config.model_type}: {encoding.name} with these options needs attention computed by "
                "rope_ext, which this architecture does not host; only rotary methods without a pattern."
            )
        rope, modules = find(self.model)
        assert isinstance(encoding, (RotaryMethod, BiasMethod, RawMethod))
        trained = geometry(rope, modules, encoding.original_max_position_embeddings)
        (rotary,) = trained.values()
        usable = round(rotary.trained_length * encoding.extension)
        text = text_config(self.model.config)
        slides = getattr(text, "sliding_window", None)
        if (encoding.sinks or encoding.global_tokens) and slides and getattr(text, "use_sliding_window", True):
            raise ValueError(
                f"{encoding.name}: options `sinks` and `global_tokens` keep keys that this checkpoint's own sliding "
                f"window ({text.sliding_window} tokens) lets go; load it with sliding_window=None, or leave them out."
            )
        form, host = raw_form(encoding), self._host(rotary)
        if isinstance(form, RawMethod):
            form.check(host)
        tables: Tables = still(trained)
        channels: Tables = {}
        if isinstance(encoding, RotaryMethod):
            channels = {None: checked_table(encoding, rotary)}
            tables = channels if isinstance(form, Kept) else tables
        elif isinstance(encoding, Turning):
            last = encoding.stages(torch.tensor([[usable - 1]]), host)
            channels = {None: encoding.table(rotary, int(last))}

        parameters = rope.with_sections({key: {"rope_type": UNSTOCKABLE} for key in trained})
        configs = self._configs(encoding, rope, parameters, usable, rotary.trained_length)
        for _, new in configs:
            new._attn_implementation = NAME
        swaps = self._swaps(rope, modules, configs, tables, kind=GuardedRotary)
        attentions = attention_modules(self.model)
        added: list[tuple[nn.Module, str, nn.Module]] = []
        root = self.model.base_model
        if isinstance(form, Kept):
            sources: list[Any] = [form] * len(attentions)
        else:
            module = Positions(form, host, next(attentions[0].parameters()))
            added = additions(root, module)
            sources = [Source(root, module, layer) for layer in range(len(attentions))]
        note = attention_note(encoding, self.model, causal=True)
        state = self._state_of(encoding, rope, trained, usable, channels, attention=note)
        attributes = [(module, SOURCE, source) for module, source in zip(attentions, sources, strict=True)]
        hooks = [*self._told(), *[(root, keep_mapped)] * keeps_mapped(form)]
        return Patch(self.model, encoding, state, swaps, configs, attributes, added, hooks)

    def _plan_embedding(self, encoding: EmbeddingMethod) -> Patch:
        """The rotary modules turn nothing; vectors are added to what the first layer reads."""
        rope, modules = find(self.model)
        trained = geometry(rope, modules, encoding.original_max_position_embeddings)
        rotary, first = next(iter(trained.values())), first_layer(self.model)
        encoding = with_scale(encoding, self.model)
        parameters = rope.with_sections({key: {"rope_type": UNSTOCKABLE} for key in trained})
        usable = rotary.trained_length
        configs = self._configs(encoding, rope, parameters, usable, usable)
        swaps = self._swaps(rope, modules, configs, still(trained))
        root, like = self.model.base_model, next(first.parameters())
        module = VectorPositions(encoding, self._host(rotary), like)
        state = self._state_of(encoding, rope, trained, usable, {})
        hooks: list[Any] = [*self._told(), (first, AddVectors(root, module))]
        return Patch(self.model, encoding, state, swaps, configs, additions=additions(root, module), hooks=hooks)

    def _told(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The hooks that see to what the model is told about positions and documents."""
        windows = self._windows() if "bias" in self.seams else None
        roots = [found.parent for found in find(self.model)[1]]
        return arguments.hooks(self.model, roots, arguments.Told(windows=windows))

    def _windows(self) -> dict[str, int | None]:
        """Tokens that queries of a layer see up to themselves, by layer type; under "" where all layers are alike."""
        text = text_config(self.model.config)
        window = getattr(text, "sliding_window", None)
        types = getattr(text, "layer_types", None) or [""]
        found = {kind: None if kind == "full_attention" else window for kind in types}
        return found if len(found) > 1 else {"": next(iter(found.values()))}

    def _host(self, rotary: Rotary) -> Host:
        text = text_config(self.model.config)
        heads, layers = int(text.num_attention_heads), int(text.num_hidden_layers)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        return Host(rotary, layers, heads, head_dim, int(text.hidden_size))

    def _state_of(
        self,
        encoding: Any,
        rope: CheckpointRope,
        trained: dict[str | None, Rotary],
        usable: int,
        tables: Tables,
        stock: str = "",
        attention: str = "",
    ) -> State:
        return State(
            method=encoding.name,
            trained_length=next(iter(trained.values())).trained_length,
            usable_length=usable,
            attention_scaling=next((factor for _, factor in tables.values()), 1.0),
            channels=_channels({key: rotary for key, rotary in trained.items() if key in tables}, tables),
            fine_tuning=encoding.fine_tuning,
            stock=stock,
            notes=_notes(rope),
            attention=attention,
        )

    def _configs(
        self, encoding: Method, rope: CheckpointRope, parameters: dict[str, Any], usable: int, length: int
    ) -> list[tuple[PreTrainedConfig, PreTrainedConfig]]:
        """(original, patched) configs."""
        configs, kinds = copy_configs(self.model), {type(text) for text in rope.texts}
        for old, new in configs:
            for text in rope_configs(new):
                if type(text) in kinds:
                    write_patch(text, parameters, usable, length)
            if old is self.model.config:
                new.rope_ext = {**encoding.to_dict(), "original": rope.original}
        return configs

    def _swaps(
        self,
        rope: CheckpointRope,
        modules: list[Found],
        configs: list[tuple[PreTrainedConfig, PreTrainedConfig]],
        tables: Tables,
        follows_config: bool = False,
        kind: Callable[[nn.Module], PatchedRotary] = PatchedRotary,
        scales: dict[nn.Module, float] | None = None,
    ) -> list[Swap]:
        """Patched modules for the model's; ``follows_config``: the patched config says what they hold.

        ``scales``: by what attention multiplies its scores; by default as the patched config says.
        """
        patched = {id(old): new for old, new in configs}
        if scales is None:
            scales = self._score_scales(rope, patched[id(modules[0].module.config)].rope_parameters)
        swaps = rescaled(scales)
        for found in modules:
            config = patched[id(found.module.config)]
            host = build(type(found.module), config if follows_config else rope.config(of=config))
            host.config = config  # type: ignore[assignment]
            if not follows_config:
                for key, (frequencies, scaling) in tables.items():
                    set_table(host, key, frequencies, scaling)
            new, device = kind(host), next(found.module.buffers()).device
            new = new if device.type == "meta" else new.to(device)
            swaps.append(Swap(found.parent, found.name, found.module, new, hand_back))
        return swaps

    def _score_scales(self, rope: CheckpointRope, parameters: dict[str, Any]) -> dict[nn.Module, float]:
        """By what attention multiplies its scores under these ``rope_parameters``, where it may depend on them."""
        if not may_scale_scores(rope.text.rope_parameters, parameters):
            return {}
        return score_scales(self.model, rope.config(parameters))

    def state(self) -> State:
        rope, modules = find(self.model)
        module = modules[0].module
        notes = _notes(rope)
        try:
            trained = geometry(rope, modules, None)
        except ValueError as error:  # the config leaves L0 open: patching asks for it, a report need not
            trained = geometry(rope, modules, rope.max_length)
            notes += (f"the trained length is a guess: {error}",)
        built = build(type(module), rope.text)
        expected = {key: table_of(built, key) for key in trained}
        tables = {key: table_of(module, key) for key in trained}
        if any(table.is_meta for table, _ in tables.values()):
            tables = expected
        elif any(not torch.allclose(tables[key][0].cpu().float(), expected[key][0], rtol=0.02) for key in trained):
            notes += ("the rotary module does not follow the config: edits of a loaded model's config change nothing",)
        key, first = next(iter(trained.items()))
        current = rope.text.rope_parameters if key is None else rope.text.rope_parameters[key]
        length, usable = first.trained_length, rope.text.max_position_embeddings
        if current["rope_type"] == "dynamic":
            usable = round(length * current["factor"])
        record = getattr(self.model.config, "rope_ext", None)
        if record:
            notes += (f"saved by rope_ext under {record['method']}; load_patched makes it a patch that can be undone",)
        method = METHODS.get(record["method"] if record else current["rope_type"])
        return State(
            method=record["method"] if record else current["rope_type"].replace("default", "rope"),
            trained_length=length,
            usable_length=max(length, usable),
            attention_scaling=float(tables[key][1]),
            channels=_channels(trained, tables),
            fine_tuning=method.fine_tuning if record and method else "not needed",
            stock=current["rope_type"],
            notes=notes,
        )


def checked_table(encoding: RotaryMethod, rotary: Rotary) -> tuple[Tensor, float]:
    """The method's frequencies and factor, checked: a registered method may return anything."""
    frequencies, scaling = encoding.frequencies(rotary), float(encoding.attention_scaling(rotary))
    shape = (rotary.dim // 2,)
    if tuple(frequencies.shape) != shape or not torch.isfinite(frequencies).all() or (frequencies < 0).any():
        raise ValueError(f"{encoding.name}.frequencies must return {shape} finite numbers >= 0, got {frequencies!r}.")
    if not (math.isfinite(scaling) and scaling > 0):
        raise ValueError(f"{encoding.name}.attention_scaling must return a finite number > 0, got {scaling!r}.")
    return frequencies.detach().to(device="cpu", dtype=torch.float32), scaling


def still(trained: dict[str | None, Rotary]) -> Tables:
    """Tables that turn nothing."""
    return {key: (torch.zeros(rotary.dim // 2), 1.0) for key, rotary in trained.items()}


def first_layer(model: PreTrainedModel) -> nn.Module:
    """The first decoder layer, checked for being told the positions."""
    layers = getattr(model.base_model, "layers", None)
    told = inspect.signature(type(layers[0]).forward).parameters if isinstance(layers, nn.ModuleList) else {}
    if not isinstance(layers, nn.ModuleList) or "position_ids" not in told:
        raise ValueError(
            f"{model.config.model_type}: its layers are not called with position_ids, so nothing can be added there."
        )
    return layers[0]


def _channels(trained: dict[str | None, Rotary], tables: Tables) -> tuple[Channels, ...]:
    return tuple(
        Channels(key, schedule(rotary.dim, rotary.base), tables[key][0].detach().cpu().float())
        for key, rotary in trained.items()
    )


def _notes(rope: CheckpointRope) -> tuple[str, ...]:
    notes = []
    for section in rope.sections.values():
        if section.get("rope_type", "default") != "default":
            pair = ", ".join(f"{name} {section[name]:g}" for name in ("mscale", READ) if section.get(name))
            scaling = f"{section['rope_type']}, {pair}" if pair else section["rope_type"]
            notes.append(f"the checkpoint comes scaled ({scaling}); a method replaces that scaling")
    if rope.per_layer_type:
        notes += [f"{key} layers keep their own rotary table" for key in rope.parameters if SLIDING in key]
    elif getattr(rope.text, "sliding_window", None) and getattr(rope.text, "use_sliding_window", True):
        notes.append(f"layers with a sliding window see at most {rope.text.sliding_window} tokens back")
    return tuple(notes)
