"""Where documents are kept and shared: a folder, PostgreSQL, Redis, object storage, or a user's own object.

A document is bytes under a name. What is in it, and whether it is trusted, is not a store's concern: a `Store` is the
value that says so, with the place.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.options.option import Where, check, declared
from backend_kwargs.stores.urls import check_shown


@runtime_checkable
class Documents(Protocol):
    """Documents by name. Each method may raise any exception: callers bound its time and continue without the store.

    A name is parts of a-z, 0-9, ".", "_" and "-", with "/" between them, at most 200 characters:
    "decisions/h100/4f3a...json". `label` names the store to people, without a password. A store may have a method
    `close`, which ends its connection; a later call opens another one.
    """

    label: str

    def get(self, name: str) -> bytes | None:
        """Return the document, None if there is none."""

    def put(self, name: str, document: bytes) -> None:
        """Keep `document` in place of any other; when this returns, it survives `kill -9` of this process."""

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the names that begin with `prefix`, with their documents."""

    def forget(self, name: str) -> None:
        """Remove the document if there is one."""


@runtime_checkable
class Claims(Protocol):
    """A store that can also give a name to one of many processes that ask for it.

    A claim whose lease has ended is as if it were not there. What was put stays, and is never claimed.
    """

    def claim(self, name: str, document: bytes, lease_s: float) -> bool:
        """Put `document` unless another one is there whose lease runs, by the server's clock; return whether it was."""

    def renew(self, name: str, document: bytes, lease_s: float) -> bool:
        """Extend the lease if the document there is still `document`; return whether it was."""


Wait = Annotated[float, Where("of at least 0, but finite", lambda seconds: 0 <= seconds < math.inf)]
Generation = Annotated[int, Where("of at least 0", lambda generation: generation >= 0)]
Text = Annotated[str, Where("of at most 200 characters", lambda text: len(text) <= 200)]


@dataclass(frozen=True, repr=False)
class Store:
    """A place for decisions, how long to wait for it, and whom to trust there; a value, checked when it is made.

    A key is an object of the package cryptography, or the path of its PEM file.
    """

    url: Annotated[
        str | Path | Documents | None,
        "a folder, a URL, env:NAME or an object; None: the default store",
    ] = None
    _: KW_ONLY
    connect_s: Annotated[Wait, "seconds to wait for its first answer"] = 2.0
    lookup_s: Annotated[Wait, "seconds to wait for a later one"] = 0.5
    label: Annotated[Text, "who may be asked; written into what is decided"] = ""
    min_generation: Annotated[Generation, "generation of the oldest decision that is used"] = 0
    signing_key: Annotated[object, "Ed25519 private key that signs what is decided"] = field(default=None, hash=False)
    trusted_keys: Annotated[
        list[Any] | tuple[Any, ...],
        "Ed25519 public keys: if others can write there, only what one of these signed is used",
    ] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        """Raise if a value is wrong, or if the URL has a password."""
        _check_url(_plain(self.url))
        values = {name: check(option, _plain(getattr(self, name)), "Store's") for name, option in FIELDS.items()}
        values["trusted_keys"] = tuple(map(_plain, values["trusted_keys"]))
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _check_key("Store's 'signing_key'", "an Ed25519 private key", "sign", self.signing_key)
        for key in self.trusted_keys:
            _check_key("Each of Store's 'trusted_keys'", "an Ed25519 public key", "verify", key)

    @classmethod
    def of(cls, given: Any) -> "Store":
        """Return the store that is given: a Store, the `url` of one, or a mapping of its fields."""
        if isinstance(given, Mapping):
            for name in given:
                if name not in FIELDS and str(name).isidentifier():  # what else it may be is not shown
                    raise unknown("argument of Store:", name, FIELDS)
            if {*given} <= {*FIELDS}:
                return cls(**given)
        return given if isinstance(given, Store) else cls(given)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not as by default, which `of` reads."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}

    def __repr__(self) -> str:
        """Return the expression that makes an equal one."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.given.items())
        return f"Store({given.removeprefix('url=')})"


FIELDS = declared(Store)


def _check_url(url: object) -> None:
    # Options are copied, so that a mapping would be no store any more.
    if isinstance(url, Mapping) or not isinstance(url, str | Documents | None):
        wanted = "a folder, a URL, 'env:NAME', a Store, a list of these, or an object with get, put, list and forget"
        kind = type(url).__name__
        is_plain = isinstance(url, bool | int | float)
        got = f"{url!r} ({kind})" if is_plain else f"a {kind}, which is not shown: it may contain a password"
        raise BackendKwargsError(f"A store must be {wanted}, got {got}.")
    if isinstance(url, str):
        check_shown(url.strip())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _check_key(what: str, wanted: str, does: str, given: object) -> None:
    if given is not None and not isinstance(given, str) and not hasattr(given, does):
        raise wrong_value(what, f"{wanted}, or the path of its PEM file", given)
