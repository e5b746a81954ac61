"""What a patched model's forward is told about positions and documents: honoured or refused, never ignored.

transformers' models take any keyword and read those that they know. BLOOM swallows ``position_ids``; Llama under sdpa
swallows ``cu_seq_lens_q``, and with them that documents of a packed row must not see each other. So a hook stands
before the forward of every patched model. A packed row is handed on as the layout of its documents in place of the
attention mask, without a matrix of all pairs.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_ext.attention import NAME, Layout, documents
from rope_ext.attention.packed import STOCK, PackedMask

from .rows import SEQUENCES, Row, flash_lengths

TOLD = ("position_ids", *SEQUENCES)

PASSED = frozenset(
    "cache past_key_values use_cache cache_position labels num_items_in_batch logits_to_keep output_attentions "
    "output_hidden_states output_router_logits return_dict max_length_q max_length_k".split()
)
"""Keywords that transformers reads on the way (losses, outputs), or that say nothing beside ``TOLD``."""

HANDED_ON = frozenset("is_causal shift_labels ignore_index debug_io debug_io_dir prune_layers".split())
"""Keywords that are read on the way in models that read positions: those hand all keywords on."""

NEUTRAL = {
    "token_type_ids": 0,
    "head_mask": 1,
    "decoder_head_mask": 1,
    "cross_attn_head_mask": 1,
    "block_sequence_ids": -1,
    "is_causal": True,
    "decoder_position_ids": None,
    "shift_labels": None,
    "ignore_index": -100,
}
"""Keywords that would change the result in models that read them, and the value at which they would not."""


@dataclass(frozen=True)
class Told:
    """The hook: called with (module, args, kwargs) before the forward of a model.

    Attributes:
        causal: whether it is a decoder.
        windows: tokens that a query sees up to itself, by the config's layer type; under "" where layers are all alike;
            empty where they have none. None where the model's masks are not known: it then makes them itself.
        stacks: how many stacks it holds; two are an encoder and a decoder.
        reads: whether its attention, or its rotary module, is given the ``position_ids`` of its forward.
        masked_by_positions: whether the masks that the model makes itself keep documents apart by their positions.
        counts: whether positions count real tokens where padding cuts a text.
        refused: keywords that it cannot honour -> why.
    """

    causal: bool = True
    windows: Mapping[str, int | None] | None = field(default_factory=dict)
    stacks: int = 1
    reads: bool = True
    masked_by_positions: bool = False
    counts: bool = False
    refused: dict[str, str] = field(default_factory=dict)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = _names(type(module).forward)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if "read_index" in given:  # continuous batching: it says where each request's keys are, and keeps them apart
            return None
        mask = given.get("attention_mask")
        if torch.compiler.is_compiling():
            if self._left_to_stock(given, mask):
                return None
        else:
            self._check_names(module, names, given)
        if isinstance(mask, (Layout, dict)):
            return None  # prepared, by the model around this one or by the caller
        changes = self._changes(module, names, given, module.config._attn_implementation or "")
        if changes is None:
            return None
        kept = {name: value for name, value in kwargs.items() if name not in SEQUENCES}
        if "position_ids" not in names:
            kept.pop("position_ids", None)
            changes.pop("position_ids", None)
        places = {name: place for place, name in enumerate(names[: len(args)])}
        placed = list(args)
        for name, value in changes.items():
            if name in places:
                placed[places[name]] = value
            else:
                kept[name] = value
        return tuple(placed), kept

    def _left_to_stock(self, given: dict[str, Any], mask: Any) -> bool:
        """Whether the model itself does what a traced call asks for; to read arguments here would break the graph."""
        if any(name in given for name in SEQUENCES):
            return False
        if "position_ids" in given and not (self.reads and self.masked_by_positions):
            return False
        if isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point():
            torch._assert_async(
                (mask < 2).all(), "`attention_mask` numbers documents in a compiled call: pass `cu_seq_lens_q` and _k."
            )
        return True

    def _check_names(self, module: Any, names: tuple[str, ...], given: dict[str, Any]) -> None:
        kind = type(module).__name__
        for name, why in self.refused.items():
            if isinstance(given.get(name), Tensor) or given.get(name):
                raise ValueError(f"`{name}`: {why}")
        read = {*names, *TOLD, *PASSED, *(HANDED_ON if self.reads else ())}
        unread = given.keys() - read
        for name in unread - _read_around(module) if unread else ():
            neutral = self.causal if name == "is_causal" else NEUTRAL.get(name)
            if name not in NEUTRAL:
                warnings.warn(f"`{name}` is not read by {kind}.forward: it has no effect.", stacklevel=3)
            elif neutral is None or not bool((torch.as_tensor(given[name]) == neutral).all()):
                raise ValueError(f"`{name}` is not read by {kind}.forward and would be ignored: leave it out.")

    def _changes(
        self, module: Any, names: tuple[str, ...], given: dict[str, Any], implementation: str
    ) -> dict[str, Any] | None:
        """Arguments in place of those given; None where they are right as they are."""
        words = next((given[name] for name in ("input_ids", "inputs_embeds") if name in given), None)
        if words is None:  # the model itself will say what is missing
            return None
        row = Row(type(module).__name__, words.shape[0], words.shape[1], given)
        if row.says_nothing:
            return None
        if self.stacks > 1:
            told = [f"`{name}`" for name in TOLD if name in given] or ["an `attention_mask` that numbers documents"]
            raise ValueError(
                f"{' and '.join(told)}: {row.kind} is an encoder with a decoder, and nothing says which of their "
                "documents belong together. Give each row one document, padded, and leave positions out."
            )
        packed = row.documents
        if packed is None:
            return self._placed(row)
        row.refuse_cache()
        if "encoder_hidden_states" in given:
            raise ValueError(
                "documents packed in a row of a decoder that reads an encoder: give each row one document."
            )
        if not given.get("is_causal", self.causal) and self.causal:
            raise ValueError(
                f"`is_causal`=False with documents packed in a row: {row.kind} keeps them apart as a decoder."
            )
        positions = row.positions if row.positions is not None else documents.counted(packed)
        changes: dict[str, Any] = {"position_ids": positions}
        if "use_cache" in names:
            changes["use_cache"] = False
        if implementation.startswith("flash"):
            return {**changes, **flash_lengths(packed)}
        if self.windows is None or implementation not in (*STOCK, NAME):
            if not self.masked_by_positions:
                raise ValueError(
                    f"documents packed in a row: {row.kind} does not keep them apart under {implementation!r} "
                    "attention. Give each row one document, padded."
                )
            return {**changes, **row.left_to_stock(implementation)}
        return {**changes, "attention_mask": self._masks(row, packed, implementation)}

    def _placed(self, row: Row) -> dict[str, Any] | None:
        """One document in each row: positions that the forward would not read."""
        if row.positions is None or self.reads:
            return None
        if row.mask is not None and row.mask.dim() != 2:
            raise ValueError(f"`position_ids` beside a mask of all pairs: {row.kind} reads one of them only.")
        expected = row.layout(self.causal, cached=True)
        expected = expected.counted() if self.counts else expected
        placed = expected.placed(row.positions)
        if placed is not expected and row.past:
            raise ValueError(
                f"`position_ids` leave out padding inside a row with a cache, and {row.kind} counts it: leave them out."
            )
        return {} if placed is expected else {"attention_mask": placed}

    def _masks(self, row: Row, packed: Tensor, implementation: str) -> Any:
        kind = Layout if implementation == NAME else PackedMask
        base = row.layout(self.causal, packed, kind=kind)
        if row.positions is not None:
            base = base.placed(row.positions)
        masks = {name: base.patterned(window, 0, ()) for name, window in (self.windows or {"": None}).items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))


@cache
def _names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that a model's forward names, in order."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD)


def _read_around(module: nn.Module) -> set[str]:
    """Keywords that functions wrapped around the forward of this one module read; trainers put some there."""
    names: set[str] = set()
    forward = module.__dict__.get("forward")
    while forward is not None:
        names.update(inspect.signature(forward, follow_wrapped=False).parameters)
        forward = getattr(forward, "__wrapped__", None)
    return names


@cache
def masks_read_positions(forward: Callable[..., Any]) -> bool:
    """Whether all masks that a model's forward makes with transformers' functions are told the positions.

    Only then do they keep documents apart. Read off its code: some families leave positions out, and nothing says so.
    """
    tree = _code(forward)
    tell: set[str] = set()  # names of the keywords that are shared by several masks, and hold positions
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            made = ast.unparse(node.value)
            if "'position_ids': position_ids" in made or made.removesuffix(".copy()") in tell:
                tell.add(node.targets[0].id)
    made_masks = [
        {ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg in (None, "position_ids")}
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("_mask", "mask_function"))
    ]
    return bool(made_masks) and all(given & {"position_ids", *tell} for given in made_masks)


@cache
def hands_on(forward: Callable[..., Any]) -> bool:
    """Whether a model's forward hands positions and all other keywords on to the model inside it."""
    calls = (node for node in ast.walk(_code(forward)) if isinstance(node, ast.Call))
    inner = [
        call for call in calls if ast.unparse(call.func).startswith("self.") and "loss" not in ast.unparse(call.func)
    ]
    given = {ast.unparse(keyword) for call in inner for keyword in call.keywords}
    return "**kwargs" in given and "position_ids" in _names(forward)


def _code(forward: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))


def hooks(model: PreTrainedModel, roots: Iterable[nn.Module], told: Told) -> list[tuple[nn.Module, Callable[..., Any]]]:
    """The hook before ``roots``, and before the models around them that would not hand positions on."""
    found: list[tuple[nn.Module, Callable[..., Any]]] = []
    roots = list(roots)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            inside = [root for root in roots if any(root is each for each in module.modules())]
            if inside and (module in inside or not hands_on(type(module).forward)):
                own = replace(
                    told,
                    causal=getattr(inside[0], "is_decoder", told.causal),
                    stacks=len(inside),
                    masked_by_positions=all(masks_read_positions(type(root).forward) for root in inside),
                )
                found.append((module, own))
    return found
