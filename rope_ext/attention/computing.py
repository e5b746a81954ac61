"""Attention with a bias, by whichever way was chosen.

Shapes: query (batch, heads, q_length, head_dim), key and value (batch, kv_heads, kv_length, head_dim); heads is a
multiple of kv_heads. The result is (batch, heads, q_length, head_dim), in the dtype of the queries. ``scale``
multiplies the scores before the bias is added.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention import blockwise, cuda, toeplitz
from rope_ext.attention.choosing import choose
from rope_ext.attention.layout import Layout
from rope_ext.attention.tables import dense
from rope_ext.encodings.bias import Bias


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float, dropout: float = 0.0
) -> Tensor:
    """softmax(scale * q k^T + bias, where seen) v, exact, never with a matrix of all pairs of a long call.

    A query that sees no key (padding) gets some finite numbers.
    """
    if not query.numel():
        return torch.zeros_like(query)
    query, key, value = (part.to(query.dtype) for part in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    kind = layout.kind
    if bias is None and kind == "plain" and not dropout and layout.window is None:
        if not layout.causal or (query.shape[2] == 1 and layout.offset == layout.kv_length - 1):
            return sdpa(query, key, value, scale=scale)
        if layout.offset == 0:
            return sdpa(query, key[:, :, : query.shape[2]], value[:, :, : query.shape[2]], is_causal=True, scale=scale)
    choice = choose(
        bias.method if bias else None,
        device=query.device.type,
        dtype=query.dtype,
        mask=kind,
        causal=layout.causal,
        gradient=bias is not None and bias.needs_gradient,
        dropout=dropout > 0,
        bytes_of_all_pairs=query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4,
        flash=cuda.has_flash(),
    )
    with torch.autocast(query.device.type, enabled=False):
        if choice.way == "dense":
            mask = dense(bias, layout, slice(0, layout.q_length), key.shape[2], query.device)
            return sdpa(query, key, value, attn_mask=mask.to(mask_dtype(query)), dropout_p=dropout, scale=scale)
        if choice.way == "blockwise":
            return blockwise.attend(query, key, value, layout, bias, scale, dropout)
        if choice.way == "flex":
            return cuda.flex(query, key, value, layout, bias, scale)
        if choice.way == "folded" and bias is not None:
            return cuda.folded(query, key, value, layout, bias, scale)
        if choice.way == "flash" and bias is not None:
            return cuda.flash(query, key, value, layout, bias, scale, dropout)
        return toeplitz.attend(query, key, value, layout, bias, scale)


def weights(query: Tensor, key: Tensor, layout: Layout, bias: Bias | None, scale: float) -> Tensor:
    """The attention weights themselves, (batch, heads, q_length, kv_length): all pairs, for who asks for them."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    scores = scores + dense(bias, layout, slice(0, layout.q_length), key.shape[2], query.device)
    return torch.softmax(scores, -1).to(query.dtype)


def attend_with_weights(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, and the weights before dropout: with all pairs."""
    seen = weights(query, key, layout, bias, scale)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return torch.matmul(torch.dropout(seen, dropout, train=dropout > 0), value), seen


def mask_dtype(query: Tensor) -> torch.dtype:
    """On the CPU a bias may stay fp32 beside low-precision queries; kernels elsewhere want their dtype."""
    return torch.float32 if query.device.type == "cpu" else query.dtype
