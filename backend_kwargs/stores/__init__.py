"""Where documents are kept and shared: a folder, PostgreSQL, Redis, object storage, or a user's own object.

A document is bytes under a name. What is in it, and whether it is trusted, is not a store's concern.
"""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


@runtime_checkable
class Store(Protocol):
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
