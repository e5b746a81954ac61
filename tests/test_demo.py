"""The demo, on the small model: what one forward pass says equals what the tasks say, and the page that comes of it."""

import math
import re
from itertools import pairwise

import pytest
import torch
from conftest import SMALL_MODEL

from rope_ext import patched
from rope_ext.cli import main
from rope_ext.demo import Reading
from rope_ext.evals.runner import run
from rope_ext.evals.scoring import token_nll
from rope_ext.evals.tasks.needle import Needle
from rope_ext.evals.text import read_text


@pytest.mark.parametrize("length", [200, 400])
def test_a_reading_finds_what_the_needle_task_finds(small, length):
    model, tokenizer = small
    text = read_text("noise")
    with patched(model, "yarn", factor=2, beta_fast=4):
        (reading,) = run(Reading(text, [length], [50], 64), model, tokenizer)
        (needle,) = run(Needle(text, [length], [50], control=False), model, tokenizer)
    for name in ("answer", "generated", "score", "true_depth"):
        assert reading[name] == needle[name]
    assert reading["score"] == 1
    assert reading["answer_log_probability"] == pytest.approx(needle["answer_log_probability"], abs=1e-3)


def nll_of_bins(row):
    edges = row["bin_edges"]
    widths = [end - start for start, end in pairwise(edges)]
    return sum(width * math.log(value) for width, value in zip(widths, row["bin_perplexity"], strict=True))


def test_a_reading_bins_every_token_of_its_prompt_once(small):
    model, tokenizer = small
    task = Reading(read_text("noise"), [300], [50], 64)
    (row,) = run(task, model, tokenizer)
    nll = token_nll(model, torch.tensor([task.question(tokenizer, task.rows()[0]).ids]))
    assert row["bin_edges"] == [0, 64, 128, 192, 256, len(nll)]
    assert nll_of_bins(row) == pytest.approx(float(nll.sum()), rel=1e-4)
    assert row["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-4)
    shifted = {**row, "bin_edges": [0, 65, *row["bin_edges"][2:]]}  # twin: the check sees a token counted twice
    assert nll_of_bins(shifted) != pytest.approx(float(nll.sum()), rel=1e-4)


@pytest.mark.parametrize(("variant", "bins", "needles"), [(["--quick"], 20, 1), ([], 24, 3)])
def test_the_page_needs_nothing_else(variant, bins, needles, capsys, tmp_path):
    given = ["demo", "--model", str(SMALL_MODEL), *variant, "--out", str(tmp_path)]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "minutes on this machine" in shown
    assert re.search(rf"^unpatched: perplexity .*; needles found: [0-{needles}] of {needles}$", shown, re.MULTILINE)
    assert re.search(rf"^yarn x2: perplexity .*; needles found: [0-{needles}] of {needles}$", shown, re.MULTILINE)
    page = (tmp_path / "index.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{5})', page)
    assert len(sources) == 4
    assert set(sources) == {"data:"}
    assert page.count("<tr>") == 1 + bins + 1 + 2 * needles
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl", ".csv", ".png", ".html"}
    before = (tmp_path / "reading.jsonl").read_text()
    assert main(given) == 0
    assert (tmp_path / "reading.jsonl").read_text() == before
