"""The documents keep up with the code."""

import re
from pathlib import Path

import pytest

from rope_ext import registry

ROOT = Path(__file__).parent.parent
BUILT_IN = [method for method in registry.METHODS.values() if method.__module__.startswith("rope_ext.")]


@pytest.mark.parametrize("document", ["README.md", "docs/methods.md"])
def test_every_method_has_a_row(document):
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / document).read_text(), flags=re.MULTILINE)
    assert sorted(rows) == sorted(method.name for method in BUILT_IN)


def test_the_readme_says_what_the_code_says_about_fine_tuning():
    said = {"no": "not needed", "recommended": "recommended", "yes": "required"}
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5 and cells[1].strip("`") in registry.METHODS:
            method = registry.METHODS[cells[1].strip("`")]
            assert said[cells[3].split(" ")[0]] == method.fine_tuning, method.name


def test_links_and_pictures_exist():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
