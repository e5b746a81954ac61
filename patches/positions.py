"""What stands for an encoding in a patched model: its learned parameters, and what attention modules ask for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_ext.attention import NAME, Kept, Layout, choose
from rope_ext.checkpoint import LEARNED
from rope_ext.encodings.bias import Bias, BiasMethod
from rope_ext.encodings.embedding import EmbeddingMethod
from rope_ext.encodings.qk import QkMethod, StaticTable
from rope_ext.encodings.raw import Encoder, Host, RawMethod
from rope_ext.encodings.rotary import RotaryMethod
from rope_ext.encodings.scores import ZonedMethod

from .rotary_module import PatchedRotary

ADDED = LEARNED.removesuffix(".")
"""Where a model keeps what its encoding learns: a child of the base model, or of each T5 stack."""


class Positions(nn.Module):
    """A method on a host: its learned parameters, if any, under their own names."""

    method: BiasMethod | RawMethod | EmbeddingMethod
    host: Host

    def __init__(self, method: BiasMethod | RawMethod | EmbeddingMethod, host: Host, like: Tensor) -> None:
        super().__init__()
        self.method, self.host = method, host
        with torch.device("cpu"):
            if isinstance(method, BiasMethod):
                started = method.parameters(host.heads)
            elif isinstance(method, EmbeddingMethod):
                started = method.parameters(host.width, host.rotary.trained_length)
            else:
                started = method.parameters(host)
        for name, value in started.items():
            self.register_parameter(name, nn.Parameter(value.to(device=like.device, dtype=like.dtype)))

    def forward(self, causal: bool, layer: int) -> Bias | Encoder:
        """What one layer's attention needs."""
        learned = dict(self.named_parameters())
        if isinstance(self.method, BiasMethod):
            return Bias(self.method, self.host.heads, causal, learned)
        assert isinstance(self.method, RawMethod)
        return Encoder(self.method, self.host, causal, {name: value[layer] for name, value in learned.items()})


class VectorPositions(Positions):
    """A method of the embedding seam on a host."""

    def forward(self, positions: Tensor) -> Tensor:  # type: ignore[override]
        """The vectors of positions in tokens, shape (\\*positions.shape, width), fp32."""
        assert isinstance(self.method, EmbeddingMethod)
        learned = {name: value.float() for name, value in self.named_parameters()}
        return self.method.vectors(positions, self.host.width, learned)


class Source:
    """One layer's encoding, from the module that is a child of ``root`` whatever it has been wrapped into by now
    (PEFT's ``modules_to_save``); without learned parameters the module has no place in the model, and is held here.
    """

    root: nn.Module
    layer: int

    def __init__(self, root: nn.Module, module: Positions, layer: int = 0) -> None:
        self.root, self.layer = root, layer
        self._alone = None if module.state_dict() else module

    @property
    def module(self) -> Any:
        return getattr(self.root, ADDED) if self._alone is None else self._alone

    def __call__(self, causal: bool) -> Bias | Encoder:
        """Called with whether the host is a decoder."""
        given: Bias | Encoder = self.module(causal, self.layer)
        return given


class AddVectors(Source):
    """A hook before the first layer: adds the vectors of the embedding seam to the hidden states."""

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # type: ignore[override]
        layout = next((given for given in (*args, *kwargs.values()) if isinstance(given, Layout)), None)
        positions = kwargs.get("position_ids")
        if layout is not None:
            positions = layout.counted().query_positions(layout.device)
        if positions is None:
            raise ValueError(
                f"{type(layer).__name__} was not told the positions: was the attention implementation changed after "
                "patching? Unpatch first."
            )
        if args:
            return (self._added(args[0], positions), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._added(kwargs["hidden_states"], positions)}

    def _added(self, states: Tensor, positions: Tensor) -> Tensor:
        return states + self.module(positions.to(states.device)).to(states)


def additions(root: nn.Module, module: Positions) -> list[tuple[nn.Module, str, nn.Module]]:
    """What has to be added to a model for an encoding that learns."""
    return [(root, ADDED, module)] if module.state_dict() else []


def raw_form(method: Any) -> Any:
    """The method as attention computes it: a rotary one with sinks needs its keys raw, else it is done before."""
    if not isinstance(method, RotaryMethod):
        return method
    window, sinks, tokens = method.pattern
    return StaticTable(of=method, window=window, sinks=sinks, global_tokens=tokens or None) if sinks else Kept(method)


def keeps_mapped(form: Any) -> bool:
    """Whether mapped keys are worth keeping: they stay the same from one decoding step to the next."""
    return isinstance(form, (QkMethod, ZonedMethod)) and not (form.learns or form.sinks or form.global_tokens)


class GuardedRotary(PatchedRotary):
    """A rotary module that sees to it that what attention does in its stead, or beside it, is not lost."""

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        check_attention(self._host[0].config)  # type: ignore[arg-type]
        return super().forward(x, position_ids, layer_type)


def check_attention(config: PreTrainedConfig) -> None:
    """ValueError where the model no longer calls rope_ext's attention, which would leave it without its encoding."""
    if config._attn_implementation != NAME:
        raise ValueError(
            f"the attention implementation was changed to {config._attn_implementation!r} after patching; the position "
            "encoding would be lost. Call unpatch_model first (rope_ext chooses its attention backend by itself)."
        )


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a Llama-like model."""
    return [module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "layer_idx")]


def token_rms(model: PreTrainedModel) -> float:
    """The root mean square of the token embeddings."""
    weight = next(model.get_input_embeddings().parameters())
    if weight.is_meta:
        return 1.0
    return float(torch.linalg.vector_norm(weight.detach(), dtype=torch.float32)) / weight.numel() ** 0.5


def with_scale(encoding: EmbeddingMethod, model: PreTrainedModel) -> EmbeddingMethod:
    """The method with its scale settled, so that a saved model does not depend on what its embeddings become."""
    if encoding.scale is not None:
        return encoding
    return dataclasses.replace(encoding, scale=encoding.default_scale(token_rms(model)))


def attention_note(method: Any, model: PreTrainedModel, causal: bool) -> str:
    """What ``describe`` says of the backend: for a long forward, and for training what the method learns."""
    if isinstance(method, QkMethod) and not method.sinks and not method.global_tokens:
        return "mapped: queries and raw keys are mapped by their positions, then the usual kernels"
    device = next(model.parameters()).device.type
    if isinstance(method, ZonedMethod) and not method.sinks and not method.global_tokens and device == "cpu":
        return "zoned: queries and raw keys are turned for each zone, then fused kernels zone by zone"
    if isinstance(method, RawMethod):
        return "blockwise: scores are computed from raw queries and keys, a block of queries at a time"
    bias = method if isinstance(method, BiasMethod) else None
    weight = next(model.parameters())
    asked = {"device": weight.device.type, "dtype": weight.dtype, "causal": causal}
    asked["patterned"] = bool(getattr(method, "sinks", 0) or getattr(method, "global_tokens", None))
    chosen = choose(bias, **asked)  # type: ignore[arg-type]
    text = f"{chosen.way}: {chosen.reason}"
    if bias is not None and bias.learns:
        trained = choose(bias, **asked, gradient=True)  # type: ignore[arg-type]
        text += f"; training its parameters {trained.way}" if trained.way != chosen.way else ""
    return text
