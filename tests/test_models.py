"""Models with something of their own: DeepSeek's score scale, Falcon's ALiBi, two stacks, a table per layer type."""

import pytest
import torch
from conftest import STOCK, TRAINED, LargestTensor, build, ids
from tolerances import LOGITS, TWICE
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from rope_ext import describe, load_patched, methods, patch_model, unpatch_model
from rope_ext.conformance import logits, tiny
from rope_ext.patches.falcon import FalconAlibiAdapter
from rope_ext.registry import compat

PAIR = {"mscale": 1.0, "mscale_all_dim": 0.7}
MLA = ["deepseek_v2", "deepseek_v3"]
X = ids(2 * TRAINED)


def variant(plain, **changes):
    """The model with other config entries and the same weights, built by stock transformers."""
    model = type(plain)(type(plain.config)(**{**plain.config.to_dict(), **changes})).eval()
    model.load_state_dict(plain.state_dict())
    return model


def scaled(plain, factor=4.0, **more):
    """The model as stock transformers builds it with yarn."""
    rope = {**STOCK["yarn"], "factor": factor, "rope_theta": 1e4, **more}
    return variant(plain, rope_parameters=rope, max_position_embeddings=round(factor * TRAINED))


# DeepSeek


@pytest.mark.parametrize("family", MLA)
def test_yarn_scales_scores_as_stock_builds_them(family):
    model = tiny(family)
    before, stock = logits(model, X), logits(scaled(model, **PAIR), X)
    patch_model(model, "yarn", factor=4, **PAIR)
    assert describe(model).stock_type == "yarn"
    assert torch.equal(logits(model, X), stock)
    patch_model(model, "yarn", factor=4, mscale=1.0, mscale_all_dim=0.71)  # twins
    assert (logits(model, X) - stock).abs().max() > 10 * LOGITS
    patch_model(model, "yarn", factor=4, attention_factor=1.03795)  # the pair's table alone
    assert (logits(model, X) - stock).abs().max() > 10 * LOGITS
    assert torch.equal(logits(unpatch_model(model), X), before)


@pytest.mark.parametrize("method", ["linear", "ntk_by_parts", "yarn", "rope"])
def test_a_checkpoint_with_the_pair_is_extended_from_its_true_length(method):
    plain = tiny("deepseek_v3")
    model = scaled(plain, 64.0, **PAIR)
    before, options = logits(model, X), {} if method == "rope" else {"factor": 128}
    assert "mscale_all_dim 0.7" in str(describe(model))
    patch_model(model, method, **options)
    assert describe(model).trained_length == TRAINED
    assert describe(model).usable_length == TRAINED * options.get("factor", 1)
    assert torch.equal(logits(model, X), logits(patch_model(plain, method, **options), X))
    assert torch.equal(logits(unpatch_model(model), X), before)


def test_the_score_scale_is_saved_in_stock_terms(tmp_path):
    plain = tiny("deepseek_v3")
    model = patch_model(tiny("deepseek_v3"), "yarn", factor=4, **PAIR)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), X), logits(model, X))
    again = load_patched(tmp_path).eval()
    assert torch.equal(logits(again, X), logits(model, X))
    assert torch.equal(logits(unpatch_model(again), X), logits(plain, X))


def test_f57_the_pair_is_no_matter_where_attention_does_not_read_it():
    plain = build("llama")
    model = scaled(plain, **PAIR)
    patch_model(model, "yarn", factor=4, **PAIR)
    assert torch.equal(logits(model, X), logits(scaled(plain, **PAIR), X))
    assert torch.equal(
        logits(patch_model(model, "linear", factor=8), X), logits(patch_model(plain, "linear", factor=8), X)
    )


def test_attention_that_cannot_be_built_is_not_guessed_at(monkeypatch):
    model = tiny("deepseek_v3")
    before, attention = logits(model, X), type(model.model.layers[0].self_attn)

    def refuse(self, config, layer_idx):
        raise TypeError("another signature")

    monkeypatch.setattr(attention, "__init__", refuse)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn .*mscale_all_dim.*another signature"):
        patch_model(model, "yarn", factor=4, **PAIR)
    assert torch.equal(logits(model, X), before)
    patch_model(model, "yarn", factor=4)  # nothing to read


@pytest.mark.parametrize("method", ["dynamic", "dynamic_yarn", "dynamic_longrope"])
def test_f52_nothing_grows_on_top_of_a_static_scaling(method):
    model = scaled(build("llama"))
    before = logits(model, X)
    with pytest.raises(ValueError, match=r"comes scaled \('yarn', factor 4\.0\).*rope_type 'default'"):
        patch_model(model, method, factor=8, **({"long_factor": [2.0] * 8} if "long" in method else {}))
    assert torch.equal(logits(model, X), before)


# Falcon

FALCONS = {
    "multi-query": {},
    "many heads": {"multi_query": False, "num_attention_heads": 6, "hidden_size": 60, "bias": True},
    "sequential": {"multi_query": False, "parallel_attn": False},
    "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
}


def falcon(kind="multi-query", **changes):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
    size |= {"max_position_embeddings": 2048, "initializer_range": 0.3, "pad_token_id": 0, "alibi": True}
    torch.manual_seed(0)
    return FalconForCausalLM(
        FalconConfig(**{**size, "bos_token_id": 1, "eos_token_id": 2, **FALCONS[kind], **changes})
    ).eval()


def apart(model, stock, x, **more):
    return (logits(model, x, **more) - stock).abs().max()


@pytest.mark.parametrize("kind", FALCONS)
def test_falcon_with_alibi_computes_what_stock_computes(kind, monkeypatch):
    model, x = falcon(kind), ids(700)  # beyond 256 tokens bfloat16 rounds the bias
    stock = logits(model, x)
    patch_model(model, "alibi")
    with LargestTensor() as seen:
        assert apart(model, stock, x) < LOGITS
    assert seen.bytes < 4 * 700 * 700 * model.config.num_attention_heads
    assert describe(model).stock_loadable
    monkeypatch.setattr(FalconAlibiAdapter, "native_biases", lambda self, encoding, attentions: None)
    assert apart(patch_model(model, "alibi"), stock, x) > 100 * LOGITS  # twin: the published bias
    monkeypatch.undo()
    assert apart(patch_model(model, "alibi", factor=1.01), stock, x) > 10 * LOGITS
    assert torch.equal(logits(unpatch_model(model), x), stock)


@pytest.mark.parametrize("kind", ["multi-query", "new"])
def test_falcon_with_alibi_pads_and_generates_as_stock(kind):
    model, x = falcon(kind), ids(300, rows=2)
    mask = torch.ones_like(x)
    mask[1, :40] = 0
    asked = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    stock, text = logits(model, x, mask), model.generate(x, **asked)
    patch_model(model, "alibi")
    assert ((logits(model, x, mask) - stock)[mask > 0]).abs().max() < LOGITS
    assert torch.equal(model.generate(x, **asked), text)
    weighed = model(x, attention_mask=mask, output_attentions=True)  # stock adds its bias twice then
    assert ((weighed.logits - stock)[mask > 0]).abs().max() < LOGITS


def test_falcon_in_bfloat16_is_no_further_off_than_stock():
    model, x = falcon(), ids(400)
    exact = logits(model.double(), x)
    low = falcon().bfloat16()
    plain = apart(low, exact, x)
    assert apart(patch_model(low, "alibi"), exact, x) <= TWICE * plain


def test_sinks_keep_falcons_slopes():
    """No slope is steeper for them: a window that hides nothing changes nothing but the rounding of the bias."""
    model, x = falcon(), ids(200)
    stock = logits(model, x)
    assert apart(patch_model(model, "alibi", window=300, sinks=1), stock, x) < LOGITS


def test_falcon_with_rotary_positions_hosts_what_it_did():
    model = falcon(alibi=False)
    assert {"yarn", "linear"} <= set(methods(model))
    assert "alibi" not in methods(model)
    before, x = logits(model, ids(100)), ids(100)
    assert not torch.equal(logits(patch_model(model, "yarn", factor=4), x), before)


# two stacks


def test_both_stacks_of_an_encoder_decoder_are_patched(tmp_path):
    model = tiny("t5gemma")
    before, rope = logits(model, X), {**STOCK["yarn"], "rope_theta": 1e4}
    entries = {"rope_parameters": rope, "max_position_embeddings": 4 * TRAINED}
    parts = {name: {**model.config.to_dict()[name], **entries} for name in ("encoder", "decoder")}
    stock = logits(variant(model, **parts), X)
    patch_model(model, "yarn", factor=4)
    assert torch.equal(logits(model, X), stock)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), X), stock)
    again = load_patched(tmp_path).eval()
    assert torch.equal(logits(again, X), stock)
    assert torch.equal(logits(unpatch_model(again), X), before)
    assert again.config.encoder.max_position_embeddings == again.config.decoder.max_position_embeddings == TRAINED
    assert torch.equal(logits(unpatch_model(model), X), before)
    for name in parts:  # twins: one stack alone
        assert (logits(variant(model, **{name: parts[name]}), X) - stock).abs().max() > 10 * LOGITS


def test_stacks_that_differ_are_refused():
    plain = tiny("t5gemma")
    encoder = {**plain.config.to_dict()["encoder"], "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    model = variant(plain, encoder=encoder)
    with pytest.raises(ValueError, match=r"its encoder has .*50000.*its decoder .*10000.*agree"):
        patch_model(model, "yarn", factor=4)


# a table per layer type

LAYERED = {
    "gemma3_text": {"head_dim": 16},
    "olmo3": {},
    "gemma3n_text": {
        "head_dim": 16,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 61,
        "laurel_rank": 8,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "laguna": {"head_dim": 16, "mlp_layer_types": ["dense"] * 4},
    "mellum": {"head_dim": 16, "mlp_layer_types": ["dense"] * 4},
}


def layered(model_type, **changes):
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": TRAINED, "sliding_window": 24}
    size |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "pad_token_id": 0, "initializer_range": 0.15}
    config = AutoConfig.for_model(model_type, **{**size, **LAYERED[model_type], **changes})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def tables(model):
    return {name.split(".")[-1]: table.clone() for name, table in model.named_buffers() if name.endswith("inv_freq")}


@pytest.mark.parametrize("model_type", LAYERED)
def test_full_layers_are_scaled_and_sliding_ones_are_not(model_type, tmp_path):
    model = layered(model_type)
    before, trained = logits(model, X), tables(model)
    patch_model(model, "linear", factor=4)
    after, now = logits(model, X), tables(model)
    assert torch.equal(now["sliding_attention_inv_freq"], trained["sliding_attention_inv_freq"])
    assert torch.allclose(4 * now["full_attention_inv_freq"], trained["full_attention_inv_freq"])
    assert not torch.equal(after, before)
    with torch.no_grad():
        name, start = compat().cache_argument(model), model(X[:, :70], use_cache=True)
        cached = model(X[:, 70:], **{name: getattr(start, name)}).logits
    assert (cached - after[:, 70:]).abs().max() < LOGITS
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), X), after)
    assert torch.equal(logits(load_patched(tmp_path).eval(), X), after)
    assert torch.equal(logits(unpatch_model(model), X), before)


def test_f58_a_layer_type_that_no_layer_has():
    model = layered("gemma3_text", layer_types=["sliding_attention"] * 4)
    before = logits(model, X)
    with pytest.raises(ValueError, match="only its sliding-window layers turn"):
        patch_model(model, "yarn", factor=4)
    assert torch.equal(logits(model, X), before)
    whole = layered("gemma3_text", layer_types=["full_attention"] * 4)
    assert list(describe(patch_model(whole, "yarn", factor=4)).wavelengths) == ["full_attention"]


def test_a_table_that_is_no_scaled_one_is_not_replaced():
    proportional = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    rope = {"full_attention": proportional, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="rope_type 'proportional' is not one"):
        patch_model(layered("gemma3_text", rope_parameters=rope), "yarn", factor=4)
