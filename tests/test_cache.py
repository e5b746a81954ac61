"""Cached keys at other positions: equal to the model's own at those positions, and to a float64 reference."""

import cmath
import copy
import math

import pytest
import reference
import torch
from conftest import FAMILIES, GENERIC, build, ids, options
from tolerances import LOGITS, OUTPUT
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextConfig, Qwen2VLTextModel

from rope_ext import cache, describe, methods, patch_model, registry

METHODS = [name for name, method in registry.METHODS.items() if method.seam == "rotary"]
RAW = [name for name, method in registry.METHODS.items() if method.seam in ("qk", "scores")]
LENGTH = 20

OTHER = {
    "glm": ("glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "llama4_nope": ("llama4_text", {**GENERIC["llama4"][1], "no_rope_layers": [1, 0]}),
    "nanochat": ("nanochat", {}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 16}),
    "falcon_alibi": ("falcon", {"alibi": True}),
    "deepseek_v3": (
        "deepseek_v3",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "head_dim": 8}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
}
"""glm pairs neighbours although its cos and sin are laid out in halves, nanochat turns backwards, hunyuan rescales the
channels of its keys after turning them, deepseek caches what it turns as values; smollm3 and llama4 leave layers
out, falcon with ALiBi has a rotary module that nothing calls."""

NEIGHBOURS = ("cohere", "glm", "llama4", "llama4_nope")
"""Pair channels (2i, 2i + 1); the others (i, i + d / 2)."""

MOVABLE = [*FAMILIES, "phi3", "gemma3", "cohere", "gpt_neox", "gpt_oss", "llama4_nope", "glm", "smollm3", "nanochat"]
HOSTS = ["bloom", "mpt"]


def make(family, method=None, **changes):
    with pytest.MonkeyPatch.context() as context:
        if family in OTHER:
            context.setitem(GENERIC, family, OTHER[family])
        model = build(family, **changes)
    return patch_model(model, method, **options(method, model)) if method else model


def fill(model, x, held=None, **given):
    """What the model caches of these tokens, behind what is held already."""
    held = DynamicCache(config=model.config) if held is None else held
    with torch.no_grad():
        model(x, use_cache=True, **{registry.compat().cache_argument(model): held}, **given)
    return held


def at(model, x, first=0, **given):
    """The cache of tokens that stand at ``first``, ``first`` + 1, ..."""
    return fill(model, x, position_ids=(torch.arange(x.shape[1]) + first).expand_as(x), **given)


def states(held):
    return [(layer.keys.clone(), layer.values.clone()) for layer in held.layers]


def deviation(one, other) -> float:
    """Largest difference of keys and values, relative to the largest of each tensor."""
    pairs = zip(sum(one, ()), sum(other, ()), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def moved(model, family, held, old, new):
    """The reference: every layer's keys taken from their old positions to raw and to new ones, pair by pair in float64.

    ``old`` and ``new`` are lists of positions, one of each per cached token.
    """
    waves, out = describe(model).wavelengths, []
    for index, layer in enumerate(held.layers):
        thetas = [2 * math.pi / wave for wave in waves.get("all", waves.get("full_attention"))]
        if "full_attention" in waves and model.config.layer_types[index] == "sliding_attention":
            thetas = reference.rope(16, 1e4, None)[0]
        if family in ("smollm3", "llama4_nope") and not model.config.no_rope_layers[index]:
            thetas = []
        keys = layer.keys.double().clone()
        for i, theta in enumerate(thetas):
            a, b = (2 * i, 2 * i + 1) if family in NEIGHBOURS else (i, i + len(thetas))
            sign = -1 if family == "nanochat" else 1
            for token, (before, after) in enumerate(zip(old, new, strict=True)):
                raw = torch.complex(keys[:, :, token, a], keys[:, :, token, b]) * cmath.exp(-1j * sign * theta * before)
                turned = raw * cmath.exp(1j * sign * theta * after)
                keys[:, :, token, a], keys[:, :, token, b] = turned.real, turned.imag
        out.append((keys.to(layer.keys.dtype), layer.values.clone()))
    return out


def shifted_deviation(model, delta, by) -> float:
    """Between keys moved by ``by`` tokens and those of tokens that stand ``delta`` later."""
    x = ids(LENGTH, rows=2)
    return deviation(states(cache.shift(model, at(model, x), by)), states(at(model, x, delta)))


@pytest.mark.parametrize(
    ("family", "method"),
    [(family, method) for family in MOVABLE for method in [None, *METHODS] if family != "nanochat" or not method],
)
def test_shifted_keys_are_those_of_tokens_that_stand_there(family, method):
    model = make(family, method)
    assert shifted_deviation(model, 37, 37) < OUTPUT


@pytest.mark.parametrize("by", [-37, 36, 38])
def test_the_shift_check_fails_on_a_wrong_sign_and_on_one_token_off(by):
    assert shifted_deviation(make("llama", "yarn"), 37, by) > 1000 * OUTPUT


def test_a_shift_there_and_back_and_of_a_part():
    model, x = make("qwen3", "yarn"), ids(LENGTH, rows=2)
    held = at(model, x)
    before = states(held)
    assert cache.shift(model, held, 5, start=3, stop=11) is held
    for (old_keys, old_values), layer in zip(before, held.layers, strict=True):
        assert torch.equal(layer.keys[:, :, :3], old_keys[:, :, :3])
        assert torch.equal(layer.keys[:, :, 11:], old_keys[:, :, 11:])
        assert torch.equal(layer.values, old_values)
        # a turn leaves lengths alone: attention_scaling is not applied again
        assert torch.allclose(layer.keys.norm(dim=-1), old_keys.norm(dim=-1), rtol=1e-5)
    positions = list(range(LENGTH))
    wanted = moved(model, "qwen3", at(model, x), positions, [p + 5 * (3 <= p < 11) for p in positions])
    assert deviation(states(held), wanted) < OUTPUT
    assert deviation(states(cache.shift(model, held, -5, start=3, stop=11)), before) < OUTPUT


def dropped(model, family, x, start, stop):
    """(the cache after a drop, the reference of the same)."""
    held = fill(model, x) if family in HOSTS else at(model, x)
    kept = [p for p in range(x.shape[1]) if not start <= p < stop]
    wanted = copy.deepcopy(held)
    for layer in wanted.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    wanted = moved(model, family, wanted, kept, range(len(kept)))
    return cache.drop(model, held, start, stop), wanted


@pytest.mark.parametrize("family", [*MOVABLE, *HOSTS])
@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 9), (15, 20)])
def test_a_drop_equals_raw_keys_turned_to_their_new_positions(family, start, stop):
    model = make(family, None if family == "nanochat" else "yarn")
    x = ids(LENGTH, rows=2)
    held, wanted = dropped(model, family, x, start, stop)
    assert held.get_seq_length() == LENGTH - (stop - start)
    assert deviation(states(held), wanted) < OUTPUT
    # the first layer has seen nothing but its own tokens: its keys are those of a prompt without the dropped ones
    kept = fill(model, torch.cat((x[:, :start], x[:, stop:]), dim=1))
    assert deviation(states(held)[:1], states(kept)[:1]) < OUTPUT
    if 0 < stop < LENGTH:  # the second has seen them
        assert deviation(states(held)[1:], states(kept)[1:]) > 100 * OUTPUT


def test_the_drop_check_fails_where_later_keys_stay_or_move_too_far():
    model, x = make("llama", "yarn"), ids(LENGTH)
    held, wanted = dropped(model, "llama", x, 3, 9)
    for off in (6, 1, -1):
        assert deviation(states(cache.shift(model, copy.deepcopy(held), off, start=3)), wanted) > 1000 * OUTPUT


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gemma3", "cohere", "bloom", "mpt"])
def test_reading_and_generating_go_on_after_a_drop(family):
    model, x, more = make(family, "yarn"), ids(LENGTH, rows=2), ids(3, rows=2, seed=5)
    held, wanted = dropped(model, family, x, 3, 9)
    built = DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(wanted):
        built.update(keys, values, index)
    name = registry.compat().cache_argument(model)
    text = torch.cat((x[:, :3], x[:, 9:], more), dim=1)
    places = {} if family in HOSTS else {"position_ids": (torch.arange(3) + LENGTH - 6).expand(2, -1)}
    with torch.no_grad():
        expected = model(more, **{name: copy.deepcopy(built)}, **places).logits
        found = model(more, **{name: copy.deepcopy(held)}).logits
    assert (found - expected).abs().max() < LOGITS
    # MPT's config says `use_cache=False`; `generate` then feeds the whole text into a given cache again and again
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "use_cache": True}
    made = model.generate(text, **{name: held}, **asked)
    assert torch.equal(made, model.generate(text, **{name: built}, **asked))
    assert held.get_seq_length() == text.shape[1] + 11


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("method", [*METHODS, *RAW, "rope with a window", "rope with sinks"])
def test_one_layer_goes_on_as_if_what_was_dropped_had_never_been(family, method):
    """Its keys and values depend on nothing but their tokens, so that all of a prompt without those is the oracle."""
    name, _, pattern = method.partition(" with ")
    model = make(family, num_hidden_layers=1)
    given = {"": {}, "a window": {"window": 12}, "sinks": {"window": 12, "sinks": 2}}[pattern]
    if name not in methods(model):
        pytest.skip(f"{family} does not host it")
    patch_model(model, name, **options(name, model), **given)
    x, more = ids(LENGTH, rows=2), ids(3, rows=2, seed=5)
    held = cache.drop(model, fill(model, x), 3, 9)
    joined = cache.concat(model, [fill(model, x[:, :3]), fill(model, x[:, 9:])])
    with torch.no_grad():
        whole = model(torch.cat((x[:, :3], x[:, 9:], more), dim=1), use_cache=False).logits[:, -3:]
        for each in (held, joined):
            found = model(more, use_cache=True, **{registry.compat().cache_argument(model): each}).logits
            assert (found - whole).abs().max() < LOGITS


def apart(model, lengths, rows=2):
    """(the caches of some segments, the cache of one forward pass over all in which none sees another)."""
    texts = [ids(length, rows, seed=length) for length in lengths]
    x = torch.cat(texts, dim=1)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (segment[:, None] == segment) & torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
    joint = at(model, x, attention_mask=torch.where(seen, 0.0, -1e9).expand(rows, 1, -1, -1))
    return [at(model, text) for text in texts], joint


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "cohere", "gpt_neox", "glm", "smollm3"])
@pytest.mark.parametrize("method", [None, "yarn"])
def test_joined_segments_equal_one_reading_in_which_none_sees_another(family, method):
    model = make(family, method)
    caches, joint = apart(model, (7, 1, 12))
    before = [states(held) for held in caches]
    joined = cache.concat(model, caches)
    assert deviation(states(joined), states(joint)) < OUTPUT
    assert all(
        torch.equal(a, b)
        for held, old in zip(caches, before, strict=True)
        for a, b in zip(sum(states(held), ()), sum(old, ()), strict=True)
    )
    name, more = registry.compat().cache_argument(model), ids(3, rows=2, seed=5)
    with torch.no_grad():
        assert (model(more, **{name: joined}).logits - model(more, **{name: joint}).logits).abs().max() < LOGITS


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3", "phi3", "bloom", "mpt"])
def test_the_first_layer_of_joined_segments_is_that_of_the_whole_text(family):
    """Its keys depend on tokens and positions alone; another order of the segments is seen."""
    model = make(family, "linear")
    first, second = ids(8, rows=2), ids(12, rows=2, seed=3)
    whole = states(fill(model, torch.cat((first, second), dim=1)))[:1]
    joined = cache.concat(model, [fill(model, first), fill(model, second)])
    assert deviation(states(joined)[:1], whole) < OUTPUT
    swapped = cache.concat(model, [fill(model, second), fill(model, first)])
    assert deviation(states(swapped)[:1], whole) > 1000 * OUTPUT


@pytest.mark.parametrize("empty", [DynamicCache, lambda: DynamicCache(config=make("llama").config)])
def test_a_whole_and_nothing_is_the_whole(empty):
    model, x = make("llama", "yarn"), ids(LENGTH, rows=2)
    held = at(model, x)
    for caches in ([held], [held, empty()], [empty(), held]):
        joined = cache.concat(model, caches)
        assert deviation(states(joined), states(held)) == 0
        assert all(one.keys is not other.keys for one, other in zip(joined.layers, held.layers, strict=True))
    assert cache.concat(model, [empty()]).get_seq_length() == 0
    assert cache.shift(model, empty(), 3).get_seq_length() == 0
    assert cache.drop(model, held, 0, LENGTH).get_seq_length() == 0
    assert deviation(states(fill(model, x, held)), states(at(model, x))) < OUTPUT


def test_joined_segments_longer_than_a_window_keep_what_it_sees():
    model = make("mistral_window", "yarn")
    model, plain, more = make("mistral_window", "yarn"), DynamicCache(), ids(3, seed=5)
    first, second = (at(model, ids(LENGTH, seed=seed)) for seed in (1, 2))
    behind = moved(model, "mistral_window", second, range(LENGTH), range(LENGTH, 2 * LENGTH))
    for index, parts in enumerate(zip(states(first), behind, strict=True)):
        plain.update(*(torch.cat(each, dim=2) for each in zip(*parts, strict=True)), index)
    sliding = cache.concat(model, [first, second])
    assert sliding.get_seq_length() == 2 * LENGTH
    assert sliding.layers[0].keys.shape[2] == 23
    name = registry.compat().cache_argument(model)
    with torch.no_grad():
        assert (model(more, **{name: sliding}).logits - model(more, **{name: plain}).logits).abs().max() < LOGITS


def bf16_error(turn) -> float:
    """Largest error of keys turned in a bf16 cache, in steps of bf16 at the exact result."""
    model = make("llama", "yarn").to(torch.bfloat16)
    held = at(model, ids(LENGTH))
    exact = copy.deepcopy(held)
    for layer in exact.layers:
        layer.keys = layer.keys.double()
    exact = moved(model, "llama", exact, [0] * LENGTH, [100] * LENGTH)
    turn(model, held)
    errors = []
    for layer, (keys, _) in zip(held.layers, exact, strict=True):
        assert layer.keys.dtype == torch.bfloat16
        step = 2.0 ** (keys.abs().clamp(min=1e-3).log2().floor() - 7)
        errors.append(float(((layer.keys.double() - keys).abs() / step).max()))
    return max(errors)


def test_bf16_keys_are_turned_in_fp32_and_rounded_once():
    assert bf16_error(lambda model, held: cache.shift(model, held, 100)) < 0.51

    def coarse(model, held):
        theta = 2 * math.pi / torch.tensor(describe(model).wavelengths["all"])
        cos, sin = (100 * theta).cos().bfloat16(), (100 * theta).sin().bfloat16()
        for layer in held.layers:
            a, b = layer.keys.chunk(2, dim=-1)
            layer.keys = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    assert bf16_error(coarse) > 1


@pytest.mark.parametrize("family", ["smollm3", "llama4_nope"])
def test_layers_without_rotation_stay(family):
    model = make(family)
    held = at(model, ids(LENGTH))
    (first, _), (second, _) = states(held)
    cache.shift(model, held, 5)
    assert not torch.equal(held.layers[0].keys, first)
    assert torch.equal(held.layers[1].keys, second)


@pytest.mark.parametrize("family", ["llama", "bloom", "mpt"])
def test_keys_stay_where_nothing_turns(family):
    model = make(family, "nope")
    held = fill(model, ids(LENGTH))
    before = states(held)
    assert deviation(states(cache.shift(model, held, 5)), before) == 0


@pytest.mark.parametrize("method", RAW)
def test_keys_cached_raw_are_cut_and_joined_as_they_are(method):
    """Positions are counted in the cache there."""
    model, x = make("llama", method), ids(LENGTH)
    held = fill(model, x)
    before = states(held)
    assert deviation(states(cache.shift(model, held, 9)), before) == 0
    twice = cache.concat(model, [held, held])
    assert deviation(states(twice), [(torch.cat((k, k), 2), torch.cat((v, v), 2)) for k, v in before]) == 0
    wanted = [(torch.cat((k[:, :, :3], k[:, :, 9:]), 2), torch.cat((v[:, :, :3], v[:, :, 9:]), 2)) for k, v in before]
    assert deviation(states(cache.drop(model, held, 3, 9)), wanted) == 0


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def trained_norms():
    model = make("hunyuan")
    for name, weight in model.named_parameters():
        if "key_layernorm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def several_axes():
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 61}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2VLTextConfig(**size, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope)
    return Qwen2VLTextModel(config).eval()


@pytest.mark.parametrize(
    ("make_model", "says"),
    [
        (lambda: make("llama", "alibi"), "alibi is no rotary method"),
        (lambda: make("bloom"), "no rotary module"),
        (lambda: make("bloom", "kerple"), "kerple is no rotary method"),
        (lambda: make("t5", "rope"), "encoder-decoder"),
        (lambda: make("llama", rope_parameters=DYNAMIC), "length of the input .*dynamic"),
        (lambda: make("llama", rope_parameters=LONGROPE), "length of the input .*longrope"),
        (lambda: patch_model(make("llama"), "dynamic", factor=4, exact=False), "length of the input .*dynamic"),
        (lambda: make("llama", "sinusoidal"), "sinusoidal is no rotary method"),
        (lambda: make("llama").train(), "training mode"),
        (lambda: make("llama", num_hidden_layers=3), "2 layers, the model 3"),
        (several_axes, "several axes"),
        (lambda: make("falcon_alibi"), "does not turn its keys"),
        (lambda: make("deepseek_v3"), "not a rotation of the keys"),
        (trained_norms, "not a rotation of the keys"),
    ],
)
def test_models_whose_keys_cannot_be_moved_are_refused(make_model, says):
    held = at(make("llama"), ids(LENGTH))
    before, model = states(held), make_model()
    moves = [
        lambda: cache.shift(model, held, 3),
        lambda: cache.drop(model, held, 3, 9),
        lambda: cache.concat(model, [held, held]),
    ]
    for move in moves:
        with pytest.raises(ValueError, match=says):
            move()
        assert deviation(states(held), before) == 0


def test_caches_and_numbers_that_do_not_fit_are_refused():
    model, x = make("mistral_window"), ids(LENGTH)
    held, full = at(model, x), at(model, ids(30))
    both = EncoderDecoderCache(held, DynamicCache())
    before, slid = states(held), states(full)
    static = fill(model, x, StaticCache(config=model.config, max_cache_len=64))
    offloaded, uneven = at(model, x), at(model, x)
    offloaded.offloading = True
    uneven.layers[1].crop(-1)
    other = at(make("llama", num_hidden_layers=3), x)
    subclassed = at(model, x)
    subclassed.layers[1].__class__ = type("OtherLayer", (type(subclassed.layers[1]),), {})
    refused = [
        (ValueError, "slides and holds the last 23 of 30", lambda: cache.shift(model, full, 3)),
        (ValueError, "slides and holds the last 23 of 30", lambda: cache.drop(model, full, 0, 3)),
        (ValueError, "slides and holds the last 23 of 30", lambda: cache.concat(model, [held, full])),
        (ValueError, "not in this StaticCache", lambda: cache.shift(model, static, 3)),
        (ValueError, "without offloading", lambda: cache.shift(model, offloaded, 3)),
        (ValueError, "not in this EncoderDecoderCache", lambda: cache.drop(model, both, 0, 1)),
        (ValueError, "layer 1 of the cache is a OtherLayer", lambda: cache.shift(model, subclassed, 3)),
        (ValueError, "different numbers of tokens", lambda: cache.shift(model, uneven, 3)),
        (ValueError, "3 layers, the model 2", lambda: cache.concat(model, [held, other])),
        (ValueError, "differ in layer 0", lambda: cache.concat(model, [held, at(model, ids(LENGTH, rows=2))])),
        (ValueError, "`caches` is empty", lambda: cache.concat(model, [])),
        (TypeError, "must be a DynamicCache", lambda: cache.shift(model, before, 3)),
        (TypeError, "`delta` must be a whole number", lambda: cache.shift(model, held, 0.5)),
        (TypeError, "`start` must be a whole number", lambda: cache.drop(model, held, True, 3)),
        (ValueError, "`start`=-1", lambda: cache.drop(model, held, -1, 3)),
        (ValueError, "`stop`=21", lambda: cache.drop(model, held, 3, 21)),
        (ValueError, "`start`=9, `stop`=3", lambda: cache.shift(model, held, 1, start=9, stop=3)),
    ]
    for error, says, move in refused:
        with pytest.raises(error, match=says):
            move()
    assert deviation(states(held), before) == 0
    assert deviation(states(full), slid) == 0
    assert full.get_seq_length() == 30


def test_asking_a_model_leaves_no_trace():
    model, x = make("llama", "yarn"), ids(LENGTH)
    held, before = at(model, x), {name: tensor.clone() for name, tensor in all_tensors(model)}
    logits = model(x, use_cache=False).logits
    cache.shift(model, held, 5)
    assert torch.equal(model(x, use_cache=False).logits, logits)
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(model))


def all_tensors(model):
    return [*model.named_parameters(), *model.named_buffers()]
