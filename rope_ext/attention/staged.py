"""The qk seam: queries that share a map are computed together, by ordinary attention over mapped queries and keys.

Raw keys are mapped anew in every call: for one decoding step O(keys x channels), about what reading them costs. The
factors that they are mapped with are computed once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rope_ext.attention.layout import Layout, Run
from rope_ext.encodings.qk import QkMethod
from rope_ext.encodings.raw import Encoder, turned_by

Plain = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
"""Attention of mapped queries and keys: (query, key, value, layout) -> output."""


def attend(plain: Plain, query: Tensor, key: Tensor, value: Tensor, layout: Layout, encoder: Encoder) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; the layout is "plain", without sinks or global tokens."""
    method = encoder.method
    assert isinstance(method, QkMethod)
    places = layout.key_positions(query.device)
    queries, keys = slice(0, layout.q_length), slice(0, layout.kv_length)
    if len(places) > 1:  # sliding caches of padded rows: each row counts for itself
        runs = [Run(slice(row, row + 1), queries, keys) for row in range(layout.batch)]
        rows = [(query[run.rows], key[run.rows], value[run.rows], layout.of_run(run)) for run in runs]
        return torch.cat([attend(plain, *row, encoder) for row in rows])
    own = places[:, layout.offset : layout.offset + layout.q_length]
    stages = method.stages_of(encoder, own, places)[0]
    edges = torch.nonzero(stages.diff()).flatten().add(1).tolist()
    pieces = [slice(a, b) for a, b in zip([0, *edges], [*edges, layout.q_length], strict=True)]
    again = torch.is_grad_enabled() and len(pieces) > 1  # else every piece would keep keys of its own for the backward
    shared = not encoder.parameters and len(pieces) == 1

    def piece(rows: slice, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stage, columns = int(stages[rows.start]), layout.columns(rows)
        assert isinstance(columns, slice)

        def factors() -> tuple[Tensor, ...]:
            return (
                *method.query_factors(encoder, own[:, rows], stage),
                *method.key_factors(encoder, places[:, columns], stage),
            )

        found = layout.once((method, stage), factors) if shared else factors()
        q, k = turned_by(query[:, :, rows], *found[:2]), turned_by(key[:, :, columns], *found[2:])
        count, offset = rows.stop - rows.start, layout.offset + rows.start - columns.start
        part = Layout(
            layout.batch,
            count,
            columns.stop - columns.start,
            offset=offset,
            causal=layout.causal,
            window=layout.window,
        )
        return plain(q, k, value[:, :, columns], part)

    if again:
        parts = [checkpoint(piece, rows, query, key, value, use_reentrant=False) for rows in pieces]
    else:
        parts = [piece(rows, query, key, value) for rows in pieces]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]
