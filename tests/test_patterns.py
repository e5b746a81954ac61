"""Windows, sinks and global tokens on whole models, and the cache that stays bounded."""

from itertools import pairwise

import pytest
import torch
from conftest import TRAINED, build, ids, logits, options
from tolerances import LOGITS

from rope_ext import describe, load_patched, patch_model, registry, unpatch_model
from rope_ext.attention import choosing
from rope_ext.streaming import streaming_cache

LONG = 2 * TRAINED
METHODS = [name for name, method in registry.METHODS.items() if method.seam != "embedding"]
PATTERNS = {
    "window": {"window": 20},
    "sinks": {"window": 20, "sinks": 3},
    "global": {"window": 20, "global_tokens": [0, 40]},
}
SOME = [("llama", "yarn"), ("llama", "dynamic"), ("qwen3", "self_extend"), ("mistral", "alibi"), ("bloom", "alibi")]
SOME += [("bloom", "yarn"), ("mpt", "dca"), ("llama", "fire"), ("qwen2", "shaw"), ("llama", "rope"), ("bloom", "xpos")]

patterns = pytest.mark.parametrize("pattern", PATTERNS)
some = pytest.mark.parametrize(("host", "method"), SOME)


def patched(host, method, pattern):
    model = build(host)
    return patch_model(model, method, **options(method, model), **PATTERNS[pattern])


@patterns
@pytest.mark.parametrize("method", METHODS)
def test_a_query_sees_what_the_pattern_says_and_no_more(method, pattern):
    """Of a model with one layer: editing a token changes what sees it, and nothing else."""
    model = build("llama", num_hidden_layers=1)
    before = logits(model, ids(LONG))
    patch_model(model, method, **options(method, model), **PATTERNS[pattern])
    x = ids(LONG)
    wanted = logits(model, x)
    for token in (1, 40, 60):
        changed = x.clone()
        changed[0, token] = 3 + (changed[0, token] - 2) % 50
        moved = (logits(model, changed) - wanted).abs().amax(-1)[0] > 1e-6
        sees = torch.zeros(LONG, dtype=torch.bool)
        sees[token : token + 20] = True
        if (pattern == "sinks" and token < 3) or (pattern == "global" and token == 40):
            sees[token:] = True
        if pattern == "global":
            sees[40] |= token <= 40
        assert not moved[~sees].any(), token
        assert moved[sees].float().mean() > 0.9, token
    unpatch_model(model)
    assert torch.equal(logits(model, x), before)


@patterns
@some
def test_cached_decoding_chunks_and_long_calls_equal_the_full_forward(host, method, pattern, monkeypatch):
    model, x = patched(host, method, pattern), ids(LONG)
    full = logits(model, x)
    assert (steps(model, x, (0, 50, 71, *range(72, LONG + 1))) - full).abs().max() < LOGITS
    monkeypatch.setattr(choosing, "SMALL", 0)
    assert (logits(model, x) - full).abs().max() < LOGITS
    assert (steps(model, x, (0, 30, 70, LONG)) - full).abs().max() < LOGITS


@torch.no_grad()
def steps(model, x, edges, cache=None):
    name = registry.compat().cache_argument(model)
    parts = []
    for a, b in pairwise(edges):
        output = model(x[:, a:b], use_cache=True, **({name: cache} if cache is not None else {}))
        cache = getattr(output, name)
        parts.append(output.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("pattern", ["window", "sinks"])
@some
def test_a_streaming_cache_gives_the_same_and_stays_bounded(host, method, pattern):
    model, x = patched(host, method, pattern), ids(LONG)
    cache = streaming_cache(model)
    found = steps(model, x, (0, 50, 60, 61, 62, *range(63, LONG + 1)), cache)
    assert (found - logits(model, x)).abs().max() < LOGITS
    assert cache.layers[0].keys.shape[2] == 19 + PATTERNS[pattern].get("sinks", 0)
    assert cache.get_seq_length() == LONG


def test_the_streaming_check_fails_on_planted_faults():
    for fault in ({"window": 19}, {"sinks": 0}):
        model, x = patched("llama", "rope", "sinks"), ids(LONG)
        cache = streaming_cache(model)
        for layer in cache.layers:
            vars(layer).update(fault)
        assert (steps(model, x, (0, 50, *range(51, LONG + 1)), cache) - logits(model, x)).abs().max() > 10 * LOGITS


@pytest.mark.parametrize(("host", "method"), [("llama", "rope"), ("bloom", "alibi"), ("llama", "dynamic")])
def test_generate_with_a_streaming_cache(host, method):
    model = patched(host, method, "sinks")
    asked = {"max_new_tokens": 3 * TRAINED, "do_sample": False, "eos_token_id": None}
    x = ids(TRAINED, rows=2)
    cache = streaming_cache(model)
    made = model.generate(x, **{registry.compat().cache_argument(model): cache}, **asked)
    assert made.shape[1] == 4 * TRAINED
    assert torch.equal(made, model.generate(x, **asked))
    assert cache.layers[0].keys.shape[2] == 22


@patterns
@some
def test_padded_and_packed_rows_equal_each_alone(host, method, pattern):
    model = patched(host, method, pattern)
    long, short, pad = ids(LONG), ids(LONG - 30, seed=3), ids(30, seed=5)
    for left in (True, False):
        x = torch.cat((long, torch.cat((pad, short) if left else (short, pad), 1)))
        mask = torch.ones_like(x)
        mask[1, slice(0, 30) if left else slice(-30, None)] = 0
        more = {} if host in ("bloom", "mpt") else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        both = logits(model, x, attention_mask=mask, **more)
        assert (both[:1] - logits(model, long)).abs().max() < LOGITS
        assert (both[1:][mask[1:] > 0] - logits(model, short)[0]).abs().max() < LOGITS
    if host not in ("bloom", "mpt"):
        positions = torch.cat((torch.arange(LONG), torch.arange(short.shape[1])))[None]
        packed = logits(model, torch.cat((long, short), 1), position_ids=positions)
        assert (packed[:, :LONG] - logits(model, long)).abs().max() < LOGITS
        assert (packed[:, LONG:] - logits(model, short)).abs().max() < LOGITS


@patterns
@pytest.mark.parametrize(
    ("host", "method"), [("llama", "yarn"), ("bloom", "alibi"), ("t5", "t5_bias"), ("qwen3", "dca")]
)
def test_saved_patterns_load_back_and_never_without_them(host, method, pattern, tmp_path):
    model = patched(host, method, pattern)
    given = {"decoder_input_ids": ids(LONG)} if host == "t5" else {}
    wanted = logits(model, ids(LONG), **given)
    assert not describe(model).stock_loadable
    model.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"rope_ext\.load_patched"):
        type(model).from_pretrained(tmp_path)
    assert torch.equal(logits(load_patched(tmp_path).eval(), ids(LONG), **given), wanted)


def test_encoders_have_windows_on_either_side():
    model = patch_model(build("t5", num_hidden_layers=1), "t5_bias", window=10, global_tokens=[5])
    x = ids(60)

    @torch.no_grad()
    def encoded(words):
        return model.get_encoder()(words).last_hidden_state

    wanted, changed = encoded(x), x.clone()
    changed[0, 30] = 3 + (changed[0, 30] - 2) % 50
    moved = torch.nonzero((encoded(changed) - wanted).abs().amax(-1)[0] > 1e-6).flatten().tolist()
    assert moved == [5, *range(21, 40)]


def test_training_with_a_pattern_reaches_every_weight():
    model = patched("llama", "yarn", "sinks").train()
    x = ids(LONG)
    model(x, labels=x, use_cache=False).loss.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize(
    ("options_", "message"),
    [
        ({"sinks": 4}, r"`sinks`=4 keeps keys outside a window; give `window`"),
        ({"global_tokens": [0]}, r"`global_tokens`=\(0,\) keeps keys outside"),
        ({"window": 0}, "`window` must be a whole number >= 1, got 0"),
        ({"window": 8, "sinks": -1}, "`sinks` must be a whole number >= 0"),
        ({"window": 8, "global_tokens": [-1]}, "`global_tokens` must hold numbers >= 0 and"),
    ],
)
def test_patterns_that_make_no_sense(options_, message):
    model = build("llama")
    with pytest.raises(ValueError, match=message):
        patch_model(model, "rope", **options_)
    assert not hasattr(model, "_rope_ext")


def test_refusals():
    with pytest.raises(ValueError, match=r"own sliding\s+window \(24 tokens\)"):
        patch_model(build("mistral_window"), "rope", window=30, sinks=2)
    with pytest.raises(ValueError, match="needs attention computed by"):
        patch_model(build("gemma2"), "rope", window=30)
    with pytest.raises(ValueError, match="needs a model patched with a window"):
        streaming_cache(build("llama"))
    with pytest.raises(ValueError, match="`global_tokens` see every key"):
        streaming_cache(patched("llama", "rope", "global"))
    with pytest.raises(ValueError, match="encoder-decoder"):
        streaming_cache(patch_model(build("t5"), "t5_bias", window=9))


def test_a_window_beside_the_models_own():
    """The narrower of the two counts."""
    x, narrow = ids(LONG), patch_model(build("mistral_window"), "rope", window=10)
    wide = patch_model(build("mistral_window"), "rope", window=100)
    unwindowed = patch_model(build("mistral"), "rope", window=10)
    assert (logits(narrow, x) - logits(unwindowed, x)).abs().max() < LOGITS
    assert (logits(wide, x) - logits(build("mistral_window"), x)).abs().max() < LOGITS
