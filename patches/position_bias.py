"""The bias seam's module, and its host on rotary architectures: rotation muted, attention computed by rope_ext."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_ext.attention import NAME, choose
from rope_ext.checkpoint import LEARNED
from rope_ext.encodings.bias import Bias, BiasMethod

from .rotary_module import PatchedRotary

BiasSource = Callable[[bool], Bias]
"""Called with whether the host is a decoder, gives the bias of one attention call."""

ADDED = LEARNED.removesuffix(".")
"""Where a model keeps what its bias learns: a child of the base model, or of each T5 stack."""


class PositionBias(nn.Module):
    """A method on a host: its learned parameters, if any, under their own names. Called, it gives a Bias."""

    def __init__(self, method: BiasMethod, heads: int, like: Tensor) -> None:
        super().__init__()
        self.method, self.heads = method, heads
        with torch.device("cpu"):
            started = method.parameters(heads)
        for name, value in started.items():
            self.register_parameter(name, nn.Parameter(value.to(device=like.device, dtype=like.dtype)))

    def forward(self, causal: bool) -> Bias:
        return Bias(self.method, self.heads, causal, dict(self.named_parameters()))


class AtRoot:
    """The bias that is a child of ``root``, whatever it has been wrapped into by now (PEFT's ``modules_to_save``)."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    def __call__(self, causal: bool) -> Bias:
        bias: Bias = getattr(self.root, ADDED)(causal)
        return bias


def place_in(root: nn.Module, bias: PositionBias) -> tuple[BiasSource, list[tuple[nn.Module, str, nn.Module]]]:
    """(what gives attention modules the bias, what has to be added to the model for it)."""
    return (AtRoot(root), [(root, ADDED, bias)]) if bias.state_dict() else (bias, [])


class MutedRotary(PatchedRotary):
    """A rotary module that turns nothing, and sees to it that the bias in its stead is not lost."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        check_attention(self._host[0].config)  # type: ignore[arg-type]
        return super().forward(x, position_ids, layer_type)


def check_attention(config: PreTrainedConfig) -> None:
    """ValueError where the model no longer calls rope_ext's attention, which would leave it without positions."""
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the attention implementation was changed to {config._attn_implementation!r} after patching; the position "
            "bias would be lost. Call unpatch_model first (rope_ext chooses its attention backend by itself)."
        )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a Llama-like model."""
    return [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "layer_idx")]


def heads_of(config: PreTrainedConfig) -> int:
    """Query heads."""
    return int(config.num_attention_heads)


def attention_note(method: BiasMethod | None, model: PreTrainedModel, causal: bool) -> str:
    """What ``describe`` says of the backend: for a long forward, and for training what the bias learns."""
    weight = next(model.parameters())
    asked = {"device": weight.device.type, "dtype": weight.dtype, "causal": causal}
    chosen = choose(method, **asked)  # type: ignore[arg-type]
    text = f"{chosen.way}: {chosen.reason}"
    if method is not None and method.parameters(1):
        trained = choose(method, **asked, gradient=True)  # type: ignore[arg-type]
        text += f"; training its parameters {trained.way}" if trained.way != chosen.way else ""
    return text
