"""Attention with a position encoding of any seam, by whichever way was chosen.

Shapes: query (batch, heads, q_length, head_dim), key and value (batch, kv_heads, kv_length, head_dim); heads is a
multiple of kv_heads. The result is (batch, heads, q_length, head_dim), in the dtype of the queries. ``scale``
multiplies the scores before a bias is added.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention import blockwise, cuda, staged, toeplitz, zoned
from rope_ext.attention.choosing import choose
from rope_ext.attention.layout import Layout, Run
from rope_ext.attention.mapped_cache import part_of
from rope_ext.attention.tables import dense
from rope_ext.encodings.bias import Bias
from rope_ext.encodings.qk import QkMethod
from rope_ext.encodings.raw import Encoder, weighted


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    method: Bias | Encoder | None,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scores, where seen) v, exact, never with a matrix of all pairs of a long call.

    ``method``: a bias on top of scale * q k^T, what computes scores from raw q and k, or None. A query that sees no key
    (padding) gets some finite numbers.
    """
    if not query.numel():
        return torch.zeros_like(query)
    query, key, value = (part.to(query.dtype) for part in (query, key, value))
    if isinstance(method, Encoder):
        with torch.autocast(query.device.type, enabled=False):
            return _attend_raw(query, key, value, layout, method, scale, dropout)
    repeats = query.shape[1] // key.shape[1]
    alone = query.shape[2] == 1 and layout.offset == layout.kv_length - 1  # one decoding step
    if method is None and alone and layout.kind == "plain" and not dropout and layout.window is None:
        # heads that share keys as queries of one head: nothing is copied
        grouped = query.reshape(query.shape[0], key.shape[1], repeats, query.shape[3])
        return sdpa(grouped, key, value, scale=scale).view_as(query)
    grouped_kernels = method is None and query.device.type == "cpu"
    if repeats > 1 and not grouped_kernels:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    kind = layout.kind
    if method is None and kind == "plain" and not dropout and layout.window is None:
        if not layout.causal:
            return sdpa(query, key, value, scale=scale, enable_gqa=True)
        if layout.offset == 0:
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            return sdpa(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    if kind == "runs" and len(layout.runs()) > layout.batch:  # packed documents: the pairs of each, no others
        return by_runs(layout.runs(), query, key, value, layout, method, scale, dropout)
    choice = choose(
        method.method if method else None,
        device=query.device.type,
        dtype=query.dtype,
        mask=kind,
        causal=layout.causal,
        patterned=bool(layout.sinks or layout.global_tokens),
        gradient=method is not None and method.needs_gradient,
        dropout=dropout > 0,
        bytes_of_all_pairs=query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] * 4,
        flash=cuda.has_flash(),
    )
    with torch.autocast(query.device.type, enabled=False):
        if choice.way == "dense":
            mask = dense(method, layout, slice(0, layout.q_length), key.shape[2], query.device).to(mask_dtype(query))
            return sdpa(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True)
        if choice.way == "blockwise":
            if kind == "runs" and layout.window is not None:
                return by_runs(layout.runs(), query, key, value, layout, method, scale, dropout)
            return blockwise.attend(query, (key,), value, layout, method, scale, dropout)
        if choice.way == "flex":
            return cuda.flex(query, key, value, layout, method, scale)
        if choice.way == "folded" and method is not None:
            return cuda.folded(query, key, value, layout, method, scale)
        if choice.way == "flash" and method is not None:
            return cuda.flash(query, key, value, layout, method, scale, dropout)
        return toeplitz.attend(query, key, value, layout, method, scale)


def _attend_raw(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, encoder: Encoder, scale: float, dropout: float
) -> Tensor:
    """Raw keys: stage by stage or zone by zone where that makes fused kernels do, else block by block."""
    kind = layout.kind
    if kind == "runs":
        return by_runs(layout.runs(), query, key, value, layout, encoder, scale, dropout)
    if kind == "plain" and not layout.sinks and not layout.global_tokens:
        if len(layout.key_positions(query.device)) > 1:  # sliding caches of padded rows: each row counts for itself
            whole = slice(0, layout.q_length), slice(0, layout.kv_length)
            rows = [Run(slice(row, row + 1), *whole) for row in range(layout.batch)]
            return by_runs(rows, query, key, value, layout, encoder, scale, dropout)
        if isinstance(encoder.method, QkMethod):
            plain = partial(attend, method=None, scale=scale, dropout=dropout)
            return staged.attend(plain, query, key, value, layout, encoder)
        plan = zoned.plan(query, value, layout, encoder, dropout)
        if plan is not None:
            return zoned.attend(query, key, value, layout, encoder, scale, plan)
    encoder, keys = prepared(key, layout, encoder)
    return blockwise.attend(query, keys, value, layout, encoder, scale, dropout)


def prepared(key: Tensor, layout: Layout, encoder: Encoder) -> tuple[Encoder, blockwise.Keys]:
    """(the encoder for this call, the keys in the forms that it reads)."""
    places, own = layout.key_positions(key.device), layout.query_positions(key.device)
    low, high = int(own.min()) - int(places.max()), int(own.max()) - int(places.min())
    encoder = encoder.method.prepare(encoder, layout.q_length, low, high)
    return encoder, encoder.method.keys(encoder, key, places)


def by_runs(
    runs: list[Run],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    method: Bias | Encoder | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """Padded rows and packed documents, each as a call of its own."""
    output = query.new_zeros(query.shape)
    for run in runs:
        if not layout.causal:  # an encoder's runs have all queries, those of padding too
            run = Run(run.rows, slice(run.keys.start - layout.offset, run.keys.stop - layout.offset), run.keys)
        q, v = query[run.rows, :, run.queries], value[run.rows, :, run.keys]
        k, own = part_of(key, run.rows, run.keys), layout.of_run(run, of=len(runs))
        output[run.rows, :, run.queries] = attend(q, k, v, own, method, scale, dropout)
    return output


def weights(query: Tensor, key: Tensor, layout: Layout, method: Bias | Encoder | None, scale: float) -> Tensor:
    """The attention weights themselves, (batch, heads, q_length, kv_length): all pairs, for who asks for them."""
    everyone, count = slice(0, layout.q_length), key.shape[2]
    if isinstance(method, Encoder):
        encoder, keys = prepared(key, layout, method)
        return blockwise.encoded_weights(everyone, count, query, keys, layout, encoder, scale).to(query.dtype)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * scale
    return torch.softmax(scores + dense(method, layout, everyone, count, query.device), -1).to(query.dtype)


def attend_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    method: Bias | Encoder | None,
    scale: float,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, and the weights before dropout: with all pairs."""
    seen = weights(query, key, layout, method, scale)
    dropped = torch.dropout(seen, dropout, train=dropout > 0)
    output = weighted(dropped.float(), value).to(query.dtype)
    if isinstance(method, Encoder):
        places, own = layout.key_positions(query.device), layout.query_positions(query.device)
        extra = method.method.values(method, dropped.float(), own, places)
        output = output if extra is None else output + extra.to(output.dtype)
    return output, seen


def mask_dtype(query: Tensor) -> torch.dtype:
    """On the CPU a bias may stay fp32 beside low-precision queries; kernels elsewhere want their dtype."""
    return torch.float32 if query.device.type == "cpu" else query.dtype
