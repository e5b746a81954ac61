"""The tasks' prompts and scores. What a prompt holds is read back from its decoded text, not from the builder."""

import copy
import gzip
import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest

from rope_ext.evals.runner import run
from rope_ext.evals.tasks.kv_retrieval import KvRetrieval, place
from rope_ext.evals.tasks.multi_doc_qa import MultiDocQa, invented, normalized, read_entries
from rope_ext.evals.tasks.passkey import Passkey, passkey_context
from rope_ext.evals.tasks.ruler import BASE, INSTRUCT, NIAH, SUBTASKS, Ruler, effective_length
from rope_ext.evals.text import NOISE, read_text
from rope_ext.evals.words import ADJECTIVES, FACTS, NAMES, NOUNS, PAIRS, SINGLES, pairs, vocabulary

NOISE_TEXT = " ".join(NOISE)
ESSAY = read_text()


@pytest.fixture(scope="module")
def tokenizer(small):
    return small[1]


@pytest.fixture(scope="module")
def chatting(small):
    """A tokenizer with a chat template."""
    tokenizer = copy.deepcopy(small[1])
    messages = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %}[reply]{% endif %}"
    return tokenizer


def read_back(tokenizer, question):
    """The prompt as text; exactly one BOS, at the start."""
    assert question.ids[0] == tokenizer.bos_token_id
    assert question.ids.count(tokenizer.bos_token_id) == 1
    return tokenizer.decode(question.ids[1:])


def shared(one, other):
    """How many ids two prompts have in common at their beginning."""
    pairs_of_ids = zip(one.ids, other.ids, strict=False)
    return next(
        (at for at, (left, right) in enumerate(pairs_of_ids) if left != right), min(len(one.ids), len(other.ids))
    )


def asked(task, tokenizer, /, **entries):
    """The question of the only row with these entries."""
    (row,) = [row for row in task.rows() if entries.items() <= row.items()]
    return task.question(tokenizer, row)


# words


def test_no_word_is_contained_in_another_one():
    assert len(ADJECTIVES) >= 120
    assert len(NOUNS) >= 120
    assert len(set(SINGLES)) == len(SINGLES)
    assert all(word.isascii() and word.isalpha() and word.islower() and len(word) > 3 for word in SINGLES)
    assert [(one, other) for one in SINGLES for other in SINGLES if one != other and one in other] == []


def test_vocabulary_takes_single_words_while_they_last():
    singles = vocabulary(len(SINGLES), random.Random(0))
    assert sorted(singles) == sorted(SINGLES)
    compounds = vocabulary(len(SINGLES) + 1, random.Random(0))
    assert len(set(compounds)) == len(compounds) == len(SINGLES) + 1
    assert all(set(word.split("-")) <= set(SINGLES) and word.count("-") == 1 for word in compounds)
    assert len(set(pairs(PAIRS, random.Random(0)))) == PAIRS == len(ADJECTIVES) * len(NOUNS)
    assert vocabulary(9, random.Random(1)) == vocabulary(9, random.Random(1)) != vocabulary(9, random.Random(2))
    with pytest.raises(ValueError, match=f"count {PAIRS + 1} is more than the {PAIRS} distinct words"):
        vocabulary(PAIRS + 1, random.Random(0))


def test_no_value_of_a_fact_is_contained_in_another_one():
    assert len(set(NAMES)) == len(NAMES)
    for fact in FACTS:
        values = [normalized(value) for value in fact.values]
        assert [(one, other) for one, other in combinations(values, 2) if one in other or other in one] == []
        for wording in (*fact.wordings, fact.question + "{value}"):
            assert re.findall(r"{(\w+)}", wording).count("name") == 1
            assert re.findall(r"{(\w+)}", wording).count("value") == 1


# passkey


@pytest.mark.parametrize("length", [300, 411, 1000])
def test_passkey_fills_the_length_and_holds_the_key_once(tokenizer, length):
    task = Passkey(NOISE_TEXT, [length], depths=[0, 40, 100], samples=2)
    for row in task.rows():
        question = task.question(tokenizer, row)
        text = read_back(tokenizer, question)
        (key,) = question.references
        assert len(question.ids) + task.max_new_tokens == length
        assert text.count(f" The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert text.count(key) == 2
        assert text.endswith("\nWhat is the pass key? The pass key is")
        assert abs(question.facts["true_depth"] - row["depth"]) < 10
        assert tokenizer.decode(question.answer_ids) == f" {key}"


def test_passkey_depths_and_keys_are_uniform(tokenizer):
    task = Passkey(NOISE_TEXT, [1200], samples=200)
    questions = [task.question(tokenizer, row) for row in task.rows()]
    depths = [question.facts["true_depth"] for question in questions]
    keys = [int(question.references[0]) for question in questions]
    for values, top in ((depths, 100), (keys, 50000)):
        assert min(values) < 0.05 * top
        assert max(values) > 0.95 * top
        assert 0.4 * top < sum(values) / len(values) < 0.6 * top
    assert all(1 <= key <= 50000 for key in keys)
    assert len(set(keys)) > 190


def test_a_passkey_sample_is_the_same_at_all_lengths(tokenizer):
    task = Passkey(NOISE_TEXT, [600, 900], samples=3)
    for sample in range(3):
        short, long = (asked(task, tokenizer, length=length, sample=sample) for length in (600, 900))
        assert short.references == long.references
        assert abs(short.facts["true_depth"] - long.facts["true_depth"]) < 5
        before = tokenizer.decode(short.ids[1:]).index(" The pass key is")
        assert len(tokenizer.decode(short.ids[1 : shared(short, long)])) >= before


@pytest.mark.parametrize(
    ("generated", "score"),
    [
        (" 1234.", 1),
        (" 1234", 1),
        (": 01234 is the key", 1),
        ("\n\n1234 12345", 1),
        (" 12345", 0),  # contains the key
        (" 234", 0),
        (" 5 or 1234", 0),  # not the first
        ("", 0),
        (" a number", 0),
    ],
)
def test_only_the_first_whole_number_counts(tokenizer, generated, score):
    task = Passkey(NOISE_TEXT, [300])
    question = task.question(tokenizer, task.rows()[0])
    assert task.score(generated, replace(question, references=("1234",))) == score


def test_the_passkey_context_is_the_largest_length_with_four_of_five():
    rows = [
        {"length": length, "score": float(sample < right), "sample": sample}
        for length, right in ((1000, 10), (2000, 7), (4000, 8), (8000, 7))
        for sample in range(10)
    ]
    assert passkey_context(rows) == 4000
    assert passkey_context([row for row in rows if row["length"] in (2000, 8000)]) is None
    assert passkey_context([]) is None
    cells = [{"length": 500, "n": 15, "score": 12 / 15}, {"length": 700, "n": 15, "score": 11 / 15}]
    assert passkey_context(cells) == 500
    uneven = [{"length": 500, "n": 1, "score": 1.0}, {"length": 500, "n": 9, "score": 7 / 9}]
    assert passkey_context(uneven) == 500


def test_passkey_refuses(tokenizer):
    for wrong in ({"depths": [101]}, {"depths": []}, {"depths": ["a"]}, {"samples": 0}, {"max_new_tokens": 0.5}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            Passkey(NOISE_TEXT, [300], **wrong)
    with pytest.raises(ValueError, match=r"length 100 leaves no room for a filler: the rest takes [0-9]+ tokens"):
        asked(Passkey(NOISE_TEXT, [100], samples=1), tokenizer)
    with pytest.raises(ValueError, match=r"max_new_tokens=1 is too few: the answer takes [0-9]+ tokens"):
        asked(Passkey(NOISE_TEXT, [300], samples=1, max_new_tokens=1), tokenizer)


# key-value retrieval


def object_in(text):
    """The JSON object of a prompt, as its pairs in order."""
    return list(json.loads(re.search(r"{.*}", text, re.DOTALL).group()).items())


@pytest.mark.parametrize("count", [1, 2, 9, 75])
def test_kv_holds_the_asked_pair_at_its_index(tokenizer, count):
    task = KvRetrieval([count], [0, 30, 100], samples=2)
    for row in task.rows():
        question = task.question(tokenizer, row)
        text = read_back(tokenizer, question)
        found = object_in(text)
        key = re.search('value of the key "(.{36})"[?]', text).group(1)
        assert len(found) == len({word for pair in found for word in pair}) / 2 == count
        assert found[question.facts["index"]] == (key, *question.references)
        assert question.facts["index"] == {0: 0, 100: count - 1}.get(row["position"], place(count, 30))
        assert text.endswith(f'The value of the key "{key}" is')
        assert tokenizer.decode(question.answer_ids) == f' "{question.references[0]}"'


def test_kv_positions_move_one_pair_only(tokenizer):
    task = KvRetrieval([20, 50], samples=1)
    questions = {row["pairs"]: [] for row in task.rows()}
    for row in task.rows():
        questions[row["pairs"]].append(task.question(tokenizer, row))
    for asked_ones in questions.values():
        references = {question.references for question in asked_ones}
        orders = {
            tuple(pair for pair in object_in(read_back(tokenizer, question)) if pair[1:] != question.references)
            for question in asked_ones
        }
        assert (len(references), len(orders)) == (1, 1)
        for one, other in combinations(asked_ones, 2):
            before = tokenizer.decode(one.ids[1 : shared(one, other) + 2])
            assert before.count('": "') >= one.facts["index"]
    few, many = questions[20][0], questions[50][0]  # in front: all pairs of the smaller object are shared
    assert shared(few, many) > 0.9 * (len(few.ids) - 100)


def test_kv_query_first_asks_twice(tokenizer):
    once, twice = (asked(KvRetrieval([5], [50], samples=1, query_first=first), tokenizer) for first in (False, True))
    texts = [read_back(tokenizer, question) for question in (once, twice)]
    wanted = re.search("What is the value of the key .*?[?]", texts[0]).group()
    assert [text.count(wanted) for text in texts] == [1, 2]
    assert texts[1].index(wanted) < texts[1].index("{")
    assert object_in(texts[0]) == object_in(texts[1])


def test_kv_scores_the_whole_value(tokenizer):
    task = KvRetrieval([5], [50], samples=1)
    question = asked(task, tokenizer)
    (value,) = question.references
    assert task.score(f' "{value}"', question) == 1
    assert task.score(f"I say {value.upper()}.", question) == 1
    wrong = value[:-1] + ("0" if value[-1] != "0" else "1")
    assert task.score(f' "{wrong}"', question) == task.score(value[:-1], question) == 0
    key = object_in(read_back(tokenizer, question))[2][0]
    assert task.score(key, question) == 0


def test_longest_is_the_longest_prompt_with_its_answer(tokenizer):
    for task in (KvRetrieval([3, 12], samples=3), MultiDocQa([2, 6], samples=3)):
        sizes = [len(one.ids) + one.max_new_tokens for one in (task.question(tokenizer, row) for row in task.rows())]
        assert 0.98 * max(sizes) <= task.longest(tokenizer, task.rows()) <= max(sizes)


def test_kv_refuses(tokenizer):
    for wrong in ({"pairs": [0]}, {"positions": [-1]}, {"positions": 50}, {"samples": True}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
            KvRetrieval(**wrong)
    with pytest.raises(ValueError, match="max_new_tokens=20 is too few"):
        asked(KvRetrieval([2], [0], samples=1, max_new_tokens=20), tokenizer)


# multi-document question answering


def documents_in(text):
    """(number, title, text) of the documents of a prompt."""
    parts = re.findall(r"^Document \[(\d+)\]\(Title: (.*?)\) (.*)$", text, re.MULTILINE)
    return [(int(number), title, said) for number, title, said in parts]


def test_documents_are_numbered_and_only_the_right_one_answers(tokenizer):
    task = MultiDocQa([1, 4, 11], samples=6)
    for row in task.rows():
        question = task.question(tokenizer, row)
        text = read_back(tokenizer, question)
        found = documents_in(text)
        assert [number for number, _, _ in found] == list(range(1, row["documents"] + 1))
        assert len({title for _, title, _ in found}) == len(found)
        (answer,) = question.references
        holding = [number - 1 for number, _, said in found if answer in said]
        assert holding == [question.facts["index"]] * (row["documents"] > 0)
        if isinstance(row["position"], float):
            assert question.facts["index"] == place(row["documents"], row["position"])
        name = re.search("Question: .*?([A-Z][a-z]+ [A-Z][a-z]+)", text).group(1)
        assert all(found[index][1] == name for index in holding)
        assert text.endswith("? Answer:")
        assert tokenizer.decode(question.answer_ids) == f" {answer}"


def test_document_positions_move_one_document_only(tokenizer):
    task = MultiDocQa([4, 10], samples=2)
    for sample in range(2):
        questions = [
            (row["documents"], task.question(tokenizer, row))
            for row in task.rows()
            if row["sample"] == sample and isinstance(row["position"], float)
        ]
        orders = {}
        for count, question in questions:
            titles = [title for _, title, _ in documents_in(read_back(tokenizer, question))]
            orders.setdefault(count, set()).add(
                tuple(titles[: question.facts["index"]] + titles[question.facts["index"] + 1 :])
            )
        ((few,), (many,)) = orders[4], orders[10]
        assert many[:3] == few
        for (count, one), (other_count, other) in combinations(questions, 2):
            if count == other_count:
                before = documents_in(tokenizer.decode(one.ids[1 : shared(one, other)]))
                assert len(before) >= one.facts["index"]


def test_closed_book_oracle_and_remedy_rows(tokenizer):
    task = MultiDocQa([10, 30], [50], samples=20)
    assert Counter((row["documents"], row["position"]) for row in task.rows()) == {
        (10, 50.0): 20,
        (10, "remedy"): 20,
        (30, 50.0): 20,
        (30, "remedy"): 20,
        (0, "closed book"): 20,
        (1, "oracle"): 20,
    }
    for row in task.rows():
        if row["position"] == "remedy":
            assert task.question(tokenizer, row).facts["index"] in (0, row["documents"] - 1)
    assert "documents below" not in read_back(tokenizer, asked(task, tokenizer, documents=0, sample=3))
    bare = MultiDocQa([10], [50], samples=1, remedy=False, closed_book=False, oracle=False)
    assert bare.rows() == [{"documents": 10, "position": 50.0, "sample": 0}]


def test_the_remedy_does_not_know_the_answer(tmp_path, tokenizer):
    texts = ["a cat sat", "red river bank", "red river bank old", "red river bank town", "a dog ran", "birds fly"]
    contexts = [{"title": f"T{n}", "text": text, "isgold": n == 0} for n, text in enumerate(texts)]
    file = tmp_path / "planted.jsonl"
    file.write_text(json.dumps({"question": "Which red river bank town?", "answers": ["cat"], "ctxs": contexts}))
    question = asked(MultiDocQa([6], file=file, samples=1), tokenizer, position="remedy")
    titles = [title for _, title, _ in documents_in(read_back(tokenizer, question))]
    assert titles[0] == "T3"  # the best first, the second last, the third second
    assert {titles[-1], titles[1]} == {"T1", "T2"}
    assert question.facts["index"] in (2, 3, 4)


@pytest.mark.parametrize(
    ("generated", "score"),
    [
        (" Paris", 1),
        (" It is in the PARIS, of course", 1),
        (" Wilbur Wright, and his brother", 1),
        (" wilbur  the wright", 1),
        (" Parisian", 1),  # a substring, as the paper has it
        ("\nParis", 0),  # behind the first line
        (" London\nParis", 0),
        (" Pari s", 0),
        (" Wilbur and Wright", 0),
        ("", 0),
    ],
)
def test_subspan_match(tokenizer, generated, score):
    task = MultiDocQa([1], samples=1)
    question = replace(task.question(tokenizer, task.rows()[0]), references=("Wilbur Wright", "A Paris!"))
    assert task.score(generated, question) == score


def test_normal_form():
    assert normalized("  The U.S.A.,  an   Answer: a\tTheatre ") == "usa answer theatre"


def entry(number, distractors=3, **more):
    """One line of a question file in the paper's form."""
    contexts = [{"title": f"D{number}.{n}", "text": f"Nothing of use, {number} {n}."} for n in range(distractors)]
    contexts.insert(1, {"title": f"Gold {number}", "text": f"The answer is word{number}.", "isgold": True})
    contexts.insert(0, {"title": "Also", "text": f"Some say word{number}, too.", "hasanswer": True, "isgold": False})
    return {"question": f"what is number {number}", "answers": [f"word{number}"], "ctxs": contexts, **more}


def lines(path, *entries):
    text = "\n".join(json.dumps(each) for each in entries) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["questions.jsonl", "questions.jsonl.gz"])
def test_question_files(tmp_path, tokenizer, name):
    file = lines(tmp_path / name, entry(0), entry(1))
    task = MultiDocQa([2, 4], [0, 100], file=file, samples=2)
    question = asked(task, tokenizer, documents=4, position=100.0, sample=1)
    text = read_back(tokenizer, question)
    assert [title for _, title, _ in documents_in(text)] == ["D1.0", "D1.1", "D1.2", "Gold 1"]
    assert "Question: what is number 1 Answer:" in text
    assert question.references == ("word1",)
    assert (
        task.settings()
        != MultiDocQa([2, 4], [0, 100], file=lines(tmp_path / name, entry(0), entry(2)), samples=2).settings()
    )
    assert task.settings() != MultiDocQa([2, 4], [0, 100], samples=2).settings()


def test_flags_answers_and_odd_lines_of_question_files(tmp_path):
    marked = [{"title": "A", "text": "a word"}, {"title": "B", "text": "b word", "hasanswer": True}]
    line = {"question": "q", "answers": ["the", "b\u2028c"], "ctxs": marked}
    file = tmp_path / "odd.jsonl"
    file.write_text(json.dumps(line, ensure_ascii=False) + "\n\n", encoding="utf-8")
    (read,) = read_entries(file)
    assert [document.title for document in read.gold] == ["B"]
    assert [document.title for document in read.distractors] == ["A"]
    assert read.answers == ("b\u2028c",)  # "the" would be found in every answer
    lines(file, {"question": "q", "answers": ["x"], "context": "x marks the spot"})
    (read,) = read_entries(file)
    assert (read.gold[0].text, read.distractors) == ("x marks the spot", ())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"answers": "word0"}, "answers is not a list"),
        ({"answers": ["The"]}, "no answer holds a word"),
        ({"ctxs": [{"title": "x", "text": "y"}]}, "no document is marked"),
        ({"ctxs": [{"title": "x"}]}, "'text'"),
        ({"ctxs": None}, "'context'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, broken, message):
    file = lines(tmp_path / "q.jsonl", entry(0), entry(1, **broken))
    with pytest.raises(ValueError, match=rf"q.jsonl', line 2 is not in the form it must have.*{message}"):
        read_entries(file)


def test_multi_doc_refuses(tmp_path, tokenizer):
    file = lines(tmp_path / "q.jsonl", entry(0), entry(1, distractors=2))
    for arguments, message in (
        ({"file": tmp_path / "none"}, "does not exist"),
        ({"file": lines(tmp_path / "empty.jsonl")}, "holds no questions"),
        ({"file": file, "documents": [4], "samples": 2}, "`documents` asks for 4, but a question in .* has only 3"),
        ({"file": file, "documents": [2], "samples": 3}, "samples=3 is more than the 2 questions"),
        ({"documents": [len(NAMES) + 1]}, f"`documents` must be at most {len(NAMES)}"),
        ({"documents": []}, "`documents` must be"),
        ({"positions": [200]}, "`positions` must be"),
        ({"samples": 0}, "`samples` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            MultiDocQa(**arguments)
    assert MultiDocQa([4], file=file, samples=1).rows()
    with pytest.raises(ValueError, match="max_new_tokens=1 is too few"):
        asked(MultiDocQa([2], [0], file=file, samples=1, max_new_tokens=1, remedy=False), tokenizer, documents=2)


def test_more_people_are_the_same_ones_and_more():
    few, many = (invented(random.Random("x"), count) for count in (3, 9))
    assert (few.question, few.answers, few.gold) == (many.question, many.answers, many.gold)
    assert few.distractors == many.distractors[:2]
    assert len({each.title for each in (*many.gold, *many.distractors)}) == 9


# ruler


@pytest.mark.parametrize("task", SUBTASKS)
@pytest.mark.parametrize("length", [2500, 32768])
def test_ruler_fills_each_length(tokenizer, task, length):
    question = asked(Ruler(ESSAY, [length], subtasks=[task], samples=1), tokenizer)
    text = read_back(tokenizer, question)
    left = length - len(question.ids) - question.max_new_tokens
    limit = {"niah_multikey_2": 60, "niah_multikey_3": 120, "cwe": 60, "fwe": 60}  # one more would not fit
    assert 0 <= left <= limit.get(task, 0)
    papers = {"vt": 30, "cwe": 120, "fwe": 50}.get(task, 128)
    assert question.max_new_tokens == max(papers, len(question.answer_ids))  # 31 for vt with this tokenizer
    assert tokenizer.decode(question.answer_ids) == " " + ", ".join(question.references)
    assert re.search(r"\? The [^.]* (is|are)$", text)


HIDDEN = r"One of the secret codes of (\S+) is ([0-9a-f-]+)\."
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


@pytest.mark.parametrize("name", NIAH)
def test_niah_needles(tokenizer, name):
    needles_only = name in ("niah_multikey_2", "niah_multikey_3")
    number, words = r"[1-9]\d{6}", "[a-z]+-[a-z]+"
    key_form = UUID if name == "niah_multikey_3" else words
    value_form = UUID if name in ("niah_single_3", "niah_multikey_3") else number
    for sample in range(4):
        question = asked(Ruler(ESSAY, [2500], subtasks=[name], samples=4), tokenizer, sample=sample)
        text = read_back(tokenizer, question)
        found = re.findall(HIDDEN, text)
        count = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
        assert len(found) > 10 if needles_only else len(found) == count
        assert len(set(found)) == len({value for _, value in found}) == len(found)
        keys = re.search("secret codes? of (.*) in the text above[?]", text).group(1).split(", ")
        assert Counter(question.references) == Counter(value for key, value in found if key in keys)
        assert len(keys) == (4 if name == "niah_multiquery" else 1)
        assert len(question.references) == (4 if name in ("niah_multiquery", "niah_multivalue") else 1)
        assert len(question.facts["true_depths"]) == len(question.references)
        assert all(re.fullmatch(key_form, key) and re.fullmatch(value_form, value) for key, value in found)


def test_niah_haystacks(tokenizer):
    def rest(name):
        text = re.sub(
            " ?" + HIDDEN, "", read_back(tokenizer, asked(Ruler(ESSAY, [2500], subtasks=[name], samples=1), tokenizer))
        )
        return text.split("\n", 1)[1].rsplit("\n", 1)[0].strip()

    assert set(re.split(r"(?<=\.) ", rest("niah_single_1"))[:-1]) == set(NOISE)
    assert rest("niah_multikey_2") == rest("niah_multikey_3") == ""
    assert " ".join(ESSAY.split()).startswith(rest("niah_single_2")[:1500])


def test_the_values_of_one_key_stand_in_the_order_of_the_answer(tokenizer):
    for sample in range(5):
        question = asked(Ruler(ESSAY, [2500], subtasks=["niah_multivalue"]), tokenizer, sample=sample)
        assert tuple(value for _, value in re.findall(HIDDEN, read_back(tokenizer, question))) == question.references
        assert question.facts["true_depths"] == sorted(question.facts["true_depths"])


def test_niah_lengths_share_their_beginning(tokenizer):
    task = Ruler(ESSAY, [1500, 3000], subtasks=["niah_single_2", "niah_multikey_2"], samples=1)
    for name in task.subtasks:
        short, long = (asked(task, tokenizer, length=length, subtask=name) for length in (1500, 3000))
        assert short.references == long.references
        before = read_back(tokenizer, short).index(f" is {short.references[0]}.")
        assert len(tokenizer.decode(short.ids[1 : shared(short, long)])) > before - 60


def followed(text, value):
    """The variables that end up as ``value``, in the order they are set, by following every statement."""
    known, order = {}, []
    for name, other in re.findall(r"Set ([A-Z]{5}) to (\w+)\.", text):
        known[name] = known.get(other, other)
        order += [name] if known[name] == value else []
    return order


def test_vt_chains(tokenizer):
    task = Ruler(ESSAY, [1500], subtasks=["vt"], samples=8)
    for row in task.rows():
        question = task.question(tokenizer, row)
        text = read_back(tokenizer, question)
        example, rest = text.split("\n\n")
        value = re.search(r"set to (\d+) in", rest).group(1)
        assert followed(rest, value) == list(question.references)
        assert len(set(question.references)) == 5
        hops = [(name, before) for name, before in re.findall(r"Set (\w+) to (\w+)\.", rest)]
        assert hops == list(zip(question.references, (value, *question.references), strict=False))
        assert question.facts["true_depths"] == sorted(question.facts["true_depths"])
        shown = re.search(r"set to (\d+) in", example).group(1)
        assert example.endswith(" are " + ", ".join(followed(example, shown)))
        assert len(followed(example, shown)) == 5
        assert shown not in rest
        assert not set(followed(example, shown)) & set(question.references)


def listed(text):
    """The words of a numbered list; the numbers must count up."""
    found = re.findall(r"(\d+)\. ([a-z-]+)", text)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return Counter(word for _, word in found)


@pytest.mark.parametrize(("length", "often", "rarely"), [(2500, 10, 1), (4500, 30, 3), (16000, 30, 3)])
def test_cwe_counts(tokenizer, length, often, rarely):
    question = asked(Ruler(ESSAY, [length], subtasks=["cwe"], samples=1), tokenizer)
    example, rest = read_back(tokenizer, question).split("\n\n")
    counts = listed(rest)
    assert {word for word, count in counts.items() if count == often} == set(question.references)
    assert Counter(counts.values()) == {often: 10, rarely: len(counts) - 10}
    assert len(counts) >= 20
    assert question.facts == {"words": len(counts), "common_times": often, "other_times": rarely}
    assert ("-" in question.references[0]) == any("-" in word for word in counts) == (length == 16000)
    assert [pair for pair in combinations(counts, 2) if pair[0] in pair[1] or pair[1] in pair[0]] == []
    assert len(set(re.findall(r"\. ([a-z-]+)", rest)[:often])) > 5  # shuffled
    body, answer = example.split(" are ")
    shown = listed(body)
    assert {word for word, count in shown.items() if count == 3} == set(answer.split(", "))
    assert not set(shown) & set(counts)


def test_fwe_counts(tokenizer):
    for length in (700, 6000):
        question = asked(Ruler(ESSAY, [length], subtasks=["fwe"], samples=1), tokenizer)
        context = read_back(tokenizer, question).split("\n")[1]
        (dots, first), *ranking = Counter(context.split()).most_common()
        assert dots == "..."
        assert tuple(word for word, _ in ranking[:3]) == question.references
        for rank, (word, count) in enumerate(ranking, start=2):
            assert re.fullmatch("[a-z]{6}", word)
            assert abs(count - first / rank**2) <= 1  # zeta with alpha 2
        assert context.split()[: len(context.split()) // 4].count(ranking[0][0]) > 0.1 * ranking[0][1]  # shuffled
        counts = [count for _, count in ranking]
        assert counts[0] > counts[1] > counts[2] > counts[3]
        assert question.facts["words"] == len(context.split())


def test_ruler_scores_shares(tokenizer):
    task = Ruler(ESSAY, [2500], subtasks=["niah_multivalue", "niah_single_1"], samples=1)
    question = asked(task, tokenizer, subtask="niah_multivalue")
    values = question.references
    assert task.score(", ".join(values), question) == 1
    assert task.score(f" {values[2]} and {values[0]}", question) == 0.5
    assert task.score(f" {values[2]} {values[2]}", question) == 0.25
    wrong = str(int(values[0]) + 1)
    assert task.score(wrong, question) == (wrong in values)
    one = asked(task, tokenizer, subtask="niah_single_1")
    assert (task.score(one.references[0], one), task.score(one.references[0][1:], one)) == (1, 0)


def passages(count, words=40):
    return [
        {
            "question": f"what is word {n}",
            "answers": [f"zeta{n}zeta", f"eta{n}eta"],
            "context": f"zeta{n}zeta. " + "plain " * words,
        }
        for n in range(count)
    ]


def test_ruler_qa(tmp_path, tokenizer):
    file = lines(tmp_path / "qa.jsonl", *passages(60))
    task = Ruler(ESSAY, [1500], subtasks=["vt"], qa=[file, lines(tmp_path / "two.jsonl", *passages(50))], samples=3)
    assert task.subtasks == ("vt", "qa_1", "qa_2")
    assert Ruler(ESSAY, [1500], qa=file).subtasks == (*SUBTASKS, "qa_1")
    places = set()
    for sample in range(3):
        question = asked(task, tokenizer, subtask="qa_1", sample=sample)
        text = read_back(tokenizer, question)
        assert 0 <= 1500 - len(question.ids) - 32 < 150
        assert question.max_new_tokens == 32
        numbers = re.findall(r"^Document (\d+):$", text, re.MULTILINE)
        assert [int(number) for number in numbers] == list(range(1, question.facts["documents"] + 1))
        assert len(re.findall(r"zeta\d+zeta", text)) == len(set(re.findall(r"zeta\d+zeta", text))) == len(numbers)
        assert text.count(f"zeta{sample}zeta") == 1
        places.add(re.findall(r"zeta(\d+)zeta", text).index(str(sample)))
        assert text.endswith(f"\nQuestion: what is word {sample} Answer:")
        assert tokenizer.decode(question.answer_ids) == f" zeta{sample}zeta"
        for said, score in ((f"Zeta{sample}zeta", 1), (f"eta{sample}eta", 1), (f"zeta{sample + 1}zeta", 0)):
            assert task.score(said, question) == score
    assert len(places) > 1


def test_ruler_qa_fills_with_documents_that_do_not_answer(tmp_path, tokenizer):
    told = passages(30)
    for each in told[10:]:
        each["context"] = "Also zeta0zeta. " + each["context"]
    task = Ruler(ESSAY, [700], qa=lines(tmp_path / "qa.jsonl", *told), subtasks=[], samples=1)
    assert read_back(tokenizer, asked(task, tokenizer)).count("zeta0zeta") == 1
    own = lines(tmp_path / "ctxs.jsonl", entry(0), *(entry(n, title="x") for n in range(1, 40)))
    text = read_back(tokenizer, asked(Ruler(ESSAY, [700], qa=own, subtasks=[], samples=1), tokenizer))
    assert all(f": D0.{n}\nNothing of use, 0 {n}." in text for n in range(3))  # its own ones come first
    assert text.count(": Gold 0\n") == 1
    assert "Some say word0" not in text


def test_ruler_refuses(tmp_path, tokenizer):
    for arguments, message in (
        ({"subtasks": ["niah"]}, "`subtasks` must be from niah_single_1, .*, got .'niah'"),
        ({"subtasks": ["qa_1"]}, "qa_1 needs a file"),
        ({"subtasks": []}, "`subtasks` must be from"),
        ({"samples": 0}, "`samples` must be"),
        ({"qa": lines(tmp_path / "few.jsonl", *passages(2)), "samples": 3}, "samples=3 is more than the 2 questions"),
        ({"lengths": [0]}, "`lengths` must be"),
    ):
        with pytest.raises(ValueError, match=message):
            Ruler(ESSAY, **{"lengths": [2500], **arguments})
    short = Ruler(ESSAY, [200], qa=lines(tmp_path / "qa.jsonl", *passages(3)), samples=3)
    for row in short.rows():
        with pytest.raises(
            ValueError, match=rf"length 200 is too short for {row['subtask']}: it takes at least (\d+)\."
        ) as caught:
            short.question(tokenizer, row)
        least = int(re.search(r"least (\d+)", str(caught.value)).group(1))
        if row["subtask"] != "qa_1":
            assert short.question(tokenizer, {**row, "length": least}).ids
        with pytest.raises(ValueError, match="too short"):
            short.question(tokenizer, {**row, "length": least - 1})
    with pytest.raises(ValueError, match=r"length 9000 is too long for qa_1: all its documents take only .* tokens"):
        short.question(tokenizer, {"length": 9000, "subtask": "qa_1", "sample": 0})
    with pytest.raises(ValueError, match=f"too long for niah_multikey_2: there are {PAIRS - 1} distinct keys"):
        short.question(tokenizer, {"length": 2_000_000, "subtask": "niah_multikey_2", "sample": 0})


def test_effective_length():
    def rows(**means):
        return [
            {"length": int(length[1:]), "subtask": task, "score": mean + change}
            for length, mean in means.items()
            for task, change in (("vt", 0.01), ("vt", -0.01), ("cwe", 0.0))
        ]

    assert (INSTRUCT, BASE) == (85.6, 79.4)
    table = rows(l4096=0.95, l8192=0.86, l16384=0.80, l32768=0.2)
    assert effective_length(table, INSTRUCT) == 8192
    assert effective_length(table, BASE) == 16384
    assert effective_length(rows(l4096=0.5), BASE) is None
    assert effective_length([], BASE) is None
    # the mean is over tasks, however many samples one has
    uneven = [{"length": 1, "subtask": "vt", "score": 1.0}] * 9 + [{"length": 1, "subtask": "cwe", "score": 0.5}]
    assert effective_length(uneven, BASE) is None
    with pytest.raises(ValueError, match="length 4096 has no rows of cwe"):
        effective_length([row for row in table if (row["length"], row["subtask"]) != (4096, "cwe")], BASE)


# all of them


def every_task(tmp_path, seed=0, samples=2, chat=False):
    qa = lines(tmp_path / "every.jsonl", *passages(40))
    more = {"seed": seed, "samples": samples, "chat": chat}
    return [
        Passkey(NOISE_TEXT, [400], **more),
        KvRetrieval([6], [50], **more),
        MultiDocQa([4], [50], **more),
        Ruler(ESSAY, [2500], qa=qa, **more),
    ]


def test_rows_are_built_alike_and_seeds_and_samples_differ(tmp_path, tokenizer):
    once, again, other = (every_task(tmp_path, seed) for seed in (0, 0, 1))
    for one, same, different in zip(once, again, other, strict=True):
        assert one.settings() == same.settings() != different.settings()
        built = [one.question(tokenizer, row) for row in one.rows()]
        assert built[::-1] == [same.question(tokenizer, row) for row in same.rows()[::-1]]
        for row, question in zip(one.rows(), built, strict=True):
            assert different.question(tokenizer, row).ids != question.ids
        assert len({tuple(question.ids) for question in built}) == len(built)
        assert json.loads(json.dumps([one.settings(), one.rows(), [each.facts for each in built]]))


def test_a_row_depends_on_its_own_entries_only(tmp_path, tokenizer):
    many = Ruler(ESSAY, [1000, 2500], samples=5)
    alone = Ruler(ESSAY, [2500], subtasks=["vt"], samples=1)
    row = alone.rows()[0]
    assert row in many.rows()
    assert alone.question(tokenizer, row) == many.question(tokenizer, row)
    assert "samples" not in many.settings()


def test_settings_follow_the_texts(tmp_path):
    for kind in (Passkey, Ruler):
        assert kind(ESSAY, [2500]).settings() != kind(ESSAY + " More.", [2500]).settings()
        assert kind(ESSAY, [2500]).settings() == kind(ESSAY, [3000]).settings()
    files = [lines(tmp_path / f"{count}.jsonl", *passages(count)) for count in (5, 6)]
    assert Ruler(ESSAY, [2500], qa=files[0]).settings() != Ruler(ESSAY, [2500], qa=files[1]).settings()


def test_chat_puts_the_answer_prefix_behind_the_assistant_header(tmp_path, tokenizer, chatting):
    for plain, task in zip(every_task(tmp_path), every_task(tmp_path, chat=True), strict=True):
        assert plain.settings() != task.settings()
        for row in task.rows():
            question = task.question(chatting, row)
            text = read_back(chatting, question)
            assert text.startswith("[user]")
            assert text.count("[end]") == 1
            prefix = text.split("[end][reply]")[1]
            assert re.fullmatch(r"Answer:|The [^.?]* (is|are)", prefix)
            assert "length" not in row or len(question.ids) + question.max_new_tokens <= row["length"]
        with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
            task.question(tokenizer, task.rows()[0])


def test_each_task_runs(tmp_path, small):
    tasks = [
        Passkey(NOISE_TEXT, [300], samples=2),
        KvRetrieval([2], [0, 100], samples=1),
        MultiDocQa([2], [100], samples=1, remedy=False),
        Ruler(NOISE_TEXT, [700], subtasks=["vt", "fwe"], samples=1),
    ]
    for task in tasks:
        rows = run(task, *small, tmp_path)
        assert [
            {name: row[name] for name in wanted} for row, wanted in zip(rows, task.rows(), strict=True)
        ] == task.rows()
        for row in rows:
            assert 0 <= row["score"] <= 1
            assert row["answer_log_probability"] < 0
            assert row["tokens"] == len(task.question(small[1], row).ids)
