"""The matrix of methods and architectures: what runs, what is refused, and that the table in docs/ says so."""

from pathlib import Path

import pytest

from rope_ext import conformance, registry
from rope_ext.cli import main

TABLE = (Path(__file__).parent.parent / "docs" / "matrix.md").read_text()


def row(method):
    cells = next(line for line in TABLE.splitlines() if line.startswith(f"| `{method}` |"))
    header = next(line for line in TABLE.splitlines() if line.startswith("| method |"))
    names, found = ([cell.strip() for cell in line.strip("|").split("|")] for line in (header, cells))
    return dict(zip(names, found, strict=True))


def test_the_table_has_every_method_and_nothing_failed():
    for method in registry.METHODS:
        found = row(method)
        assert set(found) == {"method", *conformance.ARCHITECTURES}
        assert set(found.values()) - {f"`{method}`"} <= {f"ok ({len(conformance.CHECKS)})", "refused"}


def test_every_seam_is_hosted_where_the_documents_say():
    """Decoders that the package knows host everything; refusals are for a reason of the method or the architecture."""
    for method, kind in registry.METHODS.items():
        found = row(method)
        for architecture in ("llama", "mistral", "qwen2", "qwen3", "bloom", "mpt", "falcon"):
            assert found[architecture].startswith("ok"), (method, architecture)
        for architecture in ("t5", "umt5"):
            assert found[architecture].startswith("ok") != getattr(kind, "causal_only", False)
        for architecture in ("gemma2", "gemma3_text", "deepseek_v2", "deepseek_v3", "t5gemma", "gpt_neox", "olmo2"):
            assert found[architecture].startswith("ok") == (kind.seam == "rotary")


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("qwen2", "dca"), ("t5", "cope"), ("gemma2", "dynamic"), ("gpt_neox", "yarn"), ("umt5", "shaw"), ("mpt", "xpos")],
)
def test_cells_are_what_the_table_says(architecture, method):
    cell = conformance.check(architecture, method)
    assert not cell.failed
    assert row(method)[architecture] == ("refused" if cell.refused else str(cell))


def test_a_method_that_breaks_a_contract_fails(monkeypatch):
    """Twin: dynamic scaling as stock computes it, whose cached keys keep the base of their time."""
    monkeypatch.setattr(conformance, "usual_options", lambda method, model: {"factor": 4, "exact": False})
    cell = conformance.check("llama", "dynamic")
    assert any("cached decoding" in failure for failure in cell.failed)
    assert str(cell).startswith("FAILED")


def test_the_command(capsys, tmp_path, monkeypatch):
    wanted = ["methods", "--matrix", "--architectures", "llama,gemma2", "--methods", "yarn,alibi"]
    assert main([*wanted, "--out", str(tmp_path / "matrix.md")]) == 0
    printed = capsys.readouterr().out
    assert "| `yarn` | ok (9) | ok (9) |" in printed
    assert "| `alibi` | ok (9) | refused |" in printed
    assert "- gemma2 hosts no bias encodings here (hosted seams: rotary): `alibi`" in printed
    assert (tmp_path / "matrix.md").read_text() == printed
    assert main(["methods"]) == 0
    assert "transformer_xl" in capsys.readouterr().out
    assert main(["methods", "--matrix", "--architectures", "lama"]) == 2
    assert "no tiny model of 'lama'" in capsys.readouterr().err
    monkeypatch.setattr(conformance, "usual_options", lambda method, model: {"factor": 4, "exact": False})
    assert main(["methods", "--matrix", "--architectures", "llama", "--methods", "dynamic"]) == 1
    assert "1 of 1 pairs failed" in capsys.readouterr().err
