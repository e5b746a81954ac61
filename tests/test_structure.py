"""How the library hangs together."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLACES = {"rope_ext": ROOT / "rope_ext", "rope_ext.patches": ROOT / "patches", "rope_ext.recipes": ROOT / "recipes"}


def sources():
    """Module name -> source, of all that a wheel installs."""
    found = {}
    for package, folder in PLACES.items():
        for file in folder.rglob("*.py"):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return {name: file.read_text() for name, file in found.items()}


class Imports(ast.NodeVisitor):
    """Modules that a module imports when it runs, wherever the statement stands; not what only type checkers read."""

    def __init__(self, module, package, known):
        self.module, self.package, self.known, self.found = module, package, known, set()

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node):
        self.found |= {alias.name for alias in node.names} & self.known

    def visit_ImportFrom(self, node):
        above = self.package.split(".")[: len(self.package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        inside = {f"{base}.{alias.name}" for alias in node.names} & self.known
        self.found |= inside or ({base} & self.known)


def graph(modules):
    made = {}
    for name, text in modules.items():
        package = name if any(other.startswith(f"{name}.") for other in modules) else name.rpartition(".")[0]
        imports = Imports(name, package, set(modules))
        imports.visit(ast.parse(text))
        made[name] = imports.found - {name}
    return made


def test_no_module_imports_itself_by_way_of_others():
    made = graph(sources())
    assert len(made) > 60
    assert "rope_ext.evals.cells" in made["rope_ext.evals.plots"]
    assert "rope_ext.evals.plots" in made["rope_ext.evals.results"]  # inside a function
    assert "rope_ext.patches.base" in made["rope_ext.patches.hosted"]  # relative
    TopologicalSorter(made).prepare()


def test_a_circle_is_seen():
    planted = sources()
    planted["rope_ext.evals.cells"] += "\ndef draw():\n    from rope_ext.evals import plots\n"
    with pytest.raises(CycleError):
        TopologicalSorter(graph(planted)).prepare()
