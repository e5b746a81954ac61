"""One self-contained HTML page: text, tables and pictures, no external file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path

from rope_ext.files import whole_file

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2733; background: #f6f7f9; margin: 0; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.4rem; }
section { background: #fff; border: 1px solid #e2e6ea; border-radius: 10px; }
section { padding: .4rem 1.2rem 1.2rem; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e9edf1; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
small { color: #5b6875; }
th { font-weight: 600; color: #5b6875; }
summary { cursor: pointer; color: #2166ac; }
img { max-width: 100%; height: auto; display: block; margin: .8rem auto; }
pre { background: #f0f2f5; border-radius: 6px; padding: .8rem 1rem; overflow-x: auto; font-size: .88rem; }
p.lead { font-size: 1.05rem; }
"""


class Page:
    """Collects sections; ``write`` makes the file."""

    def __init__(self, title: str, lead: str) -> None:
        self._title = title
        self._body = [f"<h1>{html.escape(title)}</h1>", f'<p class="lead">{html.escape(lead)}</p>']

    def section(self, title: str, text: str = "", *parts: str) -> None:
        """A titled box; ``parts`` come from :func:`table`, :func:`picture` and :func:`code`."""
        lead = f"<p>{html.escape(text)}</p>" if text else ""
        self._body.append(f"<section><h2>{html.escape(title)}</h2>{lead}{''.join(parts)}</section>")

    def write(self, path: Path) -> None:
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        icon = '<link rel="icon" href="data:,">'
        page = (
            f'<!doctype html><html lang="en"><head>{head}{icon}<title>{html.escape(self._title)}</title>'
            f"<style>{_STYLE}</style></head><body><main>{''.join(self._body)}</main></body></html>\n"
        )
        with whole_file(path) as scratch:
            scratch.write_text(page, encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[str]], folded: bool = False) -> str:
    """An HTML table that scrolls sideways on a narrow screen; ``folded`` to be opened with a click.

    What stands behind a line break in a cell is shown small below.
    """
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ("".join(f"<td>{_cell(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    made = f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<details><summary>{len(rows)} lines</summary>{made}</details>" if folded else made


def _cell(text: str) -> str:
    first, *more = html.escape(text).split("\n")
    return "".join([first, *(f"<br><small>{line}</small>" for line in more)])


def picture(path: Path, caption: str) -> str:
    """A PNG, embedded."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(caption, quote=True)}" src="data:image/png;base64,{data}">'


def code(text: str) -> str:
    """Preformatted text."""
    return f"<pre>{html.escape(text)}</pre>"
