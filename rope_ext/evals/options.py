"""Tasks on a command line: the options of each, and the task that they ask for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NamedTuple

from rope_ext.evals.runner import Task
from rope_ext.evals.tasks.kv_retrieval import KvRetrieval
from rope_ext.evals.tasks.multi_doc_qa import MultiDocQa
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.passkey import Passkey
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.tasks.ruler import Ruler
from rope_ext.evals.text import read_text

Options = argparse.Namespace


class Kind(NamedTuple):
    """How a task is asked for."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    """Adds the task's own options to a parser."""
    make: Callable[[Options], Task]


def kinds() -> dict[str, Kind]:
    """By name, in the order in which ``all`` measures them."""
    return {
        "perplexity": Kind("perplexity of a long text, by position", _add_perplexity, _perplexity),
        "needle": Kind("find one fact in a long text", _add_needle, _needle),
        "passkey": Kind("find a pass key in filler", _add_passkey, _passkey),
        "kv_retrieval": Kind("read a value from a long JSON object, by its place", _add_kv_retrieval, _kv_retrieval),
        "multi_doc_qa": Kind("answer from one of many documents, by its place", _add_multi_doc_qa, _multi_doc_qa),
        "ruler": Kind("eleven synthetic tasks (RULER)", _add_ruler, _ruler),
    }


def whole_numbers(text: str) -> list[int]:
    """ "4096,8192" -> [4096, 8192]."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of whole numbers") from None
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} holds a number below 1")
    return values


def numbers(text: str) -> list[float]:
    """ "0,12.5" -> [0.0, 12.5]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of numbers") from None


def names(text: str) -> list[str]:
    """ "a,b" -> ["a", "b"]."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of names")
    return found


def file(text: str) -> str:
    """The name of a file that is there."""
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no file")
    return text


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bins", type=int, default=8, help="position bins of one forward")
    parser.add_argument("--stride", type=int, help="sliding windows of this stride instead of one forward")
    parser.add_argument("--windows", type=int, default=10, help="how many sliding windows")
    parser.add_argument(
        "--mean-of-windows", action="store_true", help="with --stride: also the mean of each window's own perplexity"
    )


def _perplexity(given: Options) -> Task:
    return Perplexity(
        read_text(given.text),
        given.lengths,
        bins=given.bins,
        stride=given.stride,
        windows=given.windows,
        mean_of_windows=given.mean_of_windows,
        samples=given.limit,
    )


def _add_needle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depths", type=numbers, default=[0, 25, 50, 75, 100], help="percent, comma-separated")


def _needle(given: Options) -> Task:
    return Needle(
        read_text(given.text), given.lengths, given.depths, samples=given.limit, seed=given.seed, chat=given.chat
    )


def _add_passkey(parser: argparse.ArgumentParser) -> None:
    pass


def _passkey(given: Options) -> Task:
    return Passkey(read_text("noise"), given.lengths, samples=given.limit, seed=given.seed, chat=given.chat)


def _add_kv_retrieval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=whole_numbers, default=[75, 140], help="sizes of the object, comma-separated")
    parser.add_argument("--query-first", action="store_true", help="ask before the object, too")


def _kv_retrieval(given: Options) -> Task:
    return KvRetrieval(
        given.pairs, samples=given.limit, seed=given.seed, query_first=given.query_first, chat=given.chat
    )


def _add_multi_doc_qa(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--documents", type=whole_numbers, default=[10, 20, 30], help="how many, comma-separated")
    parser.add_argument(
        "--qa-file", type=file, metavar="JSONL", help="questions in the form of Liu et al.; default: invented ones"
    )


def _multi_doc_qa(given: Options) -> Task:
    return MultiDocQa(given.documents, file=given.qa_file, samples=given.limit, seed=given.seed, chat=given.chat)


def _add_ruler(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subtasks", type=names, help="comma-separated; default: all eleven")
    parser.add_argument(
        "--qa", type=file, metavar="JSONL", action="append", help="a file of questions: one more subtask"
    )


def _ruler(given: Options) -> Task:
    return Ruler(
        read_text(given.text),
        given.lengths,
        subtasks=given.subtasks,
        qa=given.qa,
        samples=given.limit,
        seed=given.seed,
        chat=given.chat,
    )
