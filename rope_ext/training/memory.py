"""What a training step will need, per device, before it starts."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass

from transformers import PreTrainedModel

from rope_ext.training.loss import CHUNK


def prepare_allocator() -> None:
    """On Linux, have freed tensors on the CPU go back to the system at once, and new ones come in huge pages.

    By default glibc keeps blocks of up to 32 MiB, in which the tensors of a training step leave holes: with SmolLM2 at
    8,192 tokens two thirds of a process's memory. Memory that comes from the system anew has to be mapped page by page;
    pages of 2 MiB, which PyTorch asks for if it is told to, make that several times fewer. Call it before tensors are
    made; an own setting of ``THP_MEM_ALLOC_ENABLE`` is kept.
    """
    if sys.platform != "linux":
        return
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
        mallopt(mmap_threshold, 4 * 2**20)
        mallopt(trim_threshold, 4 * 2**20)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on each of ``devices`` devices."""

    weights: int
    gradients: int
    optimizer: int
    saved_activations: int
    """What the backward pass needs of the forward pass: with checkpointing, inputs and attention of each layer."""
    one_layer: int
    """The widest moment inside a layer."""
    logits: int

    @property
    def total(self) -> int:
        return (
            self.weights + self.gradients + self.optimizer + self.saved_activations + max(self.one_layer, self.logits)
        )

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "saved activations": self.saved_activations,
            "one layer": self.one_layer,
            "logits": self.logits,
        }
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items())
        return f"about {self.total / 1e9:.2f} GB per device ({listed})"


def estimate(
    model: PreTrainedModel, length: int, micro_batch: int, checkpointing: bool, devices: int = 1, chunk: int = CHUNK
) -> TrainingMemory:
    """Memory of one micro step with fused attention and AdamW.

    Args:
        model: with its adapters attached; one on the meta device will do.
        length: tokens per row.
        micro_batch: rows per device and micro step.
        checkpointing: layers are computed again in the backward pass.
        devices: over which FSDP shards weights, gradients and optimizer state.
        chunk: tokens whose logits exist at once.
    """
    config = model.config.get_text_config(decoder=True)
    weights = [(weight.numel(), weight.element_size(), weight.requires_grad) for weight in model.parameters()]
    width = max((size for _, size, _ in weights), default=4)
    trained = sum(count for count, _, needs in weights if needs)
    tokens, hidden = length * micro_batch, config.hidden_size
    layers = config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or getattr(config, "d_ff", None) or 4 * hidden
    # inside a layer: norms, q k v o, two sums (about ten times hidden), gate, up, their product and activation
    inside = tokens * (10 * hidden + 4 * inner) * width
    per_layer = 2 * tokens * hidden * width if checkpointing else inside
    return TrainingMemory(
        weights=sum(count * size for count, size, _ in weights) // devices,
        gradients=trained * width // devices,
        optimizer=8 * trained // devices,
        saved_activations=layers * per_layer,
        one_layer=inside * 2,
        logits=3 * min(chunk, tokens) * config.vocab_size * 4,
    )
