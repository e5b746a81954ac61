"""What the fine-tuning recipe is made of: losses, rows, shifted sparse attention, memory."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import FAMILIES, TRAINED, build, ids, options
from tolerances import GRADIENT, LOGITS
from torch.nn import functional as F

from rope_ext import patch_model
from rope_ext.recipes import finetune
from rope_ext.training import data, loss, memory, s2

IGNORED = loss.IGNORED


@pytest.mark.parametrize("chunk", [1, 7, 40, 1000])
@pytest.mark.parametrize("trained_head", [True, False])
def test_the_chunked_loss_equals_the_loss_of_all_logits(chunk, trained_head):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50, bias=False).requires_grad_(trained_head)
    hidden, labels = torch.randn(40, 16), torch.randint(0, 50, (40,))

    def gradients(function, targets):
        head.zero_grad()
        inputs = hidden.clone().requires_grad_()
        value = function(inputs, targets) * 0.3
        value.backward()
        return [value.detach(), inputs.grad, *([head.weight.grad.clone()] if trained_head else [])]

    def whole(inputs, targets):
        return F.cross_entropy(head(inputs), targets, reduction="sum")

    wanted = gradients(whole, labels)
    found = gradients(lambda inputs, targets: loss.chunked_cross_entropy(inputs, targets, head, chunk), labels)
    for ours, right in zip(found, wanted, strict=True):
        assert (ours - right).abs().max() < GRADIENT * max(1, right.abs().max())
    wrong = gradients(whole, labels.roll(1))
    assert all((a - b).abs().max() > 10 * GRADIENT for a, b in zip(wrong, wanted, strict=True))


@pytest.mark.parametrize("host", [*FAMILIES, "bloom", "mpt", "t5", "umt5", "cohere", "gpt_neox"])
def test_the_loss_of_a_model_is_that_of_transformers(host):
    model, x = build(host), ids(70, rows=2)
    labels = x.clone()
    labels[0, 10:20] = IGNORED
    model.train(False)
    asked = {"input_ids": ids(30, rows=2, seed=5)} if model.config.is_encoder_decoder else {"input_ids": x}
    wanted = model(**asked, labels=labels, use_cache=False).loss
    total, count = loss.language_model_loss(model, {**asked, "labels": labels}, chunk=16)
    assert abs(float(total.detach() / count) - float(wanted.detach())) < LOGITS
    shifted = loss.language_model_loss(model, {**asked, "labels": labels.roll(1, 1)}, chunk=16)
    assert abs(float(shifted[0].detach() / shifted[1]) - float(wanted.detach())) > 10 * LOGITS


def test_models_that_cap_their_logits_are_refused():
    with pytest.raises(ValueError, match="caps its logits"):
        loss.language_model_loss(build("gemma2"), {"input_ids": ids(9), "labels": ids(9)})


def test_logits_never_exist_at_once():
    head = torch.nn.Linear(8, 20_000, bias=False).requires_grad_(False)
    hidden, largest = torch.randn(4000, 8, requires_grad=True), 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            nonlocal largest
            result = function(*arguments, **(named or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Watch():
        loss.chunked_cross_entropy(hidden, torch.zeros(4000, dtype=torch.long), head, 100).backward()
    assert 100 * 20_000 * 4 <= largest < 4000 * 20_000 * 4 / 10


def tokenize(text):
    return [ord(letter) - 90 for letter in text]


TEXTS = ["abcdefg", "hij", "", "klmnopqrstuvwxyz" * 2, "ab"]


def test_packing_loses_nothing_and_keeps_documents_apart():
    rows = data.pack(iter(TEXTS), tokenize, 2, 8)
    stream = [token for text in TEXTS for token in [*tokenize(text), 2]]
    assert rows.tokens.flatten().tolist() == stream[: rows.tokens.numel()]
    assert len(rows) == len(stream) // 8
    first = data.packed_row(rows, 0)  # abcdefg.
    second = data.packed_row(rows, 1)  # hij..klm: three documents
    assert first["position_ids"].tolist() == list(range(8))
    assert second["position_ids"].tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert (second["labels"] == IGNORED).tolist() == [True, False, False, False, True, True, False, False]
    assert data.packed_row(rows, 2)["position_ids"].tolist() == list(range(8))  # goes on as a document of its own
    assert len(data.pack(iter(TEXTS), tokenize, 2, 8, most=2)) == 2
    with pytest.raises(ValueError, match="less than one row of train_length=1000"):
        data.pack(iter(TEXTS), tokenize, 2, 1000)


@pytest.mark.parametrize("host", ["llama", "mistral_window", "qwen3"])
def test_a_packed_row_has_the_loss_of_its_documents_alone(host):
    model = build(host)
    rows = data.Rows(ids(40), (torch.arange(40) % 13 == 0)[None])
    packed = {name: value[None] for name, value in data.packed_row(rows, 0).items()}
    total, count = loss.language_model_loss(model, packed)
    alone = [loss.language_model_loss(model, {"input_ids": part, "labels": part}) for part in rows.tokens.split(13, 1)]
    assert abs(float(total) - float(sum(value for value, _ in alone))) < LOGITS * float(count)
    assert count == sum(number for _, number in alone)
    whole = {name: value[None] for name, value in data.whole_row(rows, 0).items()}
    assert abs(float(loss.language_model_loss(model, whole)[0]) - float(total)) > 1  # twin: boundaries ignored


def test_pose_positions():
    rows = data.Rows(ids(32, rows=200), torch.zeros(200, 32, dtype=torch.bool))
    ends = []
    for index in range(200):
        row = data.pose_row(rows, index, 1000, seed=3)
        steps = torch.diff(row["position_ids"])
        assert row["position_ids"][0] == 0
        assert (steps >= 1).all()
        assert (steps > 1).sum() <= 1
        assert row["position_ids"][-1] < 1000
        assert torch.equal(row["labels"], row["input_ids"])
        again = data.pose_row(rows, index, 1000, seed=3)
        assert torch.equal(again["position_ids"], row["position_ids"])
        ends.append(int(row["position_ids"][-1]))
    assert min(ends) < 100
    assert max(ends) > 900
    assert 400 < sum(ends) / len(ends) < 620
    with pytest.raises(ValueError, match="target_length=16 is shorter than train_length=32"):
        data.pose_row(rows, 0, 16, seed=0)


@pytest.mark.parametrize("method", ["yarn", "alibi", "kerple"])
def test_pose_rows_see_across_the_jump_and_not_ahead(method):
    model = patch_model(build("llama"), method, **({"factor": 5} if method == "yarn" else {}))
    rows = data.Rows(ids(40), torch.zeros(1, 40, dtype=torch.bool))
    row = {name: value[None] for name, value in data.pose_row(rows, 0, 5 * TRAINED, seed=1).items()}
    assert row["position_ids"][0, -1] > 40

    def hidden(tokens):
        inputs = {"attention_mask": row["attention_mask"], "position_ids": row["position_ids"]}
        return loss.hidden_states(model, {"input_ids": tokens, **inputs}, tokens)

    plain = hidden(row["input_ids"])
    first, last = row["input_ids"].clone(), row["input_ids"].clone()
    first[0, 0] = 3 + (first[0, 0] - 2) % 50
    last[0, -1] = 3 + (last[0, -1] - 2) % 50
    assert (hidden(first) - plain)[0, -1].abs().max() > 10 * LOGITS
    assert (hidden(last) - plain)[0, :-1].abs().max() < LOGITS


@pytest.mark.parametrize("length", [8, 40, 511])
def test_span_corruption_can_be_undone(length):
    rows = data.Rows(torch.arange(1000, 1000 + length)[None], torch.zeros(1, length, dtype=torch.bool))
    sentinels = list(range(900, 940))
    row = data.span_corruption(rows, 0, sentinels, 1, seed=5)
    source, target = row["input_ids"].tolist(), row["labels"].tolist()
    assert source.pop() == 1
    assert target.pop() == 1
    spans, current = {}, None
    for token in target:
        if token in sentinels:
            current = token
            spans[current] = []
        else:
            spans[current].append(token)
    restored = [token for item in source for token in spans.get(item, [item])]
    assert restored == rows.tokens[0].tolist()
    assert all(spans.values())
    assert sum(map(len, spans.values())) == max(len(spans), round(0.15 * length))


def test_sources(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "first"}) + "\n\n" + json.dumps({"text": "more"}) + "\n")
    (tmp_path / "ignored.md").write_text("no")
    assert list(data.documents(str(tmp_path))) == ["first", "more", "second"]
    assert list(data.documents(str(tmp_path / "b.txt"))) == ["second"]
    assert len(list(data.documents("builtin"))) > 50
    docstrings = list(data.documents("docstrings"))
    assert 1e6 < sum(map(len, docstrings)) < 4e6
    assert not any('The "if" statement\n' in text for text in docstrings)  # not what evaluations read
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"words": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2"):
        list(data.documents(str(tmp_path / "bad.jsonl")))
    with pytest.raises(ValueError, match="no such file"):
        list(data.documents(str(tmp_path / "missing")))


def test_groups_cover_every_token_once():
    assert s2.spans(16, 4, False) == [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 16)]
    assert s2.spans(16, 4, True) == [slice(0, 2), slice(2, 6), slice(6, 10), slice(10, 14), slice(14, 16)]


@pytest.mark.parametrize("host", ["llama", "qwen3"])
def test_shifted_sparse_attention(host):
    model, x = build(host).train(), ids(64)
    full = model(x, use_cache=False).logits
    with s2.shifted_sparse_attention(model, 16):
        sparse = model(x, use_cache=False).logits
        assert (sparse - full)[:, :8].abs().max() < LOGITS  # the first half group sees all there is
        assert (sparse - full)[:, 20:].abs().max() > 10 * LOGITS
        for at in (3, 17, 40, 63):  # what comes later is not seen, the ends do not meet
            changed = x.clone()
            changed[0, at] = 3 + (changed[0, at] - 2) % 50
            difference = (model(changed, use_cache=False).logits - sparse)[0].abs().amax(-1)
            assert (
                difference[:at].max(initial=torch.tensor(0.0)) < LOGITS if at == 0 else difference[:at].max() < LOGITS
            )
            assert difference[at] > LOGITS
        model.eval()
        assert (model(x, use_cache=False).logits - full).abs().max() < LOGITS
        model.train()
        mask = torch.ones_like(x)
        mask[0, 0] = 0
        with pytest.raises(ValueError, match="padding"):
            model(x, attention_mask=mask, use_cache=False)
    assert torch.equal(model(x, use_cache=False).logits, full)


def test_shifted_sparse_attention_equals_a_masked_one():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 32, 8) for heads in (4, 2, 2))
    module = torch.nn.Module().train()
    module.__dict__[s2.GROUP] = 8
    found, _ = s2.attention(module, q, k, v, None)
    place = torch.arange(32)
    masks = [(place[:, None] // 8 == place // 8), ((place[:, None] + 4) // 8 == (place + 4) // 8)]
    seen = torch.stack([masks[0], masks[0], masks[1], masks[1]]) & (place <= place[:, None])
    k, v = (part.repeat_interleave(2, 1) for part in (k, v))
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None])
    assert torch.allclose(found.transpose(1, 2), wanted, atol=1e-5)
    wrapped = seen.clone()
    wrapped[2:, 28:, :4] = True  # twin: the published code's last group sees the first tokens
    assert not torch.allclose(F.scaled_dot_product_attention(q, k, v, attn_mask=wrapped[None]), wanted, atol=1e-5)


def test_s2_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="even number"), s2.shifted_sparse_attention(build("llama"), 7):
        pass
    model = patch_model(build("llama"), "alibi")
    with pytest.raises(ValueError, match="'rope_ext'"), s2.shifted_sparse_attention(model, 8):
        pass
    with pytest.raises(ValueError, match="bloom"), s2.shifted_sparse_attention(build("bloom"), 8):
        pass


@pytest.mark.parametrize("method", ["linear", "yarn", "llama3", "lrope"])
def test_positions_of_a_shard_come_from_its_position_ids(method):
    """A sequence spread over processes: each has a part of the tokens and their positions, never arange(local)."""
    options = {} if method == "lrope" else {"factor": 4}
    model = patch_model(build("llama"), method, **options)
    x, places = torch.zeros(1, 64, 1), torch.arange(64)[None]
    whole = model.model.rotary_emb(x, places)
    halves = [model.model.rotary_emb(x[:, part], places[:, part]) for part in (slice(0, 32), slice(32, 64))]
    for index in (0, 1):
        assert torch.equal(torch.cat([half[index] for half in halves], 1), whole[index])
    local = model.model.rotary_emb(x[:, :32], torch.arange(32)[None])
    assert not torch.equal(local[0], halves[1][0])


def test_the_estimate_knows_what_matters():
    model = build("llama")
    full = memory.estimate(model, 1024, 1, checkpointing=False)
    assert memory.estimate(model, 1024, 1, checkpointing=True).saved_activations < full.saved_activations / 2
    assert memory.estimate(model, 2048, 1, checkpointing=False).saved_activations == 2 * full.saved_activations
    assert memory.estimate(model, 1024, 1, checkpointing=False, devices=4).weights == full.weights // 4
    model.requires_grad_(False)
    assert memory.estimate(model, 1024, 1, checkpointing=False).optimizer == 0
    assert "per device" in str(full)


def test_freed_memory_is_returned():
    """In a process of its own: many tensors of some MiB, freed in part, as a training step leaves them."""
    script = """
import sys, torch
from pathlib import Path
from rope_ext.training.memory import prepare_allocator
if sys.argv[1] == "yes":
    prepare_allocator()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
torch.ones(8 * 2**20)  # glibc raises its threshold once a large block is freed
before, kept = resident(), []
for _ in range(40):
    large = torch.ones(2 * 2**20)
    kept.append(torch.ones(1000))
    held = [torch.ones(2 * 2**20) for _ in range(3)]
    kept.append(torch.ones(1000))
    del large, held
print(resident() - before)
"""
    found = {
        answer: float(
            subprocess.run([sys.executable, "-c", script, answer], capture_output=True, text=True, check=True).stdout
        )
        for answer in ("yes", "no")
    }
    assert found["yes"] < 8
    assert found["yes"] <= found["no"]


@pytest.mark.parametrize(
    ("host", "method"), [("llama", None), ("bloom", None), ("t5", None), ("llama", "self_extend"), ("qwen3", "dca")]
)
def test_what_is_kept_instead_of_computed_again_changes_no_gradient(host, method):
    plain = {"dropout_rate": 0.0} if host == "t5" else {}

    def gradients(settings):
        model, x = build(host, **plain).train(), ids(70)
        if method is not None:
            patch_model(model, method, **options(method, model))
        if settings is not None:
            model.gradient_checkpointing_enable(settings)
        asked = {"input_ids": ids(30, seed=5)} if host == "t5" else {"input_ids": x}
        total, count = loss.language_model_loss(model, {**asked, "labels": x})
        (total / count).backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    wanted = gradients(None)
    found = gradients({"use_reentrant": False, "context_fn": finetune.kept_attention})
    for name, right in wanted.items():
        assert (found[name] - right).abs().max() < GRADIENT * max(1, right.abs().max()), name
