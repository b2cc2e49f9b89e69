"""Several stores as one: read in order, the newest wins, and what is found further on is copied to those before.

Each is reached in a thread, with a deadline: one that is away, slow or full is as if it were not there. A name look-up
and a client library may know no time-out of their own, so that the caller waits for the thread, and leaves it where it
is when the deadline has passed. What lies below a prefix is listed once; later questions are answered from memory.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import methodcaller
from typing import Any, Generic, TypeAlias, TypeVar

from backend_kwargs.errors import BackendKwargsError, error_text, printable, warn_once
from backend_kwargs.stores import Documents, Store
from backend_kwargs.stores.documents import (
    Document,
    Kind,
    RefusedError,
    check_schema,
    decoded,
    encoded,
    heading,
    readable,
)
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.opening import StoreURL, place_or_object

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

    threads: list[_Thread]  # the last one is asked; the others were left waiting
    process: int = field(default_factory=os.getpid)
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
        self._state = _State([self._new_thread()])

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
        state.time_outs, state.in_row, state.threads[-1].left = state.time_outs + 1, state.in_row + 1, True

    def _usable(self) -> _Thread:
        """Return the thread to ask; another one in place of one that was left waiting, if not too many were."""
        state = self._of_process()
        if state.threads[-1].left:
            stuck = [each for each in state.threads if each.running is not None]
            # At once, since other threads ask meanwhile.
            state.threads = stuck if len(stuck) > MOST_STUCK else [*stuck, self._new_thread()]
        return state.threads[-1]

    def _of_process(self) -> _State:
        if self._state.process != os.getpid():
            self._state = _State([self._new_thread()], inherited=[self._state])
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


Body = TypeVar("Body")
_Copy: TypeAlias = tuple[Document[Body], bytes]
# What each store has, and whether signatures are checked, and needed of none there.
LookedUp: TypeAlias = dict[Reached, tuple[dict[str, bytes], bool]]

HALF = 0.5


@dataclass
class Layered(Generic[Body]):
    """The documents of one kind in several stores, which never raise: each warns once, and is then left out.

    Of each is known what the user said: how long to wait for it, and whom to trust there.
    """

    kind: Kind[Body]
    layers: Mapping[Reached, Store]

    @property
    def label(self) -> str:
        """The stores' names."""
        return ", ".join(f"store {layer.label!r}" for layer in self.layers) or "no store"

    def begin(self, folder: str, length: int) -> None:
        """Begin to list what lies in `folder` in each store, by the first `length` characters of its names."""
        for layer in self.layers:
            layer.begin(folder, length)

    def looked_up(self, folder: str, start: str) -> LookedUp:
        """Return what the stores that answer have below a prefix, all asked at once and waited for once."""
        checked = [layer for layer, store in self.layers.items() if layer.is_local and store.trusted_keys]
        own = {layer: layer.ask(is_own) for layer in checked}
        self.begin(folder, len(start))
        began = time.monotonic()
        found: LookedUp = {}
        for layer in sorted(self.layers, key=lambda layer: layer.time_outs):  # who did not answer before, at last
            try:
                found[layer] = layer.group(folder, start, self.layers[layer], began), False
            except AwayError as error:
                self._warn(layer, "cannot be read", str(error))
                continue
            with suppress(AwayError):
                if layer in own and layer.answer(own[layer], layer.longest_s(self.layers[layer]), began):
                    found[layer] = found[layer][0], True
        return {layer: found[layer] for layer in self.layers if layer in found}

    def newest(self, found: LookedUp, only: Callable[[str], bool] = lambda name: True) -> dict[str, Document[Body]]:
        """Return the newest document of each name for which `only` holds, and copy it to the stores before."""
        copies: dict[str, dict[Reached, _Copy[Body]]] = {}
        for layer, (contents, is_own) in found.items():
            for name in filter(only, [*contents]):
                if (document := self._decoded(layer, name, contents[name], is_own)) is not None:
                    copies.setdefault(name, {})[layer] = (document, contents[name])
        newest = {}
        for name, those in copies.items():
            newest[name], content = max(those.values(), key=lambda copy: copy[0].order)
            for layer, (contents, _) in () if self._stays(newest[name]) else found.items():
                if layer in those and those[layer][0].order == newest[name].order:
                    break
                if self._may_have(layer, name, content):
                    # Only what nobody else has made newer meanwhile. It is noted, so that it is tried once.
                    layer.ask(partial(_copy, self.kind, name, content))
                    contents[name] = content
        return newest

    def put(self, folder: str, *named: tuple[str, Document[Body]]) -> None:
        """Keep documents in every store that can be written, as newer than what any has under their names.

        Each is given with the beginning of its name. All stores are asked at once, and waited for once: half of the
        time for what they have, the rest for writing.
        """
        began, writing = time.monotonic(), []
        writable = [layer for layer in self.layers if self._may_write(layer, began)]
        for start, document in named:
            layers = [layer for layer in writable if layer.is_local or not self._stays(document)]
            longest_s = {layer: layer.longest_s(self.layers[layer]) for layer in layers}
            newest = document
            if len(layers) > 1:
                there = [(layer, layer.ask(methodcaller("get", document.name))) for layer in layers]
                for layer, asked in there:
                    newest = newest.after(_heading(layer, asked, HALF * longest_s[layer], began))
            generation = max([newest.generation, *(self.layers[layer].min_generation for layer in layers)])
            for layer in layers:
                kept = replace(newest, generation=generation, label=self.layers[layer].label)
                by = self.layers[layer].signing_key
                asked = layer.ask(partial(put, self.kind, document=kept, signing_key=by))
                writing.append((layer, longest_s[layer], start, document.name, asked))
        for layer, within_s, start, name, written in writing:
            try:
                layer.note(folder, start, name, layer.answer(written, within_s, began))
            except AwayError as error:
                self._warn(layer, "cannot be written", str(error))

    def _may_write(self, layer: Reached, began: float) -> bool:
        """Return whether others, who trust keys as this process does, could use what it writes."""
        store = self.layers[layer]
        if not store.trusted_keys or store.signing_key is not None:
            return True
        with suppress(AwayError):
            return layer.is_local and bool(layer.answer(layer.ask(is_own), HALF * layer.longest_s(store), began))
        return False

    def _stays(self, document: Document[Body]) -> bool:
        return document.body is not None and self.kind.stays(document.body)

    def _decoded(self, layer: Reached, name: str, content: bytes, is_own: bool) -> Document[Body] | None:
        try:
            return self._used(layer, name, content, is_own)
        except RefusedError as error:
            warn_once(f"{name} in store {layer.label!r} is not used: {printable(str(error))}.")
        except BackendKwargsError as error:  # of a key, so that no signature can be checked
            self._warn(layer, "cannot be trusted", str(error).rstrip("."))
        return None

    def _may_have(self, layer: Reached, name: str, content: bytes) -> bool:
        """Return whether a store may get a copy: if there are trusted keys for it, of what one of these signed.

        Also where the user alone can write: what is there is used unsigned.
        """
        try:
            self._used(layer, name, content)
        except ValueError:  # it is refused, or no signature can be checked
            return False
        return True

    def _used(self, layer: Reached, name: str, content: bytes, is_own: bool = False) -> Document[Body]:
        """Return a document as it is used of a store; raise if it is not."""
        store = self.layers[layer]
        return decoded(self.kind, name, content, () if is_own else store.trusted_keys, store.min_generation)

    def _warn(self, layer: Reached, what: str, why: str) -> None:
        if not layer.warned:
            layer.warned = True
            warn_once(
                f"Store {layer.label!r} {what}: {printable(why)}. It is left out, and tried again for later graphs."
            )


def _heading(layer: Reached, asked: "Future[bytes | None]", longest_s: float, began: float) -> Document[Any] | None:
    """Return the heading of what a store has under a name, None if it has nothing that can be read in time."""
    try:
        return readable(layer.answer(asked, longest_s, began, last=False))
    except (AwayError, TypeError):  # TypeError: a user's own store may return anything
        return None


def is_own(store: Documents) -> bool:
    """Return whether a store is a folder that nobody else can write, so that no signature is needed."""
    return isinstance(store, Folder) and store.is_own


def reached(given: str | Documents | Store | None) -> Reached:
    """Return a store to be reached in a thread: one that a text names, an object, or for None the user's own."""
    place = place_or_object(given)
    if not isinstance(place, StoreURL):
        return Reached(lambda: place, str(getattr(place, "label", type(place).__name__)), id(place), is_given=True)
    return Reached(place.open, place.label, place, words=place.without_secrets, is_local=place.driver is None)


def put(kind: Kind[Body], store: Documents, document: Document[Body], signing_key: object = None) -> bytes:
    """Put a document, or a tombstone, as newer than what is there under its name; return its bytes.

    Raises RefusedError for an unsigned one in place of a signed one, which those who check signatures would lose.
    """
    if (there := readable(store.get(document.name))) is not None:
        check_replaces(store, there, signing_key)
        if document.body is not None:
            check_schema(kind, there)
    content = encoded(kind, document.after(there), signing_key)
    store.put(document.name, content)
    return content


def check_replaces(store: Documents, there: Document[Any] | None, signing_key: object) -> None:
    """Raise if what is there is signed, what replaces it would not be, and others read the store."""
    if there and there.is_signed and signing_key is None and not is_own(store):
        raise RefusedError(f"{there.name} is signed there, so its place is for signed ones: give a signing key")


def _copy(kind: Kind[Any], name: str, content: bytes, store: Documents) -> None:
    _copied(kind, name, content, store, store.get(name))


# ---- a whole store at once, for the command line: errors are raised


COPIED = ("new", "newer")


def synced(
    kind: Kind[Any],
    source: Iterable[tuple[str, bytes]],
    target: Documents,
    prefix: str,
    *,
    dry_run: bool,
    trusted_keys: Sequence[object] = (),
) -> Iterator[tuple[str, str]]:
    """Copy what is newer in a listing to `target`; yield each name and what was done: new, newer, same, older.

    Or "refused: ", and why; if keys are given, what none of them signed is refused, and so is what stays on its
    machine. Signatures are copied.
    """
    there = dict(target.list(prefix))
    for name, content in source:
        what = _compared(kind, name, content, target, there.get(name), trusted_keys)
        if what in COPIED and not dry_run:
            now = there.get(name)  # or what was written since the listing
            with suppress(Exception):  # as a folder's file may not be read, and writing says why
                now = target.get(name)
            what = _copied(kind, name, content, target, now, trusted_keys)
        yield name, what


def _copied(
    kind: Kind[Any],
    name: str,
    content: bytes,
    target: Documents,
    there: bytes | None,
    trusted_keys: Sequence[object] = (),
) -> str:
    """Put a document in place of what is there, if it is newer; return what `synced` yields of it."""
    what = _compared(kind, name, content, target, there, trusted_keys)
    if what in COPIED:
        target.put(name, content)
    return what


def _compared(
    kind: Kind[Any], name: str, content: bytes, target: Documents, there: bytes | None, trusted_keys: Sequence[object]
) -> str:
    try:
        ours, theirs = heading(content, kind, trusted_keys), readable(there)
        if ours.name != name:
            return f"refused: it is {ours.name!r}"
        if theirs and ours.order <= theirs.order:
            return "same" if ours.order == theirs.order else "older"
        # One of a newer release's schema is copied as it is.
        body = decoded(kind, name, content).body if ours.schema <= kind.schema else None
    except RefusedError as error:
        return f"refused: {error}"
    if body is not None and kind.stays(body):
        return "refused: it is provisional, and stays on its machine"
    if theirs and theirs.is_signed and not ours.is_signed and not is_own(target):
        return "refused: it is not signed, and what it would replace is"
    return "newer" if theirs else "new"
