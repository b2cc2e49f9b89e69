"""A document written as a page, as a part of a notebook, and as JSON; and read back, whoever wrote it."""

import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.files import read_bytes
from backend_kwargs.page import figures, plots, sentence
from backend_kwargs.page.document import LONGEST, Document, checked, parse
from backend_kwargs.page.sharing import shareable

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# In JSON inside HTML: what would end the element, and line separators, which end a line of a script.
ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
TITLES = (
    ("verdict", "Verdict"),
    ("warnings", "Warnings"),
    ("speedups", "Speedups"),
    ("races", "Race"),
    ("tradeoffs", "Trade-offs"),
    ("graphs", "Graphs"),
    ("advice", "What to change"),
    ("accuracy", "Accuracy"),
    ("changes", "Changes"),
)


def to_html(document: Document) -> str:
    """Return the page as one HTML file that opens without a network.

    Raises BackendKwargsError if a value breaks the schema.
    """
    shared = checked(shareable(document))
    return _render(
        "page.html.j2",
        document=shared,
        data=_markup(msgspec.json.encode(shared).decode().translate(ESCAPES)),
        sections=list(_sections(shared)),
    )


def fragment(document: Document) -> str:
    """Return the same parts for a notebook: HTML with styles that act only inside it, without a script."""
    return _render("fragment.html.j2", document=checked(shareable(document)))


def to_json(document: Document) -> bytes:
    """Return the data that the page contains, as `parse` reads it: without what must not be told."""
    return msgspec.json.encode(checked(shareable(document)))


def policy() -> str:
    """Return the Content-Security-Policy of every page: its own style and script, and nothing else."""
    hashes = (
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()
        for each in (_asset("page.js"), _asset("page.css"))
    )
    script, style = hashes
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _sections(document: Document) -> Iterator[tuple[str, str]]:
    found = {name: getattr(document, name) for name, _ in TITLES} | {"warnings": document.doubts}
    yield from ((name, title) for name, title in TITLES if found[name])
    if document.environment or document.notes:
        yield "measured", "How it was measured"


def _render(name: str, **context: object) -> str:
    style, script = _markup(_asset("page.css")), _markup(_asset("page.js"))
    template = _environment().get_template(name)
    return template.render(plots=plots, said=sentence, policy=policy(), style=style, script=script, **context)


@cache
def _asset(name: str) -> str:
    return (files("backend_kwargs.page") / "templates" / name).read_text(encoding="utf-8")


def _markup(text: str) -> "Markup":
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - files of this package, and JSON with ESCAPES


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("backend_kwargs.page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= figures.FILTERS
    return made


# ---- reading a page or its data

BEGIN, END = '<script type="application/json" id="report-data">', "</script>"  # no "<" is written between them


def from_html(content: bytes, what: str = "the page") -> Document:
    """Return the document that a page contains, or raise BackendKwargsError."""
    if len(content) > LONGEST:
        raise BackendKwargsError(f"Cannot read {what}: it is longer than {LONGEST} bytes.")
    _, *found = content.decode(errors="replace").split(BEGIN)
    if len(found) != 1 or END not in found[0]:
        got = "ends within it" if len(found) == 1 else f"contains {len(found)}"
        raise BackendKwargsError(f"Cannot read {what}: it must contain one report, as a page that -o wrote, and {got}.")
    return parse(found[0].partition(END)[0].encode(), what)


def read_document(path: str | Path) -> Document:
    """Return the document in a file that `-o` wrote, or raise BackendKwargsError."""
    content = read_bytes(path, "a report", LONGEST)
    read = parse if content.lstrip()[:1] == b"{" else from_html
    return read(content, repr(str(path)))
