"""What a page must not tell, since it is made to be shared: homes, user and host names, stores, and what lies where.

Paths keep their last two parts, with which whoever has the file finds it. The same walk makes texts printable and cuts
what exceeds the schema's limits, so that a long name costs no page.
"""

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct, inspect

from backend_kwargs.errors import printable
from backend_kwargs.options.templates import BUILT_IN
from backend_kwargs.page.document import Code, Document

T = TypeVar("T")

# URLs that tell nothing: torch's hints name its documentation.
PUBLIC = re.compile(
    r"https?://(?:[\w-]+\.)*(?:pytorch\.org|python\.org|nvidia\.com)(?:[/?#]|$)|https://github\.com/pytorch/"
)
# Texts may be anyone's: no pattern may start in the middle of what it has tried before, so that the time is linear.
URL = re.compile(r"(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*:/{2,}[^\s\"'<>()\[\]{}]+")
# Names of accounts and machines that anybody may have.
ANYONE = frozenset(
    ["root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "docker", "jenkins", "ci", "localhost"]
)
END = r"[^\\/\s\"'<>:,;()]"  # a character of one part of a path
HOMES = (
    re.compile(rf"(?<![\w./-])[\w.-]*(?:/[\w.-]+)*/(?:home|Users)/{END}+"),
    re.compile(r"(?<![\w/])/root(?![\w-])"),
    re.compile(rf"(?i)[a-z]:(?:\\+|/)(?:Users|Documents and Settings)(?:\\+|/){END}+"),
    re.compile(r"(?i)%2F(?:home|Users)%2F[^%\s\"']+"),
    re.compile(r"(?<![\w~])~[\w.-]+(?=/)"),
)
SHARE = re.compile(rf"(?<![\\\w])\\\\(?:\\\\)?{END}+(?:\\+{END}+)+")
CACHE = re.compile(r"torchinductor_[\w.-]+")
LONG_PATH = re.compile(rf"(?<![\w.…/\\])(?<!http:)(?<!https:)(?:~|[A-Za-z]:)?(?:[\\/]+{END}+){{3,}}")
OPTION = re.compile(r"[a-z][a-z0-9_.]*")
SEPARATOR = re.compile(r"[\\/]+")


class Private(NamedTuple):
    """Who must not be named."""

    homes: tuple[str, ...]
    names: tuple[tuple[str, str], ...]  # with what is written in place of each


def here() -> Private:
    """Return the homes, and the names of the user and the host, of this process."""
    environment = os.environ
    homes = {environment.get("HOME"), environment.get("USERPROFILE")}
    users = {environment.get(name) for name in ("USER", "LOGNAME", "USERNAME", "SUDO_USER")}
    with contextlib.suppress(RuntimeError):  # no home
        homes.add(str(Path.home()))
    with contextlib.suppress(OSError, KeyError):  # no such user
        users.add(getpass.getuser())
    hosts = {platform.node(), environment.get("HOSTNAME"), environment.get("COMPUTERNAME")}
    hosts |= {host.partition(".")[0] for host in hosts if host}
    names = [(name, "<user>") for name in _longest_first(users)] + [(name, "<host>") for name in _longest_first(hosts)]
    return Private(tuple(home for home in _longest_first(homes) if len(home) > 1), tuple(names))


def _longest_first(texts: Iterable[str | None]) -> list[str]:
    return sorted(filter(None, texts), key=len, reverse=True)


def shareable(document: Document, private: Private | None = None) -> Document:
    """Return the document without what names a user, a machine or a store, and within the schema's limits."""
    private = private or here()
    # A user may be called "max": then "max_autotune" stays, and a path through "max" still goes.
    options = (option.name for graph in document.graphs for option in graph.options if OPTION.fullmatch(option.name))
    said = {piece for name in (*BUILT_IN, *options) for piece in re.split(r"[._]", name)}
    names = tuple((name, instead) for name, instead in private.names if name not in said)
    return _Walk(Private(private.homes, names)).of(document, inspect.type_info(Document))


def anonymous(text: str, private: Private) -> str:
    """Return `text` without what names a user, a machine or a store."""
    text = URL.sub(lambda url: url[0] if PUBLIC.match(url[0]) else "<url>", text)
    for home in private.homes:
        text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
    for pattern in HOMES:
        text = pattern.sub("~", text)
    text = CACHE.sub("torchinductor_<user>", SHARE.sub("<share>", text))
    text = LONG_PATH.sub(lambda path: "…/" + "/".join(SEPARATOR.split(path[0])[-2:]), text)
    for name, instead in private.names:
        if len(name) > 1 and name.lower() not in ANYONE:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
    return text


class _Walk:
    """Goes through a document along its schema."""

    def __init__(self, private: Private) -> None:
        self.private = private

    def of(self, value: T, kind: inspect.Type | None) -> T:
        """Return `value`, of a type that the schema describes as `kind`, as it may be shared."""
        return self._of(value, kind)  # type: ignore[no-any-return]

    def _of(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Code):
            text = anonymous(printable(value.text, keep="\n\t"), self.private)
            return Code.of(self._text(value.name, None), text, self._text(value.direction, None))
        if isinstance(value, Struct):
            known = _fields(type(value))
            return type(value)(**{name: self._of(getattr(value, name), each) for name, each in known.items()})
        if isinstance(value, str):
            return self._text(value, kind)
        if isinstance(value, tuple | list):
            kind = _within(kind, inspect.VarTupleType)
            return tuple(self._of(each, kind and kind.item_type) for each in value[: kind and kind.max_length])
        if isinstance(value, dict):
            return {self._text(name, None): self._of(each, None) for name, each in value.items()}
        return value

    def _text(self, text: str, kind: Any) -> str:
        if isinstance(kind, inspect.LiteralType):
            return text
        found = _within(kind, inspect.StrType)
        longest = (found and found.max_length) or 500
        shared = anonymous(printable(text[: 4 * longest], keep="\n\t"), self.private)
        return shared if len(shared) <= longest else shared[: longest - 1] + "…"


@cache
def _fields(kind: type[Struct]) -> dict[str, inspect.Type]:
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return {field.name: field.type for field in described.fields}


def _within(kind: Any, wanted: type) -> Any:
    """Return the part of a type that is `wanted`: the type itself, what it annotates, or a member of its union."""
    if isinstance(kind, inspect.Metadata):
        return _within(kind.type, wanted)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in members if isinstance(each, wanted)), None)
