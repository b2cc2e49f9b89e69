"""What a page must not tell, since it is made to be shared: a text that tells it is left out, and its field says so.

Whoever makes a document writes of a place its last part (`file_of`). Here nothing is spelled otherwise: a text that
names a home, a store, the user or the host is left out whole, and of an exception only its class is kept. The same walk
makes texts printable and cuts what exceeds the schema's limits, so that a long name costs no page.
"""

import contextlib
import getpass
import os
import platform
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec import Struct, inspect
from msgspec.structs import replace

from backend_kwargs.errors import printable
from backend_kwargs.options.templates import BUILT_IN
from backend_kwargs.page.document import Document, Lane, Row

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
    if isinstance(value, Row | Lane) and value.status in FAILED:
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
    described = inspect.type_info(kind)
    assert isinstance(described, inspect.StructType)
    return {field.name: field.type for field in described.fields}


def _within(kind: Any, wanted: type) -> Any:
    """Return the part of a type that is `wanted`: the type itself, what it annotates, or a member of its union."""
    if isinstance(kind, inspect.Metadata):
        return _within(kind.type, wanted)
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((each for each in members if isinstance(each, wanted)), None)
