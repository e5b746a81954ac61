"""The documents keep up with the code."""

import re
import shlex
from pathlib import Path

import pytest

from rope_ext import registry
from rope_ext.cli import _parser

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
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
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def commands(text):
    """What of this project a text tells to run, in its blocks and its inline code; each a list of words."""
    blocks = [block for language, block in FENCED.findall(text) if not language]
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    for part in re.split(r"\n| && ", "\n".join(blocks + inline)):
        if re.match(r"(\$ )?(rope-ext .|\S.*\.py\b)", part):
            yield [word for word in shlex.split(part.removeprefix("$ "), comments=True) if word != "..."]


def fault(words):
    """What is wrong with a command of this project, or None."""
    if words[0] == "rope-ext":
        try:
            _parser().parse_args(words[1:])
        except SystemExit:
            return words
        return None
    script = next(word for word in words if word.endswith(".py"))
    if not (ROOT / script).is_file():
        return script
    source = (ROOT / script).read_text()
    options = [word.lstrip("-") for word in words[words.index(script) :] if word.startswith("--")]
    return [option for option in options if not re.search(rf"\b{option}\b", source)] or None


def test_commands_exist_with_their_options():
    found = [words for document in DOCUMENTS for words in commands(document.read_text())]
    assert len(found) > 30
    assert [words for words in found if fault(words)] == []


@pytest.mark.parametrize(
    "line", ["rope-ext needel -h", "rope-ext needle --size 4", "python recipes/finetune.py --poze"]
)
def test_a_command_that_does_not_exist_is_found(line):
    (words,) = commands(f"Run `{line}`.")
    assert fault(words)


def test_python_blocks_compile():
    blocks = [found for document in DOCUMENTS for found in FENCED.findall(document.read_text())]
    for language, block in blocks:
        if language == "python" and not block.startswith("--8<--"):
            compile(block, block, "exec")
