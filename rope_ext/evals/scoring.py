"""Negative log-likelihood of every token of a long text, without ever holding [length, vocabulary] logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from rope_ext.registry import compat

HEAD_CHUNK = 512
"""Positions that go through the output head at a time."""


def token_nll(model: PreTrainedModel, ids: Tensor, start: int = 1, cache: Cache | None = None) -> Tensor:
    """-ln p(ids[t] | ids[:t]) for t = start .. length - 1, from one forward pass.

    Args:
        model: a causal language model in eval mode.
        ids: shape (1, length).
        start: first token to score, at least 1.
        cache: an empty one, to hold the text afterwards.

    Returns:
        fp32, shape (length - start,), in nats.

    Raises:
        ValueError: the model does more to its logits than its output head says (and no known post-processing fits).
    """
    with torch.inference_mode():
        decoder = _decoder(model)
        head = _Head(model, decoder, ids[:, :16])
        held = {compat().cache_argument(decoder): cache}
        hidden = decoder(ids, use_cache=cache is not None, **held).last_hidden_state[0, start - 1 : -1]
        targets = ids[0, start:]
        chunks = range(0, len(targets), HEAD_CHUNK)
        parts = [
            F.cross_entropy(head(hidden[at : at + HEAD_CHUNK]), targets[at : at + HEAD_CHUNK], reduction="none")
            for at in chunks
        ]
        return torch.cat(parts).cpu()


def _decoder(model: PreTrainedModel) -> nn.Module:
    """The part below the output head."""
    candidates = (model.get_decoder(), model.base_model, getattr(model, "model", None))
    decoder: nn.Module | None = next((found for found in candidates if found is not None and found is not model), None)
    if decoder is None or model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no output head: perplexity needs a causal language model.")
    return decoder


class _Head:
    """The output head and what some models do to its logits (soft-capping, scaling), checked against the model."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, probe: Tensor) -> None:
        config = model.config.get_text_config(decoder=True)
        self._linear = model.get_output_embeddings()
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", 1.0)) / float(getattr(config, "logits_scaling", 1.0))
        hidden = decoder(probe, use_cache=False).last_hidden_state[0]
        expected, found = model(probe, use_cache=False).logits[0].float(), self(hidden)
        if not torch.allclose(found, expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
            raise ValueError(
                f"{type(model).__name__} changes its logits after the output head in a way that is not known here; "
                "its perplexity cannot be computed in chunks."
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._linear(hidden).float() * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap
