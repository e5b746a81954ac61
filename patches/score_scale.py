"""Attention that is built to scale its scores by the rope parameters: DeepSeek's reads ``mscale_all_dim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .base import Swap

READ = "mscale_all_dim"
"""The entry of ``rope_parameters`` that some attention modules read."""


def score_scales(model: PreTrainedModel, config: PreTrainedConfig) -> dict[nn.Module, float]:
    """By what each attention module multiplies its scores when stock transformers builds it from this text config.

    Found out by building it, without weights: whether a module reads the entry is for the module to show.

    Raises:
        ValueError: a module cannot be built that way.
    """
    scales = {}
    for name, module in model.named_modules():
        own = module.__dict__
        if "scaling" in own and "layer_idx" in own and type(own.get("config")) is type(config):
            try:
                with torch.device("meta"):
                    scales[module] = type(module)(config, own["layer_idx"]).scaling
            except Exception as error:
                raise ValueError(
                    f"{name} ({type(module).__name__}) cannot be built to see whether its scores follow "
                    f"rope_parameters[{READ!r}]: {error!r}."
                ) from error
    return scales


def rescaled(scales: Mapping[nn.Module, float]) -> list[Swap]:
    """The scales in place of those that modules have, where they differ."""
    return [
        Swap(module, "scaling", module.scaling, scale) for module, scale in scales.items() if module.scaling != scale
    ]


def may_scale_scores(*parameters: Mapping[str, Any]) -> bool:
    """Whether attention could find the entry in any of these ``rope_parameters``."""
    sections = [part for given in parameters for part in (given, *given.values()) if isinstance(part, Mapping)]
    return any(READ in section for section in sections)
