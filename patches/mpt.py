"""MPT: q, k and v from one matrix, ALiBi of its own, attention that builds the scores of all pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rope_ext.attention.registered import as_layout
from rope_ext.config import Method
from rope_ext.encodings.bias import Alibi, BiasMethod

from .hosted import HostedAdapter, HostedAttention


class MptAttention(HostedAttention):
    """MPT's attention with any bias or rotation, without a matrix of all pairs; it returns no attention weights."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        cache: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As stock, but ``attention_mask`` is a Layout and ``position_bias`` is not read.

        hidden_states (batch, q_length, hidden_size) -> the same.
        """
        cache = past_key_values if cache is None else cache
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = fused.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if isinstance(attention_mask, Tensor):  # one of the caller's: True is what MPT does not see
            attention_mask = attention_mask.logical_not()
        layout = as_layout(attention_mask, query)
        if self.rotation is not None:
            query, key = self.rotation(query, key, layout)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        dropout = self.attn_dropout_p if self.training else 0.0
        output, _ = self.core(query, key, value, layout, self.softmax_scale, dropout, weigh=False)
        return self.out_proj(output), None


class MptAdapter(HostedAdapter):
    """MPT. Stock has biases for ``max_seq_len`` tokens only; a patched model reads on."""

    model_types: ClassVar[tuple[str, ...]] = ("mpt",)
    native: ClassVar[type[BiasMethod]] = Alibi
    stand_in: ClassVar[type[HostedAttention]] = MptAttention
    length_name = "max_seq_len"
    usual_length = 2048
    blocks = "blocks"
    attention = "attn"
    refused: ClassVar[dict[str, str]] = {
        "output_attentions": "MPT's layers hand on no request for attention weights; unpatch the model to see them."
    }

    def refusal(self, method: type[Method]) -> str | None:
        bias_max = self.model.config.attn_config.alibi_bias_max
        if bias_max != 8:
            return f"mpt: this checkpoint's slopes are not the published ones (attn_config.alibi_bias_max={bias_max})"
        return super().refusal(method)
