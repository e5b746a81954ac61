"""Finding a model's rotary modules, and the unscaled geometry that they were trained with."""

from __future__ import annotations

import inspect
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_ext.checkpoint import rope_configs
from rope_ext.encodings.rotary import Rotary, schedule

from .rope_config import CheckpointRope
from .rotary_module import build, layer_types, same, table_of


class Found(NamedTuple):
    """A rotary module and its place: ``parent.name`` is ``module``."""

    parent: nn.Module
    name: str
    module: nn.Module


def find(model: PreTrainedModel) -> tuple[CheckpointRope, list[Found]]:
    """(what the config says, the rotary modules): all that a plan starts from.

    Raises:
        ValueError: there are none, they are called in another way, or they do not all turn alike.
    """
    modules = rotary_modules(model)
    first, *others = (found.module for found in modules)
    held = layer_types(first)
    rope = CheckpointRope(model.config, held)
    for other in others:
        if layer_types(other) != held or not all(same(table_of(first, key), table_of(other, key)) for key in held):
            raise ValueError(
                f"{model.config.model_type}: its {len(modules)} rotary modules turn differently; a method is "
                "hosted on all or none."
            )
    return rope, modules


def rotary_modules(model: PreTrainedModel) -> list[Found]:
    """The rotary modules of the text model, or of both its stacks."""
    kind, texts = model.config.model_type, rope_configs(model.config)
    if getattr(texts[-1], "alibi", False):
        raise ValueError(f"{kind}: this checkpoint uses ALiBi; its rotary module is not called (config.alibi).")
    kinds, found = {type(text) for text in texts}, []
    for path, module in model.named_modules():
        tables = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if tables and type(module.__dict__.get("config")) in kinds:
            if "position_ids" not in inspect.signature(type(module).forward).parameters:
                raise ValueError(f"{kind}: {path} ({type(module).__name__}) is not called with position_ids.")
            parent, _, name = path.rpartition(".")
            found.append(Found(model.get_submodule(parent), name, module))
    if not found:
        raise ValueError(
            f"no rotary module found in {type(model).__name__} (model_type {kind!r}): nothing was replaced. "
            "Rotary encodings need a module that holds `inv_freq` and the text config."
        )
    return found


def geometry(rope: CheckpointRope, modules: list[Found], length: int | None) -> dict[str | None, Rotary]:
    """The unscaled geometry of each section, checked against the table that the host builds from it.

    Raises:
        ValueError: there is nothing to extend, or the host turns in a way that no method here can follow.
    """
    if not rope.sections:
        raise ValueError(
            f"{rope.text.model_type}: only its sliding-window layers turn, which no context outgrows; "
            "there is none to extend."
        )
    plain = rope.config(rope.with_sections({key: {"rope_type": "default"} for key in rope.sections}))
    kind = type(modules[0].module)
    try:
        host = build(kind, plain)
    except Exception as error:
        raise ValueError(f"{kind.__name__} cannot be built without the checkpoint's scaling: {error!r}.") from error
    trained = {}
    for key, section in rope.sections.items():
        table, base = table_of(host, key)[0], float(section["rope_theta"])
        dim = 2 * table.numel()
        if dim < 4:
            raise ValueError(f"rotary dimension {dim} is too small: the methods need at least 2 channel pairs.")
        if table.shape != (dim // 2,) or not torch.allclose(table, schedule(dim, base), rtol=1e-5):
            raise ValueError(
                f"{kind.__name__} does not rotate with base^(-2i/d) (base {base:g}, d {dim}): "
                "its frequencies cannot be rescaled by these methods."
            )
        trained[key] = Rotary(dim, base, length or rope.trained_length(section), section)
    return trained
