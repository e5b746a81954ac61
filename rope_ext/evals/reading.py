"""Reads prompts and decodes answers: shared beginnings once, long prompts in chunks, several answers at a time.

None of it changes a result: what a prompt's cache holds does not depend on what else was read, and greedy decoding
takes the known answer as a draft, whose tokens count only as far as the model itself would have chosen them.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from rope_ext.config import LARGEST
from rope_ext.evals.caches import beginning, can_be_cut, cut, new_cache, stack
from rope_ext.evals.checks import at_least_one
from rope_ext.evals.identity import depends_on_length, ends_of
from rope_ext.evals.prefixes import Node, plan
from rope_ext.evals.usage import Usage, cost
from rope_ext.registry import compat

Advance = Callable[[int, float], None]
"""Told (key, share) when a share of a row's work is done."""


TOGETHER = 16
"""Prompts whose answers are decoded together, at most."""

PATIENCE = 60.0
"""Seconds that a prompt that was read may wait for others: what a run that is stopped loses beside the row in work."""


@dataclass(frozen=True)
class Limits:
    """How much is held at once. Only time and memory depend on it."""

    chunk: int = 1024
    """Tokens that a forward pass reads: bounds what activations take."""
    batch_tokens: int = 16384
    """Cached tokens of the prompts whose answers are decoded together."""
    reuse: bool = True
    """Read a beginning that several prompts share only once."""

    def __post_init__(self) -> None:
        at_least_one(LARGEST, chunk=self.chunk, batch_tokens=self.batch_tokens)


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the answer whose log-probability is wanted."""

    ids: Sequence[int]
    answer_ids: Sequence[int]
    max_new_tokens: int

    @property
    def room(self) -> int:
        """Tokens that its cache will hold at most."""
        return len(self.ids) + max(self.max_new_tokens, len(self.answer_ids))


@dataclass(frozen=True)
class Answer:
    """What the model does after a prompt."""

    generated: list[int]
    """Greedily, up to an end-of-sequence id of the generation config."""
    log_probability: float
    """Of the prompt's ``answer_ids``, natural, teacher-forced."""


class Reader:
    """Of decoders. Call it with groups of prompts; those of one group may share their beginnings.

    Args:
        model: a causal language model in eval mode.
        limits: what is held at once.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.usage = Usage(*cost(model))
        arguments = inspect.signature(type(model).forward).parameters
        self._cache_argument = compat().cache_argument(model)
        self._takes_positions = "position_ids" in arguments
        self._ends = ends_of(model)
        self._exact = can_be_cut(model) and not depends_on_length(model)

    def __call__(
        self, groups: Iterable[Sequence[tuple[int, Prompt]]], advance: Advance = lambda key, share: None
    ) -> Iterator[tuple[int, Answer]]:
        """(key, answer) of every prompt, in the order they are finished.

        Args:
            groups: groups of (key, prompt).
            advance: told about progress.
        """
        waiting: list[_Reading] = []
        since = 0.0
        for group in groups:
            for reading in self._read_group(group, advance):
                if reading.finished:
                    yield reading.key, reading.answer
                else:
                    since = since if waiting else time.monotonic()
                    waiting.append(reading)
                full = len(waiting) == TOGETHER or sum(each.room for each in waiting) > self.limits.batch_tokens
                if full or (waiting and time.monotonic() - since > PATIENCE):
                    yield from self._finish(waiting)
                    waiting = []
        yield from self._finish(waiting)

    def _read_group(self, group: Sequence[tuple[int, Prompt]], advance: Advance) -> Iterator[_Reading]:
        if not self._exact:
            for key, prompt in group:
                yield self._read_alone(key, prompt)
                advance(key, 1.0)
            return
        ids = [torch.tensor(prompt.ids) for _, prompt in group]
        roots = plan(ids) if self.limits.reuse else [Node(index, 0) for index in range(len(ids))]
        for root in roots:
            yield from self._read_tree(root, None, group, ids, advance)

    def _read_tree(
        self,
        node: Node,
        cache: Any,
        group: Sequence[tuple[int, Prompt]],
        ids: Sequence[Tensor],
        advance: Advance,
    ) -> Iterator[_Reading]:
        """``cache`` holds the node's shared beginning, and is this node's to use."""
        key, prompt = group[node.index]
        cache = new_cache(prompt.room) if cache is None else cache
        reading = self._read(key, prompt, ids[node.index], cache, node.start, advance)
        if node.branches and not reading.finished:
            reading.cache = beginning(cache, reading.length, prompt.room)
        yield reading
        for branch in node.branches:
            _, other = group[branch.index]
            yield from self._read_tree(branch, beginning(cache, branch.start, other.room), group, ids, advance)

    def _read(self, key: int, prompt: Prompt, ids: Tensor, cache: Any, start: int, advance: Advance) -> _Reading:
        """Read the prompt's rest with the answer behind it, then cut the cache where the model would not say that."""
        start = min(start, len(ids) - 1)
        cut(cache, start)
        self.usage.add(start, len(ids))
        answer = torch.tensor(prompt.answer_ids)
        tokens = torch.cat([ids[start:], answer[:-1]]).to(self.model.device)
        kept = len(answer)  # positions whose logits count: the prompt's last and all but the last of the answer
        edges = [*range(0, max(1, len(tokens) - kept), self.limits.chunk), len(tokens)]
        for begin, end in pairwise(edges):
            logits = self._forward(tokens[None, begin:end], cache, kept if end == len(tokens) else 1)
            advance(key, (end - begin) / len(tokens))
        reading = _Reading(key, cache, len(ids), prompt.max_new_tokens)
        reading.take_draft(logits[0], prompt.answer_ids, self._ends)
        cut(cache, reading.length)
        return reading

    def _read_alone(self, key: int, prompt: Prompt) -> _Reading:
        """For models whose cache cannot be cut, or holds what depends on the length of the input.

        Decoding comes first: a stock model that stretches its frequencies as the input grows does not take them back.
        """
        self.usage.add(0, len(prompt.ids))
        cache = DynamicCache(config=self.model.config)
        ids = torch.tensor([prompt.ids], device=self.model.device)
        logits = self._forward(ids, cache, 1)[0]
        reading = _Reading(key, copy.deepcopy(cache), len(prompt.ids), prompt.max_new_tokens)
        reading.take(int(logits.argmax()), self._ends)
        if not reading.finished:
            self._decode([reading])
        reading.cache = None
        answer = torch.tensor(prompt.answer_ids)
        if len(answer) > 1:
            rest = self._forward(answer[None, :-1].to(ids.device), cache, len(answer) - 1)
            logits = torch.cat([logits, rest[0]])
        reading.log_probability = _log_probability(logits, answer)
        return reading

    def _finish(self, waiting: Sequence[_Reading]) -> Iterator[tuple[int, Answer]]:
        """Decode on from all of them, together."""
        if waiting:
            self._decode(waiting)
        for reading in waiting:
            yield reading.key, reading.answer

    def _decode(self, readings: Sequence[_Reading]) -> None:
        lengths = [reading.length for reading in readings]
        longest, more = max(lengths), max(reading.max_new_tokens for reading in readings)
        cache, arguments = readings[0].cache, {}
        if len(readings) > 1:
            cache = stack([reading.cache for reading in readings], longest + more)
            for reading in readings:
                reading.cache = None
        ends = torch.tensor(lengths, device=self.model.device)[:, None]
        visible = torch.arange(longest + more, device=ends.device) >= longest - ends
        for step in range(more):
            last = torch.tensor([[reading.generated[-1]] for reading in readings], device=ends.device)
            if len(set(lengths)) > 1:
                arguments = {"attention_mask": visible[:, : longest + step + 1].long()}
                if self._takes_positions:
                    arguments["position_ids"] = ends + step
            logits = self._forward(last, cache, 1, **arguments)
            for reading, token in zip(readings, logits[:, -1].argmax(-1).tolist(), strict=True):
                if not reading.finished:
                    reading.take(token, self._ends)
            if all(reading.finished for reading in readings):
                return

    @torch.inference_mode()
    def _forward(self, ids: Tensor, cache: Any, keep: int, **more: Any) -> Tensor:
        """Logits of the last ``keep`` positions, (batch, keep, vocabulary)."""
        output = self.model(ids, use_cache=True, logits_to_keep=keep, **{self._cache_argument: cache}, **more)
        logits: Tensor = output.logits
        return logits


class EncoderDecoderReader:
    """Of models with an encoder (T5): it sees a whole prompt at once, so nothing is shared between prompts.

    The prompt goes to the encoder with an end-of-sequence token, the answer comes from the decoder.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.usage = model, Usage()
        self._ends = ends_of(model)
        self._start = model.generation_config.decoder_start_token_id
        if self._start is None:
            self._start = model.config.decoder_start_token_id

    def __call__(
        self, groups: Iterable[Sequence[tuple[int, Prompt]]], advance: Advance = lambda key, share: None
    ) -> Iterator[tuple[int, Answer]]:
        """As :meth:`Reader.__call__`."""
        for group in groups:
            for key, prompt in group:
                self.usage.add(0, len(prompt.ids))
                yield key, self._answer(prompt)
                advance(key, 1.0)

    @torch.inference_mode()
    def _answer(self, prompt: Prompt) -> Answer:
        end = self.model.config.eos_token_id
        ids = torch.tensor([[*prompt.ids, end]], device=self.model.device)
        encoded = self.model.get_encoder()(ids)
        cache = EncoderDecoderCache(new_cache(prompt.max_new_tokens + len(prompt.answer_ids)), DynamicCache())
        first = torch.tensor([[self._start, *prompt.answer_ids[:-1]]], device=ids.device)
        logits = self._forward(encoded, first, cache)
        reading = _Reading(0, cache, 1, prompt.max_new_tokens)
        reading.take_draft(logits[0], prompt.answer_ids, self._ends)
        cut(cache.self_attention_cache, reading.length)
        while not reading.finished:
            last = torch.tensor([[reading.generated[-1]]], device=ids.device)
            reading.take(int(self._forward(encoded, last, cache)[0, -1].argmax()), self._ends)
        return reading.answer

    def _forward(self, encoded: Any, ids: Tensor, cache: Any) -> Tensor:
        output = self.model(
            encoder_outputs=encoded,
            decoder_input_ids=ids,
            use_cache=True,
            **{compat().cache_argument(self.model): cache},
        )
        logits: Tensor = output.logits
        return logits


def reader(model: PreTrainedModel, limits: Limits) -> Reader | EncoderDecoderReader:
    """The reader that fits the model."""
    return EncoderDecoderReader(model) if model.config.is_encoder_decoder else Reader(model, limits)


@dataclass
class _Reading:
    """A prompt that has been read; ``cache`` holds it and all that was generated but the last token."""

    key: int
    cache: Any
    prompt_length: int
    max_new_tokens: int
    log_probability: float = 0.0
    generated: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def answer(self) -> Answer:
        return Answer(self.generated, self.log_probability)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.prompt_length + max(0, len(self.generated) - 1)

    @property
    def room(self) -> int:
        """Tokens that the cache will hold in the end."""
        return self.prompt_length + self.max_new_tokens

    def take(self, token: int, ends: set[int | None]) -> None:
        """The next token that the model chose."""
        if token not in ends:
            self.generated.append(token)
        self.finished = token in ends or len(self.generated) == self.max_new_tokens

    def take_draft(self, logits: Tensor, answer: Sequence[int], ends: set[int | None]) -> None:
        """The answer's log-probability, and the tokens that the model chose as long as it followed the answer.

        Args:
            logits: where each of the answer's tokens is predicted, (tokens, vocabulary).
        """
        self.log_probability = _log_probability(logits, torch.tensor(answer))
        for drafted, token in zip(answer, logits.argmax(-1).tolist(), strict=True):
            self.take(token, ends)
            if self.finished or token != drafted:
                return


def _log_probability(logits: Tensor, answer: Tensor) -> float:
    return float(logits.float().log_softmax(-1).gather(1, answer[:, None].to(logits.device)).sum())
