"""Shared beginnings, chunks and joint decoding change no result, for any model and method."""

import copy
import math
import random

import pytest
import torch
from conftest import FAMILIES, GENERIC, OPTIONS, build, ids, options
from transformers import AutoModelForCausalLM, GenerationConfig, T5Config, T5ForConditionalGeneration

from rope_ext import patch_model, patched
from rope_ext.evals import prefixes
from rope_ext.evals.prefixes import plan
from rope_ext.evals.reading import Limits, Prompt, reader
from rope_ext.evals.runner import run
from rope_ext.evals.tasks.kv_retrieval import KvRetrieval
from rope_ext.evals.tasks.multi_doc_qa import MultiDocQa
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.passkey import Passkey
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.tasks.ruler import Ruler
from rope_ext.evals.text import NOISE, read_text

ALONE = Limits(chunk=10**6, batch_tokens=1, reuse=False)
TOGETHER = Limits(chunk=7, batch_tokens=10**6, reuse=True)
NEW = 6


def prompts(vocabulary=90):
    """Needles at several depths of several lengths, one prompt twice and one that begins another."""
    hay, needle, tail = (ids(size, seed=seed)[0].tolist() for seed, size in ((1, 60), (2, 5), (3, 4)))
    made = [hay[:at] + needle + hay[at:length] + tail for length in (20, 41, 60) for at in range(0, length + 1, 10)]
    made += [made[3], hay[:30], hay[:25]]
    answer = ids(4, seed=4)[0].tolist()
    return [
        Prompt([token % vocabulary for token in each], [token % vocabulary for token in answer], NEW) for each in made
    ]


def answers(model, limits, asked=None):
    return dict(reader(model, limits)([list(enumerate(asked or prompts()))]))


def same(model, asked=None):
    """Everything at once against each prompt alone in one forward pass."""
    alone, together = answers(model, ALONE, asked), answers(model, TOGETHER, asked)
    assert together.keys() == alone.keys()
    for key, expected in alone.items():
        assert together[key].generated == expected.generated
        assert together[key].log_probability == pytest.approx(expected.log_probability, abs=1e-4)
    return alone


def random_prompts(seed):
    rng = random.Random(seed)
    return [torch.tensor([rng.randint(0, 1) for _ in range(rng.randint(1, 9))]) for _ in range(rng.randint(1, 12))]


def test_a_plan_reads_each_shared_beginning_once():
    for seed in range(300):
        made = random_prompts(seed)
        edges = {tuple(prompt[: end + 1].tolist()) for prompt in made for end in range(len(prompt))}
        nodes = [node for root in plan(made) for node in root.walk()]
        assert sorted(node.index for node in nodes) == list(range(len(made)))
        assert sum(len(made[node.index]) - node.start for node in nodes) == len(edges)
        for node in nodes:
            starts = [each.start for each in node.branches]
            assert starts == sorted(starts, reverse=True)  # the trunk's cache is cut, never read again
            assert all(
                torch.equal(made[node.index][: each.start], made[each.index][: each.start]) for each in node.branches
            )


def test_a_needle_grid_needs_three_caches():
    """The trunk, a branch per depth, one per length on top of that, whatever the number of depths and lengths."""
    made = [torch.tensor([1, *prompt.ids]) for prompt in prompts()[:-3]]
    (root,) = plan(made)
    assert [branch.start for branch in root.branches] == [51, 41, 31, 21, 11, 1]
    assert all(not twig.branches for branch in root.branches for twig in branch.branches)


@pytest.mark.parametrize("family", [*FAMILIES, *GENERIC, "bloom", "mpt"])
def test_reading_together_equals_reading_alone(family):
    same(build(family))


@pytest.mark.parametrize(
    ("family", "method"), [("llama", method) for method in OPTIONS] + [("bloom", "yarn"), ("bloom", "alibi")]
)
def test_with_every_method(family, method):
    model = build(family)
    patch_model(model, method, **options(method, model))
    same(model)


def test_sharing_one_token_too_many_is_noticed(monkeypatch):
    model, right = build("llama"), prefixes._common
    same(model)
    monkeypatch.setattr(prefixes, "_common", lambda one, other: min(right(one, other) + 1, len(one), len(other)))
    with pytest.raises(AssertionError):
        same(model)


def test_a_draft_counts_only_as_far_as_the_model_agrees():
    """The greedy continuation does not depend on which answer was asked about, right in part or wrong at once."""
    model, asked = build("llama"), prompts()[0]
    with torch.no_grad():
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        x = torch.tensor([asked.ids])
        theirs = model.generate(x, generation_config=config)[0, x.shape[1] :].tolist()
    wrong = (theirs[2] + 1) % 90
    for answer in (theirs, theirs[:2], [*theirs[:2], wrong, 5], [*theirs, 5, 6, 7], [wrong]):
        for limits in (ALONE, TOGETHER):
            (found,) = answers(model, limits, [Prompt(asked.ids, answer, NEW)]).values()
            assert found.generated == theirs
            with torch.no_grad():
                table = model(torch.tensor([[*asked.ids, *answer]])).logits[0].log_softmax(-1)
            places = range(len(asked.ids) - 1, len(asked.ids) - 1 + len(answer))
            expected = sum(float(table[place, token]) for place, token in zip(places, answer, strict=True))
            assert found.log_probability == pytest.approx(expected, abs=1e-4)
    for ends in (theirs[3], [theirs[3], 500]):
        stopping = copy.copy(model)
        stopping.generation_config = GenerationConfig(eos_token_id=ends)
        (found,) = answers(stopping, TOGETHER, [Prompt(asked.ids, theirs, NEW)]).values()
        assert found.generated == theirs[: theirs.index(theirs[3])]


@pytest.mark.parametrize("method", ["dynamic", "longrope"])
def test_what_depends_on_the_length_is_read_alone(method):
    """Stock ``dynamic`` keys depend on the length of the input: sharing them would change results."""
    model = build("llama")
    parameters = {"rope_type": method, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if method == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = copy.deepcopy(model.config)
    config.rope_parameters = parameters
    config.max_position_embeddings = 32
    scaled = AutoModelForCausalLM.from_config(config).eval()
    scaled.load_state_dict(model.state_dict())
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    scaled.generation_config = config
    read = reader(scaled, TOGETHER)
    found = dict(read([list(enumerate(prompts()))]))
    assert read.usage.read_tokens == read.usage.asked_tokens
    for key, asked in enumerate(prompts()):
        x = torch.tensor([asked.ids])
        assert found[key].generated == scaled.generate(x, generation_config=config)[0, x.shape[1] :].tolist()


def test_the_output_head_sees_what_is_needed_only(small):
    model, _ = small
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(tuple(inputs[0].shape[:2])))
    answers(model, Limits(chunk=16, reuse=False), [Prompt(ids(90)[0].tolist(), [5, 6, 7], 3)])
    handle.remove()
    assert {rows for rows, _ in seen} == {1}
    assert max(length for _, length in seen) == 3


def test_usage_counts_what_the_model_reads():
    model = build("llama")
    read = []
    handle = model.model.register_forward_hook(
        lambda module, given, named, output: read.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    used = reader(model, Limits(chunk=10**6))
    asked = [Prompt(prompt.ids, prompt.answer_ids[:1], 1) for prompt in prompts()]  # nothing is decoded after reading
    list(used([list(enumerate(asked))]))
    handle.remove()
    assert sum(read) == used.usage.read_tokens
    assert used.usage.asked_tokens == sum(len(prompt.ids) for prompt in asked)
    assert used.usage.asked_operations / used.usage.read_operations > 1.3


@pytest.mark.parametrize("method", [None, "t5_bias", "alibi", "yarn"])
def test_encoder_decoders(method):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, eos_token_id=1
    )
    model = T5ForConditionalGeneration(config).eval()
    if method:
        patch_model(model, method, **({"factor": 2} if method == "yarn" else {}))
    found = answers(model, Limits())
    options = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0
    )
    model.generation_config = options
    for key, asked in list(enumerate(prompts()))[::4]:
        x = torch.tensor([[*asked.ids, 1]])
        theirs = model.generate(x, generation_config=options)[0, 1:].tolist()
        assert found[key].generated == [token for token in theirs if token != 1]
        with torch.no_grad():
            decoded = torch.tensor([[0, *asked.answer_ids[:-1]]])
            table = model(x, decoder_input_ids=decoded).logits[0].log_softmax(-1)
        expected = float(table.gather(1, torch.tensor(asked.answer_ids)[:, None]).sum())
        assert found[key].log_probability == pytest.approx(expected, abs=1e-4)


def test_a_task_gives_the_same_rows_either_way(small):
    model, tokenizer = small
    text = " ".join(NOISE)
    tasks = [Needle(text, [128, 200, 300], [0, 30, 100], samples=2) for _ in range(2)]
    with patched(model, "yarn", factor=2):
        one, other = (
            run(task, model, tokenizer, limits=limits) for task, limits in zip(tasks, (ALONE, TOGETHER), strict=True)
        )
    for alone, together in zip(one, other, strict=True):
        close = pytest.approx(alone.pop("answer_log_probability"), abs=1e-4)
        assert together.pop("answer_log_probability") == close
        assert together == alone
    assert tasks[0].usage.read_tokens == tasks[0].usage.asked_tokens
    assert tasks[1].usage.read_tokens < 0.7 * tasks[1].usage.asked_tokens


def test_tasks_of_an_encoder_decoder(small):
    config = T5Config(
        vocab_size=512,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    model, tokenizer = T5ForConditionalGeneration(config).eval(), small[1]
    patch_model(model, "t5_bias", factor=2)
    text = read_text()
    tasks = [
        Needle(text, [400], [50]),
        Passkey(text, [400], samples=1),
        KvRetrieval([3], samples=1),
        MultiDocQa([3], samples=1),
        Ruler(text, [2400], subtasks=["niah_single_1", "vt"], samples=1),
    ]
    for task in tasks:
        rows = run(task, model, tokenizer)
        assert len(rows) == len(task.rows())
        assert all(math.isfinite(row["answer_log_probability"]) for row in rows)
        assert {row["label"] for row in rows} == {"t5_bias x2"}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        run(Perplexity(text, [200]), model, tokenizer)


def test_reading_leaves_autograd_as_it_is():
    """Between two answers, and when an evaluation is given up."""
    model = build("llama")
    for _ in reader(model, Limits(batch_tokens=1))([list(enumerate(prompts()))]):
        assert not torch.is_inference_mode_enabled()
        break
    assert not torch.is_inference_mode_enabled()
    model(ids(8), labels=ids(8)).loss.backward()
