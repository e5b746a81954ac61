"""How much memory an evaluation will need, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rope_ext.evals.scoring import HEAD_CHUNK


def check(model: PreTrainedModel, length: int) -> MemoryEstimate:
    """The estimate, if it fits.

    Raises:
        ValueError: more than what is free on the model's device.
    """
    needed, free = estimate(model, length), available(model.device)
    if free is not None and needed.total - needed.weights > free:
        raise ValueError(
            f"{length} tokens need {needed}, but beside the weights {free / 1e9:.2f} GB are free on {model.device}; "
            "use shorter lengths, --dtype bfloat16, or a device with more memory."
        )
    return needed


def available(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    table = Path("/proc/meminfo")
    if device.type != "cpu" or not table.exists():
        return None
    (line,) = [line for line in table.read_text().splitlines() if line.startswith("MemAvailable")]
    return 1024 * int(line.split()[1])


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes. Activations are those of the widest moment of one layer at batch size 1 with fused attention."""

    weights: int
    kv_cache: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.logits

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("KV cache", self.kv_cache), ("activations", self.activations))
        listed = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in (*parts, ("logits", self.logits)))
        return f"about {self.total / 1e9:.2f} GB ({listed})"


def estimate(model: PreTrainedModel, length: int) -> MemoryEstimate:
    """What one sequence of ``length`` tokens takes on top of each other: weights, cache, activations, logits."""
    config = model.config.get_text_config(decoder=True)
    width = next(model.parameters()).element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return MemoryEstimate(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        kv_cache=2 * config.num_hidden_layers * heads * head_dim * length * width,
        activations=length * (4 * config.hidden_size + 3 * inner) * width,
        logits=2 * HEAD_CHUNK * config.vocab_size * 4,
    )
