"""Every difference between the supported transformers versions (5.2 up to the newest 5.x) is dealt with here."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

TESTED = {"transformers": ("5.2.0", "5.8.0", "5.17.0", "5.24.0"), "torch": ("2.9.1", "2.13.0")}
"""The versions that the tests were run on, oldest first; ``make matrix`` runs them again."""


def warn_if_untested(package: str, version: str) -> None:
    """UserWarning for a version whose first two numbers lie outside the range that was tested."""
    oldest, found, newest = (
        tuple(map(int, text.split(".")[:2])) for text in (TESTED[package][0], version, TESTED[package][-1])
    )
    if not oldest <= found <= newest:
        warnings.warn(
            f"rope_ext is tested with {package} {', '.join(TESTED[package])}; this is {version}. Install one of those, "
            "or see with `rope-ext methods --matrix` whether what you need holds here.",
            stacklevel=2,
        )


# an import happens once per process: the first time that anything is patched
warn_if_untested("transformers", transformers.__version__)
warn_if_untested("torch", torch.__version__)


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which this model's ``forward`` takes a KV cache; ``past_key_values`` became ``cache`` in 5.x."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def scales_decoder_output(config: PreTrainedConfig) -> bool:
    """Whether a T5-like model scales what its head is given by d_model^-0.5; UMT5 had no entry for it before 5.24."""
    return bool(getattr(config, "scale_decoder_outputs", config.tie_word_embeddings))


def mask_function(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make`` as transformers calls a mask function, which before 5.4 was told ``cache_position``, no lengths."""

    @functools.wraps(make)
    def called(cache_position: Tensor | None = None, **given: Any) -> Any:
        if cache_position is not None:
            given |= {"q_length": len(cache_position), "q_offset": cache_position[0], "device": cache_position.device}
        return make(**given)

    return called


def wants_weights(attention: nn.Module) -> bool:
    """Whether the config of a T5 attention module asks for weights; older ones have none, and their caller asks."""
    return bool(getattr(getattr(attention, "config", None), "output_attentions", False))


def hooks_on_weights(stack: nn.Module, attention: nn.Module) -> list[tuple[nn.Module, Callable[..., None]]]:
    """What a stack of UMT5 needs before 5.16, where its attention modules are not told that weights are asked for."""
    return [] if hasattr(attention, "config") else [(stack, _refuse_weights)]


def _refuse_weights(stack: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    if given.get("output_attentions") or stack.config.output_attentions:  # type: ignore[union-attr]
        raise ValueError(
            f"`output_attentions`=True: a patched UMT5 gives its weights with transformers 5.16 or newer, and this is "
            f"{transformers.__version__}; install that, or call unpatch_model first."
        )
