"""Every error this package raises, and its wording: what was wanted, what came, the next step, in one line."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
from warnings import warn

LONGEST_VALUE = 80
LONGEST_SAYING = 200
PACKAGE = str(Path(__file__).parent)


class BackendKwargsError(ValueError):
    """A wrong name, value or spec. Holds one string, so that it pickles."""


class BrokenPluginError(BackendKwargsError):
    """An installed package offers a backend or a template that does not load."""


class BackendKwargsWarning(UserWarning):
    """Something asked for cannot act here, and a documented fallback runs in its place."""


def printable(text: str) -> str:
    """Return `text` with an escape in place of each character that a terminal or a log would act on."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def shown(value: Any) -> str:
    """Return `repr(value)`, cut so that a message stays one readable line."""
    return _one_line(repr(value), LONGEST_VALUE)


def _one_line(text: str, longest: int) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= longest else text[: longest - 3] + "..."


def error_text(error: BaseException) -> str:
    """Return an error of somebody else's code as one line, cut."""
    return f"{type(error).__name__}: {_one_line(str(error), LONGEST_SAYING)}"


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str = "") -> BackendKwargsError:
    """Say that `name` is no `kind`; suggest the nearest of `known`, or else the next step `otherwise`."""
    nearest = get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    advice = f"Did you mean {nearest[0]!r}?" if nearest else otherwise
    return BackendKwargsError(f"Unknown {kind} {shown(name)}. {advice}".rstrip())


def wrong_value(what: str, wanted: str, got: Any) -> BackendKwargsError:
    """Say that `what` must be `wanted` and what came instead."""
    return BackendKwargsError(f"{what} must be {wanted}, got {shown(got)} ({type(got).__name__}).")


@cache
def warn_once(message: object) -> None:
    """Warn with `message` once per process, at the line outside this package that led to it."""
    warn(str(message), BackendKwargsWarning, stacklevel=_levels_outside())


def _levels_outside() -> int:
    inside = itertools.takewhile(lambda frame: frame.f_code.co_filename.startswith(PACKAGE), _callers())
    return len(list(inside)) + 1


def _callers() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
