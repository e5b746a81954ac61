"""The contracts of a patch where attention is ours: every host x every method, in short and in long calls."""

import contextlib
import copy
import gc

import pytest
import torch
from conftest import FAMILIES, HOSTED, OPTIONS, TRAINED, VOCABULARY, LargestTensor, build, ids, options
from tolerances import GRADIENT, LOGITS
from transformers import EncoderDecoderCache, StaticCache
from transformers.models.bloom import modeling_bloom

from rope_ext import describe, load_adapter, load_patched, patch_model, registry, save_adapter, unpatch_model
from rope_ext.attention import choosing, computing, registered
from rope_ext.patches import hosted

SEAM = {name: method.seam for name, method in registry.METHODS.items()}
BIASES = [name for name, seam in SEAM.items() if seam == "bias"]
OURS = [name for name, seam in SEAM.items() if seam in ("qk", "bias", "scores")]
LEARNED = [name for name, method in registry.METHODS.items() if "factor" not in OPTIONS[name] and method().learns]
LEARNED += ["t5_bias"]
NATIVE = {
    "bloom": "alibi",
    "bloom_6": "alibi",
    "mpt": "alibi",
    "t5": "t5_bias",
    "t5_gated": "t5_bias",
    "mt5": "t5_bias",
    "umt5": "t5_bias",
}
ONE_EACH = ["llama", "mistral_window", "qwen2", "qwen3", "bloom", "mpt", "t5", "umt5"]
"""The other families of FAMILIES and HOSTED share an adapter with one of these."""


def refused(host, method):
    return "t5" in host and getattr(registry.METHODS[method], "causal_only", False)


PAIRS = [(host, method) for host in HOSTED for method in registry.METHODS if SEAM[method] in ("rotary", "bias")]
PAIRS += [(host, method) for host in FAMILIES for method in BIASES]
PAIRS += [
    (host, method)
    for host in ONE_EACH
    for method in registry.METHODS
    if SEAM[method] in ("qk", "scores", "embedding") and not refused(host, method)
]
FEW = [("bloom_6", "alibi"), ("bloom", "yarn"), ("t5_gated", "t5_bias"), ("umt5", "fire"), ("mt5", "rope")]
FEW += [("llama", "alibi"), ("llama", "fire"), ("mistral_window", "kerple"), ("qwen3", "t5_bias")]
FEW += [("llama", "dynamic"), ("qwen3", "self_extend"), ("mistral_window", "dca"), ("bloom", "xpos"), ("t5", "shaw")]
FEW += [("llama", "transformer_xl"), ("bloom", "cope"), ("qwen2", "learned"), ("t5", "sinusoidal"), ("llama", "comay")]
FEW += [("t5", "dynamic_yarn"), ("t5", "fourier"), ("umt5", "transformer_xl")]
LONG = TRAINED + 40

pairs = pytest.mark.parametrize(("host", "method"), PAIRS)
few = pytest.mark.parametrize(("host", "method"), FEW)
few_ours = pytest.mark.parametrize(
    ("host", "method"), [(host, method) for host, method in FEW if host in HOSTED or SEAM[method] != "embedding"]
)
"""Without those where attention is the model's own."""


@pytest.fixture(params=["short calls", "long calls"])
def way(request, monkeypatch):
    if request.param == "long calls":
        monkeypatch.setattr(choosing, "SMALL", 0)


both = pytest.mark.usefixtures("way")
both_ways = pytest.mark.parametrize(
    ("host", "method", "way"),
    [
        (host, method, way)
        for host, method in PAIRS
        for way in ("short calls", "long calls")
        if way == "long calls" or SEAM[method] in ("rotary", "bias")  # elsewhere the two are one
    ],
    indirect=["way"],
)


def is_t5(model):
    return model.config.is_encoder_decoder


def prompt(rows=1):
    """What a T5 encoder reads in tests of the decoder, the same for every row."""
    return ids(30, seed=9).expand(rows, -1)


@torch.no_grad()
def logits(model, x, mask=None, **more):
    """Of a decoder: the language model itself, or T5's decoder after a fixed prompt."""
    if is_t5(model):
        return model(prompt(len(x)), decoder_input_ids=x, decoder_attention_mask=mask, use_cache=False, **more).logits
    return model(x, attention_mask=mask, use_cache=False, **more).logits


@torch.no_grad()
def encoded(model, x, mask=None):
    return model.get_encoder()(x, attention_mask=mask).last_hidden_state


def learn(model):
    """Move what the encoding learns away from where it starts."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "position_encoding." in name:
                weight += 0.3 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(4))
    return model


def patched(host, method, **given):
    model = build(host)
    chosen = options(method, model)
    return learn(patch_model(model, method, **{**chosen, **given}))


@pairs
def test_changes_the_output_and_undoes_exactly(host, method):
    model = build(host)
    x, config = ids(LONG), model.config
    before, entries, keys = logits(model, x), copy.deepcopy(config.to_dict()), list(model.state_dict())
    modules = {name: (id(module), type(module), set(module.__dict__)) for name, module in model.named_modules()}
    patch_model(model, method, **options(method, model))
    added = set(model.state_dict()) - set(keys)
    assert all("position_encoding." in name for name in added)
    assert bool(added) == (method in LEARNED and NATIVE.get(host) != method)
    assert set(keys) <= set(model.state_dict())
    starts_as_it_was = method == "comay" and host in FAMILIES
    assert torch.allclose(logits(model, x), before, atol=LOGITS) == starts_as_it_was
    unpatch_model(model)
    assert torch.equal(logits(model, x), before)
    assert model.config is config
    assert config.to_dict() == entries
    assert config._attn_implementation != "rope_ext"
    assert {name: (id(m), type(m), set(m.__dict__)) for name, m in model.named_modules()} == modules


@pairs
def test_other_models_are_untouched_and_twice_is_once(host, method):
    older, model, younger = build(host), patched(host, method), build(host)
    x = ids(LONG)
    once = logits(model, x)
    assert torch.equal(logits(older, x), logits(younger, x))
    assert older.config._attn_implementation != "rope_ext"
    chosen = options(method, model)
    assert torch.equal(logits(learn(patch_model(model, method, **chosen)), x), once)


@both_ways
def test_the_future_is_unseen_and_nothing_is_left_behind(host, method, way):
    model = patched(host, method)
    short, long = ids(20), ids(LONG)
    before, seen = logits(model, short), logits(model, long)
    changed = long.clone()
    changed[0, -1] = 3 + (changed[0, -1] - 2) % 50
    after = logits(model, changed)
    assert (after[:, :-1] - seen[:, :-1]).abs().max() < LOGITS
    assert (after[:, -1] - seen[:, -1]).abs().max() > 10 * LOGITS
    assert torch.equal(logits(model, short), before)


@both
@few_ours
def test_the_future_check_fails_on_a_planted_fault(host, method, monkeypatch):
    def leak(query, key, value, layout, *others):
        seen = copy.copy(layout)
        seen.causal = False
        return computing.attend(query, key, value, seen, *others)

    model = patched(host, method)
    x = ids(LONG)
    monkeypatch.setattr(registered, "attend", leak)
    monkeypatch.setattr(hosted, "attend", leak)
    changed = x.clone()
    changed[0, -1] = 3 + (changed[0, -1] - 2) % 50
    assert (logits(model, changed)[:, :-1] - logits(model, x)[:, :-1]).abs().max() > 10 * LOGITS


@both
@pytest.mark.parametrize("method", OURS)
def test_f18_fused_attention_equals_the_weights_written_out(method):
    model, x = patched("llama", method), ids(LONG)
    assert (logits(model, x) - logits(model, x, output_attentions=True)).abs().max() < LOGITS


@torch.no_grad()
def stepwise(model, x, start, step=1, static=False, mask=None):
    """Logits with a cache: a chunk of ``start`` tokens, then ``step`` at a time."""
    name = registry.compat().cache_argument(model)
    encoder = {"encoder_outputs": model.get_encoder()(prompt(len(x)), return_dict=True)} if is_t5(model) else {}
    cache = None
    if static:
        cache = StaticCache(config=model.config, max_cache_len=x.shape[1] + 5)
        if encoder:
            cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=30))
    outputs, at = [], 0
    while at < x.shape[1]:
        until = start if at == 0 else min(at + step, x.shape[1])
        part = {"decoder_input_ids" if encoder else "input_ids": x[:, at:until]}
        if mask is not None:
            part["decoder_attention_mask" if encoder else "attention_mask"] = mask[:, :until]
            if model.config.model_type not in ("bloom", "mpt") and not encoder:
                part["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, at:until]
        output = model(**part, **encoder, use_cache=True, **({name: cache} if cache is not None else {}))
        cache = getattr(output, name)
        outputs.append(output.logits)
        at = until
    return torch.cat(outputs, 1)


@both_ways
def test_f21_f22_cached_decoding_equals_the_full_forward(host, method, way):
    model = patched(host, method)
    x = ids(LONG)
    full = logits(model, x)
    assert (stepwise(model, x, TRAINED) - full).abs().max() < LOGITS
    assert (stepwise(model, x, 30, step=17) - full).abs().max() < LOGITS  # chunked prefill


@both
@few
def test_a_static_cache_equals_the_full_forward(host, method):
    model = patched(host, method)
    x = ids(LONG)
    assert (stepwise(model, x, 30, step=7, static=True) - logits(model, x)).abs().max() < LOGITS


def eager(stock):
    """Stock to compare with: in transformers 5.17, the decoder of UMT5 sees the future with sdpa."""
    for module in stock.modules():
        if "config" in module.__dict__:
            module.config._attn_implementation = "eager"
    return stock


def padded(side, missing=17):
    """(two rows, mask): the second row is shorter, its padding not all of one token."""
    long, short = ids(LONG), ids(LONG - missing, seed=3)
    pad = ids(missing, seed=5)
    row = torch.cat((pad, short) if side == "left" else (short, pad), 1)
    mask = torch.ones(2, LONG, dtype=torch.long)
    if side == "left":
        mask[1, :missing] = 0
    else:
        mask[1, -missing:] = 0
    return torch.cat((long, row)), mask, (long, short)


@pytest.mark.parametrize("side", ["left", "right"])
@both_ways
def test_f16_padding_equals_each_row_alone(host, method, way, side):
    model = patched(host, method)
    x, mask, alone = padded(side)
    more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if host in FAMILIES else {}
    together = logits(model, x, mask, **more)
    for row, single in enumerate(alone):
        assert (together[row][mask[row] > 0] - logits(model, single)[0]).abs().max() < LOGITS
    if side == "left":
        assert (stepwise(model, x, 40, step=9, mask=mask) - together)[mask > 0].abs().max() < LOGITS


def test_the_padding_check_fails_on_a_planted_fault():
    model = patched("bloom", "alibi")
    x, mask, alone = padded("left")
    assert (logits(model, x)[1][mask[1] > 0] - logits(model, alone[1])[0]).abs().max() > 10 * LOGITS


@both
@pytest.mark.parametrize(("host", "method"), [pair for pair in PAIRS if "t5" in pair[0]])
def test_encoders_see_both_ways_and_no_padding(host, method):
    model = patched(host, method)
    for side in ("left", "right"):
        x, mask, alone = padded(side)
        together = encoded(model, x, mask)
        for row, single in enumerate(alone):
            assert (together[row][mask[row] > 0] - encoded(model, single)[0]).abs().max() < LOGITS
    changed = alone[0].clone()
    changed[0, -1] = 3 + (changed[0, -1] - 2) % 50
    assert (encoded(model, changed)[:, 0] - encoded(model, alone[0])[:, 0]).abs().max() > 0
    # cross-attention: a decoder does not see the encoder's padding
    x, mask, alone = padded("right")
    with torch.no_grad():
        both_rows = model(x, attention_mask=mask, decoder_input_ids=ids(9, 2)).logits
        single = model(alone[1], decoder_input_ids=ids(9, 2)[1:]).logits
    assert (both_rows[1:] - single).abs().max() < LOGITS


@both
@pytest.mark.parametrize(("host", "method"), [(host, m) for host, m in PAIRS if host in FAMILIES and m in OURS])
def test_packed_documents_and_jumping_positions(host, method):
    model = patched(host, method)
    first, second = ids(50), ids(LONG, seed=3)
    positions = torch.cat((torch.arange(50), torch.arange(LONG)))[None]
    packed = logits(model, torch.cat((first, second), 1), position_ids=positions)
    assert (packed[:, :50] - logits(model, first)).abs().max() < LOGITS
    assert (packed[:, 50:] - logits(model, second)).abs().max() < LOGITS
    # skip-wise training: positions jump, tokens still see each other; equal positions give equal outputs
    x, mask = ids(40), torch.ones(1, 40, dtype=torch.long)
    jump = torch.cat((torch.arange(15), 500 + torch.arange(25)))[None]
    here, far = logits(model, x, mask), logits(model, x, mask, position_ids=jump)
    assert (here[:, :15] - far[:, :15]).abs().max() < LOGITS
    if method != "cope":  # counts what it sees, wherever that stands
        assert (here[:, 15:] - far[:, 15:]).abs().max() > 10 * LOGITS
    name = registry.compat().cache_argument(model)
    cached = {name: getattr(model(x, use_cache=True), name)}
    with pytest.raises(ValueError, match="`position_ids` jump while keys are cached"):
        model(x[:, :9], position_ids=jump[:, 10:19], **cached)


@both
@pytest.mark.parametrize("host", NATIVE)
def test_the_native_method_equals_stock(host):
    """Outputs of real tokens, padded or not, 1e-4 relative, and the same words."""
    stock, model = eager(build(host)), patch_model(build(host), NATIVE[host])
    for side in ("left", "right"):
        x, mask, _ = padded(side)
        for mask_ in (None, mask):
            wanted, found = logits(stock, x, mask_), logits(model, x, mask_)
            real = torch.ones_like(x) if mask_ is None else mask
            assert (found - wanted)[real > 0].abs().max() < LOGITS * wanted.abs().max()
            if is_t5(stock):
                wanted, found = encoded(stock, x, mask_), encoded(model, x, mask_)
                assert (found - wanted)[real > 0].abs().max() < LOGITS * wanted.abs().max()
    x, mask, _ = padded("left", missing=60)
    mask[0, 20:25] = 0  # a hole: BLOOM counts what is real
    if not is_t5(stock):
        assert (logits(stock, x, mask) - logits(model, x, mask))[mask > 0].abs().max() < LOGITS * 10
    for beams in (1, 3):
        for cache in (None, "static"):
            asked = {"attention_mask": padded("left", missing=60)[1], "max_new_tokens": 12, "num_beams": beams}
            asked |= {"do_sample": False, "cache_implementation": cache, "eos_token_id": None}
            assert torch.equal(model.generate(x, **asked), stock.generate(x, **asked)), (beams, cache)


@pytest.mark.parametrize("host", NATIVE)
def test_the_comparison_with_stock_fails_on_planted_faults(host):
    stock, x = build(host), ids(LONG)
    scaled = patch_model(build(host), NATIVE[host], factor=1.1)
    assert (logits(stock, x) - logits(scaled, x)).abs().max() > 10 * LOGITS


@both
@few
def test_generate_past_the_trained_length_equals_full_forwards(host, method):
    model = patched(host, method)
    x = ids(TRAINED - 4, rows=2)
    asked = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    if is_t5(model):
        made = model.generate(prompt(2), **asked)
        greedy = made[:, :1]
    else:
        made, greedy = model.generate(x, **asked), x
    for _ in range(16):
        greedy = torch.cat((greedy, logits(model, greedy)[:, -1:].argmax(-1)), 1)
    assert torch.equal(made, greedy)


@pairs
def test_saved_is_never_silently_wrong_and_loads_back(host, method, tmp_path):
    twin, model = build(host), patched(host, method)
    x = ids(LONG)
    expected = logits(model, x)
    model.save_pretrained(tmp_path)
    if describe(model).stock_loadable:
        assert NATIVE[host] == method
        stock = eager(type(model).from_pretrained(tmp_path).eval())
        assert (logits(stock, x) - expected).abs().max() < LOGITS * expected.abs().max()
    else:
        with pytest.raises(Exception, match=r"rope_ext\.load_patched"):
            type(model).from_pretrained(tmp_path)
    again = load_patched(tmp_path).eval()
    assert torch.equal(logits(again, x), expected)
    assert describe(again).trained_length == describe(model).trained_length
    assert describe(again).usable_length == describe(model).usable_length
    unpatch_model(again)
    assert torch.equal(logits(again, x), logits(twin, x))
    assert not hasattr(again.config, "rope_ext")
    assert again.config._experts_implementation == twin.config._experts_implementation
    for name in (
        "experts_implementation",
        "rope_parameters",
        "n_positions",
        "seq_length",
        "relative_attention_max_distance",
    ):
        assert getattr(again.config, name, None) == getattr(twin.config, name, None)


@pytest.mark.parametrize("factor", [1, 3])
@pytest.mark.parametrize("host", NATIVE)
def test_stock_loads_what_it_can_express(host, factor, tmp_path):
    model = patch_model(build(host), NATIVE[host], factor=factor)
    x = ids(4 * LONG)
    wanted = logits(model, x)
    model.save_pretrained(tmp_path)
    if factor == 1 or NATIVE[host] == "t5_bias":
        stock = eager(type(model).from_pretrained(tmp_path).eval())
        assert (logits(stock, x) - wanted).abs().max() < LOGITS * wanted.abs().max()
        assert "loads it" in str(describe(model))
    else:
        with pytest.raises(ValueError, match=r"rope_ext\.load_patched"):
            type(model).from_pretrained(tmp_path)


@few
def test_low_precision_parameters_and_modules_found(host, method):  # F27
    model = build(host).to(torch.bfloat16)
    chosen = options(method, model)
    patch_model(model, method, **chosen)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    names = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) <= names
    assert torch.isfinite(logits(model, ids(LONG))).all()


def training_step(model, checkpointing=None):
    model.train()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
    model.zero_grad()
    x = ids(LONG)
    asked = {"input_ids": prompt(), "labels": x} if is_t5(model) else {"input_ids": x, "labels": x}
    model(**asked, use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@both
@few
def test_training_reaches_every_weight_and_checkpointing_changes_nothing(host, method):  # F37
    plain = {"dropout_rate": 0.0} if "t5" in host else {}
    model = build(host, **plain)
    chosen = options(method, model)
    learn(patch_model(model, method, **chosen))
    wanted = training_step(model)
    unused = "relative_attention_bias" if NATIVE.get(host) != method else "nothing"
    assert all(grad is not None and grad.any() for name, grad in wanted.items() if unused not in name), [
        name for name, grad in wanted.items() if grad is None or not grad.any()
    ]
    for reentrant in (False, True):
        found = training_step(model, reentrant)
        for name, right in wanted.items():
            if right is not None:
                assert (found[name] - right).abs().max() < GRADIENT * max(1, right.abs().max()), (name, reentrant)


@pytest.mark.parametrize("host", ["bloom", "t5", "umt5"])
def test_training_with_dropout(host):
    """T5 trains with dropout, BLOOM can: gradients differ from draw to draw, and not for one seed."""
    dropped = {"dropout_rate": 0.3} if "t5" in host else {"attention_dropout": 0.3}
    model = patch_model(build(host, **dropped), NATIVE[host])

    def step(seed):
        torch.manual_seed(seed)
        return training_step(model)

    first, again, other = step(0), step(0), step(1)
    name = next(name for name in first if name.endswith(("q.weight", "query_key_value.weight")))
    assert torch.equal(first[name], again[name])
    assert not torch.allclose(first[name], other[name])


@pytest.mark.parametrize(
    ("host", "method"), [("bloom", "kerple"), ("t5", "fire"), ("llama", "t5_bias"), ("t5", "t5_bias")]
)
def test_f36_lora_finds_its_targets_and_learned_positions_survive(host, method, tmp_path):
    from peft import LoraConfig, get_peft_model

    targets = {"bloom": ["query_key_value"], "t5": ["q", "v"], "llama": ["q_proj", "v_proj"]}[host]
    native = NATIVE.get(host) == method
    settings = LoraConfig(
        r=4, target_modules=targets, modules_to_save=["relative_attention_bias" if native else "position_encoding"]
    )
    model = patched(host, method)
    before = logits(model, ids(LONG))
    adapted = get_peft_model(model, settings)
    assert torch.equal(logits(adapted.base_model.model, ids(LONG)), before)
    optimizer = torch.optim.SGD([weight for weight in adapted.parameters() if weight.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        x = ids(LONG)
        asked = {"input_ids": prompt(), "labels": x} if is_t5(model) else {"input_ids": x, "labels": x}
        adapted(**asked).loss.backward()
        optimizer.step()
    trained = [weight for name, weight in adapted.named_parameters() if "modules_to_save" in name]
    assert trained
    assert all(weight.grad is not None and weight.grad.any() for weight in trained)
    adapted.eval()
    after = logits(adapted.base_model.model, ids(LONG))
    assert (after - before).abs().max() > 10 * LOGITS
    save_adapter(adapted, tmp_path)
    again = load_adapter(patched(host, method), tmp_path).eval()
    assert torch.equal(logits(again.base_model.model, ids(LONG)), after)
    merged = adapted.merge_and_unload()
    assert (logits(merged, ids(LONG)) - after).abs().max() < LOGITS
    unpatch_model(merged)
    assert torch.isfinite(logits(merged, ids(LONG))).all()


@few_ours
def test_another_attention_implementation_is_refused_or_right(host, method):
    model = patched(host, method)
    before = logits(model, ids(LONG))
    model.set_attn_implementation("eager")
    if host in FAMILIES:  # their own attention would have no bias
        with pytest.raises(ValueError, match=r"after patching.*unpatch_model"):
            logits(model, ids(LONG))
    elif "bloom" in host:
        assert (logits(model, ids(LONG)) - before).abs().max() < LOGITS
    else:  # depends on the masks that this transformers version makes
        with contextlib.suppress(ValueError):
            assert (logits(model, ids(LONG)) - before).abs().max() < LOGITS


@both
@few_ours
def test_attention_weights_on_request(host, method):
    model = patched(host, method)
    x = ids(40)
    more = {"decoder_input_ids": x} if is_t5(model) else {}
    if "umt5" in host and not hasattr(build(host).encoder.block[0].layer[0].SelfAttention, "config"):
        with pytest.raises(ValueError, match=r"5\.16 or newer"):
            model(x, **more, output_attentions=True)
        return
    with torch.no_grad():
        output = model(x, **more, output_attentions=True, use_cache=False)
    seen = output.decoder_attentions if is_t5(model) else output.attentions
    assert len(seen) == 2
    assert seen[0].shape[-2:] == (40, 40)
    assert torch.allclose(seen[0].sum(-1), torch.ones(()), atol=1e-5)
    assert seen[0].triu(1).abs().max() == 0
    if is_t5(model):
        assert output.encoder_attentions[0].triu(1).abs().max() > 0
        assert output.cross_attentions[0].shape[-2:] == (40, 40)


@few
def test_a_copy_and_a_pickle_are_patched_models_of_their_own(host, method, tmp_path):
    model = patched(host, method)
    x = ids(LONG)
    wanted = logits(model, x)
    other = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    unpatch_model(model)
    assert torch.equal(logits(other, x), wanted)
    assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False), x), wanted)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            if "position_encoding." in name or "relative_attention_bias" in name:
                weight.zero_()
    if method in ("t5_bias", "fire"):
        assert not torch.allclose(logits(other, x), wanted, atol=LOGITS)


@pytest.mark.parametrize("host", NATIVE)
def test_describe_says_what_to_expect(host):
    model = build(host)
    trained = 1000 if host == "mpt" else TRAINED
    plain = describe(model)
    assert (plain.method, plain.patched, plain.fine_tuning) == (NATIVE[host], False, "not needed")
    assert (plain.trained_length, plain.usable_length) == (trained, trained)
    pure = describe(patch_model(model, NATIVE[host]))
    assert (pure.fine_tuning, pure.stock_loadable) == ("not needed", True)
    assert pure.attention.startswith("toeplitz: ")
    longer = describe(patch_model(model, NATIVE[host], factor=2))
    assert (longer.fine_tuning, longer.usable_length) == ("recommended", 2 * trained)
    assert longer.stock_loadable == (NATIVE[host] == "t5_bias")
    foreign = describe(patch_model(model, "rope"))
    assert (foreign.fine_tuning, foreign.stock_loadable) == ("required", False)
    assert "attention" in str(foreign)
    learned = describe(patch_model(model, "kerple"))
    assert "training its parameters blockwise" in learned.attention
    assert describe(unpatch_model(model)) == plain


def test_bloom_without_a_stated_length_says_so():
    model = build("bloom")
    del model.config.seq_length
    assert describe(model).trained_length == 2048
    assert any("does not say" in note for note in describe(model).notes)
    patch_model(model, "alibi", factor=2, original_max_position_embeddings=1000)
    assert describe(model).usable_length == 2000


def test_bad_requests_leave_the_model():
    model = build("t5")
    before = logits(model, ids(LONG))
    with pytest.raises(ValueError, match=r"`num_buckets`=8 does not fit.*16 rows"):
        patch_model(model, "t5_bias", num_buckets=8)
    odd = build("t5", head_dim=15)
    with pytest.raises(ValueError, match="15 channels cannot be rotated"):
        patch_model(odd, "yarn", factor=2)
    assert torch.equal(logits(model, ids(LONG)), before)
    assert not hasattr(model, "_rope_ext")


def test_bloom_keeps_its_formula_of_gelu():
    x = torch.linspace(-8, 8, 1001, requires_grad=True)
    model = patch_model(build("bloom"), "alibi")
    ours, theirs = model.transformer.h[0].mlp.gelu_impl, modeling_bloom.BloomGelu()
    assert (ours(x) - theirs(x)).abs().max() < 1e-6
    found, wanted = (torch.autograd.grad(gelu(x).sum(), x)[0] for gelu in (ours, theirs))
    assert (found - wanted).abs().max() < 1e-5


def test_stock_attention_is_never_called_with_all_pairs(monkeypatch):
    """A T5 forward of 3,000 tokens builds no tensor of 3,000 x 3,000 per head, cross-attention included."""
    gc.collect()
    model = patch_model(build("t5"), "t5_bias")
    with LargestTensor() as largest, torch.no_grad():
        model(ids(3000), decoder_input_ids=ids(3000), use_cache=False)
    assert 4 * 3000 * VOCABULARY <= largest.bytes < 4 * 3000 * 3000


def own_mask(x, kind):
    """The causal mask written out for all pairs, as a caller may pass it."""
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[None, None].expand(len(x), 1, -1, -1)
    return seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@both
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    ("host", "method"),
    [(host, method) for host, method in PAIRS if host in ("llama", "mpt", "t5", "umt5") and method in OURS]
    + [("t5", "rope"), ("mpt", "rope")],
)
def test_a_mask_of_the_callers_for_all_pairs(host, method, kind):
    model, x = patched(host, method), ids(50)
    wanted, mask = logits(model, x), own_mask(x, kind)
    stock_means = mask.logical_not() if host == "mpt" and kind == "bool" else mask  # True: not seen
    assert (logits(model, x, stock_means) - wanted).abs().max() < LOGITS
    name = registry.compat().cache_argument(model)
    for static in (False, True):
        encoder = {"encoder_outputs": model.get_encoder()(prompt(), return_dict=True)} if is_t5(model) else {}
        cache, outputs = None, []
        width = 60 if static else None
        if static:
            cache = StaticCache(config=model.config, max_cache_len=60)
            if encoder:
                cache = EncoderDecoderCache(cache, StaticCache(config=model.config, max_cache_len=30))
        for a, b in ((0, 30), (30, 37), (37, 50)):
            part = torch.nn.functional.pad(
                mask[:, :, a:b, :b], (0, (width or b) - b), value=False if kind == "bool" else torch.finfo().min
            )
            part = part.logical_not() if host == "mpt" and kind == "bool" else part
            given = {"decoder_input_ids" if encoder else "input_ids": x[:, a:b]}
            given["decoder_attention_mask" if encoder else "attention_mask"] = part
            with torch.no_grad():
                output = model(**given, **encoder, use_cache=True, **({name: cache} if cache is not None else {}))
            cache = getattr(output, name)
            outputs.append(output.logits)
        assert (torch.cat(outputs, 1) - wanted).abs().max() < LOGITS, static


@pytest.mark.parametrize("host", ["mpt", "t5", "umt5"])
def test_a_mask_of_the_callers_means_what_it_means_in_stock(host):
    stock, model, x = eager(build(host)), patch_model(build(host), NATIVE[host]), ids(50)
    mask = own_mask(x, "float")
    assert (logits(model, x, mask) - logits(stock, x, mask)).abs().max() < 10 * LOGITS
    assert (logits(stock, x, mask) - logits(stock, x)).abs().max() < 10 * LOGITS


@pytest.mark.parametrize(("method", "options"), [("nope", {}), ("longrope", {"factor": 4, "long_factor": [1.0] * 3})])
def test_what_lora_trained_of_the_positions_survives_another_patch(method, options):
    from peft import LoraConfig, get_peft_model

    from rope_ext import patched as for_a_while

    model = get_peft_model(
        patched("llama", "kerple"), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["position_encoding"])
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "modules_to_save" in name:
                weight.add_(0.7)
    wanted, keys = logits(model, ids(LONG)), list(model.state_dict())
    if options:
        with pytest.raises(ValueError, match="long_factor"):
            patch_model(model, method, **options)
    else:
        with for_a_while(model, method):
            assert not torch.equal(logits(model, ids(LONG)), wanted)
    assert torch.equal(logits(model, ids(LONG)), wanted)
    assert list(model.state_dict()) == keys


def test_learned_positions_follow_a_model_that_was_moved_meanwhile():
    from rope_ext import patched as for_a_while

    model = patched("bloom", "kerple")
    with for_a_while(model, "nope"):
        model.to(torch.float64)
    assert {weight.dtype for weight in model.parameters()} == {torch.float64}
    with for_a_while(model, "nope"):
        model.to("meta")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


def test_a_config_that_was_loaded_and_saved_alone_still_warns(tmp_path, caplog):
    from transformers import AutoConfig
    from transformers.utils import logging

    model = patched("bloom", "rope")
    model.save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    logging.enable_propagation()
    type(model).from_pretrained(tmp_path)
    logging.disable_propagation()
    assert "rope_ext.load_patched" in caplog.text
    assert torch.equal(logits(load_patched(tmp_path).eval(), ids(LONG)), logits(model, ids(LONG)))


def test_learned_positions_load_with_and_without_a_head(tmp_path):
    from transformers import BloomForCausalLM, BloomModel, T5EncoderModel

    model = patched("bloom", "kerple")
    model.save_pretrained(tmp_path / "whole")
    base = load_patched(tmp_path / "whole", model_class=BloomModel).eval()
    with torch.no_grad():
        wanted = model.transformer(ids(LONG)).last_hidden_state
        assert torch.equal(base(ids(LONG)).last_hidden_state, wanted)
    base.save_pretrained(tmp_path / "base")
    again = load_patched(tmp_path / "base", model_class=BloomForCausalLM).eval()
    assert torch.equal(again.transformer.position_encoding.r1, model.transformer.position_encoding.r1)
    both_stacks = patched("t5", "kerple")
    both_stacks.save_pretrained(tmp_path / "t5")
    encoder = load_patched(tmp_path / "t5", model_class=T5EncoderModel).eval()
    with torch.no_grad():
        assert torch.equal(encoder(ids(30)).last_hidden_state, encoded(both_stacks, ids(30)))


@both
def test_no_rows_give_no_rows():
    model = patched("bloom", "alibi")
    assert logits(model, ids(9)[:0]).shape == (0, 9, VOCABULARY)
