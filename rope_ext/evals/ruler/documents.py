"""Questions about documents from a file, among as many others as fit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rope_ext.evals.questions import Question
from rope_ext.evals.ruler.sheet import Sheet, Wording
from rope_ext.evals.tasks.multi_doc_qa import Document, Entry, normalized

ANSWERING = Wording(
    "Answer the question in a few words, with the help of the documents below.",
    "Question: {question}",
    "Answer:",
    32,
)

ENOUGH_MISSES = 20
"""After so many documents that do not fit into what is left, no more are tried."""


@dataclass(frozen=True)
class AnyOf(Question):
    """Of its references one is enough."""


def qa_prompt(sheet: Sheet, entries: Sequence[Entry]) -> Question:
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
    return AnyOf(sheet.head + ids + sheet.tail, entry.answers, answer, sheet.new_tokens, {"documents": len(bodies)})


def _number(sheet: Sheet, place: int) -> list[int]:
    return sheet.encode(f"\n\nDocument {place + 1}:" if place else "Document 1:")


def _others(entry: Entry, entries: Sequence[Entry], rng: random.Random) -> Iterator[Document]:
    """The entry's own documents without the answer, then those of the others in random order."""
    yield from entry.distractors
    answers = [normalized(answer) for answer in entry.answers]
    pool = [document for each in entries for document in (*each.gold, *each.distractors)]
    for document in rng.sample(pool, len(pool)):
        if not any(answer in normalized(document.text) for answer in answers):
            yield document
