"""Which way a biased attention call is computed: a pure function of what is asked, so it can be told in advance."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rope_ext.encodings.bias import Alibi, BiasMethod

SMALL = 16 * 2**20
"""Bytes: where a call's bias for all pairs is smaller, it is built."""


@dataclass(frozen=True)
class Choice:
    """The way, and why."""

    way: str
    """ "dense", "toeplitz", "folded", "flex", "flash" or "blockwise"."""
    reason: str


def choose(
    method: BiasMethod | None,
    *,
    device: str,
    dtype: torch.dtype,
    mask: str = "plain",
    causal: bool = True,
    patterned: bool = False,
    gradient: bool = False,
    dropout: bool = False,
    bytes_of_all_pairs: int = SMALL,
    flash: bool = False,
) -> Choice:
    """How attention with this bias is computed.

    Args:
        method: the encoding; None for attention without a bias.
        device: "cpu", "cuda", ...
        dtype: of the queries.
        mask: a Layout's ``kind``: "plain", "runs" or "pairs".
        causal: whether queries see no keys after themselves.
        patterned: whether keys outside a window are kept: sinks, global tokens.
        gradient: whether the bias's own parameters are trained in this call.
        dropout: whether attention weights are dropped in this call.
        bytes_of_all_pairs: batch * heads * queries * keys * 4.
        flash: whether the flash-attn package is there.
    """
    if bytes_of_all_pairs < SMALL:
        return Choice("dense", f"the bias of all pairs is smaller than {SMALL >> 20} MiB")
    if patterned:
        return Choice("blockwise", "sinks and global tokens: each block of queries gathers the keys it may see")
    if mask == "pairs":
        return Choice("blockwise", "padding inside a row, or positions that jump, follow no pattern of distances")
    if method is not None and not method.toeplitz:
        return Choice("blockwise", f"{method.name} depends on positions, not on the distance alone")
    if gradient:
        return Choice("blockwise", "fused kernels give no gradient to a learned bias")
    half = dtype in (torch.float16, torch.bfloat16)
    if device == "cuda" and flash and half and causal and isinstance(method, Alibi):
        return Choice("flash", "flash-attn has ALiBi in its kernel")
    if dropout:
        return Choice("blockwise", "fused kernels with a bias have no dropout")
    if device == "cpu":
        return Choice("toeplitz", "SDPA reads the bias through a strided view of one number per head and distance")
    if device == "cuda" and causal and isinstance(method, Alibi):
        return Choice("folded", "under a causal mask ALiBi is a few more channels of q and k, then SDPA is_causal")
    if device == "cuda":
        return Choice("flex", "FlexAttention reads the bias from one number per head and distance")
    return Choice("blockwise", f"no fused kernel is known to take a bias on {device}")
