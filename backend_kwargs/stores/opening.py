"""Which store a text names: a folder, a URL of a database or of object storage, or `env:NAME`.

A password stands in no value, which is printed, pickled and written to reports: only in a variable of the environment.
"""

import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, shown, unknown, wrong_value
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import RefusedError
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.urls import label_of, secrets_of, unclear, without_secrets

VARIABLE = "BACKEND_KWARGS_STORE"
ENV, NAME = "env:", re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
FORMER = ".sqlite"  # the suffix of the file that earlier releases kept decisions in
URL = re.compile(r"(?P<chain>(?:[a-z0-9+.-]+::)*)(?P<scheme>[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# What is no URL, but no folder either.
UNCLEAR = re.compile(
    r"""://|^[a-z][a-z0-9+.-]+:/  # jdbc:postgresql://..., redis:/...
    |^(?![a-z]:[\\/])(?://)?[^/]*:.*@  # user:password@host
    # password=..., but not as a folder in another one: data/key=1
    |(?:^|[^\w.%/-])[\w.%-]*(?:pass(?:w(?:or)?d)?|pwd|secret|token|key|credentials?|sig(?:nature)?|sas|auth)\s*=
    |[?&;]\s*[\w.%-]+\s*=|^\s*\w+\s*=\s*\S+\s+\w+\s*=  # host/db?name=..., host=... name=...""",
    re.IGNORECASE | re.DOTALL | re.VERBOSE,
)


class Driver(NamedTuple):
    """The module with `open(url) -> Store`, the client library that it imports, and the extra that installs that."""

    module: str
    needs: str
    extra: str


POSTGRES = Driver("backend_kwargs.stores.postgres", "psycopg", "postgres")
REDIS = Driver("backend_kwargs.stores.redis", "redis", "redis")
OBJECTS = Driver("backend_kwargs.stores.objects", "fsspec", "fsspec")  # of every other scheme
DRIVERS = {"postgresql": POSTGRES, "postgres": POSTGRES, "redis": REDIS, "rediss": REDIS}


@dataclass(frozen=True, slots=True)
class StoreURL:
    """Where a store is: a path, or a URL that may contain a password, which is never shown."""

    text: str = field(repr=False)
    label: str
    driver: Driver | None = None
    private: bool = False

    def open(self) -> Store:
        """Return the store there, not connected yet; raise if it can be none."""
        if self.driver is None:
            _check_folder(self.text)
            return Folder(Path(self.text), private=self.private)
        try:
            opened: Store = importlib.import_module(self.driver.module).open(self.text)
        except BackendKwargsError:
            raise
        except Exception as error:  # noqa: BLE001 - each client library raises its own errors, some with the URL
            raise BackendKwargsError(f"Cannot open store {self.label!r}: {self.without_secrets(error)}.") from None
        return opened

    def without_secrets(self, error: BaseException) -> str:
        """Return the error of a client library as one line without this place's passwords."""
        text = without_secrets(error, self.text).removeprefix(f"Store {self.label!r} failed: ").rstrip(".")
        begins = f"Store {self.label!r} "
        return f"it {text.removeprefix(begins)}" if text.startswith(begins) else text


def place_of(given: str) -> StoreURL:
    """Return the place that a text names: a path, a URL without a password, or `env:NAME`; raise if it is none."""
    given = given.strip()
    if not given:  # as "$STORE" of a shell where it is not set: the current folder is nobody's choice
        raise wrong_value("A store", "a folder, a URL or 'env:NAME'", given)
    if given.startswith(ENV):
        return place_in_variable(given.removeprefix(ENV), required=True) or default_place()
    if URL.match(given) and secrets_of(given):
        raise BackendKwargsError(
            f"Store {label_of(given)!r} must not contain a password: put the URL into a variable of the environment, "
            "and write store='env:NAME'."
        )
    return _place(given)


def place_in_variable(name: str, *, required: bool = False) -> StoreURL | None:
    """Return the place that a variable of the environment names; None if it is not set and not required."""
    check_variable(name)
    if given := os.environ.get(name, "").strip():
        if given.startswith(ENV):
            raise BackendKwargsError(f"Variable {name} must be a folder or a URL, and names a variable itself.")
        return _place(given)
    if required:
        raise BackendKwargsError(f"Store {shown(f'env:{name}')} names a variable of the environment that is not set.")
    return None


def check_variable(name: str) -> None:
    """Raise if this is no name of a variable, such as the URL that a shell puts into "env:$TUNED"."""
    if not NAME.fullmatch(name):
        raise BackendKwargsError(
            "After 'env:' a store has the name of a variable of the environment, such as env:TUNED. What was given is "
            "not shown: it may contain a password."
        )


def check_store(given: object, *, elsewhere: bool = False) -> None:
    """Raise if this names no store: a URL that no client library here opens, or a variable that is not set.

    A folder is not looked at: its disk may not answer. Nor is a variable whose store is used `elsewhere`.
    """
    # Options are copied, so that a mapping would be no store any more.
    if isinstance(given, Mapping) or not isinstance(given, str | Store | None):
        wanted = "a folder, a URL, 'env:NAME', a list of these, or an object with get, put, list and forget"
        if isinstance(given, bool | int | float):
            raise wrong_value("A store", wanted, given)
        kind = type(given).__name__
        raise BackendKwargsError(
            f"A store must be {wanted}, got a {kind}, which is not shown: it may contain a password."
        )
    if not isinstance(given, str):
        return
    if elsewhere and given.strip().startswith(ENV):
        check_variable(given.strip().removeprefix(ENV))
    elif (place := place_of(given)).driver:
        place.open()


def default_place() -> StoreURL:
    """Return the place in BACKEND_KWARGS_STORE, or the user's data folder."""
    if named := place_in_variable(VARIABLE):
        return named
    from platformdirs import user_data_path

    try:
        folder = str(user_data_path("backend_kwargs", appauthor=False))
    except RuntimeError:  # platformdirs finds no home; its earlier releases return "~/..."
        folder = "~"
    return _folder(folder, private=True)


class Opened(NamedTuple):
    """A store, and what words its errors without a password."""

    store: Store
    words: Callable[[BaseException], str] = error_text

    @contextmanager
    def doing(self, what: str) -> Iterator[Store]:
        """Yield the store to do `what` with it; raise BackendKwargsError for any error of a client library."""
        try:
            yield self.store
        except BackendKwargsError:
            raise
        except Exception as error:  # noqa: BLE001 - each client library raises its own
            why = str(error) if isinstance(error, RefusedError) else self.words(error)
            raise BackendKwargsError(f"Cannot {what} store {self.store.label!r}: {why}.") from None


def opened(given: str | Store | None = None, *, must_exist: bool = False) -> Opened:
    """Return the store that `given` names, or is, for a caller that has its errors raised.

    If it `must_exist`, a folder that is not there is an error, unless it is the user's own, which the first race makes.
    """
    if given is not None and not isinstance(given, str):
        return Opened(given)
    place = default_place() if given is None else place_of(given)
    store = place.open()
    if must_exist and isinstance(store, Folder) and not store.private and not store.exists:
        raise BackendKwargsError(
            f"Store {store.label!r} does not exist: compile with tmpl-inductor:auto and store={store.label!r}, or name "
            "another one."
        )
    return Opened(store, place.without_secrets)


def open_store(given: str | Store | None = None) -> Store:
    """Return the store that `given` names, or is; None is BACKEND_KWARGS_STORE, or the user's data folder."""
    return opened(given).store


def _place(given: str) -> StoreURL:
    if found := URL.match(given):
        scheme = found["scheme"].lower()
        driver = OBJECTS if found["chain"] else DRIVERS.get(scheme, OBJECTS)
        if importlib.util.find_spec(driver.needs) is None:
            if driver is OBJECTS and get_close_matches(scheme, DRIVERS, n=1, cutoff=0.8):
                raise unknown_scheme(label_of(given), scheme)
            raise BackendKwargsError(
                f"Store {label_of(given)!r} needs the package {driver.needs}: "
                f"{pip_install(driver.extra)} ({driver.needs} is not importable)."
            )
        return StoreURL(given, label_of(given), driver)
    if UNCLEAR.search(given):
        raise unclear()
    return _folder(os.path.expanduser(given))  # noqa: PTH111 - pathlib's raises if a home is unknown


def unknown_scheme(label: str, scheme: str, others: Iterable[str] = ()) -> BackendKwargsError:
    """Return the error for the scheme of a store's URL that is neither ours nor one of `others`, with the closest."""
    known = [*DRIVERS, *others]
    return unknown(f"scheme of store {label!r}:", scheme.lower(), known, otherwise="docs/stores.md lists those in use.")


def _folder(path: str, *, private: bool = False) -> StoreURL:
    if path.startswith("~"):
        raise BackendKwargsError(f"Store {path!r} has no place: no home directory is known.")
    return StoreURL(path, path, private=private)


def _check_folder(path: str) -> None:
    """Raise if something else than a folder is at `path`, or if it is missing and named as a file of earlier releases.

    Who has not noticed that such a file is none any more would get a folder of its name.
    """
    path = path.rstrip("/") or path
    if os.path.isdir(path):  # noqa: PTH112 - pathlib's raises if it may not look
        return
    if os.path.exists(path):  # noqa: PTH110 - as above
        raise BackendKwargsError(f"Store {path!r} is a file, and decisions are kept in a folder: name one.")
    if path.endswith(FORMER):
        raise BackendKwargsError(
            f"Store {path!r} does not exist, and is named as the files of earlier releases: decisions are kept in a "
            f"folder now, such as {path.removesuffix(FORMER)!r}."
        )
