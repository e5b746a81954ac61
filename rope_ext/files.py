"""Files that are whole or not there, and texts that are texts."""

from __future__ import annotations

import gzip
import os
import re
import zlib
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


_CONTROL = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""Control characters that no text needs: not white space, not the escapes that colour a log."""


def read_utf8(path: Path) -> str:
    """What a text file says; one that ends in .gz is unpacked.

    Raises:
        ValueError: it is not UTF-8, or binary data that could be: numbers measured on wrongly decoded text would look
            like any others.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (at byte {error.start}); convert it, for example with iconv.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}.") from error
    odd = sum(1 for _ in _CONTROL.finditer(text))
    if "\0" in text or odd > len(text) // 100:
        raise ValueError(f"{path} is binary data, not text: {odd} of its {len(text)} characters are control codes.")
    return text
