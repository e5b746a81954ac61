"""Faults that other context-extension tools shipped, each as the test that would have caught it.

The numbers are those of the project's fault list; the links in brackets are where users reported them.
"""

import copy
import json
import math
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import torch
from conftest import TRAINED, build, config, ids, logits, options, rotary_dim
from peft import LoraConfig, PeftModel, get_peft_model
from tolerances import ANGLE, GRADIENT, LOGITS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from rope_ext import (
    describe,
    load_adapter,
    load_patched,
    patch_model,
    patched,
    save_adapter,
    unpatch_model,
)
from rope_ext.encodings.rotary import Yarn


def angles_at(model, positions, dtype=torch.float32):
    """cos of every channel pair at the given positions, as the model's rotary module returns it."""
    rotary = model.get_decoder().rotary_emb
    cos, _ = rotary(torch.zeros(1, 1, 1, dtype=dtype), torch.tensor([positions]))
    return cos[0, :, : rotary_dim(model) // 2].double()


def exact_cos(method, positions):
    """The same in float64, from the paper's formula."""
    table = torch.tensor(getattr(reference, method)(16, 1e4, TRAINED, 4.0)[0], dtype=torch.float64)
    return (torch.tensor(positions, dtype=torch.float64)[:, None] * table).cos()


def test_f01_low_precision_modes_do_not_round_positions():  # transformers#29285
    model, positions = patch_model(build("llama"), "linear", factor=4), list(range(8192))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = angles_at(model, positions)
    assert (found - exact_cos("linear", positions)).abs().max() < ANGLE
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert (angles_at(model, positions) - exact_cos("linear", positions)).abs().max() < ANGLE
    finally:
        torch.set_float32_matmul_precision(before)
    rounded = (torch.tensor(positions).bfloat16().double()[:, None] * model.model.rotary_emb.inv_freq.double()).cos()
    assert (rounded - exact_cos("linear", positions)).abs().max() > ANGLE  # the planted fault would be seen


@pytest.mark.parametrize("order", ["patch then cast", "cast then patch", "default dtype"])
def test_f02_frequencies_stay_fp32_in_a_bf16_model(order):  # DeepSpeed#5812
    exact = patch_model(build("llama"), "yarn", factor=4, attention_factor=1.0).model.rotary_emb.inv_freq
    model = build("llama")
    if order == "patch then cast":
        model = patch_model(model, "yarn", factor=4, attention_factor=1.0).to(torch.bfloat16)
    elif order == "cast then patch":
        model = patch_model(model.to(torch.bfloat16), "yarn", factor=4, attention_factor=1.0)
    else:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = patch_model(model, "yarn", factor=4, attention_factor=1.0)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert (angles_at(model, [8191]) - exact_cos("yarn", [8191])).abs().max() < ANGLE
    assert (exact.bfloat16().double() * 8191).cos().sub((exact.double() * 8191).cos()).abs().max() > ANGLE


def test_f06_the_factor_given_counts_not_the_ratio_of_lengths():  # transformers#38224
    scaled = build("llama", max_position_embeddings=128)
    patch_model(scaled, "yarn", factor=4, original_max_position_embeddings=64)
    table = scaled.model.rotary_emb.inv_freq
    plain = unpatch_model(scaled).model.rotary_emb.inv_freq
    assert torch.isclose(table[-1], plain[-1] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "cos_of_zero"),
    [({}, 0.1 * math.log(4) + 1), ({"attention_factor": 1.0}, 1.0), ({"attention_factor": 1.2}, 1.2)],
)
def test_f08_attention_factor_replaces_the_default(given, cos_of_zero):  # vllm#48351
    model = patch_model(build("llama"), "yarn", factor=4, **given)
    assert angles_at(model, [0])[0].tolist() == pytest.approx([cos_of_zero] * (rotary_dim(model) // 2), rel=1e-6)


def test_f10_one_options_dict_serves_models_with_different_bases():
    given = {"factor": 4, "beta_fast": 8}
    kept = dict(given)
    models = [build("llama", rope_parameters={"rope_type": "default", "rope_theta": base}) for base in (1e4, 5e5)]
    for model in models:
        patch_model(model, "yarn", **given)
    assert given == kept
    assert [model.config.rope_parameters["rope_theta"] for model in models] == [1e4, 5e5]
    slow = [float(model.model.rotary_emb.inv_freq[-1]) for model in models]
    assert slow == pytest.approx([1e4 ** (-14 / 16) / 4, 5e5 ** (-14 / 16) / 4], rel=1e-5)


@pytest.mark.parametrize("family", ["mistral_nemo", "qwen3"])
def test_f11_head_dim_is_not_hidden_size_over_heads(family):  # transformers#32495
    model = patch_model(build(family), "yarn", factor=4)
    assert model.model.rotary_emb.inv_freq.shape == (16,)
    assert logits(model, ids(2 * TRAINED)).isfinite().all()


def test_f15_left_padded_generation_equals_each_row_alone():  # unsloth#3699
    model = patch_model(build("llama"), "yarn", factor=4)
    short, long = ids(5), ids(9, seed=3)
    batch = torch.cat((torch.cat((torch.zeros(1, 4, dtype=torch.long), short), dim=1), long))
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    how = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    made = model.generate(batch, attention_mask=mask, **how)[:, 9:]
    for row, prompt in zip(made, (short, long), strict=True):
        assert torch.equal(
            row, model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)[0, prompt.shape[1] :]
        )


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
if sys.argv[1] == "plugin":
    from rope_ext import load_patched
    model = load_patched(sys.argv[2])
else:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
    assert not any(name.split(".")[0] == "rope_ext" for name in sys.modules)
torch.save([model.eval()(torch.load(sys.argv[3])).logits.detach(), dict(model.named_buffers())], sys.argv[4])
"""


@pytest.mark.parametrize("how", ["plugin", "stock"])
@pytest.mark.parametrize("method", ["yarn", "ntk_by_parts"])
def test_f24_a_fresh_process_loads_the_scaled_frequencies(method, how, tmp_path):  # transformers#48892
    model = build("llama")
    patch_model(model, method, **options(method, model))
    x, expected = ids(3 * TRAINED), logits(model, ids(3 * TRAINED))
    model.save_pretrained(tmp_path / "model")
    torch.save(x, tmp_path / "ids.pt")
    files = [str(tmp_path / name) for name in ("model", "ids.pt", "out.pt")]
    subprocess.run([sys.executable, "-c", FRESH, how, *files], check=True, cwd=tmp_path)
    found, buffers = torch.load(tmp_path / "out.pt")
    assert torch.equal(found, expected)
    assert found.isfinite().all()
    (table,) = [value for name, value in buffers.items() if name.endswith("rotary_emb.inv_freq")]
    assert torch.equal(table, model.model.rotary_emb.inv_freq)


def test_f25_keys_unchanged_and_meta_to_real_storage():  # transformers#34234
    plain, real = build("llama"), patch_model(build("llama"), "yarn", factor=4)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config("llama"))
    patch_model(empty, "yarn", factor=4)
    assert list(empty.state_dict()) == list(plain.state_dict())
    empty.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(logits(empty.eval(), ids(2 * TRAINED)), logits(real, ids(2 * TRAINED)))


def test_f27_no_new_parameters_and_layer_classes_are_found():  # trl#1723
    plain, model = build("llama"), patch_model(build("llama"), "yarn", factor=4).to(torch.bfloat16)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert set(model._no_split_modules) <= {type(module).__name__ for module in model.modules()}


def test_f28_nothing_to_replace_is_an_error():
    from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

    for model in (
        OPTForCausalLM(OPTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)),
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50)),
    ):
        with pytest.raises(ValueError, match="nothing was replaced"):
            patch_model(model, "yarn", factor=4)


def test_f29_patching_one_model_leaves_older_and_newer_ones_alone():  # Liger#772
    x = ids(2 * TRAINED)
    older = build("llama")
    before, forwards = logits(older, x), {name: type(m).forward for name, m in older.named_modules()}
    model = patch_model(build("llama"), "yarn", factor=4)
    newer = build("llama")
    assert torch.equal(logits(older, x), before)
    assert torch.equal(logits(newer, x), before)
    unpatch_model(model)
    assert torch.equal(logits(model, x), before)
    assert {name: type(m).forward for name, m in model.named_modules()} == forwards


def test_f30_patching_twice_is_patching_once(tmp_path):
    model, x = patch_model(build("llama"), "linear", factor=4), ids(2 * TRAINED)
    once = logits(model, x)
    patch_model(model, "linear", factor=4)
    assert torch.equal(logits(model, x), once)
    assert model.config.max_position_embeddings == 4 * TRAINED
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()  # scaled by stock, its record says from what
    assert torch.equal(logits(patch_model(loaded, "linear", factor=4), x), once)
    assert loaded.config.max_position_embeddings == 4 * TRAINED


@pytest.mark.parametrize("factor", [2, 2.0])
def test_f32_legacy_entries_and_whole_factors_roundtrip_in_silence(factor, tmp_path, caplog):
    entries = {**config("llama").to_dict(), "rope_scaling": {"type": "linear", "factor": factor}, "rope_theta": 1e4}
    entries.pop("rope_parameters")
    legacy = LlamaForCausalLM(LlamaConfig(**entries)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(legacy, "yarn", factor=4, original_max_position_embeddings=TRAINED)
        patch_model(legacy, "linear", factor=2, original_max_position_embeddings=TRAINED)
        legacy.save_pretrained(tmp_path)
        stock = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        again = load_patched(tmp_path).eval()
    x = ids(2 * TRAINED)
    assert torch.equal(logits(stock, x), logits(legacy, x))
    assert torch.equal(logits(again, x), logits(legacy, x))
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def lora(model, **more):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **more))


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
def test_f34_a_merged_save_states_the_scaling_in_standard_keys(method, tmp_path):  # LongLoRA#181
    model = lora(patch_model(build("llama"), method, factor=4))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    rope = saved["rope_parameters"]
    assert rope["rope_type"] == {"linear": "linear", "yarn": "yarn", "ntk": "default"}[method]
    assert rope.get("factor", 4.0) == 4.0
    assert (rope.get("original_max_position_embeddings") or saved["original_max_position_embeddings"]) == TRAINED
    assert saved["max_position_embeddings"] == 4 * TRAINED
    assert saved["rope_ext"]["method"] == method
    x = ids(3 * TRAINED)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), x), logits(merged, x))


def test_f34_an_adapter_refuses_a_base_that_does_not_match(tmp_path):
    model = lora(patch_model(build("llama"), "yarn", factor=4)).eval()
    x = ids(3 * TRAINED)
    expected = logits(model, x)
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ValueError, match="first call patch_model"):
        load_adapter(build("llama"), tmp_path / "adapter")
    with pytest.raises(ValueError, match="trained under yarn"):
        load_adapter(patch_model(build("llama"), "yarn", factor=2), tmp_path / "adapter")
    with pytest.warns(UserWarning, match="rope_ext"):
        PeftModel.from_pretrained(build("llama"), str(tmp_path / "adapter"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = load_adapter(patch_model(build("llama"), "yarn", factor=4), tmp_path / "adapter").eval()
    assert not [warning for warning in caught if "rope_ext" in str(warning.message)]
    assert torch.equal(logits(again, x), expected)


def test_f35_merging_lora_keeps_the_scaling():
    model = lora(patch_model(build("llama"), "yarn", factor=4))
    x = ids(2 * TRAINED)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(x, labels=x).loss.backward()
    optimizer.step()
    model.eval()
    before = logits(model, x)
    merged = model.merge_and_unload()
    assert (logits(merged, x) - before).abs().max() < LOGITS / 10
    assert describe(merged).method == "yarn"
    unscaled = copy.deepcopy(merged)
    assert (logits(unpatch_model(unscaled), x) - before).abs().max() > LOGITS


@pytest.mark.parametrize("reentrant", [True, False])
def test_f37_gradient_checkpointing_changes_no_gradient(reentrant):  # peft#2826
    gradients = []
    for recompute in (False, True):
        model = lora(patch_model(build("llama"), "yarn", factor=4), lora_dropout=0.0).train()
        if recompute:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        x = ids(2 * TRAINED)
        model(x, labels=x, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        assert (gradient - gradients[1][name]).abs().max() < GRADIENT, name


@pytest.mark.parametrize("method", ["linear", "ntk", "yarn", "llama3"])
def test_f39_compiles_without_a_graph_break(method):  # transformers#35716
    model = patch_model(build("llama"), method, factor=4)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for length in (8, 16, 32):
        assert (logits(compiled, ids(length)) - logits(model, ids(length))).abs().max() < LOGITS


def test_f41_lengths_follow(small, caplog):
    _, tokenizer = small
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = TRAINED
    model = patch_model(build("llama"), "yarn", factor=4, tokenizer=tokenizer)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 4 * TRAINED

    def reminded(new_tokens):
        caplog.clear()
        logging.enable_propagation()
        logging.get_logger("transformers.generation.stopping_criteria").warning_once.__func__.cache_clear()
        model.generate(ids(4 * TRAINED - 8), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
        return any("predefined maximum length" in record.message for record in caplog.records)

    assert not reminded(8)
    assert reminded(12)
    unpatch_model(model)
    assert model.config.max_position_embeddings == tokenizer.model_max_length == TRAINED


def test_f46_a_config_object_shared_by_two_models():
    shared = config("llama")
    first, second = LlamaForCausalLM(shared).eval(), LlamaForCausalLM(shared).eval()
    x, entries = ids(2 * TRAINED), copy.deepcopy(shared.to_dict())
    before, implementation = logits(second, x), shared._attn_implementation
    patch_model(first, "yarn", factor=4)
    assert second.config is shared
    assert shared.to_dict() == entries
    assert shared._attn_implementation == implementation == first.config._attn_implementation
    assert torch.equal(logits(second, x), before)
    inside = [module.config for module in first.modules() if hasattr(module, "config")]
    assert all(found is first.config for found in inside)
    unpatch_model(first)
    assert all(module.config is shared for module in first.modules() if hasattr(module, "config"))


def test_threads_with_two_models_do_not_see_each_other():
    models = [patch_model(build("llama"), Yarn(factor=factor)) for factor in (2, 8)]
    x = ids(2 * TRAINED)
    expected = [logits(model, x) for model in models]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda at: logits(models[at % 2], x), range(16)))
    assert all(torch.equal(value, expected[at % 2]) for at, value in enumerate(found))


def test_a_context_manager_restores_what_was_there_also_after_an_error():
    model, x = patch_model(build("llama"), "linear", factor=2), ids(2 * TRAINED)
    before = logits(model, x)
    inside = []
    with pytest.raises(RuntimeError, match="inside"), patched(model, "yarn", factor=4):
        _fail(inside.append(describe(model).method))
    assert inside == ["yarn"]
    assert torch.equal(logits(model, x), before)
    assert describe(model).method == "linear"


def _fail(_):
    raise RuntimeError("inside")
