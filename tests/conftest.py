"""Small random models of every hosted family, and default options of every method."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from rope_ext.conformance import ARCHITECTURES, TRAINED, random_model, tiny_config
from rope_ext.conformance import WORDS as VOCABULARY

SMALL_MODEL = Path(__file__).parent / "small_model"
"""A model of our own that really retrieves (see small_model/train.py)."""

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}

FAMILIES = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral", {"sliding_window": 24}),
    "mistral_nemo": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 32}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, "head_dim": 16}),
}
"""The families with an adapter of their own."""

_T5 = {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40}

HOSTED = {
    "bloom": ("bloom", {}),
    "bloom_6": ("bloom", {"num_attention_heads": 6, "hidden_size": 60}),
    "mpt": ("mpt", {"num_attention_heads": 6, "hidden_size": 60, "max_seq_len": 1000}),
    "t5": ("t5", _T5),
    "t5_gated": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "num_attention_heads": 6}),
    "mt5": ("mt5", {**ARCHITECTURES["t5"], **_T5}),
    "umt5": ("umt5", _T5),
}
"""Architectures whose attention modules are replaced."""

GENERIC = {
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.5, "original_max_position_embeddings": TRAINED}),
    "gpt_neox": ("gpt_neox", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("llama4_text", {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64}),
}
"""Other architectures, through the generic rotary adapter."""

OPTIONS = {
    "rope": {},
    "linear": {"factor": 4},
    "ntk": {"factor": 4},
    "ntk_by_parts": {"factor": 4, "beta": 8},
    "yarn": {"factor": 4, "beta_fast": 8},
    "longrope": {"factor": 4},
    "llama3": {"factor": 4},
    "abf": {"factor": 4, "base": 2e5},
    "lrope": {},
    "pient": {"factor": 4},
    "nope": {},
    "alibi": {"factor": 2},
    "t5_bias": {"factor": 2},
    "kerple": {},
    "fire": {"threshold": 32},
    "sandwich": {},
    "dynamic": {"factor": 4, "step": 7},
    "dynamic_yarn": {"beta_fast": 8, "step": 5},
    "dynamic_longrope": {"factor": 4},
    "xpos": {"scale_base": 32},
    "comay": {},
    "self_extend": {"group_size": 3, "neighbor_window": 20},
    "rerope": {"neighbor_window": 20, "log_scale": True},
    "leaky_rerope": {"neighbor_window": 20, "leak": 3},
    "dca": {"chunk_size": 24, "local_window": 5},
    "shaw": {"max_distance": 8, "value_vectors": True},
    "transformer_xl": {"dim": 32},
    "cope": {"max_positions": 12},
    "sinusoidal": {},
    "learned": {"max_positions": 600},
    "fourier": {},
}
"""Options for every method; longrope's lists depend on the model, see ``options``."""


STOCK = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
"""How stock transformers is asked for a scaling, in ``rope_parameters``."""


def config(family: str, **changes):
    model_type, own = {**FAMILIES, **HOSTED, **GENERIC}[family]
    return tiny_config(model_type, **{**own, **changes})


def build(family: str, seed: int = 0, **changes):
    torch.manual_seed(seed)
    return random_model(config(family, **changes))


def rotary_dim(model) -> int:
    tables = [table for name, table in model.named_buffers() if name.endswith("inv_freq")]
    config = model.config  # hosts without a rotary module turn whole heads
    own = getattr(config, "d_kv", None) or config.hidden_size // config.num_attention_heads
    return 2 * tables[0].numel() if tables else own


def options(method: str, model) -> dict:
    extra = {}
    if "longrope" in method:
        pairs = rotary_dim(model) // 2
        extra = {"long_factor": [1 + 3 * i / pairs for i in range(pairs)]}
    return {**OPTIONS[method], **extra}


def ids(length: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


@torch.no_grad()
def logits(model, input_ids, **kwargs) -> torch.Tensor:
    return model(input_ids, use_cache=False, **kwargs).logits


class LargestTensor(TorchDispatchMode):
    """While entered, ``bytes`` is the largest storage that any operation gave."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.bytes = max(self.bytes, part.untyped_storage().nbytes())
        return result


@pytest.fixture(autouse=True)
def _process_wide_settings():
    """The same for every test, whatever the one before it did."""
    torch.set_num_threads(1)  # tiny models gain nothing from more, and beside other work two wait for each other
    logging.disable_progress_bar()
    logging.set_verbosity_warning()


@pytest.fixture(scope="session")
def small():
    """(model, tokenizer) of the trained small model; tests leave it unpatched."""
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(SMALL_MODEL)
