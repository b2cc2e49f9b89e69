"""A document written as a page, as a part of a notebook, and as JSON; and read back, whoever wrote it.

A page is made to be shared: a text that names a home, a store, the user or the host is left out whole, and its field
says so; of an exception only its class is kept. Of a path, whoever makes a document writes only the last part
(`file_of`). The same walk makes texts printable and cuts what exceeds the schema's limits, so that a long name costs no
page.
"""

import base64
import contextlib
import getpass
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct, inspect
from msgspec.structs import replace

from backend_kwargs.errors import BackendKwargsError, printable
from backend_kwargs.files import read_bytes
from backend_kwargs.options.templates import BUILT_IN
from backend_kwargs.page import figures, plots, sentence
from backend_kwargs.page.document import LONGEST, Candidate, Document, checked, parse

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

LEFT_OUT = "(left out)"
# Texts may be anyone's: no pattern may start in the middle of what it has tried before, so that the time is linear.
# URLs that tell nothing: torch's hints name its documentation.
PUBLIC = re.compile(
    r"https?://(?:(?:[\w-]+\.)*(?:pytorch\.org|python\.org|nvidia\.com)|(?:meta-)?pytorch\.github\.io)(?:[/?#]\S*|(?!\S))"
    r"|https://github\.com/pytorch/\S*"
)
PLACE = re.compile(
    r"(?i)\w:/{2}"  # a URL
    r"|(?<![\w.…/\\<])[\\/]{1,2}[\w.-]+[\\/]+[\w.-]"  # an absolute path, a share
    r"|(?<![\w~])~[\w.-]*[\\/]"
    r"|(?:(?<![a-z])|%2F)(?:home|Users|Documents and Settings)(?:[\\/]+|%2F)\w"
    r"|torchinductor_\w"
)
EXCEPTION = re.compile(r"\b([A-Za-z]\w*(?:Error|Exception|Interrupt)):.*", re.DOTALL)
# Names of accounts and machines that anybody may have.
ANYONE = frozenset(
    ["root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "docker", "jenkins", "ci", "localhost"]
)
FAILED = ("fail_to_run", "oom", "failed", "fails")  # statuses whose reasons are texts of other code
OPTION = re.compile(r"[a-z][a-z0-9_.]*")


def here() -> frozenset[str]:
    """Return the homes, and the names of the user and the host, of this process."""
    names = ("HOME", "USERPROFILE", "USER", "LOGNAME", "USERNAME", "SUDO_USER", "HOSTNAME", "COMPUTERNAME")
    found = {os.environ.get(name) for name in names} | {platform.node()}
    for ask in (Path.home, getpass.getuser):
        with contextlib.suppress(RuntimeError, OSError, KeyError):  # no such user, or no home
            found.add(str(ask()))
    found |= {platform.node().partition(".")[0], os.environ.get("HOSTNAME", "").partition(".")[0]}
    return frozenset(name for name in found if name and len(name) > 1 and name.lower() not in ANYONE)


def shareable(document: Document, private: frozenset[str] | None = None) -> Document:
    """Return the document without what names a user, a machine or a store, and within the schema's limits."""
    # A user may be called "max": then "max_autotune" stays.
    options = (option.name for graph in document.graphs for option in graph.options if OPTION.fullmatch(option.name))
    said = {piece for name in (*BUILT_IN, *options) for piece in re.split(r"[._]", name)}
    told = partial(shared, private=(here() if private is None else private) - said)
    return _walked(document, inspect.type_info(Document), told)  # type: ignore[no-any-return]


def shared(text: str, private: frozenset[str]) -> str:
    """Return a text as it may be shared: of an exception its class, and nothing of what tells a place or a name."""
    text = EXCEPTION.sub(r"\1", text)
    named = any(re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", text) for name in private)
    return LEFT_OUT if named or PLACE.search(PUBLIC.sub("", text)) else text


def _walked(value: Any, kind: Any, told: Callable[[str], str]) -> Any:
    """Return a value, of a type that the schema describes as `kind`, as it may be shared."""
    if isinstance(value, Candidate) and value.status in FAILED:
        name, colon, _ = value.reason.partition(": ")  # an error's class, which is before its text
        value = replace(value, reason=name if colon and name.isidentifier() else value.reason)
    if isinstance(value, Struct):
        fields = _fields(type(value)).items()
        return type(value)(**{name: _walked(getattr(value, name), each, told) for name, each in fields})
    if isinstance(value, str):
        return _text(value, kind, told)
    if isinstance(value, tuple | list):
        kind = _within(kind, inspect.VarTupleType)
        return tuple(_walked(each, kind and kind.item_type, told) for each in value[: kind and kind.max_length])
    if isinstance(value, dict):
        return {_text(name, None, told): _walked(each, None, told) for name, each in value.items()}
    return value


def _text(text: str, kind: Any, told: Callable[[str], str]) -> str:
    if isinstance(kind, inspect.LiteralType):
        return text
    found = _within(kind, inspect.StrType)
    longest = (found and found.max_length) or 500
    kept = printable(told(text[: 4 * longest]), keep="\n\t")
    return kept if len(kept) <= longest else kept[: longest - 1] + "…"


@cache
def _fields(kind: type[Struct]) -> dict[str, inspect.Type]:
    return {field.name: field.type for field in inspect.type_info(kind).fields}  # type: ignore[attr-defined]


def _within(kind: Any, wanted: type) -> Any:
    """Return the part of a type that is `wanted`: the type itself, what it annotates, or a member of its union."""
    if isinstance(kind, inspect.Metadata):
        return _within(kind.type, wanted)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in members if isinstance(each, wanted)), None)


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
    script, style = (
        base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in ("page.js", "page.css")
    )
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
