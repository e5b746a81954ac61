"""The contracts of a patch, for every hosted family and every method of the registry."""

import copy

import pytest
import torch
from conftest import FAMILIES, TRAINED, build, ids, logits, options
from tolerances import LOGITS

from rope_ext import load_patched, patch_model, registry, unpatch_model
from rope_ext.patches.rotary_module import PatchedRotary

METHODS = [name for name, method in registry.METHODS.items() if method.seam == "rotary"]
LONG = 2 * TRAINED

matrix = pytest.mark.parametrize("family", FAMILIES)
methods = pytest.mark.parametrize("method", METHODS)


def patched_pair(family, method):
    """(untouched twin, patched model) with equal weights."""
    twin, model = build(family), build(family)
    return twin, patch_model(model, method, **options(method, model))


def rotary_of(model) -> PatchedRotary:
    return next(module for module in model.modules() if isinstance(module, PatchedRotary))


@matrix
@methods
def test_changes_the_output_and_undoes_exactly(family, method):
    model = build(family)
    x, config = ids(LONG), model.config
    before, entries, keys = logits(model, x), copy.deepcopy(config.to_dict()), list(model.state_dict())
    modules = {name: (id(module), type(module), module.forward.__func__) for name, module in model.named_modules()}
    patch_model(model, method, **options(method, model))
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, x), before) == (method == "rope")
    unpatch_model(model)
    assert torch.equal(logits(model, x), before)
    assert model.config is config
    assert config.to_dict() == entries
    assert {name: (id(m), type(m), m.forward.__func__) for name, m in model.named_modules()} == modules
    assert not hasattr(model, "_rope_ext")


@matrix
@methods
def test_other_models_are_untouched_and_twice_is_once(family, method):
    twin, model = patched_pair(family, method)
    x = ids(LONG)
    younger = build(family)
    once = logits(model, x)
    assert torch.equal(logits(twin, x), logits(younger, x))
    assert torch.equal(logits(patch_model(younger, "rope"), x), logits(twin, x))
    patch_model(model, method, **options(method, model))
    assert torch.equal(logits(model, x), once)


def cached_deviation(model) -> float:
    """Largest difference between logits decoded token by token across L0 and those of one full forward."""
    x = ids(TRAINED + 24)
    full, steps, start = logits(model, x), [], TRAINED - 8
    with torch.no_grad():
        output = model(x[:, :start], use_cache=True)
        steps.append(output.logits)
        cache_name = registry.compat().cache_argument(model)
        for at in range(start, x.shape[1]):
            cached = {cache_name: getattr(output, cache_name)}
            output = model(x[:, at : at + 1], use_cache=True, **cached)
            steps.append(output.logits)
    return float((torch.cat(steps, dim=1) - full).abs().max())


@matrix
@methods
def test_cached_decoding_equals_the_full_forward(family, method):
    _, model = patched_pair(family, method)
    assert cached_deviation(model) < LOGITS


def test_the_cache_check_fails_on_a_known_fault():
    """Twin: stock dynamic scaling mixes keys that were rotated with different bases."""
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert cached_deviation(build("llama", rope_parameters=dynamic)) > 10 * LOGITS


@matrix
@methods
def test_padding_on_either_side_equals_each_row_alone(family, method):
    _, model = patched_pair(family, method)
    long, short = ids(LONG), ids(LONG - 37, seed=3)
    for side in ("left", "right"):
        pad = torch.zeros(1, 37, dtype=torch.long)
        row = torch.cat((pad, short) if side == "left" else (short, pad), dim=1)
        mask = torch.ones(2, LONG, dtype=torch.long)
        mask[1, :37] = 0 if side == "left" else 1
        mask[1, -37:] = 1 if side == "left" else 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        both = logits(model, torch.cat((long, row)), attention_mask=mask, position_ids=positions)
        alone = logits(model, short)
        real = both[1:, 37:] if side == "left" else both[1:, :-37]
        assert (both[:1] - logits(model, long)).abs().max() < LOGITS
        assert (real - alone).abs().max() < LOGITS


@matrix
@methods
def test_packed_documents_equal_each_alone(family, method):
    _, model = patched_pair(family, method)
    first, second = ids(50), ids(LONG, seed=3)
    positions = torch.cat((torch.arange(50), torch.arange(LONG)))[None]
    packed = logits(model, torch.cat((first, second), dim=1), position_ids=positions)
    assert (packed[:, :50] - logits(model, first)).abs().max() < LOGITS
    assert (packed[:, 50:] - logits(model, second)).abs().max() < LOGITS


@matrix
@methods
def test_nothing_is_left_behind_by_a_forward_and_the_future_is_unseen(family, method):
    _, model = patched_pair(family, method)
    short, long = ids(20), ids(LONG)
    before = logits(model, short)
    seen = logits(model, long)
    assert torch.equal(logits(model, short), before)
    changed = long.clone()
    changed[0, -1] = 3 + (changed[0, -1] - 2) % 50
    unseen = logits(model, changed)[:, :-1]
    if "moe" in family:  # the last token's experts multiply other tokens in other groups: another rounding
        assert (unseen - seen[:, :-1]).abs().max() < LOGITS
    else:
        assert torch.equal(unseen, seen[:, :-1])
    assert not torch.equal(logits(model, changed)[:, -1], seen[:, -1])


@matrix
@methods
def test_tables_stay_fp32_through_casts_and_empty_storage(family, method):
    _, model = patched_pair(family, method)
    tables = {name: table.clone() for name, table in model.named_buffers()}
    assert tables
    model.to(torch.bfloat16).to("meta").to_empty(device="cpu")
    for name, table in model.named_buffers():
        assert table.dtype == torch.float32, name
        assert torch.equal(table, tables[name]), name


@matrix
@methods
def test_saved_loads_in_stock_and_here_to_the_same_bits(family, method, tmp_path):
    twin, model = patched_pair(family, method)
    x = ids(LONG)
    expected = logits(model, x)
    model.save_pretrained(tmp_path)
    stock = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(stock, x), expected)
    assert torch.equal(logits(stock, x[:, :16]), logits(model, x[:, :16]))
    again = load_patched(tmp_path).eval()
    assert torch.equal(logits(again, x), expected)
    assert again.config.max_position_embeddings == model.config.max_position_embeddings
    assert torch.equal(logits(unpatch_model(again), x), logits(twin, x))
    assert again.config.rope_parameters == twin.config.rope_parameters
    assert not hasattr(again.config, "rope_ext")


@matrix
@methods
def test_a_training_step_reaches_every_weight(family, method):
    _, model = patched_pair(family, method)
    model.train()
    x = ids(LONG)
    model(x, labels=x, use_cache=False).loss.backward()
    missing = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not [name for name in missing if "experts" not in name]


@matrix
def test_generate_runs_past_the_trained_length(family):
    _, model = patched_pair(family, "yarn")
    x = ids(TRAINED - 4)
    made = model.generate(x, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert made.shape == (1, TRAINED + 20)
    greedy = x
    for _ in range(24):
        greedy = torch.cat((greedy, logits(model, greedy)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(made, greedy)


def test_the_table_check_fails_on_a_planted_fault():
    """Twin of the fp32 test: without the refill, casting would have destroyed the table."""
    _, model = patched_pair("llama", "yarn")
    rotary = rotary_of(model)
    table = rotary.inv_freq.clone()
    rotary._tables.clear()
    model.to(torch.bfloat16)
    assert not torch.equal(rotary.inv_freq.float(), table)


@methods
def test_the_output_check_fails_on_a_planted_fault(method):
    """Twin of the parity tests: a small shift of one frequency is seen in the logits."""
    _, model = patched_pair("llama", method)
    x = ids(LONG)
    right = logits(model, x)
    rotary = rotary_of(model)
    rotary.inv_freq[1] = 1.01 * rotary.inv_freq[1] + 1e-3
    assert (logits(model, x) - right).abs().max() > 10 * LOGITS
