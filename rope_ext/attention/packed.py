"""A packed row under stock attention, without the mask of all pairs that stock transformers would build for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rope_ext.attention.computing import attend
from rope_ext.attention.layout import Layout
from rope_ext.attention.tables import dense

STOCK = ("sdpa", "eager")
"""The attention implementations that take a :class:`PackedMask`."""

_ADDITIONS = (Tensor.__add__, Tensor.add, torch.add)


class PackedMask(Layout):
    """A layout that stands for a mask in attention functions which know none.

    PyTorch asks the arguments of its functions whether they see to the call themselves. So ``sdpa`` with this mask
    becomes attention document by document, in the same fused kernels; and eager attention, which holds the scores of
    all pairs in any case, finds the numbers to add to them.
    """

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is sdpa:
            return _attend(*args, **(kwargs or {}))
        if function in _ADDITIONS:
            scores, layout = args
            mask = dense(None, layout, slice(0, layout.q_length), layout.kv_length, scores.device)
            return scores + mask.clamp(min=torch.finfo(scores.dtype).min).to(scores.dtype)
        return NotImplemented


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Layout,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, attn_mask, None, scale, dropout_p)
