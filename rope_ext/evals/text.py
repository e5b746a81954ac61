"""Texts to read: a built-in one that needs no download, noise, files, folders, Hub datasets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

from rope_ext.files import read_utf8

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*")


def read_text(source: str | Path = "builtin") -> str:
    """The text behind a source name.

    Args:
        source: "builtin" (the language reference that ships inside CPython, ``pydoc_data.topics``: about 460 KB of
            English prose, slightly different in every Python release), "noise" (five short sentences), a text file,
            a folder of ``*.txt`` and ``*.md`` files, or "hf:NAME" for a Hub dataset with a ``text`` column.

    Raises:
        ValueError: nothing is found under that name, it is empty, or a file is not UTF-8 text.
    """
    source = str(source)
    if not source:
        raise ValueError("text source is empty; name one, for example 'builtin'.")
    if source == "builtin":
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    if source == "noise":
        return " ".join(NOISE)
    if source.startswith("hf:") and source != "hf:":
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ValueError(f"text source {source!r} needs the `datasets` package: pip install datasets.") from error
        text = "\n".join(row["text"] for row in load_dataset(source[3:], split="train"))
    elif os.path.isdir(source):
        files = sorted(file for file in Path(source).rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
        text = "\n".join(map(read_utf8, files))
    elif os.path.isfile(source):
        text = read_utf8(Path(source))
    else:
        raise ValueError(f"text source {source!r} is neither 'builtin', 'noise', 'hf:NAME', nor a file or folder here.")
    if not text.strip():
        raise ValueError(f"text source {source!r} is empty (a folder is searched for *.txt and *.md).")
    return text


def sentences(text: str) -> list[str]:
    """The text cut after '.', '!' or '?' before white space, and after '。', '！', '？'; white space is folded."""
    parts = (" ".join(part.split()) for part in _SENTENCE_END.split(text))
    return [part for part in parts if part]


def endless(parts: list[str], start: int = 0) -> Iterator[str]:
    """The sentences from ``start`` on, again and again."""
    rotated = parts[start % len(parts) :] + parts[: start % len(parts)]
    return cycle(rotated)
