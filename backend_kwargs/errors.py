"""Every error this package raises, and its wording: what was wanted, what came, the next step, in one line."""

from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from typing import Any
from warnings import warn

LONGEST_VALUE = 80


class BackendKwargsError(ValueError):
    """A wrong name, value or spec. Holds one string, so that it pickles."""


class BrokenPluginError(BackendKwargsError):
    """An installed package offers a backend or a template that does not load."""


class BackendKwargsWarning(UserWarning):
    """Something asked for cannot act here, and a documented fallback runs in its place."""


def shown(value: Any) -> str:
    """Return `repr(value)`, cut so that a message stays one readable line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str = "") -> BackendKwargsError:
    """Say that `name` is no `kind`; suggest the nearest of `known`, or else the next step `otherwise`."""
    nearest = get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    advice = f"Did you mean {nearest[0]!r}?" if nearest else otherwise
    return BackendKwargsError(f"Unknown {kind} {shown(name)}. {advice}".rstrip())


def wrong_value(what: str, wanted: str, got: Any) -> BackendKwargsError:
    """Say that `what` wants `wanted` and what came instead."""
    return BackendKwargsError(f"{what} wants {wanted}, got {shown(got)} ({type(got).__name__}).")


@cache
def warn_once(message: object) -> None:
    """Warn of `message` the first time it is told in this process."""
    warn(str(message), BackendKwargsWarning, stacklevel=2)
