"""BLOOM: q, k and v from one matrix, ALiBi of its own, attention that builds the scores of all pairs."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from rope_ext.attention.registered import as_layout
from rope_ext.encodings.bias import Alibi, BiasMethod

from .base import Swap
from .hosted import HostedAdapter, HostedAttention


class BloomAttention(HostedAttention):
    """BLOOM's attention with any bias or rotation, without a matrix of all pairs."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Any,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As stock, but ``attention_mask`` is a Layout and ``alibi`` is not read.

        hidden_states, residual (batch, q_length, hidden_size) -> (the same, weights or None).
        """
        fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        query, key, value = fused.permute(3, 0, 2, 1, 4)
        layout = as_layout(attention_mask, query).counted()
        if self.rotation is not None:
            query, key = self.rotation(query, key, layout)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        output, seen = self.core(query, key, value, layout, self.inv_norm_factor, dropout, output_attentions)
        return residual + F.dropout(self.dense(output), self.hidden_dropout, self.training), seen


def _nothing_to_hand_back(original: nn.Module, stand_in: nn.Module) -> None:
    """An activation has no state."""


def no_alibi(*args: Any, **kwargs: Any) -> None:
    """In place of the biases of all keys, which attention does not read here."""


class BloomAdapter(HostedAdapter):
    """BLOOM and BLOOMZ."""

    model_types: ClassVar[tuple[str, ...]] = ("bloom",)
    native: ClassVar[type[BiasMethod]] = Alibi
    stand_in: ClassVar[type[HostedAttention]] = BloomAttention
    length_name = "seq_length"
    usual_length = 2048
    blocks = "h"
    attention = "self_attention"
    counts = True

    def attributes(self) -> list[tuple[nn.Module, str, Any]]:
        return [(self.model.base_model, "build_alibi_tensor", no_alibi)]

    def other_swaps(self) -> list[Swap]:
        """BLOOM writes its GELU out, with five temporaries four times as wide as the model: the peak of its memory once
        attention is linear. PyTorch has the same formula in one kernel.
        """
        swaps = []
        for module in self.model.modules():
            if type(module).__name__ == "BloomMLP" and type(getattr(module, "gelu_impl", None)).__name__ == "BloomGelu":
                gelu = nn.GELU(approximate="tanh")
                swaps.append(Swap(module, "gelu_impl", module.get_submodule("gelu_impl"), gelu, _nothing_to_hand_back))
        return swaps
