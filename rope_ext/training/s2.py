"""Shifted sparse attention (S2-Attn) of LongLoRA: attention within groups, half of the heads shifted by half a group.

Chen et al. 2023, arXiv:2309.12307, section 3.2, for training only. Unlike the published code nothing wraps around: the
first and the last half group of the shifted heads are groups of their own, so no token sees the future.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

NAME = "rope_ext_s2"
GROUP = "_rope_ext_s2"


@contextmanager
def shifted_sparse_attention(model: PreTrainedModel, group: int) -> Iterator[None]:
    """Let the model's attention modules, while in training mode, see groups of ``group`` tokens only.

    Raises:
        ValueError: an odd group, or a model whose attention is not exchangeable.
    """
    if group < 2 or group % 2:
        raise ValueError(f"s2: the group must be an even number of tokens >= 2, got {group}.")
    modules = [module for module in model.modules() if hasattr(module, "num_key_value_groups")]
    before = model.config._attn_implementation
    if not modules or before not in ("sdpa", "eager", "flash_attention_2"):
        raise ValueError(
            f"s2: {model.config.model_type} with attention {before!r} has no attention that can be exchanged; "
            "train without s2."
        )
    for module in modules:
        module.__dict__[GROUP] = group
    model.config._attn_implementation = NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before
        for module in modules:
            del module.__dict__[GROUP]


def spans(length: int, group: int, shifted: bool) -> list[slice]:
    """The groups of ``length`` tokens, in order; together they are all tokens, each once."""
    edges = list(range(group // 2 if shifted else group, length, group))
    return [slice(a, b) for a, b in zip([0, *edges], [*edges, length], strict=True)]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; query (batch, heads, length, head_dim), output (batch, length, heads, head_dim)."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if not module.training:
        full = sdpa(query, key, value, is_causal=query.shape[2] > 1, scale=scaling)
        return full.transpose(1, 2).contiguous(), None
    half, outputs = query.shape[1] // 2, []
    for heads, shifted in ((slice(0, half), False), (slice(half, None), True)):
        parts = []
        for span in spans(query.shape[2], module.__dict__[GROUP], shifted):
            q, k, v = (part[:, heads, span] for part in (query, key, value))
            parts.append(sdpa(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling))
        outputs.append(torch.cat(parts, 2))
    return torch.cat(outputs, 1).transpose(1, 2).contiguous(), None


def no_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """Groups need no mask; padding is not supported.

    Raises:
        ValueError: there is padding.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("s2: rows with padding are not supported; pack them or cut them to one length.")


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, no_mask)
