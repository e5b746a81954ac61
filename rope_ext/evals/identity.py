"""What a measured setup is: names and digests, so that results of different setups never mix."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_ext.api import describe, patch_of, unwrap
from rope_ext.config import Method

UNPATCHED = "unpatched"
"""The label of a model as it was loaded."""

AS_IT_IS = ("none", UNPATCHED)
"""What asks for the model as it is, where the name of a method is expected."""


def setup_label(model: nn.Module) -> str:
    """A short name for how the model's positions stand: "unpatched", "yarn x2", "yarn x2 beta_fast=4"."""
    patch = patch_of(unwrap(model))
    return UNPATCHED if patch is None else method_label(patch.encoding)


def trained_length(model: nn.Module) -> int | None:
    """Tokens at which the checkpoint was trained; None for an architecture that says nothing."""
    try:
        return describe(model).trained_length
    except ValueError:
        return None


def method_label(method: Method) -> str:
    """A method with its options: "yarn x2 beta_fast=4"."""
    parts = [method.name]
    for name, value in method.options().items():
        shown = digest(value)[:4] if isinstance(value, list) else f"{value:.12g}" if isinstance(value, float) else value
        parts.append(f"x{shown}" if name == "factor" else f"{name}={shown}")
    return " ".join(parts)


def fingerprint(model: PreTrainedModel, checkpoint: str | None = None) -> str:
    """Of a setup: changes with the config (and the patch), any weight or table, the active adapters, and what ends a
    generated text. ``checkpoint``: its :func:`weights`, if they are known already.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    record = dict(config.pop("rope_ext", None) or {})
    # a stock model whose tables follow the length of its last input is the same setup after another input
    tables = () if depends_on_length(model) else model.named_buffers()
    ends = sorted(map(str, ends_of(model))), getattr(model.generation_config, "decoder_start_token_id", None)
    measured = [checkpoint or weights(model), *map(_summary, tables)]
    return digest([config, record.get("method"), record.get("options"), measured, ends])


def weights(model: PreTrainedModel) -> str:
    """Of a checkpoint, whatever its position encoding: its weights, their dtype, the active adapters."""
    parameters = sorted(model.named_parameters(), key=lambda named: named[0])
    adapters = [
        (name, module.disable_adapters, module.active_adapters, module.scaling)
        for name, module in model.named_modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "scaling")
    ]
    return digest([*(_summary(named) for named in parameters if "position_encoding" not in named[0]), adapters])


def _summary(named: tuple[str, Tensor]) -> tuple[str, tuple[int, ...], str, str]:
    """(name, shape, dtype, what changes with the numbers): exact, the same on every device and in every process."""
    name, tensor = named
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()
    if whole.is_meta:
        return name, tuple(whole.shape), str(whole.dtype), "offloaded"
    flat = whole.contiguous().flatten().view(torch.uint8)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # a part of a larger buffer need not begin at a word
    long = len(flat) // _BLOCK * _BLOCK
    sums = flat[:long].view(torch.int64).view(-1, _BLOCK // 8).sum(-1)  # overflows wrap round
    content = hashlib.sha256(sums.cpu().numpy().tobytes() + flat[long:].cpu().numpy().tobytes())
    return name, tuple(whole.shape), str(whole.dtype), content.hexdigest()[:16]


_BLOCK = 1024
"""Bytes of a tensor that are summed up."""


def ends_of(model: PreTrainedModel) -> set[int | None]:
    """Token ids that end what is generated."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return set(ends) if isinstance(ends, list) else {ends}


def depends_on_length(model: PreTrainedModel) -> bool:
    """Whether cached keys depend on how long the input was: stock ``dynamic`` and ``longrope``, or what imitates it."""
    patch = patch_of(model)
    if patch is not None:
        return not getattr(patch.encoding, "exact", True)
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return any(entry.get("rope_type") in ("dynamic", "longrope") for entry in (parameters, *nested))


_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def digest(value: Any) -> str:
    """Sixteen hex digits of the SHA-256 of the value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """Of what decides about ids: the tokenizer's rules (not the padding of the last call), template, special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"vocab": sorted(tokenizer.get_vocab().items())}
    for changing in ("padding", "truncation"):
        rules.pop(changing, None)
    return digest([rules, tokenizer.chat_template, tokenizer.bos_token_id, tokenizer.eos_token_id])
