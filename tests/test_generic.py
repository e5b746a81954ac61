"""Other architectures through the generic adapter: they work like the hosted families, or refuse with the reason."""

import contextlib

import pytest
import torch
from conftest import GENERIC, STOCK, TRAINED, build, ids, logits, options
from transformers import AutoConfig, AutoModelForCausalLM

from rope_ext import describe, load_patched, methods, patch_model, unpatch_model
from rope_ext.patches.rotary_module import PatchedRotary


@pytest.mark.parametrize("method", ["linear", "ntk_by_parts", "yarn", "longrope"])
@pytest.mark.parametrize("family", GENERIC)
def test_patches_saves_and_undoes(family, method, tmp_path):
    model, x = build(family), ids(2 * TRAINED)
    before, config = logits(model, x), model.config
    kept = type(config).from_dict(config.to_dict()).rope_parameters == config.rope_parameters
    given = {**options(method, model), "original_max_position_embeddings": TRAINED}
    patch_model(model, method, **given)
    after = logits(model, x)
    assert not torch.equal(after, before)
    assert describe(model).stock_loadable == kept
    if kept:  # before transformers 5.5 a saved GPT-NeoX loses a `rotary_pct` that is not the usual one, patched or not
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), x), after)
        assert torch.equal(logits(load_patched(tmp_path).eval(), x), after)
    assert torch.equal(logits(unpatch_model(model), x), before)


LAYOUTS = {"cohere": "interleaved", "gpt_oss": "single", "llama4": None}


@pytest.mark.parametrize("family", GENERIC)
def test_the_layout_is_recognised(family):
    model = patch_model(build(family), "yarn", factor=4, original_max_position_embeddings=TRAINED)
    (rotary,) = [module for module in model.modules() if isinstance(module, PatchedRotary)]
    assert rotary._layout == LAYOUTS.get(family, "halves")


def test_sliding_layers_keep_their_own_table():
    model = build("gemma3")
    trained = {name.split(".")[-1]: table.clone() for name, table in model.named_buffers() if "inv_freq" in name}
    patch_model(model, "yarn", factor=4)
    host = model.model.rotary_emb
    assert torch.equal(host.sliding_attention_inv_freq, trained["sliding_attention_inv_freq"])
    assert not torch.equal(host.full_attention_inv_freq, trained["full_attention_inv_freq"])
    assert list(describe(model).wavelengths) == ["full_attention"]
    assert "sliding_attention layers keep" in str(describe(model))


def test_partial_rotary_turns_a_part_of_each_head():
    model = patch_model(build("gpt_neox"), "linear", factor=4)
    assert len(describe(model).wavelengths["all"]) == 4  # head dimension 16, half of it rotary


@pytest.mark.parametrize("scaling", ["yarn", "llama3"])
def test_a_checkpoint_that_comes_scaled_is_extended_from_its_true_length(scaling):
    model = build("llama", rope_parameters={**STOCK[scaling], "rope_theta": 1e4}, max_position_embeddings=4 * TRAINED)
    assert describe(model).trained_length == TRAINED
    assert describe(model).method.startswith(scaling)
    x = ids(2 * TRAINED)
    scaled = logits(model, x)
    patch_model(model, "linear", factor=8)
    report = describe(model)
    assert (report.trained_length, report.usable_length) == (TRAINED, 8 * TRAINED)
    assert "comes scaled" in str(report)
    assert model.config.original_max_position_embeddings == TRAINED
    plain = patch_model(build("llama"), "linear", factor=8)
    assert torch.equal(logits(model, x), logits(plain, x))
    assert torch.equal(logits(unpatch_model(model), x), scaled)


def test_a_linear_checkpoint_must_say_its_original_length():
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = build("llama", rope_parameters=scaled, max_position_embeddings=4 * TRAINED)
    before = logits(model, ids(40))
    assert "linear" in str(describe(model))
    with pytest.raises(ValueError, match="Pass original_max_position_embeddings"):
        patch_model(model, "yarn", factor=4)
    assert torch.equal(logits(model, ids(40)), before)
    patch_model(model, "yarn", factor=8, original_max_position_embeddings=TRAINED)
    assert describe(model).trained_length == TRAINED


def test_phi3_takes_its_own_longrope_lists():
    pairs = 4
    lists = {"short_factor": [1.0] * pairs, "long_factor": [1.0, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **lists}
    model = build("phi3", rope_parameters=rope, max_position_embeddings=4 * TRAINED)
    patch_model(model, "longrope", factor=4)
    turned = model.model.rotary_emb.inv_freq * torch.tensor(lists["long_factor"])
    assert torch.allclose(turned, 1e4 ** (-torch.arange(4) / 4.0))
    with pytest.raises(ValueError, match="has 2 numbers, this checkpoint has 4"):
        patch_model(model, "longrope", factor=4, long_factor=[1, 2])


REFUSED = {
    "phimoe": "cannot be called with positions alone",
    "gpt2": "nothing was replaced",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_give_the_reason_and_leave_the_model(model_type):
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    size |= {"vocab_size": 50, "intermediate_size": 32, "num_local_experts": 2, "pad_token_id": 0, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **size))
    modules = {name: id(module) for name, module in model.named_modules()}
    entries = model.config.to_dict()
    with pytest.raises(ValueError, match=REFUSED[model_type]):
        patch_model(model, "yarn", factor=4)
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert model.config.to_dict() == entries


def test_a_multi_axis_module_is_called_as_the_host_calls_it():
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    text |= {"num_key_value_heads": 2, "max_position_embeddings": TRAINED, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    x = ids(2 * TRAINED)
    before = logits(model, x)
    with contextlib.suppress(ValueError):  # transformers 5.17's module cannot be probed: refused
        patch_model(model, "yarn", factor=4)
    assert logits(model, x).isfinite().all()
    if describe(model).patched:
        assert not torch.equal(logits(model, x), before)
        assert model.config.get_text_config().rope_parameters["mrope_section"] == [2, 3, 3]
        unpatch_model(model)
    assert torch.equal(logits(model, x), before)


def test_attention_that_reads_the_original_length_keeps_it():
    from transformers import Ministral3Config, Ministral3ForCausalLM

    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": TRAINED}
    size = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 61,
    }
    size |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4 * TRAINED}
    model = Ministral3ForCausalLM(
        Ministral3Config(**size, rope_parameters={**rope, "llama_4_scaling_beta": 0.1})
    ).eval()
    patch_model(model, "linear", factor=4)
    assert logits(model, ids(2 * TRAINED)).isfinite().all()
    assert model.config.rope_parameters["original_max_position_embeddings"] == TRAINED


def test_methods_of_a_model_without_rotary_positions_are_none():
    from transformers import GPT2Config, GPT2LMHeadModel

    assert methods(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))) == {}


def test_methods_lists_what_an_architecture_hosts():
    assert set(methods(build("llama"))) == set(methods())
    assert methods()["yarn"].source.startswith("Peng")
