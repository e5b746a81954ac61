"""Finished rows on disk: JSON lines, one file per task, while several processes work one more per process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class Store:
    """The finished rows of a task by key.

    A line that a crash cut off is dropped, and its row measured again; nothing that was whole is lost.

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
            for file in (folder / f"{task}.jsonl", *sorted(folder.glob(f"{task}.rank*.jsonl"))):
                self._read(file)

    def _read(self, file: Path) -> None:
        if not file.exists():
            return
        lines = file.read_bytes().splitlines(keepends=True)
        for line in lines:
            entry = _parse(line)
            if entry is not None:
                self.done[entry.pop("key")] = entry
        if file == self._path and lines and not lines[-1].endswith(b"\n"):
            os.truncate(file, sum(map(len, lines[:-1])))

    def add(self, key: str, row: Row) -> None:
        """On disk before this returns."""
        self.done[key] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, **row}) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def absorb(self) -> None:
        """Take what other processes wrote into the main file. Only the process of rank 0 may, when all are done."""
        if self._folder is None:
            return
        for file in sorted(self._folder.glob(f"{self._task}.rank*.jsonl")):
            for line in file.read_bytes().splitlines(keepends=True):
                entry = _parse(line)
                if entry is not None:
                    self.add(entry.pop("key"), entry)
            file.unlink()


def _parse(line: bytes) -> Row | None:
    """The row of a whole line; None for anything else."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    whole = isinstance(entry, dict) and isinstance(entry.get("key"), str) and isinstance(entry.get("setup"), dict)
    return entry if whole else None
