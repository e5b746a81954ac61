"""The range of tested versions, its warning, and the script that runs the tests on each of them."""

import importlib
import warnings
from pathlib import Path

import pytest
import versions
from versions import MATRIX, Result, result_of

from rope_ext import registry

ROOT = Path(__file__).parent.parent
compat = registry.compat()


@pytest.mark.parametrize(
    ("package", "version"), [("transformers", "5.1.0"), ("transformers", "5.99.0"), ("torch", "3.0.0+cpu")]
)
def test_a_version_outside_the_tested_range_warns(package, version):
    with pytest.warns(UserWarning, match="is tested with") as caught:
        compat.warn_if_untested(package, version)
    for told in (package, version, *compat.TESTED[package], "methods --matrix"):
        assert told in str(caught[0].message)


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_a_version_inside_does_not(package):
    oldest, newest = compat.TESTED[package][0], compat.TESTED[package][-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in (oldest, newest, f"{newest}.post1", f"{newest}+cpu", f"{newest.rpartition('.')[0]}.9"):
            compat.warn_if_untested(package, version)


def test_it_warns_once_when_it_is_imported(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    monkeypatch.setattr("torch.__version__", compat.TESTED["torch"][0])
    with pytest.warns(UserWarning, match=r"5\.99\.0") as caught:
        importlib.reload(compat)
    assert len(caught) == 1


def test_the_range_is_said_once_and_followed():
    """pyproject.toml and README.md keep to the list."""
    oldest, newest = (compat.TESTED["transformers"][i].rpartition(".")[0] for i in (0, -1))
    required = (ROOT / "pyproject.toml").read_text()
    assert f'"transformers>={oldest},<6"' in required
    assert f'"torch>={compat.TESTED["torch"][0].rpartition(".")[0]}"' in required
    assert f"transformers {oldest} to {newest}" in (ROOT / "README.md").read_text()
    assert versions.promised() == list(compat.TESTED["transformers"])


@pytest.mark.parametrize(
    ("line", "code", "wanted"),
    [
        ("40 passed in 91.35s (0:01:31)", 0, Result(40, 0, 0, True)),
        ("= 3 passed, 2 skipped, 7 deselected, 4 warnings in 1.20s =", 0, Result(3, 0, 2, True)),
        ("9 failed, 40 passed, 1 error in 91.35s (0:01:31)", 1, Result(40, 10, 0, False)),
        ("2 skipped in 0.10s", 0, Result(0, 0, 2, False)),
        ("no tests ran in 0.01s", 5, Result()),
        ("3 passed in 1.20s", 3, Result(3, 0, 0, False)),  # an error outside the tests
        ("Killed", 137, Result()),
    ],
)
def test_pytests_last_line_is_read(line, code, wanted):
    assert result_of(f"....F 8 failed in words\n{line}\n", code) == wanted


def test_a_table_and_an_exit_code_that_do_not_hide_a_failure(monkeypatch, capsys):
    found = {"5.2.0": Result(5, 0, 1, True), "5.24.0/2.9.1": Result(4, 1, 0, False)}
    monkeypatch.setattr(versions, "install", lambda folder, version: None if version == "5.1.0" else Path(version))
    monkeypatch.setattr(versions, "run", lambda python, check, more: found[str(python)])
    assert versions.main(["5.2.0", "--tests", "test_api.py", "--", "-k", "llama"]) == 0
    assert capsys.readouterr().out.splitlines()[2] == "| `test_api.py` | 5 / 0 / 1 |"
    both = ["5.24.0/2.9.1", "5.2.0", "--tests", "test_api.py", MATRIX]
    assert versions.main(both) == 1
    assert "5.2.0" not in capsys.readouterr().out  # stopped at the first failure
    assert versions.main([*both, "--keep-going"]) == 1
    assert capsys.readouterr().out.splitlines()[2] == "| `test_api.py` | **failed** 4 / 1 / 0 | 5 / 0 / 1 |"
    assert versions.main(["5.1.0"]) == 1
    assert "`pip install` | **failed**" in capsys.readouterr().out
