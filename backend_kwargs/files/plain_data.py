"""Files of options, and the values in them: read whole, and bounded, since they may come from anyone."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.files.opened import content_of, opened_file

T = TypeVar("T")

LONGEST = 8 << 20  # bytes of a file
DEEPEST, MOST = 32, 1 << 17  # levels of nesting, and values at one level
BITS = 4096  # of an integer: Python prints no more than 4,300 digits
# Python's parser of TOML takes time quadratic in the number of a key's parts. Each match is a comment, a text of
# several lines, a key or a value; only a key has more than two parts. Text without an end is an error for the parser.
PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
DOT = r"[ \t]*+\.[ \t]*+"
TOKEN = re.compile(
    r"""#[^\n]*+|\"{3}(?:[^"\\]|\\(?s:.)?|"(?!""))*+"{0,5}|'{3}(?:[^']|'(?!''))*+'{0,5}"""
    rf"|(?P<deep>(?:{PART}{DOT}){{{DEEPEST}}})|{PART}(?:{DOT}{PART})*+"
)


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Return the tables of a TOML file; raise with the reason, naming `what` was to be read."""
    return _read(path, what, _parsed_toml)


def read_json(path: str | Path, what: str) -> Any:
    """Return the value in a JSON file; raise like `read_toml`."""
    return _read(path, what, lambda content: json.loads(content.decode()))


def read_text(path: str | Path, what: str) -> str:
    """Return a file's text; raise like `read_toml`."""
    return _read(path, what, bytes.decode)


def read_bytes(path: str | Path, what: str, longest: int) -> bytes:
    """Return a file's content, of at most `longest` bytes; raise like `read_toml`."""
    return _read(path, what, bytes, longest)


def check_plain(what: str, value: object) -> None:
    """Raise if `value` contains more levels or a larger integer than any option: later steps are recursive."""
    if why := why_not_plain(value):
        raise BackendKwargsError(f"{what} must be plain data: {why}.")


def why_not_plain(value: object) -> str:
    """Return what keeps `value` from being the value of an option, "" if nothing does."""
    level = [value]
    for _ in range(DEEPEST + 1):
        if any(isinstance(each, int) and each.bit_length() > BITS for each in level):
            return f"an integer has more than {BITS} bits"
        level = [*islice((item for each in level for item in _items(each)), MOST + 1)]
        if not level:
            return ""
        if len(level) > MOST:  # in Python, a few lists that contain each other are as many
            return f"it has more than {MOST} values"
    return f"it is nested more than {DEEPEST} levels deep"


def _read(path: str | Path, what: str, parse: Callable[[bytes], T], longest: int = LONGEST) -> T:
    try:
        with opened_file(path) as opened:
            value = parse(content_of(opened, longest))
        why = why_not_plain(value)
    except (OSError, ValueError, RecursionError) as error:
        why = error_text(error)
    if why:
        raise BackendKwargsError(f"Cannot read {what} from {str(path)!r}: {why}.")
    return value


def _parsed_toml(content: bytes) -> dict[str, Any]:
    text = content.decode()
    if any(token.lastgroup for token in TOKEN.finditer(text)):
        raise ValueError(f"a key has more than {DEEPEST} parts")
    return tomllib.loads(text)


def _items(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []
