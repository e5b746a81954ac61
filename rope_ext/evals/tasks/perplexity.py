"""Perplexity of a long text: of one long forward by position, or with a sliding window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rope_ext.evals.checks import at_least_one, whole_numbers
from rope_ext.evals.identity import depends_on_length, digest
from rope_ext.evals.memory import Holding
from rope_ext.evals.reading import Advance, Limits
from rope_ext.evals.runner import Row, Task
from rope_ext.evals.scoring import token_nll

SHORTEST_PREFIX = 256


class Perplexity(Task):
    """Perplexity at each length.

    Full (default): one forward of BOS and length - 1 tokens; exp of the mean nll in each of ``bins`` equal position
    bins, and for the prefixes of 256, 512, ... tokens (not where tables follow the length of the input: there the
    beginning of a long text is not read as a short one). Sliding (``stride`` given, Press et al. 2021): windows of
    ``length`` tokens that advance by ``stride``; a window scores only the tokens no window scored before.

    Args:
        text: what is read.
        lengths: tokens of a forward, BOS included.
        bins: position bins of the full mode.
        stride: tokens between windows; None for the full mode.
        windows: how many windows the sliding mode reads.
        mean_of_windows: in the sliding mode also the mean over the windows of the perplexity of all tokens of each, as
            in YaRN's published code (there one window per text).
        samples: passages per length, one after the other in the text.

    Raises:
        ValueError: a value is out of range, or (when measuring) the text is too short.
    """

    name: ClassVar[str] = "perplexity"

    def __init__(
        self,
        text: str,
        lengths: Sequence[int],
        *,
        bins: int = 8,
        stride: int | None = None,
        windows: int = 10,
        mean_of_windows: bool = False,
        samples: int = 1,
    ) -> None:
        self.lengths = whole_numbers("lengths", lengths)
        at_least_one(bins=bins, samples=samples, windows=windows)
        for length in self.lengths:
            if stride is None and length < bins + 2:
                raise ValueError(f"length {length} is too short for {bins} bins.")
            if stride is not None and (not isinstance(stride, Integral) or not 0 < stride < length):
                raise ValueError(f"stride must be a whole number from 1 to length - 1 = {length - 1}, got {stride!r}.")
        if mean_of_windows and stride is None:
            raise ValueError("mean_of_windows needs windows: give a stride, too.")
        self.text, self.samples = text, samples
        self.bins, self.stride, self.windows, self.mean_of_windows = bins, stride, windows, mean_of_windows

    def settings(self) -> Row:
        mode = {"bins": self.bins} if self.stride is None else {"stride": self.stride, "windows": self.windows}
        return {"text": digest(self.text), **mode, **({"mean_of_windows": True} if self.mean_of_windows else {})}

    def rows(self) -> list[Row]:
        return [{"length": length, "sample": sample} for length in self.lengths for sample in range(self.samples)]

    def holds(self, tokenizer: Any, rows: Sequence[Row], limits: Limits) -> Holding:
        longest = max(row["length"] for row in rows)
        return Holding(forward=longest, cached=0, longest=longest)

    def measure(
        self, model: PreTrainedModel, tokenizer: Any, rows: Sequence[Row], limits: Limits, advance: Advance
    ) -> Iterator[tuple[int, Row]]:
        if model.config.is_encoder_decoder:
            raise ValueError(f"perplexity needs a causal language model, {type(model).__name__} has an encoder.")
        for index, row in enumerate(rows):
            tokens = row["length"] * (1 if self.stride is None else self.windows)
            with layers_advance(model, tokens, partial(advance, index)):
                measured = self._read(model, tokenizer, row)
            yield index, measured

    def _read(self, model: PreTrainedModel, tokenizer: Any, row: Row) -> Row:
        length = row["length"]
        span = length - 1 if self.stride is None else length - 1 + (self.windows - 1) * self.stride
        ids = self._tokens(tokenizer, span, row["sample"]).to(model.device)
        bos = tokenizer.bos_token_id
        if self.stride is None:
            nll = token_nll(model, _begin(bos, ids))
            return {"tokens": len(nll), "perplexity": _exp(nll.mean()), **self._by_position(nll, model)}
        parts, means = [], []
        for window in range(self.windows):
            inside = ids[window * self.stride : window * self.stride + length - 1]
            scored = length - 1 if window == 0 else self.stride
            sequence = _begin(bos, inside)
            new = max(1, sequence.shape[1] - scored)
            start = 1 if self.mean_of_windows else new
            nll = token_nll(model, sequence, start)
            means.append(_exp(nll.mean()))
            parts.append(nll[new - start :])
        nll = torch.cat(parts)
        more = {"mean_of_windows": sum(means) / len(means)} if self.mean_of_windows else {}
        return {"tokens": len(nll), "perplexity": _exp(nll.mean()), **more}

    def _by_position(self, nll: Tensor, model: PreTrainedModel) -> Row:
        parts = nll.tensor_split(self.bins)
        edges = [0]
        for part in parts:
            edges.append(edges[-1] + len(part))
        found: Row = {"bin_edges": edges, "bin_perplexity": [_exp(part.mean()) for part in parts]}
        if not depends_on_length(model):
            ends = [SHORTEST_PREFIX << power for power in range(32) if SHORTEST_PREFIX << power < len(nll)]
            found["prefix_perplexity"] = {str(end): _exp(nll[:end].mean()) for end in [*ends, len(nll)]}
        return found

    def _tokens(self, tokenizer: Any, span: int, sample: int) -> Tensor:
        start, need = sample * span, (sample + 1) * span
        for text in (self.text[: 12 * need], self.text):  # 12 characters a token are mostly enough
            ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
            if len(ids) >= need:
                break
        if len(ids) < need:
            raise ValueError(
                f"the text has {len(ids)} tokens, sample {sample} needs {need}; give a longer text or a shorter length."
            )
        return torch.tensor(ids[start:need])


@contextmanager
def layers_advance(model: PreTrainedModel, tokens: int, advance: Callable[[float], None]) -> Iterator[None]:
    """Report progress while so many tokens are read: a step per layer of each forward pass."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    left = 1.0

    def step(_: Any, __: Any, output: Any) -> None:
        nonlocal left
        read = (output[0] if isinstance(output, tuple) else output).shape[-2]
        share = min(left, read / (tokens * len(layers)))
        left -= share
        advance(share)

    handles = [layer.register_forward_hook(step) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(bos: int | None, ids: Tensor) -> Tensor:
    """(1, length) with one BOS in front, if the tokenizer has one."""
    first = ids[:0] if bos is None else torch.tensor([bos], device=ids.device)
    return torch.cat([first, ids])[None]


def _exp(mean_nll: Tensor) -> float:
    return math.exp(min(float(mean_nll), 700.0))
