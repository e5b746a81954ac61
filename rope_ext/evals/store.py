"""Finished rows on disk: JSON lines, one file per task, while several processes work one more per process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]


class Store:
    """The finished rows of a task by key.

    A line that a crash cut off is dropped when the next one is added, and its row measured again; nothing that was
    whole is lost.

    Args:
        folder: where ``<task>.jsonl`` is; None to keep rows in memory only.
        task: its name.
        rank: number of this process; others than 0 write ``<task>.rank<rank>.jsonl``.
    """

    def __init__(self, folder: Path | None, task: str, rank: int = 0) -> None:
        self.done: dict[str, Row] = {}
        self._folder, self._task = folder, task
        self._path = None if folder is None else folder / (f"{task}.rank{rank}.jsonl" if rank else f"{task}.jsonl")
        if folder is not None:
            for file in (folder / f"{task}.jsonl", *self._of_others()):
                self.done.update(_rows(file))

    def add(self, key: str, row: Row) -> None:
        """On disk before this returns."""
        self.done[key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a+b") as file:
                if file.tell() and not _ends_line(file):
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
                file.write(json.dumps({"key": key, **row}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def absorb(self) -> None:
        """Take what other processes wrote into the main file. Only the process of rank 0 may, when all are done."""
        for file in self._of_others():
            for key, row in _rows(file).items():
                self.add(key, row)
            file.unlink()

    def _of_others(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob(f"{self._task}.rank*.jsonl"))


def _ends_line(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _rows(file: Path) -> dict[str, Row]:
    """The whole rows in a file, by key."""
    entries = map(_parse, file.read_bytes().splitlines(keepends=True)) if file.exists() else ()
    return {entry.pop("key"): entry for entry in entries if entry is not None}


def _parse(line: bytes) -> Row | None:
    """The row of a whole line; None for anything else."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("setup"), dict)
    return entry if whole else None
