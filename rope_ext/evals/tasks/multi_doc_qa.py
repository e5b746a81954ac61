"""Multi-document question answering: the answer is in one of many documents (Liu et al. 2023, "Lost in the Middle")."""

from __future__ import annotations

import json
import math
import random
import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rope_ext.evals.checks import at_least_one, percentages, whole_numbers
from rope_ext.evals.identity import digest
from rope_ext.evals.questions import Question, QuestionTask, encode, frame
from rope_ext.evals.runner import Row
from rope_ext.evals.tasks.kv_retrieval import POSITIONS, place
from rope_ext.evals.words import FACTS, NAMES, Fact
from rope_ext.files import read_utf8

TASK = "Answer the question in a few words. The answer is in one of the documents below."
CLOSED_BOOK = "Answer the question in a few words."
QUESTION = "Question: {question}"
ANSWER_PREFIX = "Answer:"
DOCUMENT = "Document [{number}](Title: {title}) {text}"


@dataclass(frozen=True)
class Document:
    """What one search result says."""

    title: str
    text: str


@dataclass(frozen=True)
class Entry:
    """A question with the documents that answer it and those that do not."""

    question: str
    answers: tuple[str, ...]
    gold: tuple[Document, ...]
    distractors: tuple[Document, ...]


class MultiDocQa(QuestionTask):
    """Accuracy over the place of the document with the answer. A position moves that one, all others keep their order.

    Beside the positions there are rows without documents ("closed book"), with the right one alone ("oracle"), and with
    the article's remedy ("remedy"): the documents that share most with the question go to the edges.

    Args:
        documents: how many documents a prompt has.
        positions: percent of the way from the first document (0) to the last (100).
        file: questions and documents in the paper's form, see :func:`read_entries`; sample s asks line s. By default
            people who do not exist.
        samples: questions per number of documents and position.
        seed: of the people and what is said about them.
        remedy: one more prompt per number of documents and sample, with the remedy.
        closed_book: one more prompt per sample, without documents.
        oracle: one more prompt per sample, with the right document alone.
        chat: put the prompt into the tokenizer's chat template, the answer prefix behind the assistant header.
        max_new_tokens: how much may be generated.

    Raises:
        ValueError: a number or position is out of range, the file is too small or not in that form, or (when a question
            is built) every answer takes more than ``max_new_tokens``.
    """

    name: ClassVar[str] = "multi_doc_qa"

    def __init__(
        self,
        documents: Sequence[int] = (10, 20, 30),
        positions: Sequence[float] | None = None,
        *,
        file: str | Path | None = None,
        samples: int = 5,
        seed: int = 0,
        remedy: bool = True,
        closed_book: bool = True,
        oracle: bool = True,
        chat: bool = False,
        max_new_tokens: int = 32,
    ) -> None:
        self.documents = whole_numbers("documents", documents)
        self.positions = percentages("positions", POSITIONS if positions is None else positions)
        at_least_one(samples=samples, max_new_tokens=max_new_tokens)
        self.samples, self.seed, self.max_new_tokens, self.chat = samples, seed, max_new_tokens, chat
        self.remedy, self.closed_book, self.oracle = remedy, closed_book, oracle
        self.entries = None if file is None else read_entries(file)
        if self.entries is None and self.documents[-1] > len(NAMES):
            raise ValueError(f"`documents` must be at most {len(NAMES)} (so many people), got {self.documents[-1]}.")
        if self.entries is not None:
            _check_size(self.entries, self.documents[-1], samples, file)
        self._source = digest([repr(each) for each in self.entries or (*FACTS, *NAMES)])

    def settings(self) -> Row:
        return {
            "source": self._source,
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "chat": self.chat,
            "wording": digest([TASK, CLOSED_BOOK, QUESTION, ANSWER_PREFIX, DOCUMENT]),
        }

    def rows(self) -> list[Row]:
        """``position`` is a percentage or "remedy", "closed book" (0 documents) or "oracle" (1 document)."""
        positions: list[float | str] = [*self.positions, *(["remedy"] if self.remedy else [])]
        asked = [(count, position) for count in self.documents for position in positions]
        asked += [(0, "closed book")] if self.closed_book else []
        asked += [(1, "oracle")] if self.oracle else []
        return [
            {"documents": count, "position": position, "sample": sample}
            for count, position in asked
            for sample in range(self.samples)
        ]

    def question(self, tokenizer: Any, row: Row) -> Question:
        """``index`` (from 0) is the place of the document with the answer."""
        entry = self._entry(row)
        documents = _arranged(entry, row)
        before = f"{TASK}\n\n" if documents else CLOSED_BOOK
        asked = QUESTION.replace("{question}", entry.question)
        head, tail = frame(tokenizer, before, f"\n\n{asked}", ANSWER_PREFIX, self.chat)
        shown = [DOCUMENT.format(number=number, **vars(each)) for number, each in enumerate(documents, start=1)]
        answers = [encode(tokenizer, f" {answer}") for answer in entry.answers]
        least = min(len(answer) for answer in answers)
        if least > self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} is too few: the answer takes {least} tokens.")
        facts = {"index": documents.index(entry.gold[0]) if documents else None}
        ids = head + encode(tokenizer, "\n".join(shown)) + tail
        return Question(ids, entry.answers, answers[0], self.max_new_tokens, facts)

    def score(self, generated: str, question: Question) -> float:
        """Best-subspan exact match: 1 if the first line contains an answer, both normalized, else 0."""
        said = normalized(generated.split("\n")[0])
        return float(any(normalized(answer) in said for answer in question.references))

    def longest(self, tokenizer: Any, rows: Sequence[Row]) -> int:
        fullest = {row["sample"]: row for row in sorted(rows, key=lambda row: row["documents"])}
        questions = [self.question(tokenizer, row) for row in fullest.values()]
        return max(len(question.ids) + question.max_new_tokens for question in questions)

    def _entry(self, row: Row) -> Entry:
        if self.entries is not None:
            return self.entries[row["sample"]]
        return invented(random.Random(f"{self.seed}:{row['sample']}"), max(1, row["documents"]))


def normalized(text: str) -> str:
    """Lower-case, without punctuation and the articles a, an, the; white space folded."""
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def invented(rng: random.Random, count: int) -> Entry:
    """A question about one of ``count`` people. More people are the same ones and more; only one fits the answer."""
    names = rng.sample(NAMES, len(NAMES))[:count]
    asked = rng.choice(FACTS)
    answer = rng.choice(asked.values)
    others = [value for value in asked.values if value != answer]
    gold, *rest = [_person(rng, name, asked, others if place else [answer]) for place, name in enumerate(names)]
    return Entry(asked.question.format(name=names[0]), (answer,), (gold,), tuple(rest))


def _person(rng: random.Random, name: str, asked: Fact, choices: Sequence[str]) -> Document:
    """``choices`` are the values of the fact that is asked for."""
    said: list[str] = []
    for fact in rng.sample(FACTS, len(FACTS)):
        value = rng.choice(choices if fact is asked else fact.values)
        said.append(rng.choice(fact.wordings).format(name=name.split()[1] if said else name, value=value))
    return Document(name, " ".join(said))


def _arranged(entry: Entry, row: Row) -> list[Document]:
    """The documents of a row in their order."""
    count, position = row["documents"], row["position"]
    if count == 0:
        return []
    documents = list(entry.distractors[: count - 1])
    ranking = position == "remedy"
    percent = 0 if position == "oracle" else 50 if ranking else position
    documents.insert(place(count, percent), entry.gold[0])
    if not ranking:
        return documents
    best = ranked(entry.question, documents)
    return best[::2] + best[1::2][::-1]


def ranked(question: str, documents: Sequence[Document]) -> list[Document]:
    """Those first that share most words with the question, where a word counts more the fewer documents have it."""
    bags = [set(normalized(f"{each.title} {each.text}").split()) for each in documents]
    weights = {
        word: math.log((1 + len(bags)) / (1 + sum(word in bag for bag in bags)))
        for word in sorted(set(normalized(question).split()))
    }
    scores = [sum(weight for word, weight in weights.items() if word in bag) for bag in bags]
    return [documents[index] for index in sorted(range(len(bags)), key=lambda index: -scores[index])]


def read_entries(file: str | Path) -> list[Entry]:
    """Questions and documents, one JSON object per line (the file may be .gz).

    ``question``, ``answers`` and either ``ctxs``, each with ``title``, ``text`` and ``isgold`` or ``hasanswer`` (what
    has the answer but is not gold is left out), or ``context``, the text of the one document with the answer.

    Raises:
        ValueError: there is no such file, it is no UTF-8 text, it is empty, or a line is not in that form.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"file {str(file)!r} {'is no file' if path.exists() else 'does not exist'}.")
    entries = []
    for number, line in enumerate(read_utf8(path).split("\n"), start=1):
        if line.strip():
            try:
                entries.append(_entry_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"file {str(file)!r}, line {number} is not in the form it must have: {error!r}."
                ) from error
    if not entries:
        raise ValueError(f"file {str(file)!r} holds no questions.")
    return entries


def _entry_of(line: Row) -> Entry:
    contexts = line.get("ctxs") or [{"title": line.get("title", ""), "text": line["context"], "isgold": True}]
    flag = "isgold" if any(each.get("isgold") for each in contexts) else "hasanswer"
    made = [(Document(each.get("title", ""), each["text"]), each) for each in contexts]
    gold = tuple(document for document, each in made if each.get(flag))
    others = (document for document, each in made if not each.get("isgold") and not each.get("hasanswer"))
    if not isinstance(line["answers"], list):
        raise ValueError("answers is not a list")
    answers = tuple(answer for answer in line["answers"] if normalized(answer))
    if not gold or not answers:
        raise ValueError("no answer holds a word" if gold else "no document is marked isgold or hasanswer")
    return Entry(line["question"], answers, gold, tuple(document for document in others if document not in gold))


def _check_size(entries: Sequence[Entry], documents: int, samples: int, file: Any) -> None:
    if samples > len(entries):
        raise ValueError(f"samples={samples} is more than the {len(entries)} questions in {str(file)!r}.")
    fewest = min(1 + len(entry.distractors) for entry in entries[:samples])
    if documents > fewest:
        raise ValueError(f"`documents` asks for {documents}, but a question in {str(file)!r} has only {fewest}.")
