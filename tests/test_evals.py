"""Prompts, scores, resume. On the small trained model, so that right and wrong can be told apart."""

import copy
import json
import math
import re

import pytest
import torch

from rope_ext import patch_model, patched, unpatch_model
from rope_ext.api import unwrap
from rope_ext.evals import memory
from rope_ext.evals.cells import perplexity_bins, score_cells
from rope_ext.evals.identity import fingerprint
from rope_ext.evals.intervals import wilson
from rope_ext.evals.memory import Holding
from rope_ext.evals.questions import encode
from rope_ext.evals.results import write_csv
from rope_ext.evals.runner import Task, comparable, run
from rope_ext.evals.scoring import token_nll
from rope_ext.evals.tasks.needle import Needle, Wording
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import NOISE, read_text, sentences

NOISE_TEXT = " ".join(NOISE)


def asked(task, tokenizer, length, depth):
    return task.question(tokenizer, {"length": length, "depth": depth, "sample": 0})


@pytest.mark.parametrize("depth", [0, 33, 50, 100])
@pytest.mark.parametrize("length", [120, 200])
def test_f42_one_bos_an_intact_needle_and_the_true_length(small, length, depth):
    _, tokenizer = small
    task = Needle(NOISE_TEXT, [length], [depth])
    prompt = asked(task, tokenizer, length, depth)
    assert prompt.ids.count(tokenizer.bos_token_id) == 1
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert len(prompt.ids) + task.max_new_tokens == length
    text = tokenizer.decode(prompt.ids)
    (place,) = [at for at in range(len(text)) if text.startswith(f"is {prompt.references[0]}.", at)]
    before = text[:place].count(". ")
    assert abs(prompt.facts["true_depth"] - depth) < 12
    assert (before <= 1) == (depth == 0)
    assert text.endswith(" is")


def test_f42_a_prompt_that_does_not_fit_is_an_error(small):
    _, tokenizer = small
    with pytest.raises(ValueError, match="leaves no room for a haystack: the rest takes"):
        asked(Needle(NOISE_TEXT, [60], [50]), tokenizer, 60, 50)
    with pytest.raises(ValueError, match="percentages"):
        Needle(NOISE_TEXT, [100], [150])


def test_the_chat_template_puts_the_answer_prefix_behind_the_assistant_header(small):
    _, tokenizer = small
    messages = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    tokenizer.chat_template = messages + "{% if add_generation_prompt %}[reply]{% endif %}"
    try:
        prompt = asked(Needle(NOISE_TEXT, [240], [50], chat=True), tokenizer, 240, 50)
    finally:
        tokenizer.chat_template = None
    text = tokenizer.decode(prompt.ids, skip_special_tokens=True)
    assert text.startswith("[user]A special magic number is hidden")
    key = text.split("What is the special magic number for ")[1].split("?")[0]
    assert text.endswith(f"[end][reply]The special magic number for {key} is")
    assert prompt.ids.count(tokenizer.bos_token_id) == 1


def test_nll_equals_the_models_own_loss(small):
    model, _ = small
    x = torch.randint(3, 500, (1, 700), generator=torch.Generator().manual_seed(0))
    nll = token_nll(model, x)
    with torch.no_grad():
        loss = model(x, labels=x).loss
    assert nll.shape == (699,)
    assert float(nll.mean()) == pytest.approx(float(loss), abs=1e-4)
    assert torch.allclose(token_nll(model, x, start=650), nll[649:], atol=1e-4)


def test_nll_never_holds_the_logits_of_the_whole_text(small):
    model, _ = small
    rows = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[-2]))
    token_nll(model, torch.arange(3, 503).repeat(4)[None])
    handle.remove()
    assert max(rows) <= 512 < 1999


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_nll_knows_soft_caps_and_logit_scales(family):
    from conftest import build, ids

    model, x = (
        build(family, **({"logit_scale": 0.3} if family == "cohere" else {"final_logit_softcapping": 3.0})),
        ids(50),
    )
    with torch.no_grad():
        assert float(token_nll(model, x).mean()) == pytest.approx(float(model(x, labels=x).loss), abs=1e-4)


def test_nll_refuses_what_it_does_not_know(small):
    model, _ = small
    plain = type(model).forward

    def doubled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled.__get__(model)
    try:
        with pytest.raises(ValueError, match="changes its logits"):
            token_nll(model, torch.arange(3, 40)[None])
    finally:
        del model.forward


def test_sliding_perplexity_scores_every_token_once(small):
    model, tokenizer = small
    text = NOISE_TEXT * 40
    length, stride, windows = 64, 16, 5
    (row,) = run(Perplexity(text, [length], stride=stride, windows=windows), model, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    total, count = 0.0, 0
    for window in range(windows):
        inside = ids[window * stride : window * stride + length - 1]
        nll = token_nll(model, torch.tensor([[tokenizer.bos_token_id, *inside]]))
        fresh = nll if window == 0 else nll[-stride:]
        total, count = total + float(fresh.sum()), count + len(fresh)
    assert row["tokens"] == count == length - 1 + (windows - 1) * stride
    assert row["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_full_perplexity_by_bin_and_prefix(small):
    model, tokenizer = small
    (row,) = run(Perplexity(NOISE_TEXT * 200, [600], bins=4), model, tokenizer)
    assert row["bin_edges"] == [0, 150, 300, 450, 599]
    mean = sum(
        math.log(value) * (end - start)
        for value, start, end in zip(row["bin_perplexity"], row["bin_edges"], row["bin_edges"][1:], strict=False)
    )
    assert math.exp(mean / 599) == pytest.approx(row["perplexity"], rel=1e-6)
    assert list(row["prefix_perplexity"]) == ["256", "512", "599"]
    assert row["prefix_perplexity"]["599"] == pytest.approx(row["perplexity"])
    assert len(perplexity_bins([{**row}])) == 4
    with pytest.raises(ValueError, match="give a longer text"):
        run(Perplexity("Too short.", [600]), model, tokenizer)


class Counting(Needle):
    """Counts what is really measured, and can be interrupted."""

    measured = 0
    stop_after = math.inf

    def measure(self, *arguments):
        for found in super().measure(*arguments):
            if self.measured >= self.stop_after:
                raise KeyboardInterrupt
            self.measured += 1
            yield found


def grid(**more):
    return Counting(NOISE_TEXT, [128, 160], [0, 100], **more)


def test_resume_measures_only_what_is_missing(small, tmp_path):
    model, tokenizer = small
    whole = run(grid(), model, tokenizer)
    first = grid()
    first.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        run(first, model, tokenizer, tmp_path)
    file = tmp_path / "needle.jsonl"
    with file.open("a") as lines:
        lines.write('{"key": "half a li')
    second = grid()
    assert run(second, model, tokenizer, tmp_path) == whole
    assert second.measured == 2
    third = grid()
    assert run(third, model, tokenizer, tmp_path) == whole
    assert third.measured == 0
    *rows, cut = sorted(file.read_text().splitlines(), key=lambda line: line.endswith("half a li"))
    assert [json.loads(line)["task"] for line in rows] == ["needle"] * 6
    assert cut == '{"key": "half a li'


def test_a_changed_setup_does_not_mix(small, tmp_path):
    model, tokenizer = small
    run(grid(), model, tokenizer, tmp_path)
    changed = [grid(seed=1), grid(max_new_tokens=9), grid(wording=Wording(task="Read."))]
    for task in changed:
        run(task, model, tokenizer, tmp_path)
        assert task.measured == len(task.rows())
    with patched(model, "yarn", factor=2):
        task = grid()
        rows = run(task, model, tokenizer, tmp_path)
        assert task.measured == 6
        assert {row["label"] for row in rows} == {"yarn x2"}


def test_the_fingerprint_follows_weights_and_patch(small):
    model, _ = small
    plain = fingerprint(model)
    with patched(model, "yarn", factor=2):
        assert fingerprint(model) != plain
        two = fingerprint(model)
    with patched(model, "yarn", factor=4):
        assert fingerprint(model) not in (plain, two)
    assert fingerprint(model) == plain
    weight = model.model.norm.weight
    with torch.no_grad():
        kept = weight[0].item()
        weight[0] += 1
        assert fingerprint(model) != plain
        weight[0] = kept


def test_wilson_interval():
    assert wilson(8, 10) == pytest.approx((0.4901, 0.9433), abs=1e-3)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    assert wilson(1, 1)[0] < 0.3  # one hit of one proves little


def test_cells_and_csv(tmp_path, small):
    model, tokenizer = small
    rows = run(grid(samples=2), model, tokenizer)
    cells = score_cells(rows, ("length", "depth"))
    assert [cell["n"] for cell in cells] == [2] * 6
    assert {cell["depth"] for cell in cells} == {0, 100, "no needle"}
    assert all(cell["score"] == 0 for cell in cells if cell["depth"] == "no needle")
    write_csv(tmp_path / "cells.csv", cells)
    header, *lines = (tmp_path / "cells.csv").read_text().splitlines()
    assert header == "label,length,depth,n,score,low,high,answer_log_probability"
    assert len(lines) == 6
    assert list(tmp_path.iterdir()) == [tmp_path / "cells.csv"]


def test_texts(tmp_path):
    builtin = read_text()
    assert len(builtin) > 300_000
    parts = sentences(builtin)
    assert all(part == " ".join(part.split()) for part in parts)
    (tmp_path / "b.md").write_text("Second.")
    (tmp_path / "a.txt").write_text("First.")
    assert read_text(str(tmp_path)) == "First.\nSecond."
    assert read_text(str(tmp_path / "a.txt")) == "First."
    assert sentences("One. Two?  Three!\nFour 4.5 five") == ["One.", "Two?", "Three!", "Four 4.5 five"]
    for source in ("no such thing", str(tmp_path / "empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match="text source"):
            read_text(source)


def test_every_task_is_a_task():
    assert all(issubclass(task, Task) for task in (Needle, Perplexity))


def test_training_mode_is_kept(small):
    model, tokenizer = small
    model.train()
    run(Needle(NOISE_TEXT, [128], [50], control=False), model, tokenizer)
    assert model.training
    model.eval()
    assert unpatch_model(patch_model(model, "rope")) is model


def test_a_model_without_rotary_positions_is_evaluated_too(small):
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=512)).eval()
    rows = run(Needle(NOISE_TEXT, [128], [50], control=False), model, small[1])
    assert [row["label"] for row in rows] == ["unpatched"]
    (row,) = run(Perplexity(NOISE_TEXT * 20, [128]), model, small[1])
    assert math.isfinite(row["perplexity"])


def test_long_sentences_and_other_scripts_fill_the_haystack(small):
    _, tokenizer = small
    for text in ("Short one. " + "word " * 300 + ". Short two.", "no stop at all " * 50, "一句话。另一句！" * 9):
        prompt = asked(Needle(text, [400], [50]), tokenizer, 400, 50)
        assert len(prompt.ids) + 12 == 400
        assert abs(prompt.facts["true_depth"] - 50) < 10


def test_repeated_lengths_and_depths_count_once(small):
    assert len(Needle(NOISE_TEXT, [128, 128], [50, 50.0], control=False).rows()) == 1
    assert len(Perplexity(NOISE_TEXT, [128, 128]).rows()) == 1
    for wrong in (400, [], [0], [40.5], ["a"], "128"):
        with pytest.raises(ValueError, match="`lengths` must be"):
            Needle(NOISE_TEXT, wrong)


def test_rows_say_what_they_are(small, tmp_path):
    model, tokenizer = small
    run(grid(), model, tokenizer, tmp_path)
    with patched(model, "yarn", factor=2):
        run(grid(), model, tokenizer, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "needle.jsonl").read_text().splitlines()]
    assert {(row["label"], row["method"], str(row["options"])) for row in rows} == {
        ("unpatched", None, "{}"),
        ("yarn x2", "yarn", "{'factor': 2.0}"),
    }
    assert len(comparable(grid(), tokenizer, model, tmp_path)) == 12
    assert comparable(grid(seed=5), tokenizer, model, tmp_path) == []
    retrained = copy.deepcopy(model)
    with torch.no_grad():
        retrained.model.norm.weight *= 2
    run(grid(), retrained, tokenizer, tmp_path)
    latest = [row for row in comparable(grid(), tokenizer, retrained, tmp_path) if row["label"] == "unpatched"]
    assert len(latest) == 6
    assert {row["setup"]["model"] for row in latest} == {fingerprint(retrained)}


def test_the_key_ignores_padding_and_sees_the_template_and_adapters(small, tmp_path):
    from peft import LoraConfig, get_peft_model

    model, tokenizer = copy.deepcopy(small[0]), copy.deepcopy(small[1])
    run(grid(), model, tokenizer, tmp_path)
    tokenizer(["a", "b c"], padding=True, truncation=True)
    task = grid()
    run(task, model, tokenizer, tmp_path)
    assert task.measured == 0
    tokenizer.chat_template = "{{ messages }}"
    run(task, model, tokenizer, tmp_path)
    assert task.measured == 6
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    on = fingerprint(unwrap(tuned))
    with tuned.disable_adapter():
        assert fingerprint(unwrap(tuned)) != on


def test_memory_is_estimated_and_refused(small):
    model, _ = small
    needed = memory.check(model, Holding(forward=1000, cached=1000, longest=1000))
    assert needed.total > 2_600_000
    with pytest.raises(ValueError, match="use shorter lengths"):
        memory.check(model, Holding(forward=10**9, cached=0, longest=10**9))
    with pytest.raises(ValueError, match=r"more than max_memory=0\.00 GB; use shorter lengths"):
        run(Perplexity(NOISE_TEXT * 20, [128]), model, small[1], max_memory=10**6)
    rows = run(Perplexity(NOISE_TEXT * 20, [128]), model, small[1], max_memory=10**8)
    assert len(rows) == 1


def test_submodules_keep_their_own_mode(small):
    model, tokenizer = small
    model.train()
    model.model.norm.eval()
    run(Needle(NOISE_TEXT, [128], [50], control=False), model, tokenizer)
    assert (model.training, model.model.norm.training) == (True, False)
    model.eval()


def test_llama_4_has_a_perplexity_and_a_headless_model_none(small):
    from conftest import build, ids

    model, x = build("llama4"), ids(50)
    with torch.no_grad():
        assert float(token_nll(model, x).mean()) == pytest.approx(float(model(x, labels=x).loss), abs=1e-4)
    with pytest.raises(ValueError, match="no output head"):
        token_nll(small[0].model, x)


def sentencepiece_like(scheme):
    """A tokenizer that marks the start of words, as Llama 2's, Mistral's and T5's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"])
    made.train_from_iterator([NOISE_TEXT + "\n" + "".join(map(chr, range(32, 127)))] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_pieces_gain_no_space_where_a_tokenizer_marks_the_start_of_words(scheme):
    tokenizer = sentencepiece_like(scheme)
    assert encode(tokenizer, " sky is") == tokenizer.encode("sky is", add_special_tokens=False)
    for depth in (0, 50, 100):
        question = asked(Needle(NOISE_TEXT, [240], [depth]), tokenizer, 240, depth)
        text = tokenizer.decode(question.ids, skip_special_tokens=True)
        assert "  " not in text
        assert tokenizer.encode(text, add_special_tokens=False) == question.ids[1:]


def test_a_needle_at_the_very_start_is_followed_by_a_space(small):
    text = small[1].decode(asked(Needle(NOISE_TEXT, [160], [0]), small[1], 160, 0).ids)
    assert re.search(r"Remember it\.\n The special magic number for \w+ is \d{5}\. The grass", text)


def test_special_tokens_in_a_text_are_text(small):
    _, tokenizer = small
    task = Needle(f"One sentence. {tokenizer.bos_token} Another {tokenizer.eos_token} one.", [200], [50])
    question = asked(task, tokenizer, 200, 50)
    assert question.ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in question.ids
    assert tokenizer.bos_token in tokenizer.decode(question.ids[1:])


def test_a_chat_template_that_drops_the_text_is_refused(small):
    tokenizer = copy.deepcopy(small[1])
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
    with pytest.raises(ValueError, match="does not show a user's text"):
        asked(Needle(NOISE_TEXT, [200], [50], chat=True), tokenizer, 200, 50)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        asked(Needle(NOISE_TEXT, [200], [50], chat=True), tokenizer, 200, 50)
