"""Keys that stay mapped between decoding steps: fewer to map, the same numbers, dropped when raw keys are replaced."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from conftest import TRAINED, build, ids, logits, options
from tolerances import LOGITS
from transformers import DynamicCache

from rope_ext import patch_model, registry, unpatch_model
from rope_ext.attention import computing, mapped_cache, staged, zoned
from rope_ext.attention.mapped_cache import Mapped, MappedLayer

HOSTS = [("llama", "dynamic_longrope"), ("bloom", "xpos"), ("qwen3", "dynamic"), ("llama", "dynamic_yarn")]
HOSTS += [("llama", "self_extend"), ("qwen3", "dca"), ("bloom", "rerope")]
hosts = pytest.mark.parametrize(("host", "method"), HOSTS)


def patched(host, method, **given):
    model = build(host)
    return patch_model(model, method, **{**options(method, model), **given})


@torch.no_grad()
def step(model, x, cache):
    name = registry.compat().cache_argument(model)
    output = model(x, use_cache=True, **({name: cache} if cache is not None else {}))
    return output.logits, getattr(output, name)


@pytest.fixture
def mapped(monkeypatch):
    """How many keys each call maps."""
    counts = []
    once = Mapped.__call__

    def counted(self, form, stage, keys, turn):
        return once(self, form, stage, keys, lambda start: (counts.append(keys.shape[2] - start), turn(start))[1])

    monkeypatch.setattr(Mapped, "__call__", counted)
    return counts


def test_a_step_within_a_stage_maps_its_own_key_only(mapped):
    model, x = patched("llama", "dynamic", step=8), ids(TRAINED + 20)
    _, cache = step(model, x[:, :40], DynamicCache(config=model.config))
    assert all(type(layer) is MappedLayer for layer in cache.layers)
    for at in range(40, TRAINED + 20):
        mapped.clear()
        step(model, x[:, at : at + 1], cache)
        new_stage = at >= TRAINED and (at - TRAINED) % 8 == 0
        assert mapped == [at + 1 if new_stage else 1] * 2, at


@pytest.mark.parametrize(("method", "forms"), [("self_extend", 2), ("rerope", 1), ("leaky_rerope", 2), ("dca", 1)])
def test_a_step_of_a_zoned_method_turns_its_own_key_only(method, forms, mapped):
    model, x = patched("llama", method), ids(40)
    _, cache = step(model, x[:, :30], DynamicCache(config=model.config))
    for at in range(30, 40):
        mapped.clear()
        step(model, x[:, at : at + 1], cache)
        assert mapped == [1] * forms * 2 or at == 30, at


@torch.no_grad()
def padded_step(model, x, shown, cache):
    """``shown``: the attention mask so far, of padded rows."""
    name = registry.compat().cache_argument(model)
    return model(x, attention_mask=shown, use_cache=True, **{name: cache}).logits


@pytest.mark.parametrize(("method", "forms"), [("dynamic_yarn", 1), ("dynamic", 1), ("self_extend", 2), ("dca", 1)])
def test_a_step_of_padded_rows_maps_its_own_keys_only(method, forms, mapped):
    """Rows 1 and 2 are padded alike, and kept together."""
    model, x = patched("llama", method), ids(40, rows=4)
    shown = torch.ones(4, 40, dtype=torch.long)
    shown[1:3, :7] = 0
    shown[3, :3] = 0
    cache = DynamicCache(config=model.config)
    padded_step(model, x[:, :30], shown[:, :30], cache)
    for at in range(30, 40):
        mapped.clear()
        found = padded_step(model, x[:, at : at + 1], shown[:, : at + 1], cache)
        assert mapped == [1] * forms * 3 * 2 or at == 30, at
    for row, start in enumerate((0, 7, 7, 3)):
        alone = logits(model, x[row : row + 1, start:])[:, -1]
        assert (found[row] - alone).abs().max() < LOGITS


@hosts
def test_padded_rows_that_are_cut_and_continued_otherwise(host, method):
    """And whose stages change at different steps."""
    model, x, other = patched(host, method), ids(TRAINED + 20, rows=3), ids(TRAINED + 20, rows=3, seed=7)
    shown = torch.ones(3, TRAINED + 20, dtype=torch.long)
    shown[0, :9] = 0
    shown[1, :4] = 0
    cache = DynamicCache(config=model.config)
    padded_step(model, x[:, : TRAINED - 4], shown[:, : TRAINED - 4], cache)
    for at in range(TRAINED - 4, TRAINED + 10):
        padded_step(model, x[:, at : at + 1], shown[:, : at + 1], cache)
    cache.crop(-16)
    other[:, : TRAINED - 6] = x[:, : TRAINED - 6]
    for at in range(TRAINED - 6, TRAINED + 20):
        found = padded_step(model, other[:, at : at + 1], shown[:, : at + 1], cache)
    for row, start in enumerate((9, 4, 0)):
        assert (found[row] - logits(model, other[row : row + 1, start:])[:, -1]).abs().max() < LOGITS


def test_the_padded_check_fails_on_a_planted_fault(monkeypatch):
    """If rows did not keep their keys apart, one would get another's."""

    def mixed(keys, rows, columns):
        part = keys[rows, :, columns]
        if mapped_cache.mapped_of(keys) is not None:
            mapped_cache._mapped[part] = mapped_cache.mapped_of(keys)
        return part

    monkeypatch.setattr(computing, "part_of", mixed)
    with pytest.raises(AssertionError):
        test_padded_rows_that_are_cut_and_continued_otherwise("llama", "dynamic_longrope")


@hosts
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_gives_what_it_gives_without(host, method, beams, monkeypatch):
    model = patched(host, method)
    asked = {"max_new_tokens": 24, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    x = ids(TRAINED - 8, rows=2)
    found = model.generate(x, **asked)
    for way in (staged, zoned):
        monkeypatch.setattr(way, "mapped_of", lambda keys: None)
    assert torch.equal(found, model.generate(x, **asked))


@hosts
def test_crops_copies_and_other_branches(host, method):
    """A cache that is cut back, or copied and continued otherwise, forgets what it had mapped of other keys."""
    model, x, other = patched(host, method), ids(TRAINED + 20), ids(TRAINED + 20, seed=7)
    other[:, :40] = x[:, :40]
    _, cache = step(model, x[:, :40], None)
    _, cache = step(model, x[:, 40:41], cache)
    branch = copy.deepcopy(cache)
    for at in range(41, 50):
        found, cache = step(model, x[:, at : at + 1], cache)
    assert (found - logits(model, x[:, :50])[:, -1:]).abs().max() < LOGITS
    cache.crop(-10)
    step(model, other[:, 40:51], cache)
    found, cache = step(model, other[:, 51:52], cache)
    assert (found - logits(model, other[:, :52])[:, -1:]).abs().max() < LOGITS
    for at in range(41, 50):
        found, branch = step(model, x[:, at : at + 1], branch)
    assert (found - logits(model, x[:, :50])[:, -1:]).abs().max() < LOGITS


def test_the_branch_check_fails_on_a_planted_fault(monkeypatch):
    """If mapped keys stayed with the layer, those of cropped tokens would be used on."""
    original, kept = MappedLayer.update, {}

    def forgetful(self, *args, **kwargs):
        if id(self) in kept:
            mapped_cache._mapped[self.keys] = kept[id(self)]
        keys, values = original(self, *args, **kwargs)
        kept[id(self)] = mapped_cache._mapped[keys]
        return keys, values

    monkeypatch.setattr(MappedLayer, "update", forgetful)
    monkeypatch.setattr(mapped_cache, "_version", lambda keys: 0)
    with pytest.raises(AssertionError):
        test_crops_copies_and_other_branches("llama", "dynamic_longrope")


@hosts
def test_changes_in_place_pickles_and_the_end_of_inference_mode(host, method):
    model, x = patched(host, method), ids(50)
    with torch.inference_mode():
        _, cache = step(model, x[:, :40], DynamicCache(config=model.config))
        _, cache = step(model, x[:, 40:41], cache)
    found, cache = step(model, x[:, 41:42], cache)
    assert (found - logits(model, x[:, :42])[:, -1:]).abs().max() < LOGITS
    step(model, x[:, 42:43], cache)
    loaded = pickle.loads(pickle.dumps(cache))
    assert len(pickle.dumps(cache)) < 1.1 * len(pickle.dumps([(layer.keys, layer.values) for layer in cache.layers]))
    replaced = copy.deepcopy(cache)
    for layer, other in zip(cache.layers, replaced.layers, strict=True):
        layer.keys.mul_(0.5)
        other.keys = other.keys * 0.5
    same, changed, fresh = (step(model, x[:, 43:44], each)[0] for each in (loaded, cache, replaced))
    assert (same - logits(model, x[:, :44])[:, -1:]).abs().max() < LOGITS
    assert (changed - fresh).abs().max() < LOGITS
    assert (changed - same).abs().max() > 10 * LOGITS


def forms_of(cache):
    return [mapped_cache._mapped[layer.keys].forms for layer in cache.layers]


def test_nothing_is_kept_that_nobody_reads():
    model, x = patched("llama", "self_extend"), ids(50)
    _, cache = step(model, x[:, :40], DynamicCache(config=model.config))
    step(model, x[:, 40:41], cache)
    assert all(set(forms) == {0, 1} for forms in forms_of(cache))
    patch_model(model, "dca")  # which has one form
    step(model, x[:, 41:42], cache)
    step(model, x[:, 42:43], cache)
    assert all(set(forms) == {0} for forms in forms_of(cache))
    unpatch_model(model)
    step(model, x[:, 43:44], cache)
    step(model, x[:, 44:45], cache)
    assert not any(forms_of(cache))
    raw = [weakref.ref(layer.keys) for layer in cache.layers]
    gc.collect()
    held = len(mapped_cache._mapped)
    cache.reorder_cache(torch.tensor([0]))
    gc.collect()
    assert not any(ref() is not None for ref in raw)
    assert len(mapped_cache._mapped) == held - len(raw)


def test_another_method_or_none_on_the_same_cache():
    """Raw keys serve any raw method; what one has mapped is nothing to another."""
    model, x = patched("llama", "dynamic"), ids(40)
    _, cache = step(model, x[:, :30], None)
    _, cache = step(model, x[:, 30:31], cache)
    single = build("llama", num_hidden_layers=1)
    patch_model(single, "dynamic", factor=4)
    _, cache = step(single, x[:, :30], None)
    _, cache = step(single, x[:, 30:31], cache)
    patch_model(single, "xpos")
    found, cache = step(single, x[:, 31:32], cache)
    assert (found - logits(single, x[:, :32])[:, -1:]).abs().max() < LOGITS
    unpatch_model(single)
    assert not single.model._forward_pre_hooks


def test_training_maps_anew(mapped):
    model, x = patched("llama", "dynamic_longrope"), ids(30)
    output = model(x, use_cache=True)
    name = registry.compat().cache_argument(model)
    model(x[:, :1], use_cache=True, **{name: getattr(output, name)}).logits.sum().backward()
    assert not mapped
    assert all(weight.grad is not None for weight in model.parameters())
