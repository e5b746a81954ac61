"""The command, as a user calls it, on the small model."""

import csv
import json
import signal
import subprocess
import sys
import time

import pytest
from conftest import SMALL_MODEL

from rope_ext.cli import main

MODEL = ["--model", str(SMALL_MODEL)]
GRID = ["--text", "noise", "--lengths", "128,256,512", "--depths", "10,50,90"]


def test_inspect(capsys, tmp_path):
    picture = tmp_path / "f.png"
    assert main(["inspect", str(SMALL_MODEL), "--method", "yarn", "--factor", "2", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "trained length     256 tokens" in shown
    assert "usable length      512 tokens" in shown
    assert "ntk_by_parts" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_needle_unpatched_and_patched(capsys, tmp_path):
    out = ["--out", str(tmp_path)]
    assert main(["needle", *MODEL, *GRID, *out]) == 0
    assert main(["needle", *MODEL, *GRID, *out, "--method", "yarn", "--factor", "2", "--option", "beta_fast=4"]) == 0
    assert "95 % interval" in capsys.readouterr().out
    assert len((tmp_path / "needle.jsonl").read_text().splitlines()) == 2 * 12
    cells = list(csv.DictReader((tmp_path / "needle.csv").open()))
    assert {cell["label"] for cell in cells} == {"unpatched", "yarn x2 beta_fast=4"}
    assert len(cells) == 2 * 12
    assert (tmp_path / "needle.png").read_bytes().startswith(b"\x89PNG")


def test_perplexity(capsys, tmp_path):
    given = ["--text", "builtin", "--lengths", "256,512", "--bins", "4", "--out", str(tmp_path)]
    assert main(["perplexity", *MODEL, *given]) == 0
    assert "memory: about" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "perplexity.jsonl").read_text().splitlines()]
    assert [row["length"] for row in rows] == [256, 512]
    assert len(list(csv.DictReader((tmp_path / "perplexity.csv").open()))) == 8


def test_export(capsys, tmp_path):
    out = tmp_path / "made"
    given = ["export", *MODEL, "--method", "yarn", "--factor", "4", "--out", str(out)]
    assert main(given) == 0
    assert "loads with stock transformers" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 1024
    assert main(given) == 2
    assert "overwrite" in capsys.readouterr().err


ERRORS = [
    (["needle", "--method", "yarm", "--factor", "2"], "did you mean 'yarn'"),
    (["needle", "--method", "yarn"], "`factor` is required"),
    (["needle", "--factor", "2"], "need a --method"),
    (["needle", "--method", "yarn", "--factor", "2", "--option", "factor=3"], "both given"),
    (["needle", "--device", "foo"], "cannot use --device"),
    (["needle", "--lengths", "1000000000"], "use shorter lengths"),
    (["needle", "--method", "yarn", "--factor", "1e308"], "<= 1e+06"),
    (["needle", "--model", "/no/such/folder"], "cannot load --model"),
    (["needle", "--lengths", "20"], "leaves no room"),
    (["needle", "--depths", "200"], "percentages"),
    (["needle", "--text", "/no/such/text"], "text source"),
    (["perplexity", "--text", "noise", "--lengths", "4096"], "give a longer text"),
]


@pytest.mark.parametrize(("given", "message"), ERRORS)
def test_errors_are_one_sentence_and_exit_2(given, message, capsys, tmp_path):
    model = [] if "--model" in given else MODEL
    assert main([*given, *model, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.startswith("rope-ext: error: ")
    assert "\n" not in error


@pytest.mark.parametrize(
    "given", [[], ["nothing"], ["needle", "--lengths", "a"], ["needle", "--option", "beta"], ["export"]]
)
def test_wrong_usage_is_one_line_and_exits_2(given, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(given)
    assert exit_.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_keeps_its_rows_and_goes_on(tmp_path, how, code):
    lengths = ",".join(str(length) for length in range(200, 500, 4))
    command = [sys.executable, "-m", "rope_ext", "needle", *MODEL, "--text", "noise", "--lengths", lengths]
    command += ["--limit", "2", "--out", str(tmp_path)]
    file = tmp_path / "needle.jsonl"
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell starts deaf to it
    try:
        running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    finally:
        signal.signal(signal.SIGINT, heard)
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text().count("\n") >= 3):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(how)
    _, error = running.communicate(timeout=60)
    assert running.returncode == code
    if how == signal.SIGINT:
        assert error.strip().splitlines()[-1].startswith("rope-ext: interrupted. Finished rows are kept in")
        assert "Traceback" not in error
    kept = file.read_text().splitlines()[: file.read_text().count("\n")]
    assert len(kept) >= 3
    lengths = sorted({json.loads(line)["length"] for line in kept})[:2]
    short = [*command[3:-4], "--out", str(tmp_path), "--limit", "2"]
    short[short.index("--lengths") + 1] = ",".join(map(str, lengths))
    assert main(short) == 0
    lines = file.read_text().splitlines()
    assert lines[: len(kept)] == kept
    assert len(lines) < len(kept) + 12 * len(lengths)
    assert all(json.loads(line)["key"] for line in lines)


def test_inspect_of_a_patched_checkpoint_and_of_one_that_fits_nothing(capsys, tmp_path):
    given = ["export", *MODEL, "--method", "ntk_by_parts", "--factor", "4", "--out", str(tmp_path / "made")]
    assert main(given) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "made")]) == 0
    assert "llama: ntk_by_parts(factor=4.0)" in capsys.readouterr().out
    (tmp_path / "made" / "model.safetensors").write_bytes(b"cut off")
    assert main(["needle", "--model", str(tmp_path / "made"), "--out", str(tmp_path)]) == 2
    assert "cannot load --model" in capsys.readouterr().err


def test_help_of_every_command(capsys):
    for command in ([], ["inspect"], ["needle"], ["perplexity"], ["export"], ["demo"]):
        with pytest.raises(SystemExit) as exit_:
            main([*command, "--help"])
        assert exit_.value.code == 0
    assert "--model" in capsys.readouterr().out
