"""Finished rows on disk: JSON lines, one file per task, while several processes work one more per process."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, BinaryIO

from rope_ext.evals.identity import digest

Row = dict[str, Any]


class Store:
    """The finished rows of a task by key.

    A line carries a digest of what it says: one that was edited or cut off does not count, and its row is measured
    again. Nothing is ever taken out of a file: others may be adding to it.

    Args:
        folder: where ``<task>.jsonl`` is; None to keep rows in memory only.
        task: its name.
        rank: number of this process; others than 0 write ``<task>.rank<rank>-<job>.jsonl``.
        job: what the processes of a run, and no others, have in common.
    """

    def __init__(self, folder: Path | None, task: str, rank: int = 0, job: str = "") -> None:
        self.done: dict[str, Row] = {}
        self._folder, self._task, self._job = folder, task, job
        self._path = (
            None if folder is None else folder / (f"{task}.rank{rank}-{job}.jsonl" if rank else f"{task}.jsonl")
        )
        if folder is not None:
            for file in (folder / f"{task}.jsonl", *self._of_others("*")):
                self.done.update(_rows(file))

    def add(self, key: str, row: Row) -> None:
        """On disk before this returns."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            entry = {"key": key, **row}
            line = json.dumps({"digest": _digest(entry), **entry}).encode() + b"\n"
            with self._path.open("a+b", buffering=len(line) + 1) as file:  # in one go, whoever else writes
                file.write(line if _ends_line(file) else b"\n" + line)
                file.flush()
                os.fsync(file.fileno())
        self.done[key] = row

    def absorb(self) -> None:
        """Take what the job's other processes wrote into the main file. Only rank 0 may, when all are done."""
        for file in self._of_others(self._job):
            for key, row in _rows(file).items():
                self.add(key, row)
            file.unlink()

    def _of_others(self, job: str) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob(f"{self._task}.rank*-{job}.jsonl"))


def _digest(entry: Row) -> str:
    """Of what a line will say."""
    return digest(json.loads(json.dumps(entry)))


def _ends_line(file: BinaryIO) -> bool:
    if not file.tell():
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _rows(file: Path) -> dict[str, Row]:
    """The rows in a file, by key; lines that are no longer what was written do not count."""
    found: dict[str, Row] = {}
    edited: list[Any] = []
    for line in file.read_bytes().split(b"\n")[:-1] if file.exists() else ():
        entry = _parse(line)
        if entry is None:
            continue
        whole = entry.pop("digest", None) == _digest(entry)
        key = entry.pop("key", None)
        if whole and isinstance(key, str):
            found[key] = entry
        else:
            edited.append(key)
    lost = sum(str(key) not in found for key in edited)
    if lost:
        warnings.warn(f"{file}: lines that were edited ({lost}) do not count; their rows are measured.", stacklevel=4)
    return found


def _parse(line: bytes) -> Row | None:
    """The object in a line; None for anything else, such as a line that was cut off."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
