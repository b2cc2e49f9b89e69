"""Connections to servers: one of a process, for as long as it is used, within a time, and none across a fork."""

import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")
T = TypeVar("T")

LIMIT_S = 10.0  # of a call, the wait for other threads' included; callers that must not wait leave it earlier
IDLE_S = 1.0
# What PostgreSQL, PgBouncer and Redis say: a server full of other processes, which leave soon.
_BUSY = re.compile(r"too many|slots are reserved|no more connections|max number of clients", re.IGNORECASE)
_LONGEST_PAUSE_S = 0.5
_JITTER = random.SystemRandom()  # so that not all come back at once; draws of `random` are the user's


class Connection(Generic[C]):
    """A connection that is opened when it is needed, and closed once it was not used for `IDLE_S` seconds.

    `connect` gets the seconds left; `interrupt` must make a call that runs in another thread fail.
    """

    def __init__(
        self,
        connect: Callable[[float], C],
        close: Callable[[C], None],
        interrupt: Callable[[C], None],
        limit_s: float = LIMIT_S,
    ) -> None:
        self._connect, self._close, self._interrupt, self._limit_s = connect, close, interrupt, limit_s
        self._of_parents: list[C | None] = []  # closing one would end the parent's session
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock, self._uses = os.getpid(), threading.Lock(), 0
        self._open: C | None = None
        self._closer: threading.Timer | None = None

    def call(self, action: Callable[[C], T]) -> T:
        """Return what `action` returns of the connection; raise TimeoutError after the limit."""
        if self._pid != os.getpid():
            self._of_parents.append(self._open)
            self._begin()
        end = time.monotonic() + self._limit_s
        if not self._lock.acquire(timeout=self._limit_s):
            raise TimeoutError(f"no answer in {self._limit_s:g} s")
        try:
            return self._bounded(action, end)
        except BaseException:
            self._drop()  # in an unknown state
            raise
        finally:
            self._uses += 1
            self._close_later()
            self._lock.release()

    def close(self) -> None:
        """Close the connection if this process has one that no thread uses."""
        if self._pid == os.getpid() and self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def _bounded(self, action: Callable[[C], T], end: float) -> T:
        if self._open is None:
            self._open = retried_while_busy(self._connect, end)
        watch = threading.Timer(max(0.0, end - time.monotonic()), self._interrupt, [self._open])
        watch.daemon = True
        watch.start()
        try:
            return action(self._open)
        except Exception:
            if time.monotonic() >= end:
                raise TimeoutError(f"no answer in {self._limit_s:g} s") from None
            raise
        finally:
            watch.cancel()

    def _drop(self) -> None:
        connection, self._open = self._open, None
        if connection is not None:
            self._close(connection)

    def _close_later(self) -> None:
        if self._open is not None and self._closer is None:
            closer = threading.Timer(IDLE_S, self._close_unused, [self._uses])
            closer.daemon = True
            try:
                closer.start()
            except RuntimeError:  # no thread can be begun, so that nobody would close it
                self._drop()
            else:
                self._closer = closer

    def _close_unused(self, uses: int) -> None:
        with self._lock:
            self._closer = None
            if uses == self._uses:
                self._drop()
            self._close_later()


def retried_while_busy(connect: Callable[[float], C], end: float) -> C:
    """Return what `connect` returns, tried again after random pauses while the server has too many clients."""
    pause_s = 0.02
    while True:
        try:
            return connect(max(0.0, end - time.monotonic()))
        except Exception as error:
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            wait_s = _JITTER.uniform(0, pause_s)
            if not _BUSY.search(str(error)) or time.monotonic() + wait_s > end:
                raise
        time.sleep(wait_s)
