"""The recipe itself: settings, steps, several processes, being killed, what it leaves."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from conftest import SMALL_MODEL, build, logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext import describe, load_adapter, patch_model
from rope_ext.recipes import finetune

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "finetune.py"
SHORT = {
    "model": str(SMALL_MODEL),
    "method": "yarn",
    "factor": 4.0,
    "train_length": 64,
    "global_batch": 4,
    "max_steps": 6,
    "lr": 0.003,
    "warmup": 2,
    "lora_rank": 4,
    "save_every": 2,
    "tracker": "none",
}
SAME = 1e-5
"""Losses of the same step, computed by other numbers of processes."""


def command(out, processes=1, **settings):
    given = []
    for name, value in {**SHORT, "out": str(out), **settings}.items():
        flag = isinstance(value, bool)
        given.append(f"--{'' if value else 'no-'}{name}" if flag else f"--{name}={value}")
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *(many if processes > 1 else []), str(RECIPE), *given]


ON_CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENVIRONMENT = {**os.environ, **ON_CPU}


def finish(out, processes=1, **settings):
    done = subprocess.run(
        command(out, processes, **settings), env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def here(monkeypatch):
    """The recipe in this process, where starting another one proves nothing more: settings -> None."""
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(finetune, "prepare_allocator", lambda: None)  # it is for the whole process

    def run(out, **settings):
        monkeypatch.setattr(sys, "argv", command(out, **settings)[1:])
        try:
            finetune.main()
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    return run


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines() if "loss" in line]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A whole run, not stopped."""
    out = tmp_path_factory.mktemp("plain") / "run"
    printed = finish(out, merge=True)
    return out, printed


def test_a_run_learns_and_leaves_what_it_promises(plain):
    out, printed = plain
    found = losses(out)
    assert len(found) == 6
    assert found[-1] < found[0]
    entries = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert {"step", "loss", "lr", "gradient_norm", "tokens_per_second", "peak_memory_gb"} <= set(entries[0])
    assert entries[0]["lr"] < entries[1]["lr"] == 0.003
    assert "memory: about" in printed
    assert "loads with stock transformers (as 'yarn')" in printed

    base = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32).eval()
    x = torch.arange(5, 200)[None]
    before = logits(patch_model(base, "yarn", factor=4), x)
    adapted = load_adapter(base, out / "adapter").eval()
    after = logits(adapted.base_model.model, x)
    assert (after - before).abs().max() > 1e-3
    merged = AutoModelForCausalLM.from_pretrained(out / "merged").eval()  # what any other tool would do
    assert (logits(merged, x) - after).abs().max() < 1e-4
    assert describe(merged).method == "yarn"
    assert AutoTokenizer.from_pretrained(out / "merged").model_max_length == 1024
    with pytest.raises(ValueError, match="trained under yarn"):
        load_adapter(AutoModelForCausalLM.from_pretrained(SMALL_MODEL), out / "adapter")


def test_two_processes_equal_one(plain, tmp_path):
    out, _ = plain
    finish(tmp_path / "two", processes=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(out), abs=SAME)


def test_other_micro_batches_equal_one_and_other_seeds_do_not(plain, here, tmp_path):
    out, _ = plain
    here(tmp_path / "wide", micro_batch=4, tracker="tensorboard")
    assert list((tmp_path / "wide" / "rope_ext").glob("events.out.tfevents.*"))
    assert losses(tmp_path / "wide") == pytest.approx(losses(out), abs=SAME)
    here(tmp_path / "seed", seed=1, max_steps=2)
    assert losses(tmp_path / "seed") != pytest.approx(losses(out)[:2], abs=100 * SAME)


@pytest.mark.parametrize("after", [1, 3, 4])
def test_killed_and_resumed_has_the_same_losses(plain, tmp_path, after):
    out, _ = plain
    run = subprocess.Popen(
        command(tmp_path / "run"), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    log = tmp_path / "run" / "log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None:
        if log.exists() and log.read_text().count("\n") >= after:
            run.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    run.wait()
    finish(tmp_path / "run", resume=True)
    assert losses(tmp_path / "run") == losses(out)
    entries = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert entries == [1, 2, 3, 4, 5, 6]


def test_a_folder_in_use_is_not_overwritten(plain):
    out, _ = plain
    done = subprocess.run(command(out), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "--resume" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert len(losses(out)) == 6


def refused(run, out, **settings):
    """The one line that a run ends with."""
    with pytest.raises(SystemExit) as end:
        run(out, **settings)
    assert "\n" not in end.value.code
    return end.value.code


def test_a_run_resumes_with_its_own_settings_only(plain, here, tmp_path):
    out, run = plain[0], tmp_path / "run"
    shutil.copytree(out, run)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    said = refused(here, run, resume=True, max_steps=8, method="linear", lora_alpha=64)
    assert "method='yarn' (now 'linear'), lora_alpha=32 (now 64)" in said
    (run / "checkpoint.pt").write_bytes(before[run / "checkpoint.pt"][:1000])
    assert "checkpoint.pt is no checkpoint of this recipe, or damaged" in refused(here, run, resume=True, max_steps=8)
    (run / "checkpoint.pt").write_bytes(before[run / "checkpoint.pt"])
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "lo')
    here(run, resume=True, max_steps=8)
    assert losses(run)[:6] == losses(out)
    assert len(losses(run)) == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"pose": True, "target_length": 1024},
        {"s2": True},
        {"packed": False, "dora": True, "gradient_checkpointing": False},
        {"train_embeddings": True, "train_norms": True, "rslora": True, "schedule": "constant"},
        {"method": "alibi", "factor": 0.0},
        {"method": "kerple", "factor": 0.0},
        {"method": "unpatched", "factor": 0.0},
        {"dtype": "bfloat16"},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_the_levers(settings, here, tmp_path):
    here(tmp_path / "run", **{**settings, "max_steps": 4, "save_every": 0, "merge": True})
    found = losses(tmp_path / "run")
    assert all(loss == loss and loss < 20 for loss in found)
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").exists()
    assert (tmp_path / "run" / "merged" / "config.json").exists()


@pytest.mark.parametrize(
    ("host", "method"), [("bloom", "alibi"), ("t5", "t5_bias"), ("umt5", "kerple"), ("mpt", "rope")]
)
def test_other_architectures(host, method, here, tmp_path):
    """The small model's tokenizer on random models of other families."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra_id_{number}>" for number in range(20)]})
    model = build(host, vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "method": method, "factor": 0.0, "max_steps": 4, "merge": True}
    here(tmp_path / "run", **given)
    found = losses(tmp_path / "run")
    assert len(found) == 4
    assert all(loss == loss for loss in found)
    finish(tmp_path / "two", processes=2, **given)
    assert losses(tmp_path / "two") == pytest.approx(found, abs=SAME)


def test_evaluation_while_training(here, capsys, tmp_path):
    here(tmp_path / "run", eval_every=2, max_steps=2, target_length=512)
    (entry,) = [
        json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines() if "needle" in line
    ]
    assert entry["step"] == 2
    assert entry["perplexity"] > 1
    assert 0 <= entry["needle"] <= 1
    here(tmp_path / "far", eval_every=2, max_steps=2, target_length=1_000_000)  # longer than the text
    assert len(losses(tmp_path / "far")) == 2
    assert "no evaluation at 1000000 tokens" in capsys.readouterr().out


def test_estimate_stops_before_training(here, capsys, tmp_path):
    here(tmp_path / "run", estimate=True, devices=4)
    assert "GB per device" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_settings_come_from_the_command_over_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(
        yaml.safe_dump({"method": "linear", "factor": 2, "option": {"original_max_position_embeddings": 99}})
    )
    settings = finetune.parse(["--config", str(file), "--factor", "8", "--pose"])
    assert (settings.method, settings.factor, settings.pose) == ("linear", 8.0, True)
    assert settings.option == {"original_max_position_embeddings": 99}
    assert finetune.parse(["--option", "beta_fast=16", "--option", "truncate=false"]).option == {
        "beta_fast": 16,
        "truncate": False,
    }


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"methods": "yarn"}, "unknown setting 'methods'"),
        ({"max_steps": "many"}, "'max_steps' must be"),
        ({"pose": 1}, "'pose' must be"),
        ({"max_steps": True}, "'max_steps' must be"),
        ({"schedule": "linear"}, "'schedule'"),
        ({"lr": -1.0}, "'lr'"),
        ({"global_batch": 3, "micro_batch": 2}, "'micro_batch'"),
        ({"dtype": "float8"}, "'dtype'"),
        ({"tracker": "notebook"}, "'tracker'"),
        ({"global_batch": 0}, "'global_batch'"),
        ({"lr": float("inf")}, "'lr'"),
        ({"lora_rank": 0}, "'lora_rank'"),
        ({"lora_dropout": 1.5}, "'lora_dropout'"),
        ({"warmup": -1}, "'warmup'"),
        ({"max_norm": 0.0}, "'max_norm'"),
        ({"target_length": -5}, "'target_length'"),
        ({"save_every": -1}, "'save_every'"),
        ({"eval_every": -1}, "'eval_every'"),
        ({"devices": -2}, "'devices'"),
        ({"seed": -1}, "'seed'"),
        ({"data": ""}, "'data'"),
        (["pose"], "must hold lines 'setting: value'"),
    ],
)
def test_bad_settings_are_named(written, said, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(written))
    with pytest.raises(SystemExit, match=said):
        finetune.parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "nowhere.yaml"], "config='nowhere.yaml'"),
        (["--config", "."], "config='.'"),
    ],
)
def test_what_cannot_be_read_is_named(arguments, said):
    with pytest.raises(SystemExit, match=re.escape(said)):
        finetune.parse(arguments)


def test_a_broken_settings_file_is_named(tmp_path):
    (tmp_path / "broken.yaml").write_text("pose: [1")
    with pytest.raises(SystemExit, match=r"broken.yaml' cannot be read"):
        finetune.parse(["--config", str(tmp_path / "broken.yaml")])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "yarm"}, "yarm"),
        ({"data": "nowhere.txt"}, "data='nowhere.txt'"),
        ({"pose": True, "target_length": 16}, "target_length=16 is shorter than train_length=64"),
        ({"method": "dca", "s2": True, "factor": 0}, "s2"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_what_a_run_lacks_is_one_line_and_nothing_is_written(settings, said, here, tmp_path):
    done = refused(here, tmp_path / "run", **settings)
    assert said in done
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--lora-rank", "4"], "unrecognized arguments: --lora-rank"),
        (["--option", "beta_fast"], "--option: 'beta_fast' is not NAME=VALUE"),
    ],
)
def test_wrong_usage_is_one_line(given, said, capsys):
    with pytest.raises(SystemExit):
        finetune.parse(given)
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_settings_files_are_valid(file):
    finetune.parse(["--config", str(file)])


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_files_load(file):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))
    assert config.num_processes >= 1
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--help"]
    assert subprocess.run(launch, capture_output=True, check=False, env=ENVIRONMENT).returncode == 0


def test_learning_rates():
    settings = finetune.Settings(lr=1.0, warmup=4, max_steps=24)
    rates = [finetune.learning_rate(settings, step) for step in range(25)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[24] == pytest.approx(0.1)
    settings.schedule = "constant"
    assert finetune.learning_rate(settings, 20) == 1.0


@pytest.mark.parametrize("method", ["yarn", "alibi", "kerple"])
def test_a_patched_model_shards_trains_and_reloads(method, tmp_path):
    """FSDP2's fully_shard on a mesh of two CPU processes; accelerate itself ignores FSDP on CPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, str(ROOT / "tests" / "sharded.py"), str(tmp_path), method],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["shards"] > 10
    assert result["sharded"] == pytest.approx(result["whole"], abs=SAME)
    assert result["whole"][0] != pytest.approx(result["whole"][2], abs=100 * SAME)
    assert result["reloaded"] == result["went on"]
