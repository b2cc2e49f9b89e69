"""Servers as stores: one connection of a process, each call within a time, and none across a fork."""

import os
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from backend_kwargs.files import retried
from backend_kwargs.stores.documents import check_prefix
from backend_kwargs.stores.urls import failure


class Client(Protocol):
    """What a client library gives as a connection."""

    def close(self) -> None:
        """Close it."""


S = TypeVar("S", bound=Client)
T = TypeVar("T")

LIMIT_S = 10.0  # of a call, the wait for other threads' included; callers that must not wait leave it earlier
# What PostgreSQL, PgBouncer and Redis say: a server full of other processes, which leave soon.
_BUSY = re.compile(r"too many|slots are reserved|no more connections|max number of clients", re.IGNORECASE)
_AFTER_ALL_NAMES = "~"
_NEXT = "\x01"  # after a name: the first text that is behind it
AT_ONCE = 100  # documents of one answer
_LONGEST_PAUSE_S = 0.5
_JITTER = random.SystemRandom()  # so that not all come back at once; draws of `random` are the user's


class Server(ABC, Generic[S]):
    """A store on a server, whose errors name no password, and whose documents are listed by pages.

    Its connection is opened when it is needed, until `close` is called.
    """

    def __init__(self, url: str, label: str, limit_s: float) -> None:
        self._url, self.label, self.limit_s = url, label, limit_s
        self._of_parents: list[S | None] = []  # closing one would end the parent's session
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._client: S | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.label}>"

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Yield the names that begin with `prefix`, with their documents."""
        return self._listed(check_prefix(prefix))

    def _listed(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        begin: str | None = prefix
        while begin is not None:
            found, last = self._page(begin, prefix + _AFTER_ALL_NAMES)
            yield from found
            begin = None if last is None else last + _NEXT

    def close(self) -> None:
        """Close the connection if this process has one that no thread uses; a later call opens another one."""
        if self._pid == os.getpid() and self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def call(self, action: Callable[[S], T]) -> T:
        """Return what `action` returns of the connection, within the limit."""
        if self._pid != os.getpid():
            self._of_parents.append(self._client)
            self._begin()
        try:
            return self._bounded(action, time.monotonic() + self.limit_s)
        except Exception as error:  # noqa: BLE001 - the client's text may contain the password
            raise failure(self.label, self._url, error) from None

    def _bounded(self, action: Callable[[S], T], end: float) -> T:
        if not self._lock.acquire(timeout=self.limit_s):
            raise TimeoutError(f"no answer in {self.limit_s:g} s")
        try:
            if self._client is None:
                connect = lambda: self._connect(self._url, max(0.0, end - time.monotonic()))  # noqa: E731
                self._client = retried(connect, lambda error: bool(_BUSY.search(str(error))), _pauses_until(end))
            return self._watched(action, self._client, end)
        except BaseException:
            self._drop()  # in an unknown state
            raise
        finally:
            self._lock.release()

    def _watched(self, action: Callable[[S], T], client: S, end: float) -> T:
        watch = threading.Timer(max(0.0, end - time.monotonic()), self._interrupt, [client])
        watch.daemon = True
        watch.start()
        try:
            return action(client)
        except Exception:
            if time.monotonic() >= end:
                raise TimeoutError(f"no answer in {self.limit_s:g} s") from None
            raise
        finally:
            watch.cancel()

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @abstractmethod
    def _page(self, begin: str, end: str) -> tuple[Iterable[tuple[str, bytes]], str | None]:
        """Return the first documents from `begin` to before `end`, and the last name of a page that is full."""

    @abstractmethod
    def _connect(self, url: str, left_s: float) -> S: ...

    @staticmethod
    @abstractmethod
    def _interrupt(client: S) -> None:
        """Make a call that runs in another thread fail."""


def _pauses_until(end: float) -> Iterator[float]:
    """Yield random pauses, which may be longer each time, as long as they end before `end`."""
    longest_s = 0.04
    while True:
        pause_s = _JITTER.uniform(0, longest_s)
        if time.monotonic() + pause_s > end:
            return
        yield pause_s
        longest_s = min(2 * longest_s, _LONGEST_PAUSE_S)
