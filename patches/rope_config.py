"""Reading and writing the rope entries of a transformers config."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from transformers import PreTrainedConfig

from rope_ext.checkpoint import PATCHED_ENTRIES, rope_configs
from rope_ext.encodings.rotary import Rotary, RotaryMethod, divisor_lists, schedule

Sections = dict[str | None, dict[str, Any]]
"""``rope_parameters`` by layer type; the key is None where one entry serves all layers."""

SLIDING = "sliding"
"""Layers of a type with this in its name see a fixed window whatever the context: their table stays as trained."""

UNSTOCKABLE = "requires rope_ext.load_patched"
"""The ``rope_type`` of a config that stock transformers cannot express: loading it there fails, naming the way out."""

SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Every ``rope_type`` whose unscaled table is base^(-2i/d)."""

SCALING_KEYS = frozenset(
    "rope_type type factor original_max_position_embeddings attention_factor beta_fast beta_slow short_factor "
    "long_factor low_freq_factor high_freq_factor mscale mscale_all_dim truncate".split()
)
"""Entries of ``rope_parameters`` that describe a scaling; the others (base, partial rotary ...) describe the model."""


class CheckpointRope:
    """What a checkpoint's config said about its positions before any patch.

    ``held``: the layer types that the model has a table for (a config may name more); None: one table serves all.

    Raises:
        ValueError: there is nothing to scale, or an encoder and its decoder differ in it.
    """

    def __init__(self, config: PreTrainedConfig, held: Collection[str | None]) -> None:
        self.held, self.texts = held, rope_configs(config)
        self.text = self.texts[-1]
        record = getattr(config, "rope_ext", None)
        if record:
            self.original: dict[str, Any] = copy.deepcopy(record["original"])
        else:
            self.original, *others = (
                {name: copy.deepcopy(getattr(text, name)) for name in PATCHED_ENTRIES if hasattr(text, name)}
                for text in reversed(self.texts)
            )
            for other in others:
                if other != self.original:
                    raise ValueError(
                        f"{config.model_type}: its encoder has {other}, its decoder {self.original}; one method is "
                        "hosted on both stacks only where these agree."
                    )
        if not self.original.get("rope_parameters") or "max_position_embeddings" not in self.original:
            raise ValueError(
                f"{config.model_type}: its config has no rope_parameters or max_position_embeddings to scale."
            )
        self.parameters: dict[str, Any] = self.original["rope_parameters"]
        unknown = [key for key in held if key and key not in (getattr(self.text, "layer_types", None) or ())]
        if unknown:
            raise ValueError(
                f"{config.model_type}: its rotary tables are for {unknown}, which are not its layer_types; which of "
                "them serve sliding windows, and have to stay as they are, is not said."
            )
        for section in self.sections.values():
            if section.get("rope_type", "default") not in SCALINGS:
                raise ValueError(
                    f"{config.model_type}: rope_type {section['rope_type']!r} is not one that a method can take the "
                    f"place of ({', '.join(SCALINGS)})."
                )
        self.max_length: int = self.original["max_position_embeddings"]
        self.given_length: int | None = record["options"].get("original_max_position_embeddings") if record else None

    @property
    def sections(self) -> Sections:
        """The entries that a method changes."""
        layered = {key: value for key, value in self.parameters.items() if isinstance(value, dict)}
        if not layered:
            return {None: self.parameters}
        return {key: value for key, value in layered.items() if key in self.held and SLIDING not in key}

    @property
    def per_layer_type(self) -> bool:
        """Whether layers of different types have tables of their own."""
        return None not in self.sections

    def with_sections(self, changed: Sections) -> dict[str, Any]:
        """Full ``rope_parameters``: the changed entries written in, the model's own entries kept."""
        parameters = copy.deepcopy(self.parameters)
        for key, section in self.sections.items():
            kept = {name: value for name, value in section.items() if name not in SCALING_KEYS}
            if "llama_4_scaling_beta" in section:  # attention of its own reads L0 here, whatever the scaling
                kept["original_max_position_embeddings"] = section["original_max_position_embeddings"]
            if key is None:
                parameters = {**kept, **changed[None]}
            else:
                parameters[key] = {**kept, **changed[key]}
        return parameters

    def trained_length(self, section: dict[str, Any]) -> int:
        """L0 in tokens; ValueError where the config leaves it open."""
        if self.given_length is not None:
            return self.given_length
        rope_type = section.get("rope_type", section.get("type", "default"))
        recorded = self.original.get("original_max_position_embeddings")
        if rope_type in ("yarn", "llama3", "longrope"):
            return int(recorded or section["original_max_position_embeddings"])
        if rope_type == "linear" and section.get("factor", 1) != 1 and not recorded:
            raise ValueError(
                f"this checkpoint is already scaled ('linear', factor {section['factor']:g}) and its config does not "
                f"say whether max_position_embeddings={self.max_length} is the length before or after that. "
                "Pass original_max_position_embeddings=<length it was pretrained at>."
            )
        return int(recorded) if recorded and rope_type != "dynamic" else self.max_length

    def config(self, parameters: dict[str, Any] | None = None, of: PreTrainedConfig | None = None) -> PreTrainedConfig:
        """A copy (``of`` the decoder's text config) with these ``rope_parameters``, else the original ones, and the
        original length.
        """
        config = copy.deepcopy(of or self.text)
        config.rope_parameters = copy.deepcopy(parameters or self.parameters)
        config.max_position_embeddings = self.max_length
        return config


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text decoder: the config itself, or the part of a multimodal one."""
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


def write_patch(config: PreTrainedConfig, parameters: dict[str, Any], usable: int, trained: int) -> None:
    """Write a patch's entries into a text config; L0 beside ``rope_parameters`` whose type has no place for it."""
    config.rope_parameters = copy.deepcopy(parameters)
    config.max_position_embeddings = usable
    sections = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    stated = any("original_max_position_embeddings" in section for section in sections)
    if hasattr(config, "original_max_position_embeddings") or (usable != trained and not stated):
        config.original_max_position_embeddings = trained


def expressions(encoding: RotaryMethod, trained: dict[str | None, Rotary]) -> Iterator[tuple[str, Sections]]:
    """(rope_type, sections): ways to say a method in stock terms: its native type, then a list of divisors."""
    native = {key: encoding.native(rotary) for key, rotary in trained.items()}
    sections: Sections = {key: section for key, section in native.items() if section is not None}
    if len(sections) == len(trained):
        yield next(iter(sections.values()))["rope_type"], sections
    yield "longrope", {key: _as_divisors(encoding, rotary) for key, rotary in trained.items()}


def _as_divisors(encoding: RotaryMethod, rotary: Rotary) -> dict[str, Any]:
    """Any table of frequencies is theta_i / lambda_i for some lambda."""
    wanted = encoding.frequencies(rotary).double().clamp(min=1e-30)
    divisors = schedule(rotary.dim, rotary.base).double() / wanted
    return divisor_lists(encoding, rotary, divisors.tolist())
