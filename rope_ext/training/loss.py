"""The loss of a language model without its logits: [tokens, vocabulary] never exists, only a slice of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_ext.registry import compat

IGNORED = -100
"""The label of a token that is not scored."""

CHUNK = 256
"""Tokens whose logits exist at once."""


def language_model_loss(model: PreTrainedModel, batch: dict[str, Tensor], chunk: int = CHUNK) -> tuple[Tensor, Tensor]:
    """(sum of the negative log-likelihoods in nats, number of scored tokens) of a batch.

    Args:
        model: a causal language model, or an encoder-decoder with ``labels`` for its decoder.
        batch: ``input_ids`` and ``labels`` of shape (batch, length), and what else the model's forward takes. Labels
            are those of the tokens themselves, IGNORED where not scored; causal models are scored on the next token.
        chunk: tokens per slice of logits.

    Raises:
        ValueError: the model changes its logits in a way that is not known here.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = hidden_states(model, inputs, batch["labels"])
    labels = batch["labels"]
    if not model.config.is_encoder_decoder:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    scored = labels.reshape(-1) != IGNORED
    hidden, labels = hidden.flatten(0, 1)[scored], labels.reshape(-1)[scored]
    return chunked_cross_entropy(hidden, labels, _head(model), chunk), scored.sum()


def hidden_states(model: PreTrainedModel, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """What the language model head is given, shape (batch, length, hidden_size)."""
    if not model.config.is_encoder_decoder:
        hidden: Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
        return hidden
    shifted = model._shift_right(labels)  # type: ignore[operator]
    mask = inputs.get("attention_mask")
    encoded = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
    hidden = model.get_decoder()(
        input_ids=shifted, encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=False
    ).last_hidden_state
    return hidden * model.config.d_model**-0.5 if compat().scales_decoder_output(model.config) else hidden


def chunked_cross_entropy(hidden: Tensor, labels: Tensor, head: nn.Module, chunk: int = CHUNK) -> Tensor:
    """Sum of -log p(label) in nats, fp32, with gradients for ``hidden`` and for the head's trained parameters.

    Args:
        hidden: shape (tokens, hidden_size).
        labels: shape (tokens,).
        head: gives logits of shape (tokens, vocabulary). Its backward pass runs inside the forward pass, slice by
            slice, so that logits are computed once.
        chunk: tokens per slice.
    """
    trained = tuple(weight for weight in head.parameters() if weight.requires_grad)
    loss: Tensor = _ChunkedCrossEntropy.apply(head, chunk, labels, hidden, *trained)
    return loss


class Head(nn.Module):
    """A language model head with the factor that some models put on their logits."""

    projection: nn.Module
    factor: float

    def __init__(self, projection: nn.Module, factor: float) -> None:
        super().__init__()
        self.projection, self.factor = projection, factor

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.projection(hidden)
        return logits if self.factor == 1 else logits * self.factor


def _head(model: PreTrainedModel) -> Head:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError(f"{config.model_type} caps its logits (final_logit_softcapping): not supported here.")
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return Head(model.get_output_embeddings(), factor)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Callable[[Tensor], Tensor], chunk: int, labels: Tensor, hidden: Tensor, *trained: Tensor
    ) -> Tensor:
        needed = ctx.needs_input_grad[3:]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden) if needed[0] else None
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in trained]
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.set_grad_enabled(any(needed)):
                part = hidden[rows].detach().requires_grad_(needed[0])
                loss = nn.functional.cross_entropy(head(part).float(), labels[rows], reduction="sum")
            total += loss.detach()
            wanted = [part] * needed[0] + [w for w, need in zip(trained, needed[1:], strict=True) if need]
            if not wanted:
                continue
            found = list(torch.autograd.grad(loss, wanted))
            if gradient is not None:
                gradient[rows] = found.pop(0)
            for target, value in zip(sums, found, strict=True):
                target += value
        ctx.save_for_backward(*([gradient] if gradient is not None else []), *sums)
        ctx.has_hidden, ctx.dtypes = gradient is not None, [weight.dtype for weight in trained]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) * gradients[0] if ctx.has_hidden else None
        weights = [(value * gradients[0]).to(dtype) for value, dtype in zip(saved, ctx.dtypes, strict=True)]
        return None, None, None, hidden, *weights
