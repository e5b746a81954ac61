"""Every example runs to its end on the small model."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SMALL_MODEL

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
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


@pytest.fixture(scope="module")
def notebook():
    """(source without magics, outputs) of each code cell of the notebook."""
    cells = json.loads((FOLDER / "quickstart.ipynb").read_text())["cells"]
    return [
        ("".join(line for line in cell["source"] if not line.startswith("%")), cell["outputs"])
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def test_the_notebook_shows_what_its_cells_give(notebook, monkeypatch, capsys):
    monkeypatch.chdir(FOLDER)
    names = {}
    for source, outputs in notebook:
        *statements, last = ast.parse(source).body
        exec(compile(ast.Module(statements, []), "quickstart.ipynb", "exec"), names)
        shown = [output for output in outputs if output["output_type"] == "execute_result"]
        if shown:
            value = eval(compile(ast.Expression(last.value), "quickstart.ipynb", "eval"), names)
            assert "".join(shown[0]["data"]["text/plain"]) == repr(value)
        else:
            exec(compile(ast.Module([last], []), "quickstart.ipynb", "exec"), names)
        printed = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
        assert capsys.readouterr().out == printed


def test_the_notebook_uses_public_names_only(notebook):
    nodes = [node for source, _ in notebook for node in ast.walk(ast.parse(source))]
    used = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    used += [node.name for node in nodes if isinstance(node, ast.alias)]
    assert "describe" in used
    assert [name for name in used if name.startswith("_")] == []
