"""The qk seam: queries that share a map are computed together, by ordinary attention over mapped queries and keys.

The factors that they are mapped with are computed once for all layers; and while decoding stays in a stage, keys that
are mapped stay so (:mod:`rope_ext.attention.mapped_cache`). Elsewhere - a new stage, a cache of another kind -
all cached keys are mapped anew: O(keys x channels), about what reading them costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rope_ext.attention.layout import Layout, Shared
from rope_ext.attention.mapped_cache import mapped_of
from rope_ext.encodings.qk import QkMethod
from rope_ext.encodings.raw import Encoder, Factors, turned_by

Plain = Callable[[Tensor, Tensor, Tensor, Layout], Tensor]
"""Attention of mapped queries and keys: (query, key, value, layout) -> output."""


def attend(plain: Plain, query: Tensor, key: Tensor, value: Tensor, layout: Layout, encoder: Encoder) -> Tensor:
    """See :mod:`rope_ext.attention.computing`; the layout is "plain", without sinks or global tokens, and all its
    rows have the same positions.
    """
    method = encoder.method
    assert isinstance(method, QkMethod)
    places = layout.key_positions(query.device)
    keys = slice(0, layout.kv_length)
    own = layout.query_positions(query.device)
    pieces = layout.once((method, "pieces"), lambda: _pieces(method.stages_of(encoder, own, places)[0]))
    again = torch.is_grad_enabled() and len(pieces) > 1  # else every piece would keep keys of its own for the backward
    size = 8 * len(pieces) * layout.kv_length * encoder.host.rotary.dim
    shared: Shared[Factors] = (lambda name, make: make()) if encoder.parameters else layout.sharing(method, size)

    def piece(rows: slice, stage: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        columns = layout.columns(rows)
        assert isinstance(columns, slice)

        def turned(start: int) -> Tensor:
            places_of = places[:, columns][:, start:]
            factors = partial(method.key_factors, encoder, places_of, stage)
            return turned_by(key[:, :, columns][:, :, start:], *shared((stage, start), factors))

        alone = not encoder.parameters and len(pieces) == 1 and columns == keys
        kept = mapped_of(key) if alone else None
        k = turned(0) if kept is None else kept(0, (method, stage), key, turned)
        factors = partial(method.query_factors, encoder, own[:, rows], stage)
        q = turned_by(query[:, :, rows], *shared(stage, factors))
        part = Layout(
            layout.batch,
            rows.stop - rows.start,
            columns.stop - columns.start,
            offset=layout.offset + rows.start - columns.start,
            causal=layout.causal,
            window=layout.window,
        )
        return plain(q, k, value[:, :, columns], part)

    if again:
        parts = [checkpoint(piece, *each, query, key, value, use_reentrant=False) for each in pieces]
    else:
        parts = [piece(*each, query, key, value) for each in pieces]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _pieces(stages: Tensor) -> list[tuple[slice, int]]:
    """(queries, their stage) of neighbours that share one; ``stages`` has shape (queries,)."""
    edges = torch.nonzero(stages.diff()).flatten().add(1).tolist()
    starts = [0, *edges]
    return [(slice(a, b), int(stages[a])) for a, b in zip(starts, [*edges, len(stages)], strict=True)]
