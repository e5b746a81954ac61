"""T5, mT5, UMT5 and Flan: a learned bias per bucket of distances, encoder and decoder, cross-attention without one."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from rope_ext.attention.registered import as_layout
from rope_ext.config import Method
from rope_ext.encodings.bias import Bias, BiasMethod, T5Bias

from ._compat import hooks_on_weights, wants_weights
from .base import Swap
from .hosted import EncodingSource, HostedAdapter, HostedAttention, Place, Rotation, Stack


class CheckpointTable:
    """The bias whose table is the embedding of a T5 attention module, wherever that embedding is by now."""

    method: T5Bias
    heads: int
    attention: HostedAttention

    def __init__(self, method: T5Bias, heads: int, attention: HostedAttention) -> None:
        self.method, self.heads, self.attention = method, heads, attention

    def __call__(self, causal: bool) -> Bias:
        table: nn.Module = self.attention.relative_attention_bias
        weight = next(table.parameters())
        # through its forward: the embedding may be wrapped, offloaded or trained by an adapter
        buckets = torch.arange(self.method.num_buckets or 0, device=weight.device)
        return Bias(self.method, self.heads, causal, {"table": table(buckets)})


class T5Attention(HostedAttention):
    """T5's attention with any bias or rotation, without a matrix of all pairs."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Any = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Tensor | None]:
        """As stock, but ``mask`` is a Layout, and no bias is handed on from layer to layer.

        hidden_states (batch, q_length, d_model), key_value_states (batch, kv_length, d_model) in cross-attention.
        """
        cache = past_key_values if cache is None else cache
        query = self._heads(self.q(hidden_states))
        if key_value_states is not None:
            key, value = self._cross_keys(key_value_states, cache)
            layout = as_layout(mask, query)
        else:
            key, value = self._heads(self.k(hidden_states)), self._heads(self.v(hidden_states))
            layout = as_layout(mask, query)
            if self.rotation is not None:
                query, key = self.rotation(query, key, layout)
            if cache is not None:
                own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
                key, value = own.update(key, value, self.layer_idx)
        weigh = output_attentions or wants_weights(self)
        dropout = self.dropout if self.training else 0.0
        output, seen = self.core(query, key, value, layout, 1.0, dropout, weigh)
        return self.o(output), None, seen

    def _heads(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)

    def _cross_keys(self, states: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output, computed once per generation."""
        paired = isinstance(cache, EncoderDecoderCache)
        if cache is not None and paired and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return layer.keys, layer.values
        key, value = self._heads(self.k(states)), self._heads(self.v(states))
        if cache is not None:
            key, value = (cache.cross_attention_cache if paired else cache).update(key, value, self.layer_idx)
            if paired:
                cache.is_updated[self.layer_idx] = True
        return key, value


class UMT5Attention(T5Attention):
    """The same under UMT5's argument names; each layer has a table of its own."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        output, _, seen = super().forward(hidden_states, attention_mask, encoder_hidden_states, **kwargs)
        return output, seen


class T5Adapter(HostedAdapter):
    """T5, T5 v1.1, Flan-T5 and mT5, whole or encoder alone."""

    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5")
    native: ClassVar[type[BiasMethod]] = T5Bias
    stand_in: ClassVar[type[HostedAttention]] = T5Attention
    length_name = "n_positions"
    usual_length = 512

    def stacks(self) -> list[Stack]:
        stacks = []
        for root in self.model.modules():
            blocks = getattr(root, "block", None)
            if not (isinstance(blocks, nn.ModuleList) and hasattr(root, "final_layer_norm")):
                continue
            places = []
            for block in blocks:
                for layer in block.get_submodule("layer").children():
                    for name, is_self in (("SelfAttention", True), ("EncDecAttention", False)):
                        if hasattr(layer, name):
                            places.append(Place(layer, name, getattr(layer, name), is_self))
            stacks.append(Stack(root, places))
        return stacks

    def first_layer(self, stack: Stack) -> nn.Module:
        block: nn.Module = stack.root.get_submodule("block.0")
        return block

    def native_entries(self, encoding: BiasMethod) -> dict[str, Any] | None:
        method = self._effective(encoding)
        if method.interpolate and method.factor != 1:
            return None
        return {"relative_attention_max_distance": round((method.max_distance or 128) * method.factor)}

    def native_biases(self, encoding: BiasMethod, attentions: list[HostedAttention]) -> list[EncodingSource]:
        method, heads = self._effective(encoding), int(self.model.config.num_attention_heads)
        first = attentions[0]
        return [
            CheckpointTable(method, heads, own if hasattr(own, "relative_attention_bias") else first)
            for own in attentions
        ]

    def _effective(self, encoding: BiasMethod) -> T5Bias:
        """The method with what the checkpoint was trained with filled in."""
        assert isinstance(encoding, T5Bias)
        config = self.model.config
        buckets = config.relative_attention_num_buckets
        if encoding.num_buckets not in (None, buckets):
            raise ValueError(
                f"t5_bias: option `num_buckets`={encoding.num_buckets} does not fit this checkpoint, whose tables have "
                f"{buckets} rows; leave it out."
            )
        record = getattr(config, "rope_ext", None) or {"original": {}}
        trained = record["original"].get("relative_attention_max_distance", config.relative_attention_max_distance)
        return dataclasses.replace(encoding, num_buckets=buckets, max_distance=encoding.max_distance or trained)


class UMT5Adapter(T5Adapter):
    """UMT5."""

    model_types: ClassVar[tuple[str, ...]] = ("umt5",)
    stand_in: ClassVar[type[HostedAttention]] = UMT5Attention

    def _replacements(
        self, encoding: Method, rotation: Rotation | None, length: int
    ) -> tuple[list[Swap], list[tuple[nn.Module, str, nn.Module]], list[tuple[nn.Module, Any]]]:
        swaps, added, hooks = super()._replacements(encoding, rotation, length)
        for stack in self.stacks():
            hooks += hooks_on_weights(stack.root, stack.places[0].module)
        return swaps, added, hooks
