"""Numbers that must not be mixed, counted twice, or measured on something else than what was asked for."""

import copy
import gzip
import json
import sys

import pytest
import torch
from conftest import SMALL_MODEL, build
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from rope_ext import patched
from rope_ext.cli import main
from rope_ext.evals import (
    Limits,
    Results,
    evaluate,
    identity,
    memory,
    multi_doc_qa,
    needle,
    perplexity,
    plots,
    reading,
    setups,
    sweep,
)
from rope_ext.evals.identity import fingerprint, weights
from rope_ext.evals.intervals import wilson
from rope_ext.evals.memory import Holding
from rope_ext.evals.questions import frame
from rope_ext.evals.reading import TOGETHER, Prompt
from rope_ext.evals.scoring import token_nll
from rope_ext.evals.store import Store
from rope_ext.evals.tasks.multi_doc_qa import read_entries
from rope_ext.evals.tasks.needle import Needle, Wording
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import NOISE, read_text
from rope_ext.files import whole_file
from rope_ext.training.data import documents

TEXT = " ".join(NOISE * 60)
CELL = ["--text", "noise", "--depths", "50", "--limit", "2"]


def csv_of(folder):
    header, *lines = (folder / "needle.csv").read_text().splitlines()
    return [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]


# what a setup is


def test_checkpoints_that_share_a_name_are_not_drawn_as_one(small, tmp_path):
    """Two adapters of one base: both are "unpatched", and neither is the other."""
    for seed in range(2):
        torch.manual_seed(seed)
        tuned = get_peft_model(copy.deepcopy(small[0]), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        tuned.save_pretrained(tmp_path / f"adapter{seed}")
        small[1].save_pretrained(tmp_path / f"adapter{seed}")
    out = str(tmp_path / "out")
    for seed, lengths in enumerate(("192,256", "192")):
        given = ["eval", "needle", "--model", str(tmp_path / f"adapter{seed}"), "--lengths", lengths, "--out", out]
        assert main([*given, *CELL]) == 0
    assert {(cell["length"], cell["n"]) for cell in csv_of(tmp_path / "out")} == {("192", "2")}
    given = ["eval", "needle", "--model", str(tmp_path / "adapter1"), "--lengths", "192,256", "--out", out]
    assert main([*given, *CELL, "--method", "yarn", "--factor", "2"]) == 0
    assert {cell["label"] for cell in csv_of(tmp_path / "out")} == {"unpatched", "yarn x2"}  # of the same weights


def changed(model, how):
    other = copy.deepcopy(model)
    with torch.no_grad():
        how(other)
    return other


def swap(table, one, other):
    table[[one, other]] = table[[other, one]].clone()


CHANGES = {
    "one row": lambda model: model.get_input_embeddings().weight[7].mul_(1.5),
    "one bit": lambda model: model.model.layers[1].mlp.up_proj.weight.view(torch.int32)[3, 5].bitwise_xor_(1),
    "two rows swapped": lambda model: swap(model.get_input_embeddings().weight, 7, 9),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.div_(2),
    "what ends a text": lambda model: setattr(model.generation_config, "eos_token_id", [2, 17]),
}


@pytest.mark.parametrize("how", CHANGES)
def test_any_change_of_a_setup_is_seen(small, how):
    plain, other = fingerprint(small[0]), changed(small[0], CHANGES[how])
    assert fingerprint(copy.deepcopy(small[0])) == plain
    assert fingerprint(other) != plain
    assert (weights(other) == weights(small[0])) == (how in ("frequencies", "what ends a text"))


def test_weights_may_lie_anywhere_in_a_buffer(small):
    model = copy.deepcopy(small[0])
    before = weights(model)
    for weight in model.parameters():
        weight.data = torch.cat([torch.zeros(1), weight.data.flatten()])[1:].view_as(weight)
    assert weights(model) == before
    half = model.to(torch.bfloat16)
    for weight in half.parameters():
        weight.data = torch.cat([weight.data.flatten()[:3], weight.data.flatten()])[3:].view_as(weight)
    assert weights(half) == weights(copy.deepcopy(small[0]).to(torch.bfloat16)) != before


@pytest.mark.parametrize("host", ["llama", "qwen3", "bloom", "mpt", "t5", "umt5"])
def test_an_encoding_does_not_change_which_checkpoint_it_is(host):
    model = build(host)
    before = weights(model), fingerprint(model)
    with patched(model, "rope" if host in ("bloom", "mpt", "t5", "umt5") else "shaw"):
        assert weights(model) == before[0]
        assert fingerprint(model) != before[1]
    assert (weights(model), fingerprint(model)) == before


def test_a_stock_dynamic_model_is_the_same_setup_after_a_long_input():
    model = build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    before = fingerprint(model)
    model(torch.arange(1, 61).repeat(1, 3))
    assert fingerprint(model) == before


def test_a_learned_prompt_is_refused(small):
    tuned = get_peft_model(copy.deepcopy(small[0]), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="PROMPT_TUNING adapter, whose learned prompt would be left out"):
        needle(tuned, small[1], lengths=[128], text="noise", progress=False)


# what counts


def test_nothing_is_counted_twice(small, tmp_path, capsys):
    model, tokenizer = small
    given = ["--methods", "none,yarn,yarn", "--factor", "2,2,2.0", "--tasks", "needle,needle", "--lengths", "192"]
    assert main(["sweep", "--model", str(SMALL_MODEL), *given, *CELL, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert {(cell["label"], cell["n"]) for cell in csv_of(tmp_path)} == {("unpatched", "2"), ("yarn x2", "2")}
    close = sweep(model, tokenizer, setups(["yarn"], [2, 2.0000001]), [Perplexity(TEXT, [64])], progress=False)
    assert [row["label"] for row in close.summary()] == ["unpatched", "yarn x2", "yarn x2.0000001"]
    with pytest.raises(ValueError, match="`tasks` holds 'perplexity' twice"):
        sweep(model, tokenizer, [None], [Perplexity(TEXT, [64]), Perplexity(TEXT, [96])])
    with patched(model, "yarn", factor=2):
        made = sweep(model, tokenizer, setups(["yarn", "linear"], [2]), [Perplexity(TEXT, [64])], progress=False)
    assert [row["label"] for row in made.summary()] == ["yarn x2", "linear x2"]


def test_a_text_read_at_several_lengths_is_one_piece_of_evidence(small):
    model, tokenizer = small
    found = []
    for lengths in ([200], list(range(200, 216, 2))):
        task = Perplexity(TEXT, lengths)
        made = sweep(model, tokenizer, setups(["yarn"], [2]), [task], progress=False)
        found.append(made.summary()[1]["perplexity, inside"])
    one, many = found
    assert one["n"] == many["n"] == 8
    assert many["ratio"] == pytest.approx(one["ratio"], rel=0.05)
    assert many["high"] - many["low"] > 0.6 * (one["high"] - one["low"])


def test_lines_without_a_place_are_what_the_legend_says(small):
    figure = multi_doc_qa(*small, documents=[2, 3], positions=[0, 100], samples=1, progress=False).plot()
    assert [axis.get_title() for axis in figure.axes] == ["2 documents", "3 documents"]
    styles = [{line.get_label(): line.get_linestyle() for line in axis.get_lines()} for axis in figure.axes]
    assert styles[0] == styles[1]
    assert len(set(styles[0].values())) == 4
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(styles[0])


# what is read


MARKED = "The grass is green.</s> The sky is blue.<s> "


def test_text_that_spells_special_tokens_is_text(small):
    model, tokenizer = small
    ids = Perplexity(MARKED * 40, [200])._tokens(tokenizer, 199, 0)
    assert not set(ids.tolist()) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids).startswith(MARKED)
    found = perplexity(model, tokenizer, lengths=[64], text=str(SMALL_MODEL / "train.py"), progress=False)
    assert found.rows[0]["perplexity"] > 1


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_question_that_spells_special_tokens_is_text_in_a_chat_template(small, place):
    tokenizer = copy.deepcopy(small[1])
    tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[reply]{% endif %}"
    )
    plain = ["Read.\n", "\nWhat is it?", "It is"]
    said = [part + "</s><s>" * (number == place) for number, part in enumerate(plain)]
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    for texts in (plain, said):
        head, tail = frame(tokenizer, *texts, chat=True)
        assert [token for token in head + tail if token in special] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
        assert tokenizer.decode(head + tail) == f"<s>[user] {texts[0]}{texts[1]}</s>[reply]{texts[2]}"


def test_files_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "utf16.txt").write_text("The grass is green. " * 9, encoding="utf-16")
    (tmp_path / "mark.txt").write_text("The grass is green.", encoding="utf-8-sig")
    with pytest.raises(ValueError, match=r"utf16\.txt is not UTF-8 \(at byte 0\)"):
        read_text(tmp_path / "utf16.txt")
    assert read_text(tmp_path / "mark.txt") == "The grass is green."
    (tmp_path / "utf16.txt").unlink()
    (tmp_path / "folder.txt").mkdir()
    assert read_text(str(tmp_path)) == "The grass is green."
    with pytest.raises(ValueError, match="'hf:' is neither"):
        read_text("hf:")


@pytest.mark.parametrize("content", [b"GGUF\x03\0\0\0 the rest is words", b"\x05" * 2 + b"a" * 99, b"\x7f\x01ab"])
@pytest.mark.parametrize("read", [read_text, lambda file: list(documents(str(file)))], ids=["measured", "trained on"])
def test_binary_data_that_could_be_utf8_is_not_read_as_text(content, read, tmp_path):
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"data\.txt is binary data, not text"):
        read(tmp_path / "data.txt")
    (tmp_path / "log.txt").write_bytes(b"\x1b[31mred\x1b[0m\f\r\n" + b"One stray code \x08" + b" in a long text" * 9)
    read(tmp_path / "log.txt")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin.jsonl", "{'é'}".encode("latin-1"), r"is not UTF-8 \(at byte 2\)"),
        ("plain.gz", b"no archive", "is not a whole gzip file"),
        ("cut.gz", gzip.compress(b"{}" * 99, mtime=0)[:-9], "is not a whole gzip file"),
        ("weights.bin", bytes(range(1, 32)) * 9, "is binary data, not text"),
        ("folder", None, "is no file"),
        ("nothing", b"", "holds no questions"),
    ],
)
def test_question_files_that_cannot_be_read_are_named(name, content, said, tmp_path):
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{said}"):
        read_entries(tmp_path / name)


def test_the_right_answer_must_be_possible(small):
    with pytest.raises(ValueError, match=r"max_new_tokens=2 is too few: the answer takes"):
        needle(*small, lengths=[128], text="noise", max_new_tokens=2, progress=False)
    with pytest.raises(ValueError, match=r"`needle` must hold \{value\}"):
        Wording(needle="There is nothing here.")


# perplexity


def test_the_mean_of_windows_equals_a_loop(small):
    model, tokenizer = small
    task = Perplexity(TEXT, [64], stride=16, windows=3, mean_of_windows=True)
    (row,) = evaluate(task, model, tokenizer, progress=False).rows
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    own, sums, count = [], 0.0, 0
    for window in range(3):
        inside = [tokenizer.bos_token_id, *ids[16 * window : 16 * window + 63]]
        with torch.no_grad():
            logits = model(torch.tensor([inside])).logits[0, :-1].log_softmax(-1)
        nll = -logits.gather(1, torch.tensor(inside)[1:, None])[:, 0]
        own.append(nll.mean().exp().item())
        new = nll if window == 0 else nll[-16:]
        sums, count = sums + new.sum().item(), count + len(new)
    assert row["mean_of_windows"] == pytest.approx(sum(own) / 3, rel=1e-4)
    assert row["perplexity"] == pytest.approx(torch.tensor(sums / count).exp().item(), rel=1e-4)
    assert row["tokens"] == count
    plain = Perplexity(TEXT, [64], stride=16, windows=3)
    assert plain.settings() != task.settings()
    with pytest.raises(ValueError, match="mean_of_windows needs windows"):
        Perplexity(TEXT, [64], mean_of_windows=True)


def test_that_loop_fails_on_a_planted_fault(small, monkeypatch):
    """If the first token of every window were not scored."""
    short = sys.modules[Perplexity.__module__]
    monkeypatch.setattr(short, "token_nll", lambda model, ids, start=1: token_nll(model, ids, start + 1))
    with pytest.raises(AssertionError):
        test_the_mean_of_windows_equals_a_loop(small)


@pytest.mark.parametrize("windows", [{}, {"stride": 16, "windows": 3}])
def test_progress_is_that_of_the_tokens_that_were_read(small, windows):
    """Not of the few with which the output head is tried first."""
    model, tokenizer = small
    heard, task = [], Perplexity(TEXT, [200], **windows)
    passes = []
    handle = model.model.layers[-1].register_forward_hook(lambda *_: passes.append(sum(heard)))
    for _ in task.measure(model, tokenizer, task.rows(), Limits(), lambda index, share: heard.append(share)):
        pass
    handle.remove()
    assert sum(heard) == pytest.approx(1)
    assert passes[0] < 0.2  # after the trial
    assert len(passes) == (9 if windows else 3)


def test_prefixes_are_left_out_where_they_would_not_be_short_texts():
    model = build("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    task = Perplexity("", [100])
    nll = token_nll(model, torch.arange(1, 61).repeat(1, 2))
    assert "prefix_perplexity" not in task._by_position(nll, model)
    assert "prefix_perplexity" in task._by_position(nll, build("llama"))


# memory, order, files


def test_memory_of_scores_of_all_pairs_is_counted():
    bloom, t5, llama = build("bloom"), build("t5"), build("llama")
    holding = Holding(forward=100, cached=0, longest=700)
    assert memory.estimate(llama, holding).pairs == 0
    assert memory.estimate(bloom, holding).pairs == 4 * 4 * 4 * 100 * 700
    assert memory.estimate(t5, holding).pairs == 4 * 4 * 4 * 700 * 700  # the encoder reads everything
    for model, method in ((bloom, "alibi"), (t5, "t5_bias"), (llama, "shaw")):
        with patched(model, method):
            assert memory.estimate(model, holding).pairs == memory.BLOCKS * memory.BLOCK_BYTES
    with patched(llama, "yarn", factor=2):
        assert memory.estimate(llama, holding).pairs == 0
    llama.set_attn_implementation("eager")
    assert memory.estimate(llama, holding).pairs == 4 * 4 * 4 * 100 * 700
    assert "scores of all pairs" in str(memory.estimate(llama, holding))


def test_the_limit_of_a_container_counts(tmp_path):
    for name, content in {
        "memory.max": "5000",
        "memory.current": "3000",
        "memory.stat": "anon 9\ninactive_file 700",
    }.items():
        (tmp_path / name).write_text(content + "\n")
    assert memory._left_to_container(tmp_path) == [2700]
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_to_container(tmp_path) == []
    assert memory._left_to_container(tmp_path / "none") == []


@pytest.mark.parametrize(("patience", "most"), [(60.0, TOGETHER), (-1.0, 1)])
def test_so_many_answers_wait_for_each_other_at_most(small, patience, most, monkeypatch):
    """What a run that is stopped loses."""
    monkeypatch.setattr(reading, "PATIENCE", patience)
    model, tokenizer = small
    ids = [tokenizer.bos_token_id, *tokenizer.encode(TEXT, add_special_tokens=False)[:20]]
    prompts = [[(number, Prompt(ids[: 10 + number % 7], [5, 6], 8))] for number in range(3 * TOGETHER)]
    begun = []
    groups = (begun.append(group) or group for group in prompts)
    left = [len(begun) - done for done, _ in enumerate(reading.reader(model, Limits())(groups))]
    assert len(left) == len(prompts)
    assert max(left) == most


def test_a_run_that_writes_to_the_same_file_loses_nothing(tmp_path):
    one, row = Store(tmp_path, "needle"), {"setup": {}}
    one.add("a", row)
    with (tmp_path / "needle.jsonl").open("a") as file:
        file.write('{"key": "cut o')
    two, three = Store(tmp_path, "needle"), Store(tmp_path, "needle")
    two.add("b", row)
    Store(tmp_path, "needle")
    three.add("c", row)
    one.add("d", row)
    lines = (tmp_path / "needle.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines if line.endswith("}")] == ["a", "b", "c", "d"]
    assert list(Store(tmp_path, "needle").done) == ["a", "b", "c", "d"]


def test_two_jobs_of_several_processes_share_a_folder(tmp_path):
    first = [Store(tmp_path, "needle", rank, "one") for rank in range(3)]
    second = [Store(tmp_path, "needle", rank, "two") for rank in range(2)]
    for stores in (first, second):
        for store in stores:
            store.add(f"{store._job}{store._path.name}", {"setup": {}})
    first[0].absorb()
    assert [file.name for file in tmp_path.glob("*.rank*")] == ["needle.rank1-two.jsonl"]
    second[1].add("later", {"setup": {}})
    second[0].absorb()
    assert [file.name for file in tmp_path.iterdir()] == ["needle.jsonl"]
    assert len(Store(tmp_path, "needle").done) == 6


EDITS = {
    "no score": lambda row: row.pop("score"),
    "another score": lambda row: row.update(score=1.0 - row["score"]),
    "a word for a score": lambda row: row.update(score="high"),
    "no tokens": lambda row: row.pop("tokens"),
    "another label": lambda row: row.update(label="<b>mine</b>"),
    "no setup": lambda row: row.pop("setup"),
    "another key": lambda row: row.update(key="f" * 16),
    "no digest": lambda row: row.pop("digest"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_line_does_not_count_and_is_measured_again(edit, small, tmp_path):
    def measured():
        return needle(*small, lengths=[128], depths=[50], text="noise", out=tmp_path, progress=False)

    before, file = measured(), tmp_path / "needle.jsonl"
    first, *others = file.read_text().splitlines()
    row = json.loads(first)
    EDITS[edit](row)
    file.write_text("\n".join([json.dumps(row), *others]) + "\n")
    with pytest.warns(UserWarning, match=r"needle\.jsonl: lines that were edited \(1\)"):
        assert measured().rows == before.rows
    lines = file.read_text().splitlines()
    assert lines[: len(others) + 1] == [json.dumps(row), *others]
    assert lines[-1] == first
    assert measured().cells() == before.cells()


def test_a_sweep_reads_all_weights_once(small, monkeypatch):
    read = []
    monkeypatch.setattr(identity, "_summary", lambda named: (read.append(named[0]), str(named[1].sum()))[1])
    tasks = [Needle(TEXT, [96], [50], control=False), Perplexity(TEXT, [40], bins=1)]
    sweep(*small, setups(["linear", "ntk"], [2]), tasks, progress=False)
    for name, _ in small[0].named_parameters():
        assert read.count(name) == 1


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    (tmp_path / "page.html").write_text("old")

    def write():
        with whole_file(tmp_path / "page.html") as scratch:
            scratch.write_text("ne")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("page.html", "old")]


# refusals


def gpt2(tokenizer):
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=96, n_embd=32, n_layer=1, n_head=2)).eval()


def test_a_table_of_positions_that_ends_is_named(small):
    _, tokenizer = small
    with pytest.raises(ValueError, match=r"length 300 is more than the 96 positions of transformer\.wpe"):
        perplexity(gpt2(tokenizer), tokenizer, lengths=[300], text="noise", progress=False)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Limits(chunk=0), "`chunk` must be a whole number >= 1 .*, got 0"),
        (lambda: Limits(batch_tokens=-3), "`batch_tokens` must be a whole number >= 1 .*, got -3"),
        (
            lambda: Perplexity(TEXT, [64], stride=1.5),
            r"stride must be a whole number from 1 to length - 1 = 63, got 1\.5",
        ),
        (lambda: setups("yarn", [2]), "`methods` must be a list of names, got 'yarn'"),
        (lambda: Results("needle", []).plot(), "there is no row to draw"),
        (lambda: Needle(TEXT, [200]).rows() and plots.of_task("needle", [{"depth": None}]), "there is no row to draw"),
    ],
)
def test_wrong_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-memory", "nan", "'nan' is not a number of gigabytes above 0"),
        ("--max-memory", "inf", "'inf' is not a number of gigabytes above 0"),
        ("--max-memory", "-1", "'-1' is not a number of gigabytes above 0"),
        ("--limit", "0", "argument --limit: '0' is not a whole number >= 1"),
    ],
)
def test_wrong_options_are_named(option, value, said, capsys):
    with pytest.raises(SystemExit):
        main(["eval", "needle", f"{option}={value}"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["eval", "needle"], ["sweep", "--methods", "none"]])
def test_an_output_folder_that_cannot_be_made_is_named_before_anything_is_read(command, capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert main([*command, "--model", "nowhere", "--out", str(tmp_path / "file")]) == 2
    assert f"--out {tmp_path / 'file'} cannot be a folder for results: File exists." in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_wilson_is_that_of_the_formula():
    low, high = wilson(3, 3)
    assert (round(low, 3), high) == (0.438, 1.0)
