"""A store reached in a thread, with a deadline: one that is away, slow or full is as if it were not there.

A name look-up and a client library may know no time-out of their own, so that the caller waits for the thread, and
leaves it where it is when the deadline has passed. What lies below a prefix is listed once; later questions are
answered from memory.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from backend_kwargs.errors import error_text
from backend_kwargs.stores import Documents, Store
from backend_kwargs.stores.documents import RefusedError

LINGER_S = 0.5  # a connection is closed when nothing was asked for so long
AGAIN_S = 10.0  # a listing that takes longer is begun again, by another connection
LEAST_S = 0.005  # to wait for an answer, however often there was none
MOST_STUCK = 3  # threads that may be left waiting, for each store
LARGEST = 64 << 20  # bytes of a listing that are kept in memory

Job: TypeAlias = Callable[[Documents], Any]
Listed: TypeAlias = dict[str, dict[str, bytes]]  # documents by the beginning of their names and by names


class AwayError(Exception):
    """A store did not answer in time, or failed; the message says how."""


class _Thread:
    """Does the calls to one store in order, in a daemon thread that ends soon after the last of them."""

    def __init__(self, open_: Callable[[], Documents], linger_s: float) -> None:
        self.open, self.linger_s = open_, linger_s
        self.jobs: queue.SimpleQueue[tuple[Job, Future[Any]]] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.running: threading.Thread | None = None
        self.left = False  # waiting in a call that nobody waits for any more

    def submit(self, job: Job) -> "Future[Any]":
        future: Future[Any] = Future()
        with self.lock:
            self.jobs.put((job, future))
            if self.running is None:
                self.running = threading.Thread(target=self._run, daemon=True, name="backend_kwargs.stores")
                try:
                    self.running.start()
                except RuntimeError as error:  # there may be no more threads, or the interpreter is ending
                    self.running = None
                    while not self.jobs.empty():
                        self.jobs.get_nowait()[1].set_exception(error)
        return future

    def _run(self) -> None:
        store: Documents | None = None
        while True:
            try:
                job, future = self.jobs.get(timeout=self.linger_s) if self.linger_s else self.jobs.get_nowait()
            except queue.Empty:
                with self.lock:
                    if self.jobs.empty() or self.left:
                        self.running = None
                        break
                continue
            try:
                store = store or self.open()
                future.set_result(job(store))
            except BaseException as error:  # noqa: BLE001 - each client library raises its own
                # Frames of the client's, also of what caused it, refer to what it has listed.
                error.__cause__ = error.__context__ = None
                future.set_exception(error.with_traceback(None))
                self._close(store)
                store = None
        self._close(store)

    def _close(self, store: Documents | None) -> None:
        if self.linger_s and store is not None and (close := getattr(store, "close", None)):
            with suppress(Exception):  # it may be broken, which is why it is closed
                close()


@dataclass(eq=False)
class _Listing:
    """What lies in a folder, as it is listed: `found` is filled meanwhile, at `moved` for the last time.

    It `is_late` once it was waited for in vain, although it goes on.
    """

    future: "Future[Listed | None]" = field(default_factory=Future)
    found: Listed = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)
    is_late: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether it is not done yet, and has found something."""
        return bool(self.found) and not self.future.done()

    @property
    def is_over(self) -> bool:
        """Whether it failed, or found nothing more for so long that another one is tried."""
        if not self.future.done():
            return time.monotonic() - self.moved > AGAIN_S
        return self.future.exception() is not None


@dataclass
class _State:
    """What one process knows of a store; a child of a fork begins anew."""

    thread: _Thread
    process: int = field(default_factory=os.getpid)
    stuck: list[_Thread] = field(default_factory=list)
    listings: dict[str, _Listing] = field(default_factory=dict)
    time_outs: int = 0
    in_row: int = 0
    inherited: list[object] = field(default_factory=list)  # kept, so that no connection of the parent is closed here


class Reached:
    """A store, by a function that opens it, its name for people, and what words its errors.

    No method raises anything but AwayError.
    """

    def __init__(
        self,
        open_: Callable[[], Documents],
        label: str,
        identity: object,
        *,
        words: Callable[[Exception], str] = error_text,
        is_local: bool = False,
        is_given: bool = False,
    ) -> None:
        self.open, self.label, self.identity, self.words, self.is_local = open_, label, identity, words, is_local
        # A user's own object has its own connections, and a folder has none.
        self.linger_s = 0.0 if is_local or is_given else LINGER_S
        self.warned = False
        self._state = _State(self._new_thread())

    @property
    def time_outs(self) -> int:
        """How often this process has not waited for an answer any longer."""
        return self._of_process().time_outs

    def begin(self, folder: str, length: int) -> _Listing:
        """Begin to list what lies in `folder`, by the first `length` characters of its names, if that is not done."""
        listings = self._of_process().listings
        if folder not in listings or listings[folder].is_over:
            listing = _Listing()
            listing.future = self.ask(lambda store: _listed(store, folder, length, listing))
            listings[folder] = listing  # for other threads, which wait for its future
        return listings[folder]

    def group(self, folder: str, start: str, limits: Store, began: float | None = None) -> dict[str, bytes]:
        """Return the documents in `folder` whose names begin with `start` after it; all starts are equally long.

        The wait ends a deadline after `began`, or after now: other stores are asked meanwhile.

        Where the folder has so many that its listing is not kept, or goes on for too long, these are listed alone.
        """
        listing, longest_s = self.begin(folder, len(start)), self.longest_s(limits)
        began = time.monotonic() if began is None else began
        if not (listing.is_late and listing.goes_on):
            wait([listing.future], _left_s(longest_s / 2, began))
            if listing.goes_on:  # the other half is for another connection
                listing.is_late = True
                self._leave()
            elif (listed := self.answer(listing.future, longest_s, began)) is not None:
                return listed.setdefault(start, {})  # type: ignore[no-any-return]
        return self.answer(self.ask(lambda store: dict(store.list(f"{folder}{start}"))), longest_s, began)  # type: ignore[no-any-return]

    def ask(self, job: Job) -> "Future[Any]":
        """Begin to do `job`, and return what its result will be in."""
        return self._usable().submit(job)

    def longest_s(self, limits: Store) -> float:
        """Return how long to wait for an answer now.

        It is halved each time in vain, so that a store that never answers costs little for many graphs.
        """
        in_row = self._of_process().in_row
        return max(LEAST_S, limits.lookup_s / 2 ** min(in_row - 1, 6)) if in_row else limits.connect_s

    def answer(self, asked: "Future[Any]", longest_s: float, began: float, *, last: bool = True) -> Any:
        """Return what was asked for, within the time that began with whatever else is waited for.

        Unless it is the `last` wait, the thread goes on where it was in vain: it may be about to connect.
        """
        try:
            result = asked.result(_left_s(longest_s, began))
        except TimeoutError:
            if asked.done():
                raise AwayError("TimeoutError") from None
            if last:
                self._leave()
            raise AwayError(f"it did not answer within {longest_s:g} s") from None
        except Exception as error:  # noqa: BLE001 - each client library raises its own
            raise AwayError(str(error) if isinstance(error, RefusedError) else self.words(error)) from None
        self._of_process().in_row = 0
        return result

    def note(self, folder: str, start: str, name: str, document: bytes) -> None:
        """Remember what this process has put, where it is listed."""
        listing = self._of_process().listings.get(folder)
        if listing is None or not listing.future.done() or listing.future.exception():
            return
        if (listed := listing.future.result()) is not None:
            listed.setdefault(start, {})[name] = document

    def _leave(self) -> None:
        """Wait no longer for what the thread does."""
        state = self._of_process()
        state.time_outs, state.in_row, state.thread.left = state.time_outs + 1, state.in_row + 1, True

    def _usable(self) -> _Thread:
        """Return the thread to ask; another one in place of one that was left waiting, if not too many were."""
        state = self._of_process()
        if state.thread.left:
            state.stuck = [each for each in state.stuck if each.running is not None]
            if state.thread.running is not None:
                if len(state.stuck) >= MOST_STUCK:
                    return state.thread
                state.stuck.append(state.thread)
            state.thread = self._new_thread()
        return state.thread

    def _of_process(self) -> _State:
        if self._state.process != os.getpid():
            self._state = _State(self._new_thread(), inherited=[self._state])
        return self._state

    def _new_thread(self) -> _Thread:
        return _Thread(self.open, self.linger_s)


def _left_s(longest_s: float, began: float) -> float:
    return min(max(0.0, began + longest_s - time.monotonic()), threading.TIMEOUT_MAX)


def _listed(store: Documents, folder: str, length: int, listing: _Listing) -> Listed | None:
    """Return the documents below `folder`, by the first `length` characters of their names and by names.

    None if they are too many to be kept. What was found is not kept either where listing fails.
    """
    size = 0
    try:
        for name, document in store.list(folder):
            size += len(document)
            if size > LARGEST:
                return None
            listing.found.setdefault(name.removeprefix(folder)[:length], {})[name] = document
            listing.moved = time.monotonic()
        found, listing.found = listing.found, {}
        return found
    finally:
        listing.found = {}
