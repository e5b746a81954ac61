"""RULER: thirteen tasks of retrieval, tracing and counting at growing lengths (Hsieh et al. 2024, arXiv 2404.06654)."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import inf, isqrt, pi
from pathlib import Path
from typing import Any, ClassVar

from rope_ext.evals.checks import at_least_one, whole_numbers
from rope_ext.evals.haystack import SHORTEST, haystack, hide
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask, encode, frame
from rope_ext.evals.runner import Row
from rope_ext.evals.tasks.kv_retrieval import random_uuid
from rope_ext.evals.tasks.multi_doc_qa import Document, Entry, normalized, read_entries
from rope_ext.evals.text import NOISE, sentences
from rope_ext.evals.words import ADJECTIVES, NOUNS, PAIRS, SINGLES, pairs, vocabulary

INSTRUCT = 85.6
"""Percent that an instruction-tuned model must exceed: Llama-2-7B-chat at 4096 tokens in the paper."""

BASE = 79.4
"""Percent that a base model must exceed: Llama-2-7B at 4096 tokens in the paper."""


@dataclass(frozen=True)
class Niah:
    """A task with needles in a haystack."""

    hay: str = "text"
    """"text", "noise", or "needles": nothing but needles with other keys."""
    keys: str = "words"
    """"words" (two, with a hyphen) or "uuids"."""
    values: str = "numbers"
    """"numbers" (of seven digits) or "uuids"."""
    hidden: int = 1
    """Keys that are put into the haystack."""
    each: int = 1
    """Values per key."""
    asked: int = 1


NIAH = {
    "niah_single_1": Niah(hay="noise"),
    "niah_single_2": Niah(),
    "niah_single_3": Niah(values="uuids"),
    "niah_multikey_1": Niah(hidden=4),
    "niah_multikey_2": Niah(hay="needles"),
    "niah_multikey_3": Niah(hay="needles", keys="uuids", values="uuids"),
    "niah_multivalue": Niah(each=4),
    "niah_multiquery": Niah(hidden=4, asked=4),
}

SUBTASKS = (*NIAH, "vt", "cwe", "fwe")
"""The tasks that need no file."""

NEEDLE = "One of the secret codes of {key} is {value}."


@dataclass(frozen=True)
class Wording:
    """The sentences around the context, and how much may be generated."""

    task: str
    question: str
    answer_prefix: str
    new_tokens: int

    def frame(self, tokenizer: Any, chat: bool, example: str = "", **values: str) -> tuple[list[int], list[int]]:
        asked, prefix = self.question.format(**values), self.answer_prefix.format(**values)
        return frame(tokenizer, f"{example}{self.task}\n", f"\n{asked}", prefix, chat)

    def worked(self, context: str, answers: Sequence[str], **values: str) -> str:
        """An example with its answer, to go before the task."""
        asked, prefix = self.question.format(**values), self.answer_prefix.format(**values)
        return f"{self.task}\n{context}\n{asked} {prefix} {', '.join(answers)}\n\n"


ONE = Wording(
    "Secret codes stand somewhere in the text below. Remember them: you will be asked for them.",
    "What is the secret code of {keys} in the text above?",
    "The secret code of {keys} in the text is",
    128,
)
SEVERAL = Wording(
    ONE.task,
    "What are all the secret codes of {keys} in the text above?",
    "The secret codes of {keys} in the text are",
    128,
)
TRACKING = Wording(
    "Some sentences of the text below set a variable, to a number or to another variable. Follow them.",
    "Which variables are set to {value} in the text above, be it by way of other variables?",
    "The five variables that are set to {value} are",
    30,
)
COMMON = Wording(
    "Below is a numbered list of words, some of which come again and again. Remember those that come most often.",
    "Which ten words come most often in the list above?",
    "The ten words that come most often are",
    120,
)
FREQUENT = Wording(
    "The text below is written in code words; the dots mean nothing. Keep track of how often each code word comes.",
    "Which three code words come most often in the text above, dots aside?",
    "The three code words that come most often are",
    50,
)
ANSWERING = Wording(
    "Answer the question in a few words, with the help of the documents below.",
    "Question: {question}",
    "Answer:",
    32,
)

COMMON_WORDS = 10
TIMES = ((30, 3), (10, 1))
"""How often a common and another word come in cwe: the first that fits."""

CONSONANTS = "bcdfghjklmnpqrstvwxz"
"""Made-up names consist of these, so that they are no words."""

FEWEST_CODED = 100
"""With fewer coded words the ranks 4 and 5 are hardly apart."""

ENOUGH_MISSES = 20
"""After so many documents that do not fit into what is left, no more are tried."""


class Ruler(QuestionTask):
    """Each task at each length, as full as it can be.

    Args:
        text: the essay haystack; its sentences are repeated where it is too short.
        lengths: tokens that prompt and answer take together.
        subtasks: names from ``SUBTASKS``; all by default.
        qa: files of questions, see :func:`rope_ext.evals.tasks.multi_doc_qa.read_entries`; they add the tasks "qa_1",
            "qa_2" ... Sample s asks line s; the other lines' documents fill the prompt.
        samples: prompts per length and task.
        seed: of keys, values, places and words.
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.

    Raises:
        ValueError: a length or task is not there, a file is too small or not in its form, or (when a question is built)
            a length is too short for a task, or so long that its words run out.
    """

    name: ClassVar[str] = "ruler"

    def __init__(
        self,
        text: str,
        lengths: Sequence[int],
        *,
        subtasks: Sequence[str] | None = None,
        qa: str | Path | Sequence[str | Path] | None = None,
        samples: int = 5,
        seed: int = 0,
        chat: bool = False,
    ) -> None:
        self.lengths = whole_numbers("lengths", lengths)
        at_least_one(samples=samples)
        files = [] if qa is None else [qa] if isinstance(qa, (str, Path)) else list(qa)
        self._entries = {f"qa_{number}": read_entries(file) for number, file in enumerate(files, start=1)}
        known = (*SUBTASKS, *self._entries)
        given = [subtasks] if isinstance(subtasks, str) else SUBTASKS if subtasks is None else subtasks
        wanted = (*given, *self._entries)
        if not wanted or not set(wanted) <= set(known):
            listed = ", ".join(known)
            raise ValueError(f"`subtasks` must be from {listed}, got {subtasks!r} (qa_1 needs a file as `qa`).")
        for task, entries in self._entries.items():
            if samples > len(entries):
                raise ValueError(f"samples={samples} is more than the {len(entries)} questions of {task}.")
        self.subtasks = tuple(dict.fromkeys(wanted))
        self.text, self.samples, self.seed, self.chat = text, samples, seed, chat

    def settings(self) -> Row:
        wording = [vars(each) for each in (ONE, SEVERAL, TRACKING, COMMON, FREQUENT, ANSWERING)]
        return {
            "text": digest(self.text),
            "qa": {task: digest([repr(entry) for entry in entries]) for task, entries in self._entries.items()},
            "seed": self.seed,
            "chat": self.chat,
            "words": digest([ADJECTIVES, NOUNS, NOISE]),
            "wording": digest([NEEDLE, *wording]),
        }

    def rows(self) -> list[Row]:
        return [
            {"length": length, "subtask": task, "sample": sample}
            for length in self.lengths
            for task in self.subtasks
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """Prompt and generation together take at most ``length`` tokens, and nearly as many."""
        task = row["subtask"]
        sheet = _Sheet(tokenizer, row, random.Random(f"{self.seed}:{task}:{row['sample']}"), self.chat)
        if task in NIAH:
            return _niah(sheet, NIAH[task], self._sentences)
        if task in self._entries:
            return _qa(sheet, self._entries[task])
        return {"vt": _vt, "cwe": _cwe, "fwe": _fwe}[task](sheet)

    def score(self, generated: str, question: Question) -> float:
        """The share of the references in the generated text; of a qa task's references one is enough."""
        share = super().score(generated, question)
        return float(share > 0) if isinstance(question, _AnyOf) else share

    @cached_property
    def _sentences(self) -> list[str]:
        return sentences(self.text)


def effective_length(rows: Sequence[Row], threshold: float) -> int | None:
    """The largest length whose mean over the tasks exceeds ``threshold`` percent, None if there is none.

    Args:
        rows: of one setup, with ``length``, ``subtask`` and ``score``.
        threshold: ``INSTRUCT`` or ``BASE``.

    Raises:
        ValueError: a length lacks a task that another one has, so that the means do not compare.
    """
    scores: dict[int, dict[str, list[float]]] = {}
    for row in rows:
        scores.setdefault(row["length"], {}).setdefault(row["subtask"], []).append(row["score"])
    tasks = {row["subtask"] for row in rows}
    passed = []
    for length, found in scores.items():
        if missing := tasks - set(found):
            raise ValueError(f"length {length} has no rows of {', '.join(sorted(missing))}, which other lengths have.")
        means = [sum(values) / len(values) for values in found.values()]
        if 100 * sum(means) / len(means) > threshold:
            passed.append(length)
    return max(passed, default=None)


@dataclass(frozen=True)
class _AnyOf(Question):
    """Of its references one is enough."""


class _Sheet:
    """One prompt in the making."""

    def __init__(self, tokenizer: Any, row: Row, rng: random.Random, chat: bool) -> None:
        self.tokenizer, self.row, self.rng, self.chat = tokenizer, row, rng, chat

    def encode(self, text: str) -> list[int]:
        return encode(self.tokenizer, text)

    def frame(self, wording: Wording, example: str = "", answers: Sequence[str] = (), **values: str) -> int:
        """Tokens that are left for the context; more than the paper's may be generated where the answers take more."""
        self.head, self.tail = wording.frame(self.tokenizer, self.chat, example, **values)
        self.new_tokens = max(wording.new_tokens, len(self.encode(_listing(answers))))
        room: int = self.row["length"] - len(self.head) - len(self.tail) - self.new_tokens
        return room

    def answered_by(self, ids: list[int], references: Sequence[str], **facts: Any) -> Question:
        answer = self.encode(_listing(references))
        if len(answer) > self.new_tokens:
            taken, task = f"{len(answer)} tokens of {self.new_tokens}", self.row["subtask"]
            raise ValueError(f"{task} cannot be measured with this tokenizer: the answer takes {taken}.")
        return Question(self.head + ids + self.tail, tuple(references), answer, self.new_tokens, facts)

    def check(self, room: int, needed: int) -> None:
        length, task = self.row["length"], self.row["subtask"]
        if room < needed:
            raise ValueError(f"length {length} is too short for {task}: it takes at least {length + needed - room}.")

    def used_up(self, what: str) -> ValueError:
        return ValueError(
            f"length {self.row['length']} is too long for {self.row['subtask']}: {what}; use shorter ones."
        )


def _listing(answers: Sequence[str]) -> str:
    return " " + ", ".join(answers)


def _niah(sheet: _Sheet, kind: Niah, essay: Sequence[str]) -> Question:
    rng = sheet.rng
    keys = _strings(kind.keys, rng, PAIRS if kind.hay == "needles" else kind.hidden)
    values = _strings(kind.values, rng)
    hidden = [(key, next(values)) for key in islice(keys, kind.hidden) for _ in range(kind.each)]
    depths = [rng.uniform(0, 100) for _ in hidden]
    if kind.each > 1:
        depths.sort()  # the values of one key are asked for in the order of the text
    asked = hidden[: kind.asked * kind.each]
    wording = ONE if len(asked) == 1 else SEVERAL
    answers = [value for _, value in asked]
    room = sheet.frame(wording, answers=answers, keys=", ".join(dict.fromkeys(key for key, _ in asked)))
    needles = [sheet.encode(" " + NEEDLE.format(key=key, value=value)) for key, value in hidden]
    room -= sum(len(needle) for needle in needles)
    if kind.hay == "needles":
        hay = _needles(sheet, keys, values, room)
    else:
        sheet.check(room, SHORTEST)
        hay = haystack(sheet.tokenizer, NOISE if kind.hay == "noise" else essay, room, sheet.row["sample"])
    ids, true_depths = hide(hay, list(zip(depths, needles, strict=True)))
    return sheet.answered_by(ids, answers, true_depths=true_depths[: len(asked)])


def _needles(sheet: _Sheet, keys: Iterator[str], values: Iterator[str], room: int) -> list[list[int]]:
    """As many needles as fit, at least one."""
    hay: list[list[int]] = []
    for key in keys:
        piece = sheet.encode(" " + NEEDLE.format(key=key, value=next(values)))
        if not hay:
            sheet.check(room, len(piece))
        room -= len(piece)
        if room < 0:
            return hay
        hay.append(piece)
    raise sheet.used_up(f"there are {len(hay)} distinct keys")


def _strings(kind: str, rng: random.Random, count: int = 0) -> Iterator[str]:
    """Distinct keys or values; ``count`` is how many words there will be."""
    if kind == "words":
        return iter(pairs(count, rng))
    return _fresh(lambda: random_uuid(rng) if kind == "uuids" else str(rng.randint(10**6, 10**7 - 1)))


def _fresh(draw: Callable[[], str]) -> Iterator[str]:
    """What ``draw`` returns, again and again, without what came before."""
    seen = set()
    while True:
        drawn = draw()
        if drawn not in seen:
            seen.add(drawn)
            yield drawn


def _vt(sheet: _Sheet) -> Question:
    """One chain of four hops: the first variable is set to a number, each other one to the one before it."""
    rng = sheet.rng
    drawn = list(islice(_fresh(lambda: "".join(rng.choices(CONSONANTS.upper(), k=5))), 10))
    value, other = (str(number) for number in rng.sample(range(10000, 100000), 2))
    names, shown = drawn[:5], drawn[5:]
    context = " ".join(" ".join(each) for each in zip(NOISE, _chain(shown, other), strict=True))
    room = sheet.frame(TRACKING, TRACKING.worked(context, shown, value=other), answers=names, value=value)
    statements = [sheet.encode(" " + statement) for statement in _chain(names, value)]
    room -= sum(len(statement) for statement in statements)
    sheet.check(room, SHORTEST)
    hay = haystack(sheet.tokenizer, NOISE, room, sheet.row["sample"])
    depths = sorted(rng.uniform(0, 100) for _ in statements)
    ids, true_depths = hide(hay, list(zip(depths, statements, strict=True)))
    return sheet.answered_by(ids, names, true_depths=true_depths)


def _chain(names: Sequence[str], value: str) -> list[str]:
    return [f"Set {name} to {before}." for name, before in zip(names, (value, *names), strict=False)]


def _cwe(sheet: _Sheet) -> Question:
    """Single words while there are enough of them, else pairs; the words of the example are others."""
    rng = sheet.rng
    singles, compounds = vocabulary(len(SINGLES), rng), pairs(PAIRS, rng)
    shown, singles = singles[: 2 * COMMON_WORDS], singles[2 * COMMON_WORDS :]
    example = shown[:COMMON_WORDS] * 3 + shown[COMMON_WORDS:]
    rng.shuffle(example)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(example, start=1))
    room = sheet.frame(COMMON, COMMON.worked(context, shown[:COMMON_WORDS]))
    numbers: list[list[int]] = []
    _, least = _listed(sheet, numbers, singles[: 2 * COMMON_WORDS], TIMES[-1])
    sheet.check(room, least)
    for times in TIMES:
        for words in (singles, compounds):
            pieces, _ = _listed(sheet, numbers, words, times, room)
            if len(pieces) < len(words):
                break
        else:
            raise sheet.used_up(f"there are {len(compounds)} distinct words")
        if len(pieces) >= 2 * COMMON_WORDS:
            break
    often, rarely = times
    order = [rank for rank in range(len(pieces)) for _ in range(often if rank < COMMON_WORDS else rarely)]
    rng.shuffle(order)
    ids = [token for number, rank in zip(numbers, order, strict=False) for token in (*number, *pieces[rank])]
    facts = {"words": len(pieces), "common_times": often, "other_times": rarely}
    return sheet.answered_by(ids, words[:COMMON_WORDS], **facts)


def _listed(
    sheet: _Sheet, numbers: list[list[int]], words: Sequence[str], times: tuple[int, int], room: float = inf
) -> tuple[list[list[int]], int]:
    """(ids of the words that fit into a numbered list, tokens of the list of all words up to the first that does not).

    ``numbers`` holds the ids of the items' numbers and grows as needed.
    """
    pieces: list[list[int]] = []
    items, tokens = 0, 0
    for rank, word in enumerate(words):
        piece, more = sheet.encode(f" {word}"), times[rank >= COMMON_WORDS]
        for number in range(len(numbers) + 1, items + more + 1):
            numbers.append(sheet.encode(f" {number}." if number > 1 else "1."))
        tokens += more * len(piece) + sum(len(number) for number in numbers[items : items + more])
        items += more
        if tokens > room:
            break
        pieces.append(piece)
    return pieces, tokens


def _fwe(sheet: _Sheet) -> Question:
    """A word of rank r comes as often as total / zeta(2) / r^2 says, rounded down; rank 1 is the noise."""
    rng = sheet.rng
    room = sheet.frame(FREQUENT)
    ranks = len(_counts(max(2 * room, FEWEST_CODED)))
    coded = _fresh(lambda: "".join(rng.choices(CONSONANTS, k=6)))
    words = ["...", *islice(coded, ranks)]
    pieces = [sheet.encode(f" {word}") for word in words]

    def tokens(total: int) -> int:
        return sum(count * len(piece) for count, piece in zip(_counts(total), pieces, strict=False))

    sheet.check(room, tokens(FEWEST_CODED))
    counts = _counts(bisect_right(range(2 * room), room, key=tokens) - 1)
    order = [rank for rank, count in enumerate(counts) for _ in range(count)]
    rng.shuffle(order)
    ids = [token for rank in order for token in pieces[rank]]
    return sheet.answered_by(ids, words[1:4], words=len(order))


def _counts(total: int) -> list[int]:
    """How often the words of rank 1, 2 ... come, down to those that come once."""
    first = total * 6 / pi**2
    return [int(first / rank**2) for rank in range(1, isqrt(int(first)) + 1)]


def _qa(sheet: _Sheet, entries: Sequence[Entry]) -> Question:
    """The documents with the answer among as many others as fit, in random order."""
    entry = entries[sheet.row["sample"]]
    left = room = sheet.frame(ANSWERING, question=entry.question)
    bodies: list[list[int]] = []
    misses = 0
    for document in dict.fromkeys((*entry.gold, *_others(entry, entries, sheet.rng))):
        body = sheet.encode(f" {document.title}\n{document.text}" if document.title else f"\n{document.text}")
        size = len(_number(sheet, len(bodies))) + len(body)
        if document in entry.gold:
            sheet.check(left, size)
        if size <= left:
            bodies.append(body)
            left -= size
        else:
            misses += 1
        if misses == ENOUGH_MISSES:
            break
    if misses == 0 and left > room / 20:
        raise sheet.used_up(f"all its documents take only {room - left} tokens")
    sheet.rng.shuffle(bodies)
    ids = [token for place, body in enumerate(bodies) for token in (*_number(sheet, place), *body)]
    answer = sheet.encode(f" {entry.answers[0]}")
    return _AnyOf(sheet.head + ids + sheet.tail, entry.answers, answer, sheet.new_tokens, {"documents": len(bodies)})


def _number(sheet: _Sheet, place: int) -> list[int]:
    return sheet.encode(f"\n\nDocument {place + 1}:" if place else "Document 1:")


def _others(entry: Entry, entries: Sequence[Entry], rng: random.Random) -> Iterator[Document]:
    """The entry's own documents without the answer, then those of the others in random order."""
    yield from entry.distractors
    answers = [normalized(answer) for answer in entry.answers]
    pool = [document for each in entries for document in (*each.gold, *each.distractors)]
    for document in rng.sample(pool, len(pool)):
        if not any(answer in normalized(document.text) for answer in answers):
            yield document
