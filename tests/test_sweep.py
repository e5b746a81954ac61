"""Sweeps: the same rows for every setup, paired differences, one page; notebooks; several processes."""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SMALL_MODEL

from rope_ext import patch_model, unpatch_model
from rope_ext.api import patch_of
from rope_ext.cli import main
from rope_ext.evals import Limits, Results, needle, perplexity, setups, sweep
from rope_ext.evals.intervals import mean_difference, score_difference, wilson
from rope_ext.evals.sweeping import holds_to
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.tasks.perplexity import Perplexity
from rope_ext.evals.text import NOISE
from rope_ext.registry import find_method

TEXT = " ".join(NOISE * 60)
MODEL = ["--model", str(SMALL_MODEL)]
YARN = "yarn x4 beta_fast=4"


def test_setups():
    found = setups(["none", "yarn", "nope", "linear", "yarn"], [2, 4])
    assert [each and (each.name, each.options()) for each in found] == [
        None,
        ("yarn", {"factor": 2.0}),
        ("yarn", {"factor": 4.0}),
        ("nope", {}),
        ("linear", {"factor": 2.0}),
        ("linear", {"factor": 4.0}),
    ]
    with pytest.raises(ValueError, match="did you mean 'yarn'"):
        setups(["yarm"], [2])
    with pytest.raises(ValueError, match="`factor` is required"):
        setups(["yarn"], [])


def test_differences_of_scores():
    same = [1.0, 0.0, 1.0, 1.0, 0.0] * 4
    _, low, high = score_difference(same, same)
    assert -0.1 < low < 0 < high < 0.1
    gained = [1.0] * 20
    difference, low, high = score_difference(same, gained)
    assert difference == pytest.approx(0.4)
    assert 0 < low < difference < high < 1
    one = score_difference([0.0], [1.0])
    assert one[0] == 1
    assert one[1] < 0.3  # one pair proves little
    back = score_difference(gained, same)
    assert back == pytest.approx((-difference, -high, -low))
    rng = random.Random(0)  # how often the interval holds the true difference of paired draws
    hits = 0
    for _ in range(400):
        shared = [rng.random() for _ in range(30)]
        before, after = [float(u < 0.5) for u in shared], [float(u < 0.7) for u in shared]
        _, low, high = score_difference(before, after)
        hits += low <= 0.2 <= high
    assert 0.93 <= hits / 400 <= 1.0


def test_mean_differences():
    mean, low, high = mean_difference([0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 2.0])
    assert mean == 2
    assert 1 <= low < mean < high <= 3
    assert mean_difference([0.0] * 4, [1.0, 2.0, 3.0, 2.0]) == (mean, low, high)
    assert math.isnan(mean_difference([1.0], [2.0])[1])
    assert wilson(1.5, 3)[0] > wilson(1, 3)[0]


def test_what_length_a_needle_holds_to():
    def rows(*scores):
        return [{"length": at * 100, "depth": 50.0, "score": score} for at, score in enumerate(scores, 1)]

    assert holds_to(rows(1, 1, 0, 1)) == 200
    assert holds_to(rows(0, 1)) is None
    assert holds_to([*rows(1, 1), {"length": 100, "depth": None, "score": 0.0}]) == 200


@pytest.fixture(scope="module")
def swept(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    tasks = [Perplexity(TEXT, [200, 1024], bins=4), Needle(TEXT, [160, 1024], [10, 90], samples=2)]
    return sweep(*small, [None, find_method("yarn").from_options({"factor": 4, "beta_fast": 4})], tasks, out), out


def test_a_sweep_compares_the_same_rows(swept, small):
    found, out = swept
    assert patch_of(small[0]) is None
    assert (found.trained_length, found.baseline) == (256, "unpatched")
    unpatched, yarn = found.summary()
    assert (unpatched["label"], yarn["label"]) == ("unpatched", YARN)
    assert "ratio" not in unpatched["perplexity, beyond"]
    beyond = yarn["perplexity, beyond"]
    assert beyond["low"] <= beyond["ratio"] <= beyond["high"]
    assert beyond["ratio"] == pytest.approx(beyond["value"] / unpatched["perplexity, beyond"]["value"])
    assert yarn["needle, beyond"]["difference"] == pytest.approx(
        yarn["needle, beyond"]["value"] - unpatched["needle, beyond"]["value"]
    )
    assert yarn["needle, beyond"]["difference"] > 0
    assert unpatched["needle, inside"]["n"] == yarn["needle, inside"]["n"] == 4  # without the controls
    assert unpatched["holds_to"] == 160
    per_setup = {}
    for row in found.results["needle"].rows:
        per_setup.setdefault(row["label"], []).append((row["length"], row["depth"], row["sample"], row["answer"]))
    assert per_setup["unpatched"] == per_setup[YARN]
    lines = (out / "needle.jsonl").read_text()
    again = sweep(
        *small,
        [None, find_method("yarn").from_options({"factor": 4, "beta_fast": 4})],
        [Needle(TEXT, [160, 1024], [10, 90], samples=2)],
        out,
    )
    assert (out / "needle.jsonl").read_text() == lines
    assert again.results["needle"].rows == found.results["needle"].rows


def test_a_sweep_refuses_before_it_measures(small, tmp_path):
    with pytest.raises(ValueError, match="long_factor"):
        sweep(*small, [None, find_method("longrope").from_options({"factor": 2})], [Needle(TEXT, [160])], tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert patch_of(small[0]) is None


def test_a_sweep_of_a_patched_model_starts_from_there(small):
    model, tokenizer = small
    patch_model(model, "yarn", factor=2)
    try:
        found = sweep(model, tokenizer, setups(["linear"], [2]), [Needle(TEXT, [160], [50], control=False)])
        assert found.baseline == "yarn x2"
        assert [row["label"] for row in found.summary()] == ["yarn x2", "linear x2"]
        assert patch_of(model).encoding.name == "yarn"
    finally:
        unpatch_model(model)


def test_the_page_needs_nothing_else(swept):
    found, out = swept
    page = found.write(out, "Which <one>", "A lead & more.").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{5})', page)
    assert sources.count("data:") == len(sources) == 3
    assert "Which &lt;one&gt;" in page
    assert page.count("<h2>") == 3
    assert YARN in page
    assert {path.suffix for path in out.iterdir()} == {".jsonl", ".csv", ".png", ".html"}


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

PROBE = """<script>addEventListener("error", e => document.title = "broken");
addEventListener("load", () => {
  const images = [...document.images];
  document.body.dataset.seen = JSON.stringify({
    width: document.documentElement.scrollWidth, view: innerWidth, images: images.length,
    shown: images.filter(i => i.naturalWidth > 100 && i.getBoundingClientRect().width <= innerWidth).length,
    text: getComputedStyle(document.querySelector("p")).fontSize});
});</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [500, 1200])
def test_the_page_in_a_browser(swept, tmp_path, width):
    """It renders from disk, logs nothing, shows its pictures, and does not scroll sideways on a narrow screen."""
    found, out = swept
    page = found.write(out, "Which one", "A lead.").read_text()
    file = tmp_path / "page.html"
    file.write_text(page.replace("</body>", PROBE + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += ["--disable-background-networking", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert "<title>Which one</title>" in done.stdout
    (seen,) = re.findall(r'data-seen="([^"]*)"', done.stdout)
    seen = json.loads(seen.replace("&quot;", '"'))
    assert seen["images"] == seen["shown"] == 2
    assert seen["width"] <= seen["view"] <= width
    assert float(seen["text"].removesuffix("px")) >= 16


def test_from_a_notebook(small, tmp_path):
    pandas = pytest.importorskip("pandas")
    found = needle(*small, lengths=[160, 200], depths=[50], text="noise", samples=2, out=tmp_path, label="mine")
    assert isinstance(found, Results)
    assert found.trained_length == 256
    frame = found.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(found.rows) == 8
    assert set(frame["label"]) == {"mine"}
    assert {"length", "depth", "score", "answer_log_probability"} <= set(frame.columns)
    found.save(tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"needle.csv", "needle.png"}
    assert found.plot().axes
    with pytest.raises(TypeError, match="depth"):
        needle(*small, lengths=[160], depth=[50])
    (row,) = perplexity(*small, lengths=[200], text="builtin", limits=Limits(chunk=64)).rows
    assert row["perplexity"] > 1


def test_sweep_on_the_command_line(tmp_path, capsys):
    given = ["sweep", *MODEL, "--methods", "none,yarn", "--factor", "2", "--tasks", "needle", "--lengths", "160,400"]
    given += ["--depths", "50", "--text", "noise", "--out", str(tmp_path)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "2 setups" in shown
    assert (tmp_path / "index.html").exists()
    assert main([*given, "--tasks", "needles"]) == 2
    assert "unknown task 'needles'" in capsys.readouterr().err


def test_eval_all_and_its_pictures(tmp_path, capsys):
    given = ["eval", "all", *MODEL, "--lengths", "2400", "--pairs", "5", "--documents", "3", "--text", "builtin"]
    given += ["--subtasks", "niah_single_1,vt", "--depths", "50", "--out", str(tmp_path)]
    assert main(given) == 0
    made = {path.name for path in tmp_path.iterdir()}
    tasks = {"perplexity", "needle", "passkey", "kv_retrieval", "multi_doc_qa", "ruler"}
    assert made == {f"{task}.{kind}" for task in tasks for kind in ("jsonl", "csv", "png")}
    assert "prompt tokens" in capsys.readouterr().out


def test_an_adapter_is_evaluated_on_its_base(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from rope_ext import save_adapter
    from rope_ext.models import load

    base = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
    patch_model(base, "yarn", factor=2)
    tuned = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    save_adapter(tuned, tmp_path / "adapter")
    model, _ = load(str(tmp_path / "adapter"))
    assert patch_of(model).encoding.options() == {"factor": 2.0}
    x = torch.arange(5, 60)[None]
    with torch.no_grad():
        assert (model(x).logits - tuned.eval()(x).logits).abs().max() < 1e-4
    given = ["needle", "--model", str(tmp_path / "adapter"), "--lengths", "160", "--depths", "50", "--text", "noise"]
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    assert "yarn x2" in capsys.readouterr().out


def test_two_processes_equal_one(tmp_path, capsys):
    given = [
        "eval",
        "needle",
        *MODEL,
        "--text",
        "noise",
        "--lengths",
        "128,200",
        "--depths",
        "0,50,100",
        "--limit",
        "3",
    ]
    assert main([*given, "--out", str(tmp_path / "one")]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command += ["rope_ext", *given, "--out", str(tmp_path / "two")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

    def rows(folder):
        lines = [json.loads(line) for line in (tmp_path / folder / "needle.jsonl").read_text().splitlines()]
        return {line.pop("key"): (line["generated"], round(line["answer_log_probability"], 3)) for line in lines}

    assert rows("two") == rows("one")
    assert not list((tmp_path / "two").glob("*.rank*"))
    assert done.stdout.count("95 % interval") == 1


@pytest.mark.parametrize("seed", range(100))
def test_a_damaged_result_file_is_resumed(seed, small, tmp_path_factory, damaged):
    """Cut anywhere, a line lost, rubbish in between: rows that are whole stay, the others come again."""
    whole, rows = damaged
    rng = random.Random(seed)
    lines = whole.splitlines(keepends=True)
    if seed % 3 == 0:
        spoiled = whole[: rng.randrange(len(whole))]
    elif seed % 3 == 1:
        at = rng.randrange(len(lines))
        spoiled = b"".join(
            [*lines[:at], rng.randbytes(rng.randrange(1, 90)).replace(b"\n", b"") + b"\n", *lines[at + 1 :]]
        )
    else:
        at = rng.randrange(len(lines))
        broken = rng.choice([b"null\n", b"[]\n", b'{"key": 5}\n', b"{}\n", b"\n", lines[at][:-9] + b"\n"])
        spoiled = b"".join([*lines[:at], broken, *lines[at:]])
    out = tmp_path_factory.mktemp("damaged")
    (out / "needle.jsonl").write_bytes(spoiled)
    kept = [line for line in lines if line in spoiled.splitlines(keepends=True)]
    again = needle(*small, lengths=[128], depths=[0, 100], text="noise", out=out).rows
    assert again == rows
    after = (out / "needle.jsonl").read_bytes().splitlines(keepends=True)
    assert all(line in after for line in kept)
    assert {json.loads(line)["key"] for line in after if line in lines} == {json.loads(line)["key"] for line in lines}


@pytest.fixture(scope="module")
def damaged(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    rows = needle(*small, lengths=[128], depths=[0, 100], text="noise", out=out).rows
    return (out / "needle.jsonl").read_bytes(), rows


WRONG = {
    "--lengths": ["0", "-5", "a", "", "1e3", "128,,", "999999999999", "3"],
    "--depths": ["-1", "101", "x", "nan", ""],
    "--limit": ["0", "-1", "x", "1.5"],
    "--seed": ["x", "1.5", ""],
    "--text": ["/no/such", "", str(SMALL_MODEL / "nothing"), "hf:"],
    "--method": ["yarm", "", "YARN", "longrope", "yarn"],
    "--factor": ["0", "-2", "nan", "inf", "x", "1e400"],
    "--option": ["beta_fast", "=3", "beta_fast=-1", "unknown=1", "factor=[]"],
    "--max-memory": ["0", "-1", "x", "0.0001"],
    "--chunk": ["0", "-4", "x"],
    "--batch-tokens": ["0", "x"],
    "--device": ["tpu", "cuda:99", "cpu:x"],
    "--dtype": ["float8", ""],
    "--model": ["/no/such", "", str(SMALL_MODEL / "config.json")],
}


@pytest.mark.parametrize("seed", range(100))
def test_malformed_options_are_one_clear_line(seed, capsys, tmp_path):
    rng = random.Random(seed)
    chosen = rng.sample(sorted(WRONG), rng.randint(1, 3))
    given = ["needle", *MODEL, "--lengths", "128", "--depths", "50", "--text", "noise", "--out", str(tmp_path / "out")]
    given += [part for name in chosen for part in (f"{name}={rng.choice(WRONG[name])}",)]
    try:
        code = main(given)
    except SystemExit as exit_:
        code = exit_.code
    error = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2), given
    assert error[-1].startswith("rope-ext"), error
    assert "error" in error[-1]
    assert not any("Traceback" in line for line in error)
    assert not list(Path(tmp_path).rglob("*.jsonl"))
