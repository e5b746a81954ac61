"""What commands have in common: wrong usage and errors in one line, options of a method."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        for argument in sys.argv[1:] if args is None else args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse would read an empty list
                self.error(f"argument {argument.removesuffix('=--')}: '--' is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see --help\n")


def method_option(text: str) -> tuple[str, Any]:
    """ "beta_fast=16" -> ("beta_fast", 16): the value is JSON, or else a word.

    Raises:
        argparse.ArgumentTypeError: not of that form.
    """
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def one_line(error: Exception) -> str:
    """What a user is told of an error; ``ROPE_EXT_TRACEBACK=1`` has it raised, to show where it comes from."""
    if os.environ.get("ROPE_EXT_TRACEBACK"):
        raise error
    refused = isinstance(error, (ValueError, TypeError, OSError, ImportError))
    return " ".join(f"{'' if refused else type(error).__name__ + ': '}{error}".split())
