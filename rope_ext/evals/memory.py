"""How much memory an evaluation will need, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rope_ext.api import patch_of
from rope_ext.attention.blockwise import BLOCK_BYTES
from rope_ext.evals.scoring import HEAD_CHUNK


@dataclass(frozen=True)
class Holding:
    """What an evaluation holds at its fullest moment, in tokens."""

    forward: int
    """Read by one forward pass of a decoder; an encoder reads ``longest``."""
    cached: int
    """In key/value caches."""
    longest: int
    """Of one prompt or passage, with its answer."""


def check(model: PreTrainedModel, holding: Holding, max_memory: int | None = None) -> MemoryEstimate:
    """The estimate, if it fits.

    Args:
        model: as it will run.
        holding: what the evaluation holds.
        max_memory: bytes that it may take, weights included; by default what is free on the model's device.

    Raises:
        ValueError: it does not fit.
    """
    needed, free = estimate(model, holding), available(model.device)
    if max_memory is not None and needed.total > max_memory:
        raise ValueError(f"this needs {needed}, more than max_memory={max_memory / 1e9:.2f} GB; {_ADVICE}.")
    if free is not None and needed.total - needed.weights > free:
        raise ValueError(
            f"this needs {needed}, but beside the weights {free / 1e9:.2f} GB are free on {model.device}; {_ADVICE}, "
            "or use a device with more memory."
        )
    return needed


_ADVICE = "use shorter lengths, --dtype bfloat16, a smaller --chunk or --batch-tokens, or --no-reuse"


def available(device: torch.device) -> int | None:
    """Bytes that are free on the device, or to this container; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    (line,) = [line for line in table.read_text().splitlines() if line.startswith("MemAvailable")]
    return min([1024 * int(line.split()[1]), *_left_to_container()])


def _left_to_container(folder: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes, if it has a limit (cgroup v2); files that it has read give way."""
    try:
        most, taken = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [int(most) - int(taken) + int(counts["inactive_file"])]
    except (OSError, ValueError, KeyError):
        return []


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. Activations are those of the widest moment of one layer at batch size 1; ``pairs`` is what attention takes
    beside them: nothing where it is fused.
    """

    weights: int
    kv_cache: int
    activations: int
    pairs: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.pairs + self.logits

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "KV cache": self.kv_cache,
            "activations": self.activations,
            "scores of all pairs": self.pairs,
            "logits": self.logits,
        }
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
        return f"about {self.total / 1e9:.2f} GB ({listed})"


def estimate(model: PreTrainedModel, holding: Holding) -> MemoryEstimate:
    """What takes memory at the fullest moment, on top of each other: weights, caches, activations, scores, logits."""
    config = model.config.get_text_config(decoder=True)
    width = next(model.parameters()).element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "d_ff", None) or 4 * config.hidden_size
    forward = holding.longest if model.config.is_encoder_decoder else holding.forward
    return MemoryEstimate(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        kv_cache=2 * config.num_hidden_layers * heads * head_dim * holding.cached * width,
        activations=forward * (4 * config.hidden_size + 3 * inner) * width,
        pairs=_pairs(model, forward, holding.longest),
        logits=2 * HEAD_CHUNK * config.vocab_size * 4,
    )


def _pairs(model: PreTrainedModel, queries: int, keys: int) -> int:
    """Bytes: where a stock model builds scores or biases of all pairs, a handful of such matrices in fp32; where they
    are computed here, a handful of blocks.
    """
    config = model.config.get_text_config(decoder=True)
    patch = patch_of(model)
    if patch is not None and patch.encoding.seam != "rotary":
        return BLOCKS * BLOCK_BYTES
    hosted = patch is not None and config.model_type in BIASED
    if not hosted and (config._attn_implementation == "eager" or config.model_type in BIASED):
        return MATRICES * 4 * config.num_attention_heads * queries * keys
    return 0


BIASED = ("bloom", "mpt", "t5", "mt5", "umt5")
"""Stock models with a bias of all pairs."""

MATRICES = 4
"""Of all pairs, that attention holds at a time; BLOOM was seen to take 4.1, T5 2."""

BLOCKS = 8
"""Tensors of ``BLOCK_BYTES`` that attention holds at a time."""
