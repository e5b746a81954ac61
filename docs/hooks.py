"""What the site is made of beside docs/: README.md, CHANGELOG.md, the notebook, docstrings with Sphinx roles."""

import re
import shutil
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "build" / "package" / "rope_ext"


def on_startup(**_: Any) -> None:
    """The package as setup.cfg has it installed, with ``patches`` inside, for mkdocstrings to read."""
    shutil.rmtree(PACKAGE, ignore_errors=True)
    PACKAGE.mkdir(parents=True)
    for entry in [*(ROOT / "rope_ext").iterdir(), ROOT / "patches"]:
        (PACKAGE / entry.name).symlink_to(entry)


def on_files(files: Files, config: MkDocsConfig) -> None:
    readme = (ROOT / "README.md").read_text().replace("](examples)", "](examples.md)").replace("](docs/", "](")
    notebook, made = MarkdownExporter().from_filename(str(ROOT / "examples" / "quickstart.ipynb"))
    pages: dict[str, Any] = {
        "index.md": readme,
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "quickstart.md": notebook,
        **made["outputs"],
    }
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))


class SphinxRoles(Extension):
    """``:func:`describe``` becomes a link, and the two colons before an indented block one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring:
            linked = re.sub(r":(?:class|func|meth|mod):`([^`]+)`", r"[`\1`][]", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", linked, flags=re.MULTILINE)
