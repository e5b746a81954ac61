"""The public functions: what they take, what they refuse, what they report."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from conftest import TRAINED, build, ids, logits
from torch import nn

from rope_ext import (
    describe,
    export,
    load_patched,
    methods,
    patch_model,
    register_adapter,
    register_method,
    registry,
    save_adapter,
    unpatch_model,
)
from rope_ext.encodings.rotary import RotaryMethod, Yarn, schedule
from rope_ext.patches.rotary import RotaryAdapter

REFUSALS = [
    (("yarm", {}), ValueError, "did you mean 'yarn'"),
    (("yarn", {}), ValueError, "`factor` is required"),
    (("yarn", {"factor": 0.5}), ValueError, ">= 1 and <= 1e.06, got 0.5"),
    (("yarn", {"factor": float("nan")}), ValueError, "got nan"),
    (("yarn", {"factor": float("inf")}), ValueError, "got inf"),
    (("yarn", {"factor": 10**400}), ValueError, "<= 1e.06"),
    (("ntk", {"factor": 1e300}), ValueError, "<= 1e.06"),
    (("longrope", {"factor": 2, "original_max_position_embeddings": 1}), ValueError, ">= 2"),
    (("yarn", {"factor": True}), TypeError, "got True of type bool"),
    (("yarn", {"factor": "4"}), TypeError, "got '4' of type str"),
    (("yarn", {"factor": None}), TypeError, "got None"),
    (("yarn", {"factor": 4, "beta": 8}), ValueError, "did you mean `beta_slow`"),
    (("yarn", {"factor": 4, "beta_fast": 1, "beta_slow": 2}), ValueError, "must not exceed"),
    (("yarn", {"factor": 4, "truncate": 1}), TypeError, "True or False"),
    (("llama3", {"factor": 4, "low_freq_factor": 4, "high_freq_factor": 4}), ValueError, "must be below"),
    (("longrope", {"factor": 4}), ValueError, "`long_factor` is required"),
    (("longrope", {"factor": 4, "long_factor": [1.0, -1.0]}), ValueError, "positive"),
    (("rope", {"factor": 4}), ValueError, "unknown option `factor`"),
    (("abf", {"base": 1}), ValueError, "> 1"),
    ((4, {}), TypeError, "method name or an encoding object"),
    ((Yarn(factor=2), {"factor": 4}), ValueError, "set them on the object"),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSALS)
@pytest.mark.parametrize("already", [False, True])
def test_refusals_name_the_argument_and_leave_the_model(given, kind, message, already):
    model, x = build("llama"), ids(2 * TRAINED)
    if already:
        patch_model(model, "linear", factor=2)
    before, entries = logits(model, x), copy.deepcopy(model.config.to_dict())
    method, options = given
    with pytest.raises(kind, match=message):
        patch_model(model, method, **options)
    assert torch.equal(logits(model, x), before)
    assert model.config.to_dict() == entries


def test_only_transformers_models_are_taken():
    with pytest.raises(TypeError, match="got Linear"):
        patch_model(nn.Linear(2, 2), "yarn", factor=4)
    with pytest.raises(ValueError, match="not patched"):
        unpatch_model(build("llama"))


def test_wrappers_are_seen_through():
    class Wrapped(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model, x = build("llama"), ids(2 * TRAINED)
    before = logits(model, x)
    wrapper = patch_model(Wrapped(model), Yarn(factor=4))
    assert isinstance(wrapper, Wrapped)
    assert not torch.equal(logits(model, x), before)
    unpatch_model(wrapper)
    assert torch.equal(logits(model, x), before)


def test_describe_says_which_channels_leave_their_trained_range():
    model = build("llama")
    assert describe(model).outside_trained_range == {"all": ()}
    beyond = describe(model, length=4 * TRAINED).outside_trained_range["all"]
    waves = describe(model).wavelengths["all"]
    assert beyond == tuple(pair for pair, wave in enumerate(waves) if wave > TRAINED)
    patch_model(model, "yarn", factor=4)
    report = describe(model)
    assert report.outside_trained_range == {"all": ()}
    assert report.usable_length == 4 * TRAINED
    assert report.options == {"factor": 4.0}
    assert (report.stock_loadable, report.stock_type, report.fine_tuning) == (True, "yarn", "not needed")
    assert describe(patch_model(model, "lrope")).fine_tuning == "required"
    assert "infinite" not in str(report)


def test_copies_and_pickles_stay_patched_and_apart():
    model, x = patch_model(build("llama"), "yarn", factor=4), ids(2 * TRAINED)
    expected = logits(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, x), expected)
        unpatch_model(twin)
        assert not torch.equal(logits(twin, x), expected)
        assert torch.equal(logits(model, x), expected)


def test_a_registered_method_works_like_a_built_in_one(tmp_path):
    @dataclass(frozen=True, kw_only=True)
    class Halved(RotaryMethod):
        """Every frequency halved."""

        name = "halved"
        formula = "theta_i / 2"
        source = "this test"
        fine_tuning = "recommended"

        def frequencies(self, rotary):
            return schedule(rotary.dim, rotary.base) / 2

    register_method(Halved)
    try:
        assert methods()["halved"].summary == "Every frequency halved."
        model, x = patch_model(build("llama"), "halved"), ids(40)
        reference = patch_model(build("llama"), "linear", factor=2)
        assert (logits(model, x) - logits(reference, x)).abs().max() < 1e-5
        assert describe(model).stock_type == "longrope"
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), x), logits(model, x))
        with pytest.raises(ValueError, match="is taken"):
            register_method(Halved)
    finally:
        del registry.METHODS["halved"]


@pytest.mark.parametrize("returned", [torch.ones(3), torch.full((8,), float("nan")), -torch.ones(8)])
def test_what_a_registered_method_returns_is_checked(returned):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Yarn):
        name = "wrong"

        def frequencies(self, rotary):
            return returned

    with pytest.raises(ValueError, match=r"wrong\.frequencies must return \(8,\)"):
        patch_model(build("llama"), Wrong(factor=2))


def test_registering_an_adapter():
    class Mine(RotaryAdapter):
        model_types = ("mine",)

    register_adapter(Mine)
    try:
        with pytest.raises(ValueError, match="already has an adapter"):
            register_adapter(Mine)
    finally:
        del registry.ADAPTERS["mine"]
    with pytest.raises(ValueError, match="model_types is empty"):
        register_adapter(RotaryAdapter)
    with pytest.raises(TypeError, match="derived from RotaryMethod"):
        register_method(Mine)


def test_every_registered_adapter_is_there_and_claims_its_type():
    for model_type, entry in registry.ADAPTERS.items():
        model = build("llama")
        model.config.model_type = model_type
        assert model_type in type(registry.find_adapter(model)).model_types, entry


def test_export_writes_all_or_nothing(tmp_path, monkeypatch):
    model = patch_model(build("llama"), "yarn", factor=4)
    assert export(model, tmp_path / "made").stock_loadable
    with pytest.raises(ValueError, match="overwrite=True"):
        export(model, tmp_path / "made")
    inside = sorted(file.name for file in (tmp_path / "made").iterdir())

    def broken(folder):
        (folder / "config.json").write_text("{")
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", broken)
    for target in ("made", "new"):
        with pytest.raises(OSError, match="disk full"):
            export(model, tmp_path / target, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["made"]
    assert sorted(file.name for file in (tmp_path / "made").iterdir()) == inside
    assert load_patched(tmp_path / "made").config.max_position_embeddings == 4 * TRAINED


def test_what_stock_cannot_express_fails_there_loudly(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_ext.patches.rotary.build_as_stock", lambda kind, config: None)
    model, x = patch_model(build("llama"), "ntk_by_parts", factor=4), ids(2 * TRAINED)
    assert not describe(model).stock_loadable
    made = export(model, tmp_path / "made")
    assert not made.stock_loadable
    assert "load_patched" in made.message
    with pytest.raises(KeyError, match="load_patched"):
        type(model).from_pretrained(tmp_path / "made")
    assert torch.equal(logits(load_patched(tmp_path / "made").eval(), x), logits(model, x))
    reference = patch_model(build("llama"), "ntk_by_parts", factor=4)
    assert (logits(model, x) - logits(reference, x)).abs().max() < 1e-4


def test_loading_needs_a_record(tmp_path):
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no `rope_ext` entry"):
        load_patched(tmp_path)
    with pytest.raises(TypeError, match="takes a PEFT model"):
        save_adapter(build("llama"), tmp_path)


def test_a_newer_record_is_pointed_out(tmp_path):
    model = patch_model(build("llama"), "yarn", factor=4)
    model.config.rope_ext["version"] = "999.0"
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"saved with rope_ext 999\.0"):
        load_patched(tmp_path)


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path, monkeypatch):
    model = patch_model(build("llama"), "yarn", factor=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not replaced"):
        export(model, tmp_path / "mine", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="not replaced"):
        export(model, tmp_path / "file", overwrite=True)
    export(model, tmp_path / "made")
    monkeypatch.chdir(tmp_path / "made")
    with pytest.raises(ValueError, match="current directory"):
        export(model, ".", overwrite=True)
    monkeypatch.chdir(tmp_path)
    assert export(model, "made", overwrite=True).path == tmp_path / "made"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "made", "mine"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_saving_an_adapter_adds_to_the_folder(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(patch_model(build("llama"), "yarn", factor=4), LoraConfig(r=2, target_modules=["q_proj"]))
    (tmp_path / "optimizer.pt").write_text("state")
    save_adapter(model, tmp_path)
    assert (tmp_path / "optimizer.pt").read_text() == "state"
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not [path for path in tmp_path.parent.iterdir() if path.name.startswith(f".{tmp_path.name}")]
    with pytest.raises(ValueError, match="merge them first"):
        export(nn.DataParallel(model), tmp_path / "made")


def test_a_wrong_tokenizer_is_refused_before_anything_changes():
    model, x = build("llama"), ids(40)
    before = logits(model, x)
    with pytest.raises(TypeError, match="`tokenizer` must be"):
        patch_model(model, "yarn", factor=4, tokenizer="tok")
    assert torch.equal(logits(model, x), before)


def test_the_tokenizer_follows_a_replaced_patch(small):
    tokenizer = copy.deepcopy(small[1])
    tokenizer.model_max_length = TRAINED
    model = patch_model(build("llama"), "yarn", factor=2, tokenizer=tokenizer)
    patch_model(model, "yarn", factor=4)
    assert tokenizer.model_max_length == 4 * TRAINED
    unpatch_model(model)
    assert tokenizer.model_max_length == TRAINED


def test_config_edits_outlive_the_patch():
    model, x = patch_model(build("llama"), "yarn", factor=4), ids(40)
    model.resize_token_embeddings(80)
    model.set_attn_implementation("eager")
    patch_model(model, "linear", factor=2)
    assert (model.config.vocab_size, model.config._attn_implementation) == (80, "eager")
    unpatch_model(model)
    assert (model.config.vocab_size, model.config._attn_implementation) == (80, "eager")
    assert model.config.rope_parameters == build("llama").config.rope_parameters
    assert logits(model, x).shape[-1] == 80


def test_unpatching_after_a_move_or_from_meta_gives_a_working_model():
    plain = build("llama")
    x = ids(2 * TRAINED)
    with torch.device("meta"):
        model = type(plain)(copy.deepcopy(plain.config))
    patch_model(model, "yarn", factor=4)
    model.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(logits(unpatch_model(model).eval(), x), logits(plain, x))


def test_initialising_weights_again_keeps_the_patch():
    model = patch_model(build("llama"), "yarn", factor=4)
    table = model.model.rotary_emb.inv_freq.clone()
    model.apply(model._init_weights)
    assert torch.equal(model.model.rotary_emb.inv_freq, table)


def test_a_base_model_patched_inside_its_head():
    model, x = build("llama"), ids(2 * TRAINED)
    before = logits(model, x)
    patch_model(model.model, "yarn", factor=4)
    report = describe(model)
    assert (report.method, report.patched) == ("yarn", True)
    assert "patch the whole model" in str(report)
    patch_model(model, "yarn", factor=4)
    assert "patch the whole model" not in str(describe(model))
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert torch.equal(logits(unpatch_model(model), x), before)


def test_the_given_length_survives_a_plain_reload(tmp_path):
    model = patch_model(build("llama"), "yarn", factor=4, original_max_position_embeddings=32)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    report = describe(loaded)
    assert (report.trained_length, report.method, report.patched) == (32, "yarn", False)
    assert "load_patched" in str(report)
    patch_model(loaded, "linear", factor=2)
    assert describe(loaded).usable_length == 64


def test_describe_tells_a_guess_and_a_config_that_is_not_followed():
    model = build("llama")
    model.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    assert "does not follow the config" in str(describe(model))
    scaled = build("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    assert "is a guess" in str(describe(scaled))
    dynamic = build("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    assert describe(dynamic).usable_length == 4 * TRAINED
    for length in (0, -5, 2.5, "a"):
        with pytest.raises(ValueError, match="`length` must be"):
            describe(model, length=length)


def test_a_lrope_checkpoint_loaded_plainly_still_says_what_it_needs(tmp_path):
    patch_model(build("llama"), "lrope").save_pretrained(tmp_path)
    report = describe(type(build("llama")).from_pretrained(tmp_path))
    assert (report.method, report.fine_tuning, report.stock_type) == ("lrope", "required", "longrope")


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_the_factor_of_a_registered_method_is_checked(value):
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Yarn):
        name = "wrong"
        extra: float = 1.0  # a plain field is taken as it is

        def attention_scaling(self, rotary):
            return value

    with pytest.raises(ValueError, match=r"wrong\.attention_scaling must return"):
        patch_model(build("llama"), Wrong(factor=2))


def test_patching_in_threads_leaves_the_log_level():
    import logging
    from concurrent.futures import ThreadPoolExecutor

    logger = logging.getLogger("transformers.modeling_rope_utils")
    level, models = logger.level, [build("llama") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda model: [patch_model(model, "yarn", factor=2 + at) for at in range(10)], models))
    assert logger.level == level
