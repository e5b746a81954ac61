"""Biases on GPUs, whose fused kernels take no strided mask: channels of q and k, FlexAttention, flash-attn."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention.layout import Layout, Run
from rope_ext.attention.tables import table
from rope_ext.encodings.bias import Alibi, Bias

CHANNELS = 8
"""Channels that the fold adds to a head; kernels want multiples of eight."""


def folded(query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias, scale: float) -> Tensor:
    """ALiBi under a causal mask as channels of q and k: -slope (m - n) is slope * n up to a constant per query.

    n is split into multiples of 256 and a rest, the slope into three parts, so that every product is exact in bf16.
    Keys are counted from the last one back: what counts most is smallest. See :mod:`rope_ext.attention.computing`.
    """
    slopes = _slopes(bias, query.device) / scale
    parts, rest = [], slopes
    for _ in range(3):
        parts.append(rest.to(query.dtype))
        rest = rest - parts[-1].float()
    back = torch.arange(1 - key.shape[2], 1, device=query.device)
    low = back.remainder(-256)
    numbers = torch.stack((back - low, low), -1).to(query.dtype)
    q_extra = query.new_zeros(query.shape[1], CHANNELS)
    q_extra[:, :6] = torch.stack([part for part in parts for _ in range(2)], -1)
    k_extra = key.new_zeros(key.shape[2], CHANNELS)
    k_extra[:, :6] = numbers.repeat(1, 3)
    wide_q = torch.cat((query, q_extra[None, :, None].expand(*query.shape[:3], -1)), -1)
    wide_k = torch.cat((key, k_extra[None, None].expand(*key.shape[:3], -1)), -1)
    wide_v = torch.nn.functional.pad(value, (0, CHANNELS))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == k.shape[2]:
            return sdpa(q, k, v, is_causal=True, scale=scale)
        mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if q.shape[2] > 1 else None
        return sdpa(q, k, v, attn_mask=mask, scale=scale)

    return _by_runs(call, wide_q, wide_k, wide_v, layout)[..., : value.shape[-1]]


def flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias, scale: float, dropout: float
) -> Tensor:
    """ALiBi inside flash-attn's kernel."""
    from flash_attn import flash_attn_func

    slopes = _slopes(bias, query.device)
    window = (-1, -1) if layout.window is None else (layout.window - 1, 0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        found = flash_attn_func(
            q, k, v, dropout_p=dropout, softmax_scale=scale, causal=True, window_size=window, alibi_slopes=slopes
        )
        return found.transpose(1, 2)

    return _by_runs(call, query, key, value, layout)


def flex(query: Tensor, key: Tensor, value: Tensor, layout: Layout, bias: Bias | None, scale: float) -> Tensor:
    """One number per head and distance, read inside FlexAttention's kernel."""
    queries, keys, offset = query.shape[2], key.shape[2], layout.offset
    low = -(offset + queries - 1)
    numbers = table(bias, low, keys - 1 - offset, query.device)
    documents = None if layout.documents is None else layout.documents.to(query.device)
    bounded, window = layout.window is not None, layout.window or 0
    causal, separate = layout.causal, layout.separate

    def add(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + numbers[h, j - (i + offset) - low]

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = j >= 0
        if causal:
            seen = seen & (j <= i + offset)
        if bounded:
            seen = seen & (j > i + offset - window)
        if documents is not None:
            seen = seen & (documents[b, j] >= 0)
            if separate:
                seen = seen & (documents[b, j] == documents[b, i + offset])
        return seen

    from torch.nn.attention.flex_attention import create_block_mask

    batch = None if documents is None else query.shape[0]
    blocks = create_block_mask(sees, batch, None, queries, keys, device=str(query.device))
    output: Tensor = _flex_kernel(query.device.type)(
        query, key, value, score_mod=add if bias else None, block_mask=blocks, scale=scale
    )
    return output


@functools.cache
def _flex_kernel(device: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention


@torch.compiler.assume_constant_result
@functools.cache
def has_flash() -> bool:
    """Whether flash-attn can be imported."""
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


def _slopes(bias: Bias, device: torch.device) -> Tensor:
    assert isinstance(bias.method, Alibi)
    return bias.method.slopes(bias.heads).to(device)


def _by_runs(call: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Tensor:
    runs = layout.runs()
    whole = Run(slice(0, layout.batch), slice(0, layout.q_length), slice(0, key.shape[2]))
    if runs == [whole] and layout.offset + layout.q_length == key.shape[2]:
        return call(query, key, value)
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for run in runs:
        stop = min(run.keys.stop, layout.offset + run.queries.stop)
        keys = slice(run.keys.start, stop)
        output[run.rows, :, run.queries] = call(
            query[run.rows, :, run.queries], key[run.rows, :, keys], value[run.rows, :, keys]
        )
    return output
