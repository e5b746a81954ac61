"""Every example runs to its end on the small model."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL_MODEL

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
SHOWS = {
    "quickstart": "usable length      1024 tokens",
    "save_and_load": "logits: True\nload_patched, same logits: True\nand back to the original: True",
    "compare_methods": "perplexity in each quarter of 512 tokens",
    "add_a_method": "hard_cut(factor=4.0)",
    "add_an_architecture": "refused: method 'lrope': tiny was never trained",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example(example, tmp_path):
    command = [sys.executable, str(example), str(SMALL_MODEL)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SHOWS[example.stem] in done.stdout
