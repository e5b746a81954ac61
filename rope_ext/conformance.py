"""Which method runs on which architecture, found out by running it: tiny random models, every contract of a patch.

``rope-ext methods --matrix`` prints the table. It needs no checkpoint and takes minutes; run it after an update of
transformers, or for an adapter of your own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from rope_ext.api import patch_model, unpatch_model
from rope_ext.checkpoint import LEARNED, load_patched
from rope_ext.config import Method
from rope_ext.registry import METHODS, compat

TRAINED = 64
"""L0 of the tiny models, in tokens."""

TOLERANCE = 1e-4
"""Absolute, logits of size about 1 that were computed in another order of sums."""

WORDS = 61
"""Size of the vocabulary."""

_SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {"head_dim": 16, "d_ff": 96, "num_decoder_layers": 2, "decoder_start_token_id": 0, "n_positions": TRAINED}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_STACK = {**_SIZE, "head_dim": 16, "sliding_window": 24}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "bloom": {"seq_length": TRAINED},
    "mpt": {"max_seq_len": 2 * TRAINED},  # stock reads no further
    "t5": _T5,
    "umt5": _T5,
    "falcon": {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "t5gemma": {"encoder": _STACK, "decoder": _STACK},
    "gpt_neox": {"rotary_pct": 0.5},
    "olmo2": {},
}
"""model_type: entries of its config. From gemma2 on they go through the generic rotary adapter."""


@dataclass(frozen=True)
class Cell:
    """What was found for one method on one architecture.

    Attributes:
        passed: names of the checks that held.
        failed: those that did not, with what went wrong.
        refused: why ``patch_model`` refuses the pair; then nothing was checked but that the model is left as it was.
    """

    architecture: str
    method: str
    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        if self.failed:
            return f"FAILED: {self.failed[0]}"
        return f"refused: {self.refused}" if self.refused else f"ok ({len(self.passed)})"


def matrix(architectures: Iterable[str] = ARCHITECTURES, methods: Iterable[str] | None = None) -> Iterator[Cell]:
    """One cell after the other; ``methods``: names, by default every registered one.

    Raises:
        ValueError: an architecture that is not in ``ARCHITECTURES``.
    """
    for architecture in architectures:
        if architecture not in ARCHITECTURES:
            raise ValueError(f"no tiny model of {architecture!r} is known; there are {', '.join(ARCHITECTURES)}.")
        for method in METHODS if methods is None else methods:
            yield check(architecture, method)


def as_markdown(cells: Sequence[Cell]) -> str:
    """A table of methods by architectures, and below it why pairs are refused."""
    architectures = list(dict.fromkeys(cell.architecture for cell in cells))
    found = {(cell.method, cell.architecture): cell for cell in cells}
    lines = ["| method | " + " | ".join(architectures) + " |", "|---" * (len(architectures) + 1) + "|"]
    for method in dict.fromkeys(cell.method for cell in cells):
        row = [found[method, architecture] for architecture in architectures]
        short = ["**FAILED**" if cell.failed else "refused" if cell.refused else str(cell) for cell in row]
        lines.append(f"| `{method}` | " + " | ".join(short) + " |")
    why: dict[str, list[str]] = {}
    for cell in cells:
        for reason in (*cell.failed, *[cell.refused] * bool(cell.refused)):
            why.setdefault(reason.replace(f": {cell.method} is", ": the method is"), []).append(f"`{cell.method}`")
    lines += ["", *(f"- {reason}: {', '.join(dict.fromkeys(names))}" for reason, names in why.items())]
    return "\n".join(lines)


def tiny(architecture: str, **changes: Any) -> PreTrainedModel:
    """A random model of the architecture, the same on every call; ``changes``: entries of its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return random_model(tiny_config(architecture, **changes))


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Of a tiny model, known to ``ARCHITECTURES`` or not, with other entries where ``changes`` has some."""
    known = AutoConfig.for_model(model_type)
    sized = {name: value for name, value in _SIZE.items() if hasattr(known, name) or name.endswith("_token_id")}
    return AutoConfig.for_model(model_type, **{**sized, **ARCHITECTURES.get(model_type, {}), **changes})


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """In eval mode, from the default generator, with weights of a size that lets positions and attention matter."""
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(weight)
        if "query_key_value.weight" in name or "Wqkv" in name:
            nn.init.normal_(weight, std=0.3)
    return model


def usual_options(method: type[Method], model: PreTrainedModel) -> dict[str, Any]:
    """Options under which a method does something on a tiny model."""
    options: dict[str, Any] = {}
    names = method.__dataclass_fields__
    if "factor" in names:
        options["factor"] = 2
    if "long_factor" in names:
        tables = [table for name, table in model.named_buffers() if name.endswith("inv_freq")]
        options["long_factor"] = [1.0 + pair for pair in range(tables[0].numel() if tables else _head_dim(model) // 2)]
    if "max_positions" in names:
        options["max_positions"] = 4 * TRAINED
    return options


def _head_dim(model: PreTrainedModel) -> int:
    config = model.config
    return int(getattr(config, "d_kv", None) or config.hidden_size // config.num_attention_heads)


def check(architecture: str, method: str) -> Cell:
    """Patch a tiny model and hold it to the contracts."""
    model = tiny(architecture)
    options = usual_options(METHODS[method], model)
    before, names = logits(model, tokens()), list(model.state_dict())
    try:
        patch_model(model, method, **options)
    except ValueError as error:
        left = torch.equal(logits(model, tokens()), before) and list(model.state_dict()) == names
        reason = str(error).removeprefix(f"method {method!r}: ").split(". Methods that it hosts")[0]
        failed = () if left else ("the model was not left as it was",)
        return Cell(architecture, method, failed=failed, refused=reason)
    _stir(model)
    passed: list[str] = []
    broken: list[str] = []
    for name, run in CHECKS.items():
        try:
            run(model, before)
            passed.append(name)
        except Exception as error:
            broken.append(f"{name}: {type(error).__name__}: {error}".strip().splitlines()[0])
    return Cell(architecture, method, tuple(passed), tuple(broken))


def tokens(length: int = TRAINED + 40, seed: int = 1, rows: int = 1) -> Tensor:
    """Random words, shape (rows, length)."""
    return torch.randint(3, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: PreTrainedModel, words: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
    """Of the language model, or of T5's decoder after a fixed prompt."""
    if model.config.is_encoder_decoder:
        asked = {"decoder_input_ids": words, "decoder_attention_mask": mask}
        return model(tokens(30, 9).expand(len(words), -1), **asked, use_cache=False, **more).logits
    if mask is not None and model.config.model_type not in ("bloom", "mpt"):
        more["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(words, attention_mask=mask, use_cache=False, **more).logits


def _stir(model: nn.Module) -> None:
    """Move what the encoding learns away from where it starts."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if LEARNED in name:
                weight.add_(0.3 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(4)))


def _close(found: Tensor, wanted: Tensor) -> None:
    apart = float((found - wanted).abs().max())
    if not apart <= TOLERANCE:
        raise AssertionError(f"logits are {apart:.2g} apart")


def _unseen(model: PreTrainedModel, before: Tensor) -> None:
    words = tokens()
    changed = words.clone()
    changed[0, -1] = 3 + (changed[0, -1] - 2) % 50
    _close(logits(model, changed)[:, :-1], logits(model, words)[:, :-1])


def _pure(model: PreTrainedModel, before: Tensor) -> None:
    short = tokens(20)
    first = logits(model, short)
    logits(model, tokens())
    if not torch.equal(logits(model, short), first):
        raise AssertionError("a long input changed what a short one gives")


@torch.no_grad()
def _cached(model: PreTrainedModel, before: Tensor) -> None:
    words, name = tokens(), compat().cache_argument(model)
    whole, parts = logits(model, words), []
    cache: dict[str, Any] = {}
    encoder: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        encoder["encoder_outputs"] = model.get_encoder()(tokens(30, 9), return_dict=True)
    edges = [0, 30, TRAINED - 4, *range(TRAINED - 3, TRAINED + 20), words.shape[1]]
    for start, stop in pairwise(edges):
        asked = {"decoder_input_ids" if encoder else "input_ids": words[:, start:stop]}
        output = model(**asked, **encoder, use_cache=True, **cache)
        cache = {name: getattr(output, name)}
        parts.append(output.logits)
    _close(torch.cat(parts, 1), whole)


def _padded(model: PreTrainedModel, before: Tensor) -> None:
    long, short, pad = tokens(), tokens(TRAINED + 20, 3), tokens(20, 5)
    for left in (True, False):
        words = torch.cat((long, torch.cat((pad, short) if left else (short, pad), 1)))
        mask = torch.ones_like(words)
        mask[1, slice(0, 20) if left else slice(-20, None)] = 0
        both = logits(model, words, mask)
        _close(both[:1], logits(model, long))
        _close(both[1:][mask[1:] > 0], logits(model, short)[0])


@torch.no_grad()
def _packed(model: PreTrainedModel, before: Tensor) -> None:
    stack = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    alone = [tokens(40), tokens(TRAINED + 20, 3)]
    again = torch.cat([torch.arange(text.shape[1]) for text in alone])[None]
    wanted = torch.cat([stack(text).last_hidden_state for text in alone], 1)
    try:
        found = stack(torch.cat(alone, 1), position_ids=again).last_hidden_state
    except ValueError as error:
        if "documents packed in a row" in str(error):
            return
        raise
    _close(found, wanted)


def _saved(model: PreTrainedModel, before: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = load_patched(folder).eval()
    if not torch.equal(logits(again, tokens()), logits(model, tokens())):
        raise AssertionError("other logits after saving and loading")


def _trained(model: PreTrainedModel, before: Tensor) -> None:
    words = tokens()
    asked = {"input_ids": tokens(30, 9) if model.config.is_encoder_decoder else words, "labels": words}
    model.zero_grad()
    model(**asked, use_cache=False).loss.backward()
    learned = [(name, weight.grad) for name, weight in model.named_parameters() if LEARNED in name]
    every = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    without = [name for name, gradient in learned if gradient is None or not gradient.any()]
    if without:
        raise AssertionError(f"no gradient reaches {without[0]}")
    if not all(bool(torch.isfinite(gradient).all()) for gradient in every):
        raise AssertionError("a gradient is not finite")


def _generates(model: PreTrainedModel, before: Tensor) -> None:
    words = tokens(TRAINED - 4)
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    made = model.generate(  # type: ignore[operator]
        tokens(30, 9) if model.config.is_encoder_decoder else words, **asked
    )
    start = made[:, :1] if model.config.is_encoder_decoder else words
    for _ in range(8):
        start = torch.cat((start, logits(model, start)[:, -1:].argmax(-1)), 1)
    if not torch.equal(made, start):
        raise AssertionError("generate and full forwards disagree")


def _undone(model: PreTrainedModel, before: Tensor) -> None:
    unpatch_model(model)
    if not torch.equal(logits(model, tokens()), before):
        raise AssertionError("other logits after unpatching")


CHECKS: dict[str, Callable[[PreTrainedModel, Tensor], None]] = {
    "the future is unseen": _unseen,
    "a forward leaves nothing behind": _pure,
    "cached decoding equals the full forward": _cached,
    "padded rows equal each row alone": _padded,
    "packed documents equal each alone, or are refused": _packed,
    "generate equals full forwards": _generates,
    "saved and loaded to the same logits": _saved,
    "a training step gives finite gradients": _trained,
    "unpatching restores the logits": _undone,
}
"""Each is called with the patched model and the logits before; the last one unpatches."""
