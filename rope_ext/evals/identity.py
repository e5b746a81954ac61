"""What a measured setup is: names and digests, so that results of different setups never mix."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from torch import nn
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
        shown = digest(value)[:4] if isinstance(value, list) else f"{value:g}" if isinstance(value, float) else value
        parts.append(f"x{shown}" if name == "factor" else f"{name}={shown}")
    return " ".join(parts)


def fingerprint(model: PreTrainedModel) -> str:
    """Changes when the config (with the patch), the weights or the active adapters change; samples each tensor."""
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    record = dict(config.pop("rope_ext", None) or {})
    sample = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.flatten()[:: max(1, tensor.numel() // 8)].tolist())
        for name, tensor in model.named_parameters()
    ]
    adapters = [
        (name, module.disable_adapters, module.active_adapters, module.scaling)
        for name, module in model.named_modules()
        if hasattr(module, "disable_adapters") and hasattr(module, "scaling")
    ]
    return digest([config, record.get("method"), record.get("options"), sample, adapters])


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
