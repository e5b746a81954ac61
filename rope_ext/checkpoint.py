"""Saved models: what ``config.rope_ext`` records, loading it back, exporting for stock tools, PEFT adapters."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils import logging as transformers_logging

from rope_ext.api import patch_model, patch_of, unwrap
from rope_ext.config import Method, names_a_method, record_of
from rope_ext.registry import find_method

PATCHED_ENTRIES = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")
"""Config entries that a patch writes beside ``config.rope_ext``; their originals are kept in the record."""

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

LEARNED = "position_encoding."
"""Part of the name of every parameter that an encoding learns."""


def rope_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs whose rope entries a patch changes, the decoder's last: one, or an encoder-decoder's two."""
    if not config.is_encoder_decoder:
        return [config.get_text_config(decoder=True)]
    names = ("encoder", "decoder", "encoder_config", "decoder_config")
    parts = [part for part in (getattr(config, name, None) for name in names) if isinstance(part, PreTrainedConfig)]
    texts = [config, *(part.get_text_config() for part in parts)]
    return [text for text in texts if getattr(text, "rope_parameters", None)] or [config]


def load_patched(path: str | Path, model_class: type[PreTrainedModel] | None = None, **kwargs: Any) -> PreTrainedModel:
    """Load a checkpoint that was saved while patched, as a patched model that can be unpatched to the original.

    Args:
        path: folder or Hub id.
        model_class: by default the class named in the checkpoint's config.
        **kwargs: go to ``from_pretrained`` (``dtype``, ``device_map``, ...).

    Raises:
        ValueError: the checkpoint has no record of a patch, or a damaged one, or lacks weights.
    """
    where = {name: value for name, value in kwargs.items() if name in _HUB_ARGUMENTS}
    config = AutoConfig.from_pretrained(path, **{**SAFE, **where})
    encoding = take_record(config, str(path))
    learned = _learned_tensors(path, where) if encoding.learns else {}
    with _quiet_about(learned):
        model = load_whole(model_class or named_class(config), path, model_class is not None, config=config, **kwargs)
    patch_model(model, encoding)
    _fill(model, learned, str(path))
    return model


SAFE = {"trust_remote_code": False}
"""No code that comes with a checkpoint is run, and nobody is asked about it, unless the caller says so."""


def load_whole(kind: Any, path: str | Path, new_parts: bool = False, **kwargs: Any) -> PreTrainedModel:
    """``kind.from_pretrained`` of a checkpoint that has every weight, in safetensors: stock loading would make up those
    that are missing, and unpickle other files. ``new_parts``: those that are missing are wanted new (another head).

    Raises:
        ValueError: weights are missing, or the checkpoint's index names files outside it.
        OSError: no safetensors there.
    """
    weight_map(path, {name: value for name, value in kwargs.items() if name in _HUB_ARGUMENTS})
    given = {**SAFE, "use_safetensors": True, **kwargs}
    model: PreTrainedModel
    with _named(path):
        model, found = kind.from_pretrained(path, output_loading_info=True, **given)
    if found["missing_keys"] and not new_parts:
        missing = sorted(found["missing_keys"])
        raise ValueError(f"{path} lacks {len(missing)} of the weights of {kind.__name__}, for example {missing[0]!r}.")
    return model


def weight_map(path: str | Path, where: dict[str, Any]) -> dict[str, str] | None:
    """Tensor name -> file of a sharded checkpoint; None for one in a single file.

    Raises:
        ValueError: the index is damaged, or names a file that is not beside it.
    """
    hub = {name: value for name, value in where.items() if name != "trust_remote_code"}
    index = cached_file(str(path), SAFE_WEIGHTS_INDEX_NAME, **hub, _raise_exceptions_for_missing_entries=False)
    if index is None:
        return None
    try:
        files: dict[str, str] = json.loads(Path(index).read_bytes())["weight_map"]
        beside = all(file == Path(file).name for file in files.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged: {error!r}.") from error
    if not beside:
        raise ValueError(f"{index} names files that are not beside it; it is not followed.")
    return files


def named_class(config: PreTrainedConfig) -> Any:
    """The model class that a checkpoint's config names."""
    general = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return getattr(transformers, (config.architectures or [""])[0], general)


@torch.no_grad()
def _fill(model: PreTrainedModel, learned: dict[str, Tensor], where: str) -> None:
    """Give a patched model what its encoding had learned; names may have or lack the prefix of the base model."""
    prefix = f"{model.base_model_prefix}."
    known = {name.removeprefix(prefix): value for name, value in learned.items()}
    for name, parameter in model.named_parameters():
        if LEARNED in name:
            short = name.removeprefix(prefix)
            if short not in known:
                raise ValueError(
                    f"{where} has no tensor {name!r}; it has {sorted(learned)}. Was it saved with adapters that were "
                    "not merged? Use save_adapter, or merge_and_unload first."
                )
            parameter.copy_(known[short])


_HUB_ARGUMENTS = (
    "revision",
    "subfolder",
    "token",
    "cache_dir",
    "local_files_only",
    "force_download",
    "trust_remote_code",
)


def _learned_tensors(path: str | Path, where: dict[str, Any]) -> dict[str, Tensor]:
    """What a checkpoint holds of an encoding's learned parameters; stock loading has no place for them."""
    hub = {name: value for name, value in where.items() if name != "trust_remote_code"}
    shards = weight_map(path, where)
    files = {SAFE_WEIGHTS_NAME} if shards is None else {file for name, file in shards.items() if LEARNED in name}
    found = {}
    for file in files:
        with _named(path), safe_open(str(cached_file(str(path), file, **hub)), framework="pt") as stored:
            found.update({name: stored.get_tensor(name) for name in stored.keys() if LEARNED in name})  # noqa: SIM118
    return found


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """What is wrong with a weights file, with where it is."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} has a damaged weights file: {error}.") from error


@contextmanager
def _quiet_about(expected: dict[str, Tensor]) -> Iterator[None]:
    """Keep transformers from reporting tensors as unexpected that are read right after."""
    before = transformers_logging.get_verbosity()
    if expected:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def take_record(config: PreTrainedConfig, where: str) -> Method:
    """Turn a patched config into the original one, in place; returns the encoding it was patched with.

    Raises:
        ValueError: the config has no record of a patch, or a damaged one.
    """
    record = record_of(config)
    if record is None:
        raise ValueError(
            f"{where} has no `rope_ext` entry in its config, so it was not saved from a patched model; "
            "load it with from_pretrained and call patch_model."
        )
    if _release(record["version"]) > _release(version("rope_ext")):
        warnings.warn(
            f"{where} was saved with rope_ext {record['version']}, this is {version('rope_ext')}; consider an update.",
            stacklevel=3,
        )
    encoding = find_method(record["method"]).from_options(record["options"])
    for text in rope_configs(config):
        for name in {*PATCHED_ENTRIES, *record["original"], *record.get("added", ())}:
            if name in record["original"]:
                setattr(text, name, copy.deepcopy(record["original"][name]))
            elif hasattr(text, name):
                delattr(text, name)
    config._experts_implementation = None  # where the entry that makes stock transformers refuse has gone on loading
    del config.rope_ext
    return encoding


@dataclass(frozen=True)
class Export:
    """What :func:`export` wrote."""

    path: Path
    stock_loadable: bool
    message: str


def export(model: nn.Module, path: str | Path, tokenizer: Any = None, *, overwrite: bool = False) -> Export:
    """Write the model as a checkpoint folder, all of it or nothing.

    Where stock transformers can express the method, the folder loads there to the same logits. Where it cannot, stock
    loading fails with a message that names ``rope_ext.load_patched``; it is never silently wrong.

    Args:
        model: patched or not. A PEFT model must be merged first (``merge_and_unload``).
        path: the folder to make.
        tokenizer: written beside the model if given.
        overwrite: replace an existing checkpoint folder.

    Raises:
        ValueError: the path is taken (with ``overwrite``: by something else than a checkpoint), or adapters are not
            merged.
    """
    target = Path(path).resolve()
    inner = unwrap(model)
    if any(".base_layer." in key for key in inner.state_dict()):
        raise ValueError("export: the model carries PEFT adapters; merge them first: model = model.merge_and_unload().")
    if target.exists() and not overwrite:
        raise ValueError(f"export: {target} exists; pass overwrite=True to replace it, or choose another path.")
    if target.exists() and not (target.is_dir() and ((target / "config.json").exists() or not any(target.iterdir()))):
        raise ValueError(f"export: {target} is neither a checkpoint folder nor empty; it is not replaced.")
    if target in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"export: {target} is, or holds, the current directory; choose another path.")
    with _scratch_beside(target) as folder:
        inner.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        aside = folder.with_name(folder.name + ".old")
        if target.exists():
            target.rename(aside)
        folder.rename(target)
        shutil.rmtree(aside, ignore_errors=True)
    patch = patch_of(inner)
    if patch is None:
        return Export(target, True, "saved unpatched; loads with stock transformers")
    if patch.state.stock:
        return Export(target, True, f"loads with stock transformers (as {patch.state.stock!r})")
    way = f"load it with rope_ext.load_patched({str(target)!r})"
    return Export(target, False, f"stock transformers cannot express {patch.encoding.name} here: {way}")


def save_adapter(model: nn.Module, path: str | Path, **kwargs: Any) -> None:
    """Save a PEFT adapter with a record of the position encoding it was trained under.

    The record goes into ``adapter_config.json``; ``PeftModel.from_pretrained`` warns about the entry, and
    :func:`load_adapter` checks it.

    Raises:
        TypeError: not a PEFT model.
        ValueError: its base model is not patched.
    """
    if not hasattr(model, "peft_config"):
        raise TypeError(f"save_adapter takes a PEFT model (from get_peft_model), got {type(model).__name__}.")
    patch = patch_of(unwrap(model))
    if patch is None:
        raise ValueError("save_adapter: the base model is not patched; save the adapter with model.save_pretrained.")
    target = Path(path).resolve()
    with _scratch_beside(target) as folder:
        model.save_pretrained(str(folder), **kwargs)  # type: ignore[operator]
        for file in folder.rglob(ADAPTER_CONFIG):
            entries = json.loads(file.read_text())
            file.write_text(json.dumps({**entries, "rope_ext": patch.encoding.to_dict()}, indent=2))
        for file in [found for found in folder.rglob("*") if found.is_file()]:
            place = target / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            file.replace(place)


def load_adapter(model: PreTrainedModel, path: str | Path, **kwargs: Any) -> Any:
    """``PeftModel.from_pretrained``, refusing a base model that is not patched as the adapter was trained.

    If anything is refused, the base model is left as it was.

    Raises:
        ValueError: the adapter has no record, the base model's method or options differ from it, or its weights are not
            in safetensors.
    """
    record = adapter_config(path).get("rope_ext")
    if record is None:
        raise ValueError(f"{path} has no record of a position encoding; load it with PeftModel.from_pretrained.")
    patch = patch_of(unwrap(model))
    found = patch.encoding.to_dict() if patch else {"method": "unpatched", "options": {}}
    if (found["method"], found["options"]) != (record["method"], record["options"]):
        arguments = "".join(f", {name}={value!r}" for name, value in record["options"].items())
        raise ValueError(
            f"this adapter was trained under {record['method']} {record['options']}, the base model is "
            f"{found['method']} {found['options']}; first call patch_model(model, {record['method']!r}{arguments})."
        )
    return attach_adapter(model, path, **kwargs)


def attach_adapter(model: PreTrainedModel, path: str | Path, **kwargs: Any) -> Any:
    """``PeftModel.from_pretrained`` of weights in safetensors; after an error the base model is as it was.

    Raises:
        ValueError: there are no such weights, or they are damaged.
    """
    from peft import PeftModel

    if cached_file(str(path), ADAPTER_WEIGHTS, _raise_exceptions_for_missing_entries=False) is None:
        raise ValueError(f"{path} has no {ADAPTER_WEIGHTS}; other kinds of files can hold code and are not read.")
    with warnings.catch_warnings(), _named(path), _undone(model):
        warnings.filterwarnings("ignore", message=".*rope_ext.*")
        return PeftModel.from_pretrained(model, str(path), **kwargs)


@contextmanager
def _undone(model: nn.Module) -> Iterator[None]:
    """On an error the model gets its modules back: peft replaces them before it reads weights."""
    children = [(module, dict(module._modules), set(module.__dict__)) for module in model.modules()]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, known, names in children:
            module._modules.clear()
            module._modules.update(known)
            for name in set(module.__dict__) - names:
                del module.__dict__[name]
        for parameter, wanted in trained:
            parameter.requires_grad_(wanted)
        raise


def adapter_config(path: str | Path) -> dict[str, Any]:
    """The settings of a saved adapter.

    Raises:
        ValueError: they are damaged, or its record of a position encoding is.
    """
    file = Path(str(cached_file(str(path), ADAPTER_CONFIG)))
    try:
        entries: dict[str, Any] = json.loads(file.read_bytes())
        right = entries.get("rope_ext") is None or names_a_method(entries["rope_ext"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}.") from error
    if not right:
        raise ValueError(f"{file}: its entry `rope_ext` is not what save_adapter writes, got {entries['rope_ext']!r}.")
    return entries


def _release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """An empty folder next to ``target``, gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
