"""The attention implementation "rope_ext" of transformers: its mask function and its attention function.

Both are registered under one name. Without a mask function of that name transformers would pass no mask, and a decoder
would see the future without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from rope_ext.attention.computing import attend, attend_with_weights
from rope_ext.attention.layout import Layout
from rope_ext.config import Patterned
from rope_ext.encodings.bias import Bias
from rope_ext.encodings.raw import Encoder
from rope_ext.registry import compat

NAME = "rope_ext"
"""What ``config._attn_implementation`` is in a model whose attention is computed here."""

SOURCE = "_rope_ext_source"
"""The attribute of an attention module that gives its encoding."""


@dataclass(frozen=True)
class Kept:
    """What is left of a rotary method in attention: which keys its pattern keeps."""

    method: Patterned

    def __call__(self, causal: bool) -> Kept:
        return self


def applied(given: Bias | Encoder | Kept | None, layout: Layout) -> tuple[Layout, Bias | Encoder | None]:
    """(the layout with the method's pattern, what computes scores beside q.k)."""
    if given is None:
        return layout, None
    return layout.patterned(*given.method.pattern), None if isinstance(given, Kept) else given


def make_layout(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Layout:
    """What transformers asks for in place of a mask; the arguments are those of its own mask functions."""
    causal = mask_function is not bidirectional_mask_function
    offset = int(q_offset) - kv_offset if causal else 0
    documents: Tensor | None = None
    first: int | Tensor = kv_offset if causal else 0
    if attention_mask is not None:
        first = attention_mask[:, :kv_offset].sum(-1, keepdim=True)
        real = attention_mask[:, kv_offset : kv_offset + kv_length]
        real = nn.functional.pad(real, (0, kv_length - real.shape[1]))
        if not bool(real[:, : offset + q_length if causal else None].all()):
            documents = real.long() - 1
    elif causal and q_length > 1 and not allow_is_causal_skip and mask_function is not causal_mask_function:
        documents = _documents(mask_function, batch_size, q_length, torch.device(device))
    where = {"offset": offset, "causal": causal, "window": local_size, "documents": documents, "first": first}
    return Layout(batch_size, q_length, kv_length, **where, gone=kv_offset if causal else 0)  # type: ignore[arg-type]


def _documents(mask_function: Callable[..., Any], batch: int, length: int, device: torch.device) -> Tensor | None:
    """Packed documents, numbered: a document starts at a token that does not see the one before it."""
    rows = torch.arange(batch, device=device)[:, None]
    later = torch.arange(1, length, device=device)[None]
    joined = mask_function(rows, torch.zeros_like(rows), later, later - 1).expand(batch, -1)
    starts = nn.functional.pad(~joined, (1, 0))
    return starts.cumsum(-1) if bool(starts.any()) else None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Layout | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in a patched model whose own attention modules stay: returns (output, weights or None).

    query (batch, heads, q_length, head_dim); output (batch, q_length, heads, head_dim).
    """
    layout = as_layout(attention_mask, query)
    if position_ids is not None:
        layout = layout.at(position_ids)
    source = module.__dict__.get(SOURCE)
    if source is None:
        raise ValueError(
            f"{type(module).__name__} has no encoding: attention implementation {NAME!r} works in patched models "
            "only, and this one was built from the config of one. Build it from an unpatched config, then patch_model."
        )
    decodes = layout.causal or layout.mask is not None
    layout, method = applied(source(decodes), layout)
    if not decodes and method is not None and getattr(method.method, "causal_only", False):
        raise ValueError(f"`is_causal`=False: {method.method.name} is defined for decoders. Patch with another method.")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    config = module.__dict__.get("config")
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        output, seen = attend_with_weights(query, key, value, layout, method, scale, dropout)
        return output.transpose(1, 2).contiguous(), seen
    output = attend(query, key, value, layout, method, scale, dropout)
    return output.transpose(1, 2).contiguous(), None


def as_layout(mask: Layout | Tensor | None, query: Tensor) -> Layout:
    """The layout that the model was given, or one around a 4-D mask that the caller made.

    Of fewer queries than keys, such a mask does not say which keys they are: the last key that the last query sees is
    taken for its own.

    Raises:
        ValueError: neither.
    """
    if isinstance(mask, Layout):
        return mask
    if isinstance(mask, Tensor) and mask.dim() == 4:
        (batch, _, q_length), kv_length = query.shape[:3], mask.shape[3]
        offset = 0
        if q_length != kv_length:
            last = mask[:, 0, -1]
            seen = last if last.dtype == torch.bool else last > torch.finfo(last.dtype).min / 2
            offset = int((seen * torch.arange(1, kv_length + 1, device=seen.device)).max()) - q_length
        return Layout(batch, q_length, kv_length, offset=max(offset, 0), causal=False, mask=mask)
    shape = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        f"the attention mask is {shape}, where the model's attention implementation {NAME!r} expects "
        "what its mask function made: was the attention implementation changed after patching? Unpatch first."
    )


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, compat().mask_function(make_layout))
