"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A scratch path with the same suffix; in the end its file takes the place of ``path``. An error leaves nothing."""
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
