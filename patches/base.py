"""What an adapter is, and what it hands back: a patch that can be attached to and detached from one model."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_ext.config import Method

ATTRIBUTE = "_rope_ext"
"""Where a patched model keeps its Patch."""


@dataclass
class Swap:
    """One module in place of another: ``parent.name`` is ``old`` before and ``new`` after."""

    parent: nn.Module
    name: str
    old: nn.Module
    new: nn.Module


@dataclass(frozen=True)
class Channels:
    """Frequencies of one rotary table, shape (d / 2,), radians per token: as trained, and as they are now."""

    layer_type: str | None
    trained: Tensor
    current: Tensor


@dataclass(frozen=True)
class State:
    """How a model's positions stand: what ``describe`` reports."""

    method: str
    trained_length: int
    usable_length: int
    attention_scaling: float
    channels: tuple[Channels, ...]
    stock: str
    """How stock transformers expresses it, or ""."""
    notes: tuple[str, ...] = ()


@dataclass
class Patch:
    """Everything that makes the difference between a model and the patched model; touches nothing until attached."""

    encoding: Method
    state: State
    swaps: list[Swap]
    configs: list[tuple[PreTrainedConfig, PreTrainedConfig]]
    """(original, patched) config objects; originals may be shared with other models and are never written to."""
    tokenizer: Any = None
    _tokenizer_length: int = field(default=0, init=False)

    def attach(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Put the patch into ``model``; ``root`` is the outermost wrapper (PEFT, DDP, ...) around it."""
        for swap in self.swaps:
            setattr(swap.parent, swap.name, swap.new)
        _replace_configs(root, {id(old): new for old, new in self.configs})
        setattr(model, ATTRIBUTE, self)
        if self.tokenizer is not None:
            self._tokenizer_length = self.tokenizer.model_max_length
            self.tokenizer.model_max_length = max(self._tokenizer_length, self.state.usable_length)

    def detach(self, model: PreTrainedModel, root: nn.Module) -> None:
        """Take the patch out again: the very objects that were there before come back."""
        for swap in self.swaps:
            setattr(swap.parent, swap.name, swap.old)
        _replace_configs(root, {id(new): old for old, new in self.configs})
        delattr(model, ATTRIBUTE)
        if self.tokenizer is not None:
            self.tokenizer.model_max_length = self._tokenizer_length


class Adapter(ABC):
    """Knows one architecture: which seams it hosts and how an encoding gets in.

    Subclass it for a new architecture, name its ``model_types`` and register it with ``register_adapter``.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    seams: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def refusal(self, method: type[Method]) -> str | None:
        """Why this model cannot take the method at all, or None."""
        if method.seam not in self.seams:
            hosted = ", ".join(sorted(self.seams)) or "none"
            return f"{self.model.config.model_type} hosts no {method.seam} encodings here (hosted seams: {hosted})"
        return None

    @abstractmethod
    def plan(self, encoding: Method) -> Patch:
        """Build the patch without touching the model. Raises ValueError where the checkpoint does not fit."""

    @abstractmethod
    def state(self) -> State:
        """The model as it is, unpatched."""


def copy_configs(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, PreTrainedConfig]]:
    """(original, copy) of every config object in use inside the model; nested ones keep their relations."""
    found = (module.__dict__.get("config") for module in model.modules())
    originals = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    memo: dict[int, Any] = {}
    return [(config, copy.deepcopy(config, memo)) for config in originals.values()]


def _replace_configs(root: nn.Module, replacement: dict[int, PreTrainedConfig]) -> None:
    for module in root.modules():
        config = module.__dict__.get("config")
        if id(config) in replacement:
            module.config = replacement[id(config)]  # type: ignore[assignment]
