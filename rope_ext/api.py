"""patch_model, unpatch_model, patched, describe, methods: the whole of the library for most users."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from rope_ext.config import FineTuning, Method
from rope_ext.registry import METHODS, find_adapter, find_method

if TYPE_CHECKING:
    from rope_ext.patches.base import Patch, State

Model = TypeVar("Model", bound=nn.Module)


def patch_model(model: Model, method: str | Method, *, tokenizer: Any = None, **options: Any) -> Model:
    """Give a loaded model another position encoding, in place.

    Only this model changes: no class, no other model, no shared config. Patching a patched model replaces the patch,
    starting again from the original. If anything is refused, the model is left as it was.

    Args:
        model: a transformers model, or a PEFT, DDP or ``torch.compile`` wrapper around one.
        method: a method's name (see :func:`methods`), or an encoding object such as
            ``rope_ext.encodings.rotary.Yarn(factor=4)``.
        tokenizer: its ``model_max_length`` follows the new usable length (tokens), and goes back on unpatching.
        **options: the method's options, for example ``factor=4``.

    Returns:
        The same ``model``.

    Raises:
        ValueError: unknown method or option, a value out of range, or a model that cannot host the method.
        TypeError: a value of the wrong type, or something that is not a transformers model.
    """
    encoding = _encoding(method, options)
    if tokenizer is not None and not hasattr(tokenizer, "model_max_length"):
        raise TypeError(f"`tokenizer` must be a transformers tokenizer, got {type(tokenizer).__name__}.")
    inner = unwrap(model)
    current = patch_of(inner)
    if current is not None:
        current.detach(model)
    try:
        adapter = find_adapter(inner)
        refusal = adapter.refusal(type(encoding))
        if refusal:
            hosted = ", ".join(_hosted(inner)) or "none"
            raise ValueError(f"method {encoding.name!r}: {refusal.rstrip('.')}. Methods that it hosts: {hosted}.")
        patch = adapter.plan(encoding)
    except BaseException:
        if current is not None:
            current.attach(model)
        raise
    patch.tokenizer = current.tokenizer if tokenizer is None and current is not None else tokenizer
    patch.attach(model)
    return model


def unpatch_model(model: Model) -> Model:
    """Take the patch out: modules, config and outputs are what they were, bit for bit.

    What was changed in ``model.config`` meanwhile (a resized vocabulary, another attention implementation) stays.

    Raises:
        ValueError: the model is not patched.
    """
    inner = unwrap(model)
    patch = patch_of(inner)
    if patch is None:
        raise ValueError(f"{type(inner).__name__} is not patched: there is nothing to undo.")
    patch.detach(model)
    return model


@contextmanager
def patched(model: Model, method: str | Method, **options: Any) -> Iterator[Model]:
    """``with patched(model, "yarn", factor=4): ...``; afterwards the model is what it was before, patched or not."""
    inner = unwrap(model)
    before = patch_of(inner)
    patch_model(model, method, **options)
    try:
        yield model
    finally:
        during = patch_of(inner)
        if during is not None:
            during.detach(model)
        if before is not None:
            before.attach(model)


@dataclass(frozen=True)
class Description:
    """What :func:`describe` found. Lengths are in tokens, wavelengths in tokens per full turn."""

    model_type: str
    method: str
    options: dict[str, Any]
    patched: bool
    trained_length: int
    usable_length: int
    attention_scaling: float
    wavelengths: dict[str, tuple[float, ...]]
    """Per channel pair, by layer type ("all" where they share one table); infinite for a pair that never turns."""
    outside_trained_range: dict[str, tuple[int, ...]]
    """Channel pairs that meet angles at the usable length which training never showed them."""
    fine_tuning: FineTuning
    stock_loadable: bool
    """Whether a process without rope_ext loads the saved checkpoint to the same logits."""
    stock_type: str
    """What a saved checkpoint says to stock transformers for that: a ``rope_type``, or the family's own method."""
    attention: str
    """How attention with a bias is computed over a long input, and why; "" where it is the model's own."""
    notes: tuple[str, ...]

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        lines = [
            f"{self.model_type}: {self.method}{f'({options})' if options else ''}"
            + ("" if self.patched else ", as loaded (not patched)"),
            f"  trained length     {self.trained_length} tokens",
            f"  usable length      {self.usable_length} tokens",
            f"  attention scaling  {self.attention_scaling:.4f}",
            f"  fine-tuning        {self.fine_tuning}",
            "  stock transformers " + (f"loads it (as {self.stock_type!r})" if self.stock_loadable else "cannot"),
        ]
        lines += [f"  attention          {self.attention}"] * bool(self.attention)
        for layer_type, waves in self.wavelengths.items():
            beyond = self.outside_trained_range[layer_type]
            lines.append(f"  wavelengths        {min(waves):.1f} .. {max(waves):.0f} tokens ({layer_type} layers)")
            lines.append(
                f"  channels           {len(waves)} pairs, {len(beyond)} leave their trained range"
                + (f" ({_ranges(beyond)})" if beyond else "")
            )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def describe(model: nn.Module, length: int | None = None) -> Description:
    """How a model's positions stand: method, lengths, wavelengths, what training never showed it.

    An unpatched model is described by the tables it holds; ``method`` is then "rope" or the ``rope_type`` it came with.

    Args:
        model: a transformers model (or wrapper), patched or not; one on the meta device will do.
        length: tokens at which ``outside_trained_range`` is judged; by default the usable length.
    """
    inner = unwrap(model)
    patch = patch_of(inner)
    state: State = patch.state if patch else find_adapter(inner).state()
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ValueError(f"`length` must be a whole number of tokens >= 1, got {length!r}.")
    reach = length or state.usable_length
    notes = state.notes
    if patch is not None and patch.model is not inner:
        notes += (f"patched through its inner {type(patch.model).__name__}: patch the whole model to save it right",)
    return Description(
        model_type=inner.config.model_type,
        method=state.method,
        options=patch.encoding.options() if patch else {},
        patched=patch is not None,
        trained_length=state.trained_length,
        usable_length=state.usable_length,
        attention_scaling=state.attention_scaling,
        wavelengths={
            table.layer_type or "all": tuple((2 * math.pi / table.current.double()).tolist())
            for table in state.channels
        },
        outside_trained_range={
            table.layer_type or "all": _outside(table.trained, table.current, state.trained_length, reach)
            for table in state.channels
        },
        fine_tuning=state.fine_tuning,
        stock_loadable=bool(state.stock),
        stock_type=state.stock,
        attention=state.attention,
        notes=notes,
    )


@dataclass(frozen=True)
class MethodInfo:
    """One row of :func:`methods`."""

    name: str
    seam: str
    formula: str
    source: str
    fine_tuning: FineTuning
    summary: str


def methods(model: nn.Module | None = None) -> dict[str, MethodInfo]:
    """The methods there are, by name; given a model, those its architecture hosts."""
    names = list(METHODS) if model is None else _hosted(unwrap(model))
    return {
        name: MethodInfo(
            name,
            entry.seam,
            entry.formula,
            entry.source,
            entry.fine_tuning,
            (entry.__doc__ or "").strip().split("\n")[0],
        )
        for name, entry in METHODS.items()
        if name in names
    }


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT, DDP, FSDP or ``torch.compile`` wrappers."""
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        wrapped = [name for name in ("module", "_orig_mod", "base_model", "model") if name in _children(inner)]
        if not wrapped:
            raise TypeError(
                f"expected a transformers PreTrainedModel or a wrapper around one, got {type(model).__name__}."
            )
        inner = getattr(inner, wrapped[0])
    return inner


def patch_of(model: PreTrainedModel) -> Patch | None:
    """The patch in force, if any: of the model, or of a model inside it (the base model of a causal LM)."""
    found = (module.__dict__.get("_rope_ext") for module in model.modules())
    patch: Patch | None = next((patch for patch in found if patch is not None), None)
    return patch


def _children(module: Any) -> dict[str, nn.Module]:
    return dict(module.named_children()) if isinstance(module, nn.Module) else {}


def _encoding(method: str | Method, options: dict[str, Any]) -> Method:
    if isinstance(method, Method):
        if options:
            raise ValueError(f"options {sorted(options)} were given beside {method!r}; set them on the object instead.")
        return method
    if not isinstance(method, str):
        raise TypeError(f"`method` must be a method name or an encoding object, got {method!r}.")
    return find_method(method).from_options(options)


def _hosted(model: PreTrainedModel) -> list[str]:
    adapter = find_adapter(model)
    return [name for name, method in METHODS.items() if adapter.refusal(method) is None]


def _outside(trained: torch.Tensor, current: torch.Tensor, trained_length: int, reach: int) -> tuple[int, ...]:
    """Pairs that made less than a full turn within the trained length and turn further than that within ``reach``."""
    seen = trained.double() * trained_length
    needed = current.double() * reach
    beyond = (seen < 2 * math.pi) & (needed > seen * (1 + 1e-3))
    return tuple(torch.nonzero(beyond).flatten().tolist())


def _ranges(numbers: tuple[int, ...]) -> str:
    """(3, 4, 5, 9) as "3-5, 9"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
