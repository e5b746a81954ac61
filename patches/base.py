"""What an adapter is, and what it hands back: a patch that can be attached to and detached from one model."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_ext.checkpoint import PATCHED_ENTRIES
from rope_ext.config import FineTuning, Method

ATTRIBUTE = "_rope_ext"
"""Where a patched model keeps its Patch."""


@dataclass
class Swap:
    """One module, or number, in place of another: ``parent.name`` is ``old`` before and ``new`` after.

    ``hand_back(old, new)`` readies a module for its return: it stood aside while the model was moved.
    """

    parent: nn.Module
    name: str
    old: Any
    new: Any
    hand_back: Callable[[Any, Any], None] = lambda old, new: None


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
    fine_tuning: FineTuning
    stock: str
    """How stock transformers expresses it, or ""."""
    notes: tuple[str, ...] = ()
    attention: str = ""
    """How attention with a bias is computed, and why; "" where attention is the model's own."""


@dataclass
class Patch:
    """Everything that makes the difference between a model and the patched model; touches nothing until attached."""

    model: PreTrainedModel
    encoding: Method
    state: State
    swaps: list[Swap]
    configs: list[tuple[PreTrainedConfig, PreTrainedConfig]]
    """(original, patched) config objects; originals may be shared with other models."""
    attributes: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    """(module, name, value): plain attributes that modules carry while patched."""
    additions: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)
    """(parent, name, module): modules with learned parameters that are there while patched."""
    hooks: Sequence[tuple[nn.Module, Callable[..., Any]]] = field(default_factory=list)
    """(module, hook): called with (module, args, kwargs) before the module's forward while patched."""
    tokenizer: Any = None
    _tokenizer_lengths: tuple[int, int] = field(default=(0, 0), init=False)
    _planned: list[dict[str, Any]] = field(default_factory=list, init=False)
    _handles: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._planned = [dict(new.__dict__) for _, new in self.configs]

    def attach(self, root: nn.Module) -> None:
        """Put the patch in; ``root`` is the model or the outermost wrapper (PEFT, DDP, ...) around it."""
        for swap in self.swaps:
            setattr(swap.parent, swap.name, swap.new)
        for module, name, value in self.attributes:
            module.__dict__[name] = value  # past nn.Module, which would make a submodule of it
        for parent, name, module in self.additions:
            parent.add_module(name, _beside(parent, module))
        self._handles = [
            module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True) for module, hook in self.hooks
        ]
        _replace_configs(root, {id(old): new for old, new in self.configs})
        setattr(self.model, ATTRIBUTE, self)
        if self.tokenizer is not None:
            before = self.tokenizer.model_max_length
            self.tokenizer.model_max_length = max(before, self.state.usable_length)
            self._tokenizer_lengths = before, self.tokenizer.model_max_length

    def detach(self, root: nn.Module) -> None:
        """Take the patch out again: the very objects that were there before come back."""
        for swap in self.swaps:
            swap.hand_back(swap.old, swap.new)
            setattr(swap.parent, swap.name, swap.old)
        for module, name, _ in self.attributes:
            del module.__dict__[name]
        # as they are now, wrapped by an adapter perhaps, for whoever attaches this patch again
        self.additions = [(parent, name, parent.get_submodule(name)) for parent, name, _ in self.additions]
        for parent, name, _ in self.additions:
            delattr(parent, name)
        for handle in self._handles:
            handle.remove()
        self._keep_edits()
        _replace_configs(root, {id(new): old for old, new in self.configs})
        delattr(self.model, ATTRIBUTE)
        before, extended = self._tokenizer_lengths
        if self.tokenizer is not None and self.tokenizer.model_max_length == extended:
            self.tokenizer.model_max_length = before

    def _keep_edits(self) -> None:
        """What was changed in the config meanwhile (a resized vocabulary, another attention) outlives the patch."""
        for (old, new), planned in zip(self.configs, self._planned, strict=True):
            for name, value in new.__dict__.items():
                if value is not planned.get(name, _MISSING) and name not in (*PATCHED_ENTRIES, "rope_ext"):
                    old.__dict__[name] = value


_MISSING = object()


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


def _beside(parent: nn.Module, module: nn.Module) -> nn.Module:
    """The module on the device and in the dtype that its parent has by now."""
    theirs, own = next(parent.parameters()), next(module.parameters())
    if own.is_meta and not theirs.is_meta:
        module.to_empty(device=theirs.device)
    return (
        module if own.device == theirs.device and own.dtype == theirs.dtype else module.to(theirs.device, theirs.dtype)
    )


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
