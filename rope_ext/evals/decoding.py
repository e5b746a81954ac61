"""Prefill, greedy decoding and the log-probability of a given answer, from one KV cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rope_ext.registry import compat


class Prompt:
    """A prompt that has been read once: its KV cache and the logits of its last position.

    Args:
        model: a causal language model in eval mode.
        ids: the prompt, shape (1, length). The output head sees the last position only.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model = model
        self.length = ids.shape[1]
        self._cache_argument = compat().cache_argument(model)
        self._cache = DynamicCache(config=model.config)
        self._next = self._step(ids, self._cache)

    def greedy(self, max_new_tokens: int) -> list[int]:
        """Generated ids, at most ``max_new_tokens``, ending before an end-of-sequence id of the generation config."""
        ends = self.model.generation_config.eos_token_id
        stop = set(ends) if isinstance(ends, list) else {ends}
        generated: list[int] = []
        logits = self._next
        with self._branch() as cache:
            while (token := int(logits.argmax())) not in stop:
                generated.append(token)
                if len(generated) == max_new_tokens:
                    break
                logits = self._step(self._row([token]), cache)
        return generated

    def log_probability(self, answer: list[int]) -> float:
        """Natural log-probability of the answer's ids right after the prompt, teacher-forced."""
        logits = self._next
        if len(answer) > 1:
            with self._branch() as cache:
                logits = torch.cat([logits, self._step(self._row(answer[:-1]), cache, keep=len(answer) - 1)])
        chosen = torch.tensor(answer, device=logits.device)[:, None]
        return float(logits.float().log_softmax(dim=-1).gather(1, chosen).sum())

    @contextmanager
    def _branch(self) -> Iterator[Any]:
        """A cache to go on from the prompt with; afterwards the prompt's cache is as it was."""
        if all(type(layer) is DynamicLayer for layer in self._cache.layers):
            yield self._cache
            self._cache.crop(self.length - self._cache.get_seq_length())  # minus the tokens to remove
        else:
            yield copy.deepcopy(self._cache)

    def _row(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _step(self, ids: Tensor, cache: Any, keep: int = 1) -> Tensor:
        with torch.inference_mode():
            output = self.model(ids, use_cache=True, logits_to_keep=keep, **{self._cache_argument: cache})
        logits: Tensor = output.logits[0]
        return logits
