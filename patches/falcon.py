"""Falcon: rotary, or ALiBi of its own with attention that builds the bias of all pairs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from rope_ext.attention import Kept, Layout
from rope_ext.attention.cuda import CHANNELS
from rope_ext.attention.registered import as_layout
from rope_ext.config import Method
from rope_ext.encodings.bias import Alibi, Bias, BiasMethod, alibi_slopes

from .base import Adapter, Patch, Swap
from .hosted import EncodingSource, HostedAdapter, HostedAttention
from .rotary import RotaryAdapter


class RoundedAlibi(Kept):
    """ALiBi as Falcon computes it: slope times the key's position, all of it in bfloat16, then scaled like a score.

    Beyond 256 tokens that is not a function of the distance alone. It is one of the key, though, and a channel more in
    q and k holds it.
    """

    method: Alibi

    def folded(self, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v with one more channel, and as many heads in k and v as in q."""
        heads = query.shape[1]
        key, value = (part.repeat_interleave(heads // part.shape[1], 1) for part in (key, value))
        slopes = alibi_slopes(heads).to(query.device).bfloat16()
        bias = (slopes[:, None] * layout.key_positions(query.device)[:, None]) / self.method.factor
        channel = bias.to(key.dtype)[..., None].expand(*key.shape[:3], 1)
        query, key = F.pad(query, (0, 1), value=1.0), torch.cat((key, channel), -1)
        return F.pad(query, (0, CHANNELS - 1)), F.pad(key, (0, CHANNELS - 1)), F.pad(value, (0, CHANNELS))


class FalconAttention(HostedAttention):
    """Falcon's attention with any bias or rotation, without a matrix of all pairs; keys are cached once per KV head.

    It computes what stock's SDPA path does. Stock's eager path, taken for ``output_attentions`` as well, adds the bias
    twice: once with the mask, and once more beside it.
    """

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As stock, but ``attention_mask`` is a Layout and ``alibi`` and ``position_ids`` are not read.

        hidden_states (batch, q_length, hidden_size) -> (the same, weights or None).
        """
        groups = self.num_heads // self.num_kv_heads
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_kv_heads, groups + 2, self.head_dim))
        query, key, value = fused[..., :-2, :].flatten(2, 3), fused[..., -2, :], fused[..., -1, :]
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        layout = as_layout(attention_mask, query).counted()
        if self.rotation is not None:
            query, key = self.rotation(query, key, layout)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        if isinstance(self.source, RoundedAlibi):
            query, key, value = self.source.folded(query, key, value, layout)
        dropout = self.attention_dropout.p if self.training else 0.0
        output, seen = self.core(query, key, value, layout, self.inv_norm_factor, dropout, output_attentions)
        output = output.unflatten(-1, (self.num_heads, -1))[..., : self.head_dim].flatten(2)
        return self.dense(output), seen


class FalconAlibiAdapter(HostedAdapter):
    """Falcon with ``config.alibi``: Falcon-RW."""

    model_types = ("falcon",)
    native = Alibi
    stand_in = FalconAttention
    length_name = "max_position_embeddings"
    usual_length = 2048
    blocks = "h"
    attention = "self_attention"
    counts = True

    def other_swaps(self) -> list[Swap]:
        """The base model would build its ALiBi, and a mask of all pairs from it."""
        return [Swap(self.model.base_model, "use_alibi", True, False)]

    def native_biases(self, encoding: BiasMethod, attentions: list[HostedAttention]) -> list[EncodingSource] | None:
        assert isinstance(encoding, Alibi)
        if not encoding.sinks:
            return [RoundedAlibi(encoding)] * len(attentions)
        # sinks are seen from another distance than their own, which no channel of the key holds
        first = attentions[0]
        scaled = dataclasses.replace(encoding, factor=encoding.factor / first.inv_norm_factor)
        return [lambda causal: Bias(scaled, first.num_heads, causal)] * len(attentions)

    def plan(self, encoding: Method) -> Patch:
        patch = super().plan(encoding)
        if isinstance(encoding, Alibi) and not encoding.sinks:
            note = "folded: ALiBi is one more channel of q and k, rounded as stock rounds it; then the usual kernels"
            patch.state = dataclasses.replace(patch.state, attention=note)
        return patch


class FalconRotaryAdapter(RotaryAdapter):
    """Falcon without: its attention calls kernels by itself, so rotary methods are what it hosts."""

    model_types = ("falcon",)


def falcon(model: PreTrainedModel) -> Adapter:
    """The adapter for the positions that this Falcon has."""
    return FalconAlibiAdapter(model) if getattr(model.config, "alibi", False) else FalconRotaryAdapter(model)
