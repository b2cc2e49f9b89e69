"""Every error of this package, and its wording: the expected value, the given value, the next step, in one line.

Text is made printable where it leaves: in `str()` of these errors and in warnings, and in what the command line prints.
So no other call needs to remember it.
"""

import contextlib
import functools
import itertools
import sys
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from importlib.metadata import requires
from pathlib import Path
from warnings import warn

LONGEST_VALUE = 80
LONGEST_SAYING = 200
PACKAGE = str(Path(__file__).parent)
BETWEEN = (str(contextlib.__file__), str(functools.__file__))


class BackendKwargsError(ValueError):
    """A wrong name, value or spec. Contains one string, so that it pickles."""

    def __str__(self) -> str:
        """Return the message, which is printable whatever it quotes."""
        return printable(super().__str__())


class BrokenPluginError(BackendKwargsError):
    """A backend or template of an installed package does not load."""


class NoCompilerError(BackendKwargsError):
    """No C++ compiler works on this machine."""


class BackendKwargsWarning(UserWarning):
    """Something that was requested has no effect here, and a documented fallback is used."""


def printable(text: str, keep: str = "") -> str:
    """Return `text` with characters escaped that would control a terminal or a log, except those in `keep`.

    These are control characters, line ends, marks that change the direction of text, and halves of characters.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else repr(each)[1:-1] for each in text)


def shown(value: object) -> str:
    """Return `repr(value)`, shortened so that a message stays one readable line."""
    try:
        return shortened(_one_line(repr(value)), LONGEST_VALUE)
    except Exception:  # noqa: BLE001 - such as an integer with too many digits, or a list that is nested too deeply
        return f"<{type(value).__name__}>"


def counted(number: int, what: str) -> str:
    """Return a number with what it counts, such as "2 decisions"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def shortened(text: str, longest: int) -> str:
    """Return `text` with dots in place of what exceeds `longest` characters."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def error_text(error: BaseException) -> str:
    """Return the error of other code as one line, shortened."""
    return f"{type(error).__name__}: {shortened(_one_line(str(error)), LONGEST_SAYING)}"


def unknown(kind: str, name: str, known: Iterable[str], *, otherwise: str = "") -> BackendKwargsError:
    """Return the error for an unknown `name` of a `kind`, with the closest of `known`, or else `otherwise`."""
    nearest = get_close_matches(str(name)[:LONGEST_SAYING], list(known), n=1, cutoff=0.6)
    advice = f"Did you mean {nearest[0]!r}?" if nearest else otherwise
    return BackendKwargsError(f"Unknown {kind} {shown(name)}. {advice}".rstrip())


def wrong_value(what: str, wanted: str, got: object) -> BackendKwargsError:
    """Return the error that `what` must be `wanted`, with the value given instead."""
    return BackendKwargsError(f"{what} must be {wanted}, got {shown(got)} ({type(got).__name__}).")


def removed(what: str, instead: str) -> BackendKwargsError:
    """Return the error that `what` was there in an earlier release, with what to write instead."""
    return BackendKwargsError(f"{what} was removed: {instead}.")


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of one of this package's extras.

    It names them and not the extra: this package is on no index yet, where anyone could claim its name.
    """
    asked = f'; extra == "{extra}"'
    packages = [each.removesuffix(asked) for each in requires("backend-kwargs") or () if each.endswith(asked)]
    return " ".join(["pip install", *(f'"{each}"' for each in packages)])


@functools.cache
def warn_once(message: object) -> None:
    """Warn once per process with `message`, at the user's line: the nearest outside this package and torch."""
    warn(printable(str(message)), BackendKwargsWarning, stacklevel=_levels_outside())


def _levels_outside() -> int:
    # During a compile, torch, context managers and cached properties are between the user's line and this package.
    torch = sys.modules.get("torch")
    folders = (PACKAGE, *([str(Path(str(torch.__file__)).parent)] if torch else ()), *BETWEEN)
    callers = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return sum(1 for _ in itertools.takewhile(lambda file: file.startswith(folders), callers)) + 1
