"""Longer contexts for Hugging Face models: swap a checkpoint's position encoding with one call, and take it back."""

from importlib.metadata import version

from rope_ext.api import Description, MethodInfo, describe, methods, patch_model, patched, unpatch_model
from rope_ext.checkpoint import export, load_adapter, load_patched, save_adapter
from rope_ext.registry import register_adapter, register_method

__version__ = version("rope_ext")

__all__ = [
    "Description",
    "MethodInfo",
    "describe",
    "export",
    "load_adapter",
    "load_patched",
    "methods",
    "patch_model",
    "patched",
    "register_adapter",
    "register_method",
    "save_adapter",
    "unpatch_model",
]
