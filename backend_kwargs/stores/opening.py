"""Which store a text names: a folder, a URL of a database or of object storage, or `env:NAME`.

A password stands in no value, which is printed, pickled and written to reports: only in a variable of the environment.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from backend_kwargs.errors import BackendKwargsError, error_text, pip_install, shown, unknown, wrong_value
from backend_kwargs.stores import Documents, Store
from backend_kwargs.stores.documents import RefusedError
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.urls import (
    ENV,
    UNCLEAR,
    URL,
    check_shown,
    check_variable,
    label_of,
    unclear,
    without_secrets,
)

VARIABLE = "BACKEND_KWARGS_STORE"
FORMER = ".sqlite"  # the suffix of the file that earlier releases kept decisions in


class Driver(NamedTuple):
    """The module with `open(url) -> Documents`, the client library that it imports, and the extra that installs it."""

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

    def open(self) -> Documents:
        """Return the store there, not connected yet; raise if it can be none."""
        if self.driver is None:
            _check_folder(self.text)
            return Folder(Path(self.text), private=self.private)
        try:
            opened: Documents = importlib.import_module(self.driver.module).open(self.text)
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
    check_shown(given)
    if given.startswith(ENV):
        return place_in_variable(given.removeprefix(ENV), required=True) or default_place()
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


def check_store(given: object, *, elsewhere: bool = False) -> None:
    """Raise if this names no store: a URL that no client library here opens, or a variable that is not set.

    A folder is not looked at: its disk may not answer. Nor is a variable whose store is used `elsewhere`.
    """
    url = Store.of(given).url
    if not isinstance(url, str):
        return
    if not (elsewhere and url.strip().startswith(ENV)) and (place := place_of(url)).driver:
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

    store: Documents
    words: Callable[[BaseException], str] = error_text

    @contextmanager
    def doing(self, what: str) -> Iterator[Documents]:
        """Yield the store to do `what`, then close it; raise BackendKwargsError for any error of a client library."""
        try:
            yield self.store
            getattr(self.store, "close", lambda: None)()  # a later call opens another connection
        except BackendKwargsError:
            raise
        except Exception as error:  # noqa: BLE001 - each client library raises its own
            why = str(error) if isinstance(error, RefusedError) else self.words(error)
            raise BackendKwargsError(f"Cannot {what} store {self.store.label!r}: {why}.") from None


def opened(given: str | Documents | Store | None = None, *, must_exist: bool = False) -> Opened:
    """Return the store that `given` names, or is, for a caller that has its errors raised.

    If it `must_exist`, a folder that is not there is an error, unless it is the user's own, which the first race makes.
    """
    place = place_or_object(given)
    if not isinstance(place, StoreURL):
        return Opened(place)
    store = place.open()
    if isinstance(store, Folder) and not store.private and not (above := store.path.parent).is_dir():
        raise BackendKwargsError(f"Store {store.label!r} cannot be made: there is no folder {str(above)!r}.")
    if must_exist and isinstance(store, Folder) and not store.private and not store.exists:
        raise BackendKwargsError(
            f"Store {store.label!r} does not exist: compile with tmpl-inductor:auto and store={store.label!r}, or name "
            "another one."
        )
    return Opened(store, place.without_secrets)


def place_or_object(given: str | Documents | Store | None) -> StoreURL | Documents:
    """Return the place that is named, the user's own for None, or an object as it is."""
    url = given.url if isinstance(given, Store) else given
    if url is None:
        return default_place()
    return place_of(url) if isinstance(url, str) else url  # type: ignore[return-value]  # no Path: see Store


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
