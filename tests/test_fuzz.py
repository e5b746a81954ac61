"""Input of any kind: it works, or it is refused by name and everything is left as it was."""

import contextlib
import copy
import dataclasses
import decimal
import json
import random
from html.parser import HTMLParser

import pytest
import torch
import transformers
from conftest import SMALL_MODEL, TRAINED, build, ids, logits, options
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from rope_ext import (
    cli,
    describe,
    evals,
    export,
    load_adapter,
    load_patched,
    patch_model,
    patched,
    save_adapter,
    unpatch_model,
)
from rope_ext.api import patch_of
from rope_ext.evals import Results
from rope_ext.evals.sweeping import Sweep
from rope_ext.files import whole_file
from rope_ext.models import load
from rope_ext.registry import METHODS

REFUSED = (ValueError, TypeError)

WEIRD = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        0.5,
        -0.0,
        1e308,
        5e-324,
        float("nan"),
        float("inf"),
        -float("inf"),
        2**63,
        10**400,
    ),
    *("4", "", "yarn", "\0", "../x", b"4", [], [1.0], [1.0] * 8, [float("nan")] * 8, [0] * 8, ["a"] * 8, [[1.0] * 8]),
    *((), {}, {"a": 1}, {1}, object(), print, 4j, decimal.Decimal(4), torch.tensor(4.0), torch.ones(8), range(3)),
]
VALUES = st.one_of(
    st.sampled_from(WEIRD), st.floats(), st.integers(), st.integers(-5, 70), st.floats(0.5, 64), st.text(max_size=3)
)


def examples(number):
    return settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _one_thread(_process_wide_settings):
    """For such small models a second one only costs time."""
    torch.set_num_threads(1)


class Watched:
    """A model, and what must not change about it."""

    def __init__(self, family):
        self.model, self.x = build(family), ids(2 * TRAINED)[:, :72]
        self.before = self.look()

    def look(self):
        more = {"decoder_input_ids": self.x[:, :20]} if self.model.config.is_encoder_decoder else {}
        entries, keys = repr(self.model.config.to_dict()), list(self.model.state_dict())
        return logits(self.model, self.x, **more), entries, keys

    def check(self):
        (now, *rest), (then, *known) = self.look(), self.before
        assert torch.equal(now, then)
        assert rest == known


@pytest.fixture(scope="module")
def watched():
    return {family: Watched(family) for family in ("llama", "bloom", "t5", "gemma2")}


@st.composite
def patches(draw):
    """(family, method, options), of which any may be nonsense."""
    family, method = draw(st.sampled_from(["llama", "bloom", "t5", "gemma2"])), draw(st.sampled_from(sorted(METHODS)))
    names = [field.name for field in dataclasses.fields(METHODS[method])]
    chosen = draw(st.lists(st.sampled_from([*names, "nonsense"]), unique=True, max_size=3))
    return family, method, {name: draw(VALUES) for name in chosen}, draw(st.booleans())


@examples(150)
@given(patches())
def test_options_of_a_method(watched, case):
    family, method, given_options, usual = case
    one = watched[family]
    asked = {**options(method, one.model), **given_options} if usual else given_options
    refused = ""
    try:
        patch_model(one.model, method, **asked)
    except REFUSED as error:
        refused = str(error)
    else:
        str(describe(one.model))
        with contextlib.suppress(ValueError):  # a table of positions may be shorter than the input, and says so
            one.look()
        unpatch_model(one.model)
    assert not refused or any(name in refused for name in (method, *asked))
    one.check()


@pytest.mark.parametrize("value", WEIRD, ids=lambda value: f"{value!r:.20}")
def test_other_arguments(watched, value):
    one = watched["llama"]
    if not (type(value) is int and value > 0):
        for length in {"length": value}, {"length": [value]}:
            if value is not None or isinstance(length["length"], list):
                with pytest.raises(ValueError, match="`length` must be"):
                    describe(one.model, **length)
    if not (isinstance(value, str) and value in METHODS):
        with pytest.raises(REFUSED), patched(one.model, value, factor=2):
            pass
    for call in (patch_model, describe, export, save_adapter, load_adapter):
        more = {patch_model: ("yarn",), export: ("nowhere",), save_adapter: ("nowhere",), load_adapter: ("nowhere",)}
        with pytest.raises((*REFUSED, OSError)):
            call(value, *more.get(call, ()))
    one.check()


FEW = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 40}
_WHISPER = {"pad_token_id": 0, "d_model": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
STRANGERS = {
    "vision": ("ViTConfig", "ViTModel", {"image_size": 32, "patch_size": 16}),
    "audio": ("Wav2Vec2Config", "Wav2Vec2Model", {"conv_dim": (8,), "conv_kernel": (3,), "conv_stride": (2,)}),
    "speech": ("WhisperConfig", "WhisperModel", _WHISPER),
    "recurrent": ("RwkvConfig", "RwkvForCausalLM", {"attention_hidden_size": 32, "num_hidden_layers": 2}),
    "state space": ("MambaConfig", "MambaForCausalLM", {}),
    "absolute": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 2}),
}


def stranger(kind):
    config_name, model_name, own = STRANGERS[kind]
    config = getattr(transformers, config_name)(**{**FEW, **own})
    return getattr(transformers, model_name)(config).eval()


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("method", ["yarn", "alibi", "self_extend", "dynamic", "learned"])
def test_models_of_other_kinds_are_refused(kind, method):
    model = stranger(kind)
    before = repr(model.config), {name: (id(module), type(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=model.config.model_type):
        patch_model(model, method, **({"factor": 2} if method in ("yarn", "dynamic") else {}))
    assert before == (repr(model.config), {name: (id(one), type(one)) for name, one in model.named_modules()})


@pytest.mark.parametrize("given_model", [None, nn.Linear(2, 2), nn.Sequential(), "llama", {}, type, LoraConfig()])
def test_what_is_no_model_is_refused(given_model):
    for call in (lambda: patch_model(given_model, "yarn", factor=2), lambda: describe(given_model)):
        with pytest.raises(TypeError, match="expected a transformers PreTrainedModel"):
            call()


def test_a_config_that_says_it_is_quantized_changes_nothing_else(watched):
    model = copy.deepcopy(watched["llama"].model)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    before = logits(model, watched["llama"].x)
    for method in ("yarn", "self_extend", "alibi"):
        patch_model(model, method, **options(method, model))
        unpatch_model(model)
    assert torch.equal(logits(model, watched["llama"].x), before)
    assert model.config.quantization_config == {"quant_method": "gptq", "bits": 4}


# evaluations

TASKS = {
    "needle": "lengths text depths samples seed max_new_tokens chat control wording",
    "passkey": "lengths text depths samples seed max_new_tokens chat",
    "perplexity": "lengths text bins stride windows mean_of_windows samples",
    "kv_retrieval": "pairs positions samples seed query_first chat max_new_tokens",
    "multi_doc_qa": "documents positions file samples remedy closed_book max_new_tokens",
    "ruler": "lengths text subtasks qa samples",
}
SHORT = {"needle": {"lengths": [96]}, "passkey": {"lengths": [96]}, "perplexity": {"lengths": [20], "bins": 1}}
SHORT |= {"kv_retrieval": {"pairs": [1]}, "multi_doc_qa": {"documents": [1]}, "ruler": {"lengths": [9]}}


@st.composite
def evaluations(draw):
    task = draw(st.sampled_from(sorted(TASKS)))
    names = draw(
        st.lists(st.sampled_from([*TASKS[task].split(), "limits", "nonsense"]), unique=True, min_size=1, max_size=2)
    )
    return task, {name: draw(st.one_of(VALUES, VALUES.map(lambda value: [value]))) for name in names}


class Accepted(Exception):  # noqa: N818
    """What was asked for would now be done."""


def accept(*_, **__):
    raise Accepted


@examples(200)
@given(evaluations())
def test_options_of_an_evaluation(small, case):
    """They are checked before anything is read: a task that is made is not run here."""
    task, more = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evals, "evaluate", accept)
        with pytest.raises((Accepted, *REFUSED)):
            getattr(evals, task)(*small, **{**SHORT[task], **more})


# the command line

BAD = [
    "",
    "--",
    "0",
    "-1",
    "nan",
    "1e999",
    "a",
    "1,2,",
    "64,128",
    "true",
    "null",
    "[1]",
    "[" * 9999,
    "9" * 30,
    "x" * 300,
]
BAD += [
    "..",
    "/dev/null",
    "no/such",
    "hf:",
    "none,yarn",
    "meta",
    "factor=nan",
    "x=",
    "=",
    "beta_fast=[1",
    "\0",
    "\n",
    "é",
]
COMMANDS = {
    "inspect MODEL": "--method --factor --option --length",
    "needle": "--model --text --lengths --depths --limit --chunk --batch-tokens --max-memory --device --dtype --seed",
    "perplexity": "--model --text --lengths --bins --stride --windows --method --factor --option",
    "eval kv_retrieval": "--pairs --limit --method --factor",
    "eval multi_doc_qa": "--documents --qa-file --limit",
    "eval ruler": "--subtasks --qa --lengths --text",
    "sweep --methods yarn": "--factor --tasks --lengths --text --methods",
    "export": "--model --method --factor --option --dtype",
    "methods": "--methods --architectures --out",
}


@st.composite
def command_lines(draw):
    command = draw(st.sampled_from(sorted(COMMANDS)))
    names = draw(st.lists(st.sampled_from(COMMANDS[command].split()), unique=True, min_size=1, max_size=2))
    return command, {name: draw(st.sampled_from(BAD)) for name in names}


@examples(150)
@given(command_lines())
def test_command_lines(small, tmp_path_factory, case):
    """Refused in one line with exit code 2, with nothing written; what is accepted is not run here."""
    command, more = case
    arguments = [
        *command.replace("MODEL", str(SMALL_MODEL)).split(),
        *(f"{name}={value}" for name, value in more.items()),
    ]
    out = tmp_path_factory.mktemp("cli")
    if command.split()[0] not in ("inspect", "methods"):
        arguments += [f"--out={out / 'out'}", *([] if "--model" in more else [f"--model={SMALL_MODEL}"])]
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        for name in ("run", "sweep", "export"):
            patch.setattr(cli, name, interrupt)
        patch.setattr(cli, "load", lambda name, *more: small if name == str(SMALL_MODEL) else load(name, *more))
        patch.setattr("sys.stderr", Written(said))
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
    error = "".join(said).strip()
    assert code in (0, 2, 130), error
    if code == 2:
        assert error.count("\n") == 0
        assert error.startswith("rope-ext")
        left = [file.name for file in out.rglob("*") if file.is_file()]
        assert left == []


def interrupt(*_, **__):
    raise KeyboardInterrupt


class Written:
    def __init__(self, parts):
        self.parts = parts

    def write(self, text):
        self.parts.append(text)

    def flush(self):
        pass


# files


@pytest.fixture(scope="module")
def saved(small, tmp_path_factory):
    """A checkpoint with a record, one with learned parameters, an adapter."""
    folder = tmp_path_factory.mktemp("saved")
    for name, method in (("stock", "yarn"), ("learned", "kerple")):
        model = build("llama")
        patch_model(model, method, **options(method, model)).save_pretrained(folder / name)
        small[1].save_pretrained(folder / name)
    tuned = get_peft_model(patch_model(build("llama"), "yarn", factor=4), LoraConfig(r=2, target_modules=["q_proj"]))
    save_adapter(tuned, folder / "adapter")
    return folder


def copied(folder, target):
    """A copy of a folder of files."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


RECORDS = {
    "not a record": "yarn",
    "a list": [1],
    "no options": {"method": "yarn", "version": "0.1.0", "original": {}},
    "a method of another type": {"method": ["yarn"], "options": {}, "version": "0.1.0", "original": {}},
    "an unknown method": {"method": "os.system", "options": {}, "version": "0.1.0", "original": {}},
    "a path": {"method": "../../evil", "options": {}, "version": "0.1.0", "original": {}},
    "a wrong version": {"method": "yarn", "options": {"factor": 4}, "version": "new", "original": {}},
    "a huge number": {"method": "yarn", "options": {"factor": 10**400}, "version": "0.1.0", "original": {}},
    "an unknown option": {"method": "yarn", "options": {"factor": 4, "path": "/"}, "version": "0.1.0", "original": {}},
    "a method of the config": {
        "method": "yarn",
        "options": {"factor": 4},
        "version": "0.1.0",
        "original": {"to_dict": 1},
    },
    "a private entry": {"method": "yarn", "options": {"factor": 4}, "version": "0.1.0", "original": {"__class__": 1}},
    "a length that is none": {"original": {"max_position_embeddings": "64"}},
    "an endless length": {"original": {"max_position_embeddings": 10**30}},
    "no parameters": {"original": {"rope_parameters": [1]}},
    "additions that are none": {"added": [["x"]]},
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_damaged_record(case, saved, tmp_path):
    folder = copied(saved / "stock", tmp_path / "made")
    entries = json.loads((folder / "config.json").read_text())
    record, changed = entries["rope_ext"], RECORDS[case]
    whole = (isinstance(changed, dict) and "method" in changed) or not isinstance(changed, dict)
    entries["rope_ext"] = changed if whole else {**record, **changed}
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(REFUSED, match=r"rope_ext|unknown method|option"):
        load_patched(folder)
    if whole and not (isinstance(changed, dict) and {"method", "options"} <= set(changed)):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        for call in (lambda: describe(plain), lambda: patch_model(plain, "linear", factor=2)):
            with pytest.raises(ValueError, match="rope_ext"):
                call()
        assert patch_of(plain) is None


def spoil(file, rng):
    """Cut a file short, or put rubbish into it."""
    data = file.read_bytes()
    at = rng.randrange(len(data))
    file.write_bytes(data[:at] if rng.random() < 0.5 else data[:at] + rng.randbytes(40) + data[at + 40 :])


@pytest.mark.parametrize("seed", range(24))
def test_spoiled_checkpoints_and_adapters(seed, saved, watched, tmp_path):
    """They load to the same kind of model, or are refused; a model that was to get an adapter stays as it was."""
    rng = random.Random(seed)
    folder = copied(saved / ("learned" if seed % 2 else "stock"), tmp_path / "made")
    spoil(folder / rng.choice(["config.json", "model.safetensors"]), rng)
    with contextlib.suppress(*REFUSED, OSError, KeyError, RuntimeError, AttributeError):
        # what a stock part of the config says is checked by transformers, with errors of its own kinds
        load_patched(folder)
    adapter = copied(saved / "adapter", tmp_path / "adapter")
    file = adapter / rng.choice(["adapter_config.json", "adapter_model.safetensors"])
    file.write_bytes(file.read_bytes()[: rng.randrange(len(file.read_bytes()) - 9)])
    one = watched["llama"]
    with patched(one.model, "yarn", factor=4), pytest.raises(Exception, match=r".") as refused:
        load_adapter(one.model, adapter)
    assert type(refused.value).__name__ in ("ValueError", "SafetensorError")
    one.check()


def test_another_head_on_a_patched_checkpoint(saved):
    kind = transformers.LlamaForSequenceClassification
    assert patch_of(load_patched(saved / "stock", kind)).encoding.name == "yarn"


def test_missing_weights_are_not_made_up(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = copied(saved / "stock", tmp_path / "made")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of the weights .*'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_patched(folder)


@pytest.mark.parametrize("value", [1, [], {}, {"method": 3, "options": {}}, {"method": "yarn", "options": "x"}])
def test_a_damaged_record_of_an_adapter(value, saved, watched, tmp_path):
    adapter = copied(saved / "adapter", tmp_path / "adapter")
    entries = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**entries, "rope_ext": value}))
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_adapter(watched["llama"].model, adapter)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load(str(adapter))
    watched["llama"].check()


def test_a_full_disk_leaves_what_was_there(small, watched, saved, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    rows = evals.needle(*small, lengths=[96], depths=[50], text="noise", out=tmp_path / "rows", progress=False)
    rows.save(tmp_path / "rows")
    made = copied(saved / "stock", tmp_path / "made")
    adapter = copied(saved / "adapter", tmp_path / "adapter")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    tuned = get_peft_model(patch_model(build("llama"), "yarn", factor=4), LoraConfig(r=2, target_modules=["q_proj"]))
    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr("rope_ext.files.os.replace", full)
    monkeypatch.setattr(type(tuned), "save_pretrained", full)
    monkeypatch.setattr(type(watched["llama"].model), "save_pretrained", full)
    for write in (
        lambda: rows.save(tmp_path / "rows"),
        lambda: export(watched["llama"].model, made, overwrite=True),
        lambda: export(watched["llama"].model, tmp_path / "new"),
        lambda: save_adapter(tuned, adapter),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_file_where_a_folder_should_be(watched, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises((ValueError, OSError)):
        export(watched["llama"].model, tmp_path / "file" / "made")
    with pytest.raises(OSError, match="file"), whole_file(tmp_path / "file" / "page.html") as scratch:
        scratch.write_text("page")
    assert (tmp_path / "file").read_text() == "mine"


# what a file may not do


EVIL = """
import pathlib
from transformers import LlamaConfig, PreTrainedTokenizerFast
pathlib.Path(__file__).with_name("RAN").write_text("")
class Config(LlamaConfig):
    pass
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize(
    "start", [load_patched, lambda folder: load(str(folder)), lambda folder: cli.main(["inspect", str(folder)])]
)
def test_no_code_of_a_checkpoint_is_run(start, saved, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nobody is asked
    folder = copied(saved / "stock", tmp_path / "made")
    (folder / "evil.py").write_text(EVIL)
    for name, kind in (("config.json", "Config"), ("tokenizer_config.json", "Tokenizer")):
        entries = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        entries |= {"model_type": "evil", "auto_map": {f"Auto{kind}": f"evil.{kind}"}}
        (folder / name).write_text(json.dumps(entries))
    with contextlib.suppress(ValueError):
        assert start(folder) == 2
    assert not list(tmp_path.rglob("RAN"))


class Armed:
    def __reduce__(self):
        return (open, ("RAN", "w"))


def test_nothing_is_unpickled(saved, watched, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, adapter = copied(saved / "learned", tmp_path / "made"), copied(saved / "adapter", tmp_path / "adapter")
    (folder / "model.safetensors").unlink()
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"x": Armed()}, folder / "pytorch_model.bin")
    torch.save({"x": Armed()}, adapter / "adapter_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
    for start in (load_patched, lambda path: load(str(path))):
        with pytest.raises((ValueError, OSError), match="safetensors"):
            start(folder)
    with patched(watched["llama"].model, "yarn", factor=4), pytest.raises(ValueError, match="other kinds of files"):
        load_adapter(watched["llama"].model, adapter)
    entries = json.loads((adapter / "adapter_config.json").read_text())
    del entries["rope_ext"]
    (adapter / "adapter_config.json").write_text(json.dumps({**entries, "base_model_name_or_path": str(SMALL_MODEL)}))
    with pytest.raises(ValueError, match="other kinds of files"):
        load(str(adapter))
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize("place", ["../outside.safetensors", "/outside.safetensors", "sub/../../outside.safetensors"])
def test_an_index_leads_nowhere_else(place, saved, tmp_path):
    folder = copied(saved / "learned", tmp_path / "made")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    named = place.replace("/outside", str(tmp_path / "outside")) if place.startswith("/") else place
    index = {"metadata": {}, "weight_map": {"model.layers.0.position_encoding.x": named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for start in (load_patched, lambda path: load(str(path))):
        with pytest.raises(ValueError, match="not beside it"):
            start(folder)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index(index, saved, tmp_path):
    folder = copied(saved / "learned", tmp_path / "made")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_patched(folder)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_a_report_shows_names_and_answers_as_text(small, tmp_path):
    said = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    rows = evals.needle(*small, lengths=[96], depths=[50], text="noise", label=said, progress=False).rows
    hostile = [{**row, "label": said, "generated": said, "answer": said, "model_name": said} for row in rows]
    made = Sweep({"needle": Results("needle", hostile, 64)}, 64, said).write(tmp_path, said, said)
    page = Tags()
    page.feed(made.read_text())
    assert not [tag for tag, _ in page.found if tag == "script"]
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    assert {attributes["src"][:10] for tag, attributes in page.found if tag == "img"} == {"data:image"}
    assert "&lt;script&gt;" in made.read_text()
