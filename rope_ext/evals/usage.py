"""What reading prompts took."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel


@dataclass
class Usage:
    """What reading took, and what it would take to read every prompt from its beginning."""

    per_token: float = 0.0
    per_pair: float = 0.0
    asked_tokens: int = 0
    read_tokens: int = 0
    asked_operations: float = 0.0
    read_operations: float = 0.0

    def add(self, start: int, end: int) -> None:
        """A prompt of ``end`` tokens, of which the first ``start`` were there."""
        self.asked_tokens += end
        self.read_tokens += end - start
        self.asked_operations += self._operations(0, end)
        self.read_operations += self._operations(start, end)

    def _operations(self, start: int, end: int) -> float:
        return self.per_token * (end - start) + self.per_pair * (end * end - start * start) / 2

    def __str__(self) -> str:
        if not self.read_tokens:
            return "nothing read"
        return (
            f"read {self.read_tokens:,} of {self.asked_tokens:,} prompt tokens; reading each prompt alone takes "
            f"{self.asked_tokens / self.read_tokens:.2f} times the tokens, "
            f"{self.asked_operations / self.read_operations:.2f} times the operations"
        )


def cost(model: PreTrainedModel) -> tuple[float, float]:
    """Operations per token (two per weight below the embeddings) and per pair of query and key."""
    config = model.config.get_text_config(decoder=True)
    outside = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    weights = sum(
        weight.numel()
        for module in model.modules()
        if id(module) not in outside
        for weight in module.parameters(recurse=False)
    )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2.0 * weights, 4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim
