"""Training rows: documents, packed to a length with their boundaries kept, or stretched over longer positions."""

from __future__ import annotations

import ast
import json
import pydoc_data.topics
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext.files import read_utf8
from rope_ext.training.loss import IGNORED

BUILT_IN = "builtin"
"""The language reference that comes with every CPython: text without a download. Evaluations read it by default."""

DOCSTRINGS = "docstrings"
"""The docstrings of CPython's standard library (1.6 MB), one document per module: to train on what is not evaluated."""

Tokenize = Callable[[str], list[int]]


def documents(source: str) -> Iterator[str]:
    """The texts of a source, one after the other, in an order that does not change.

    Args:
        source: "builtin"; "docstrings"; a file (.txt: one document; .jsonl: one per line, field "text"); a folder of
            such files; or "hf:NAME[:SPLIT[:COLUMN]]", a Hugging Face dataset, streamed (default split "train", column
            "text").

    Raises:
        ValueError: nothing there, a line without text, or a file that is not UTF-8 text.
    """
    if source == BUILT_IN:
        yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    elif source == DOCSTRINGS:
        yield from _docstrings()
    elif source.startswith("hf:"):
        yield from _dataset(*source.split(":")[1:])
    else:
        path = Path(source)
        files = (
            sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
        )
        if not files or not all(file.is_file() for file in files):
            raise ValueError(
                f"data={source!r}: no such file or folder with .txt or .jsonl files; or use {DOCSTRINGS!r}."
            )
        for file in files:
            yield from _lines(file) if file.suffix == ".jsonl" else [read_utf8(file)]


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if {"site-packages", "test", "tests", "pydoc_data"} & set(file.relative_to(library).parts):
            continue
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
        if any(found):
            yield "\n\n".join(text for text in found if text)


def _lines(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"data: {file}, line {number} is not a JSON object with a field 'text'.") from error
            if not isinstance(text, str):
                raise ValueError(f"data: {file}, line {number}: 'text' is {type(text).__name__}, not a string.")
            yield text


def _dataset(name: str, split: str = "train", column: str = "text") -> Iterator[str]:
    from datasets import load_dataset

    for row in load_dataset(name, split=split, streaming=True):
        if column not in row:
            raise ValueError(f"data: dataset {name!r} has no column {column!r}; it has {sorted(row)}.")
        yield row[column]


@dataclass(frozen=True)
class Rows:
    """Training rows of one length, the same on every pass and in every process.

    Attributes:
        tokens: shape (rows, length), int64.
        starts: shape (rows, length), bool: where a document starts.
    """

    tokens: Tensor
    starts: Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def pack(texts: Iterator[str], tokenize: Tokenize, separator: int | None, length: int, most: int | None = None) -> Rows:
    """Fill rows with documents back to back; a document that does not fit goes on in the next row as a new one.

    Args:
        texts: documents.
        tokenize: text -> token ids, without special tokens.
        separator: appended to each document (the end-of-sequence token); None for nothing.
        length: tokens per row.
        most: stop after this many rows; None for all.

    Raises:
        ValueError: less than one row of text.
    """
    rows: list[list[int]] = []
    starts: list[list[bool]] = []
    ids: list[int] = []
    fresh: list[bool] = []
    for text in texts:
        made = tokenize(text) + ([separator] if separator is not None else [])
        ids += made
        fresh += [True] + [False] * (len(made) - 1) if made else []
        while len(ids) >= length:
            rows.append(ids[:length])
            starts.append([True, *fresh[1:length]])
            ids, fresh = ids[length:], fresh[length:]
        if most is not None and len(rows) >= most:
            break
    if not rows:
        raise ValueError(f"the data holds {len(ids)} tokens, less than one row of train_length={length}.")
    return Rows(torch.tensor(rows[:most]), torch.tensor(starts[:most]))


def packed_row(rows: Rows, index: int) -> dict[str, Tensor]:
    """One row with its documents kept apart: positions restart, and nothing is predicted across a boundary.

    transformers makes the mask between documents from the positions where no attention_mask is given.
    """
    tokens, starts = rows.tokens[index], rows.starts[index]
    place = torch.arange(len(tokens))
    positions = place - torch.where(starts, place, 0).cummax(0).values
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(starts, IGNORED)}


def whole_row(rows: Rows, index: int) -> dict[str, Tensor]:
    """One row as one text: everything sees everything before it."""
    tokens = rows.tokens[index]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def pose_row(rows: Rows, index: int, target_length: int, seed: int) -> dict[str, Tensor]:
    """One row whose positions are those of a text of ``target_length`` tokens with a part left out.

    Positional skip-wise training (Zhu et al. 2023, arXiv:2309.10400): the row is cut in two, and the second part moves
    away by a distance drawn uniformly from 0 .. target_length - length. The draw depends on seed and index alone.

    Raises:
        ValueError: ``target_length`` is shorter than the row.
    """
    row = whole_row(rows, index)
    length = len(row["input_ids"])
    if target_length < length:
        raise ValueError(f"target_length={target_length} is shorter than train_length={length}.")
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + index)
    cut = int(torch.randint(1, length, (), generator=drawn))
    skip = int(torch.randint(0, target_length - length + 1, (), generator=drawn))
    places = torch.arange(length)
    return {**row, "position_ids": places + skip * (places >= cut)}


def span_corruption(rows: Rows, index: int, sentinels: list[int], end: int, seed: int) -> dict[str, Tensor]:
    """A row for T5: spans are replaced with sentinels in the input; the labels name what was there.

    15 % of the tokens in spans of 3 on average (Raffel et al. 2020, section 3.1.4); the draw depends on seed and index
    alone.
    """
    tokens = rows.tokens[index]
    length = len(tokens)
    drawn = torch.Generator().manual_seed(seed * 1_000_003 + index)
    spans = min(max(1, round(0.15 * length / 3)), len(sentinels))
    noise = max(spans, min(round(0.15 * length), length - spans))

    def cut(total: int, parts: int) -> list[int]:
        edges = torch.randperm(total - 1, generator=drawn)[: parts - 1].sort().values.add(1).tolist()
        return [b - a for a, b in zip([0, *edges], [*edges, total], strict=True)]

    source: list[int] = []
    target: list[int] = []
    at = 0
    for kept, dropped, sentinel in zip(cut(length - noise, spans), cut(noise, spans), sentinels[:spans], strict=True):
        source += [*tokens[at : at + kept].tolist(), sentinel]
        target += [sentinel, *tokens[at + kept : at + kept + dropped].tolist()]
        at += kept + dropped
    made: dict[str, Any] = {"input_ids": [*source, end], "labels": [*target, end]}
    row = {name: torch.tensor(value) for name, value in made.items()}
    return {**row, "attention_mask": torch.ones_like(row["input_ids"])}
