"""Two plain dicts: method name -> encoding class, ``model_type`` -> adapter. Duplicates are refused.

Adapters are named by import path and imported when first asked for, so this package never imports ``patches``.
"""

from __future__ import annotations

import difflib
import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from rope_ext.config import Method, record_of
from rope_ext.encodings import bias, embedding, qk, rotary, scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext.patches.base import Adapter

METHODS: dict[str, type[Method]] = {
    method.name: method for seam in (rotary, qk, bias, scores, embedding) for method in seam.METHODS
}

ADAPTERS: dict[str, str | type[Adapter]] = {
    "bloom": "rope_ext.patches.bloom:BloomAdapter",
    "falcon": "rope_ext.patches.falcon:falcon",
    "llama": "rope_ext.patches.llama:LlamaAdapter",
    "mistral": "rope_ext.patches.mistral:MistralAdapter",
    "mpt": "rope_ext.patches.mpt:MptAdapter",
    "qwen2": "rope_ext.patches.qwen:QwenAdapter",
    "qwen2_moe": "rope_ext.patches.qwen:QwenAdapter",
    "qwen3": "rope_ext.patches.qwen:QwenAdapter",
    "qwen3_moe": "rope_ext.patches.qwen:QwenAdapter",
    "t5": "rope_ext.patches.t5:T5Adapter",
    "mt5": "rope_ext.patches.t5:T5Adapter",
    "umt5": "rope_ext.patches.t5:UMT5Adapter",
}

GENERIC_ADAPTER = "rope_ext.patches.rotary:RotaryAdapter"
"""Takes any other architecture that has a rotary module it understands."""


def register_method(method: type[Method]) -> type[Method]:
    """Add an encoding under its ``name``; usable as a class decorator.

    Raises:
        TypeError: not a subclass of a seam's base class.
        ValueError: the name is taken.
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise TypeError(f"register_method takes a class derived from RotaryMethod (or another seam's), got {method!r}.")
    for attribute in ("name", "seam", "formula", "source", "fine_tuning"):
        if not isinstance(getattr(method, attribute, None), str):
            raise TypeError(f"{method.__name__} needs a class attribute `{attribute}` of type str.")
    if method.name in METHODS:
        raise ValueError(f"method name {method.name!r} is taken by {METHODS[method.name].__name__}; choose another.")
    METHODS[method.name] = method
    return method


def register_adapter(adapter: type[Adapter]) -> type[Adapter]:
    """Add an adapter for each of its ``model_types``; usable as a class decorator.

    Raises:
        TypeError: not an adapter class.
        ValueError: it names no model type, or one that is taken.
    """
    if not (isinstance(adapter, type) and hasattr(adapter, "plan")):
        raise TypeError(f"register_adapter takes a class derived from Adapter or RotaryAdapter, got {adapter!r}.")
    if not adapter.model_types:
        raise ValueError(f"{adapter.__name__}.model_types is empty; name the config.model_type it is for.")
    for model_type in adapter.model_types:
        if model_type in ADAPTERS:
            raise ValueError(f"model_type {model_type!r} already has an adapter: {ADAPTERS[model_type]!r}.")
    ADAPTERS.update(dict.fromkeys(adapter.model_types, adapter))
    return adapter


def find_method(name: str) -> type[Method]:
    """The encoding class of that name; ``ValueError`` lists the names if there is none."""
    if name not in METHODS:
        close = difflib.get_close_matches(name, METHODS, n=1)
        hint = f" did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown method {name!r};{hint} known: {', '.join(sorted(METHODS))}.")
    return METHODS[name]


def find_adapter(model: PreTrainedModel) -> Adapter:
    """The adapter for this model: its architecture's own, else the generic rotary one.

    Raises:
        ValueError: what the model's config records of a patch is damaged.
    """
    record_of(model.config)
    entry = ADAPTERS.get(model.config.model_type, GENERIC_ADAPTER)
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(importlib.import_module(module), name)
    adapter: Adapter = entry(model)
    return adapter


def compat() -> ModuleType:
    """``rope_ext.patches._compat``: the one file that knows transformers versions apart."""
    return importlib.import_module("rope_ext.patches._compat")
