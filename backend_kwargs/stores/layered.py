"""Several stores as one: read in order, the newest wins, and what is found further on is copied to those before."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from backend_kwargs.errors import BackendKwargsError, printable, warn_once
from backend_kwargs.stores import Store
from backend_kwargs.stores.deadlines import AwayError, Limits, Reached
from backend_kwargs.stores.documents import (
    Document,
    Kind,
    RefusedError,
    decoded,
    encoded,
    heading,
    is_signed,
    replacing,
)
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.opening import Place, default_place, place_of

Body = TypeVar("Body")
_Copy: TypeAlias = tuple[Document[Body], bytes]


@dataclass(frozen=True, slots=True)
class Trust:
    """Who must have signed what others can write; the key by which this process signs; the oldest generation used."""

    trusted_keys: tuple[object, ...] = ()
    signing_key: object = None
    min_generation: int = 0


@dataclass
class Layered(Generic[Body]):
    """The documents of one kind in several stores, which never raise: each warns once, and is then left out."""

    kind: Kind[Body]
    layers: Sequence[Reached]
    trust: Trust = field(default_factory=Trust)
    limits: Limits = field(default_factory=Limits)

    def begin(self, folder: str, length: int) -> None:
        """Begin to list what lies in `folder` in each store, by the first `length` characters of its names."""
        for layer in self.layers:
            layer.begin(folder, length)

    def group(
        self, folder: str, start: str, only: Callable[[str], bool] = lambda name: True
    ) -> dict[str, Document[Body]]:
        """Return the newest document of each name that begins with `folder` and `start`, and for which `only` holds."""
        self.begin(folder, len(start))
        listed = {layer: each for layer in self.layers if (each := self._group(layer, folder, start)) is not None}
        found: dict[str, dict[Reached, _Copy[Body]]] = {}
        for layer, contents in listed.items():
            names = [*filter(only, contents)]
            keys = self._keys(layer) if names else ()
            for name in names:
                if (document := self._decoded(layer, name, contents[name], keys)) is not None:
                    found.setdefault(name, {})[layer] = (document, contents[name])
        newest = {}
        for name, copies in found.items():
            newest[name], content = max(copies.values(), key=lambda copy: copy[0].order)
            for layer in self._behind([*listed], copies, newest[name]):
                # Only what nobody else has made newer meanwhile. It is noted, so that it is tried once.
                layer.begin_to(partial(_copy, name=name, content=content, document=newest[name]))
                layer.note(folder, start, name, content)
        return newest

    def put(self, folder: str, start: str, document: Document[Body]) -> None:
        """Keep a document in every store that can be written, as newer than what any has under its name."""
        layers = [layer for layer in self.layers if self._may_write(layer)]
        if len(layers) > 1:
            for layer in layers:
                document = document.after(self._there(layer, document.name))
        for layer in layers:
            try:
                kept = layer.do(lambda store: put(self.kind, store, document, self.trust), self.limits)
            except AwayError as error:
                self._warn(layer, "cannot be written", str(error))
            else:
                layer.note(folder, start, document.name, kept)

    def _there(self, layer: Reached, name: str) -> Document[bool] | None:
        """Return the heading of what a store has under a name, None if it has nothing that can be read."""
        try:
            content: bytes | None = layer.do(lambda store: store.get(name), self.limits)
            return None if content is None else heading(content)
        except (AwayError, RefusedError, TypeError):  # TypeError: a user's own store may return anything
            return None

    def time_outs(self) -> dict[str, int]:
        """Return how often each store did not answer in time, for those that did not."""
        return {layer.label: count for layer in self.layers if (count := layer.time_outs)}

    def _group(self, layer: Reached, folder: str, start: str) -> dict[str, bytes] | None:
        try:
            return dict(layer.group(folder, start, self.limits))
        except AwayError as error:
            self._warn(layer, "cannot be read", str(error))
            return None

    def _keys(self, layer: Reached) -> tuple[object, ...]:
        """Return the keys of which one must have signed what is in a store: none if only its user can write it."""
        keys = self.trust.trusted_keys
        return () if keys and self._is_own(layer) else keys

    def _decoded(self, layer: Reached, name: str, content: bytes, keys: tuple[object, ...]) -> Document[Body] | None:
        try:
            return decoded(self.kind, name, content, keys, self.trust.min_generation)
        except RefusedError as error:
            warn_once(f"{name} in store {layer.label!r} is not used: {printable(str(error))}.")
        except BackendKwargsError as error:  # of a key, so that no signature can be checked
            self._warn(layer, "cannot be trusted", str(error).rstrip("."))
        return None

    def _behind(
        self, layers: Sequence[Reached], copies: "Mapping[Reached, _Copy[Body]]", newest: Document[Body]
    ) -> Sequence[Reached]:
        """Return the stores, of those that answered, that come before the first with the newest copy."""
        at = next(at for at, layer in enumerate(layers) if layer in copies and copies[layer][0].order == newest.order)
        # What is used unsigned, because only the user can write it, is not for those who check signatures.
        return layers[:at] if at and not (self.trust.trusted_keys and self._is_own(layers[at])) else ()

    def _may_write(self, layer: Reached) -> bool:
        """Return whether others, who trust keys as this process does, could use what it writes."""
        return not self.trust.trusted_keys or self.trust.signing_key is not None or self._is_own(layer)

    def _is_own(self, layer: Reached) -> bool:
        """Return whether a store is a folder that nobody else can write."""
        try:
            return layer.is_local and bool(layer.do(is_own, self.limits))
        except AwayError:
            return False

    def _warn(self, layer: Reached, what: str, why: str) -> None:
        if not layer.warned:
            layer.warned = True
            warn_once(
                f"Store {layer.label!r} {what}: {printable(why)}. It is left out, and tried again for later graphs."
            )


def is_own(store: Store) -> bool:
    """Return whether a store is a folder that nobody else can write, so that no signature is needed."""
    return isinstance(store, Folder) and store.is_own


def reached(given: str | Store | None) -> Reached:
    """Return a store to be reached in a thread: one that a text names, an object, or for None the user's own."""
    if given is not None and not isinstance(given, str):
        own: Store = given
        return Reached(lambda: own, str(getattr(own, "label", type(own).__name__)), id(own), is_given=True)
    place = default_place() if given is None else place_of(given)
    return Reached(_Opening(place), place.label, place, is_local=place.driver is None)


class _Opening:
    """Opens the store at a place, and words its errors."""

    def __init__(self, place: Place) -> None:
        self.place, self.without_secrets = place, place.without_secrets

    def __call__(self) -> Store:
        return self.place.open()


def put(kind: Kind[Body], store: Store, document: Document[Body], trust: Trust) -> bytes:
    """Put a document, or a tombstone, as newer than what is there under its name; return its bytes.

    Raises RefusedError for an unsigned one in place of a signed one, which those who check signatures would lose.
    """
    there = store.get(document.name)
    if there is not None:
        check_replaces(store, document.name, there, trust)
    document = document if there is None else replacing(kind, document, there)
    content = encoded(kind, document, trust.signing_key)
    store.put(document.name, content)
    return content


def check_replaces(store: Store, name: str, there: bytes, trust: Trust) -> None:
    """Raise if what is there is signed, what replaces it would not be, and others read the store."""
    if trust.signing_key is None and _is_others(store, there):
        raise RefusedError(f"{name} is signed there, so its place is for signed ones: give a signing key")


def _is_others(store: Store, content: bytes) -> bool:
    """Return whether a document of a store is signed for those who check signatures there."""
    return is_signed(content) and not is_own(store)


def _copy(store: Store, name: str, content: bytes, document: "Document[Body]") -> None:
    there = store.get(name)
    if there is not None and not is_signed(content) and _is_others(store, there):
        return
    try:
        newer = there is not None and heading(there).order >= document.order
    except RefusedError:
        newer = False
    if not newer:
        store.put(name, content)


# ---- a whole store at once, for the command line: errors are raised


def every(
    kind: Kind[Body],
    store: Store,
    prefix: str,
    tell: Callable[[str], object],
    trusted_keys: Sequence[object] = (),
) -> Iterator[Document[Body]]:
    """Yield the documents of a kind below `prefix`, tombstones too; `tell` is called about those that are refused."""
    for name, content in store.list(prefix):
        try:
            yield decoded(kind, name, content, trusted_keys)
        except RefusedError as error:
            tell(f"{printable(name)}: {printable(str(error))}")


def synced(
    kind: Kind[Any],
    source: Iterable[tuple[str, bytes]],
    target: Store,
    prefix: str,
    *,
    dry_run: bool,
    trusted_keys: Sequence[object] = (),
) -> Iterator[tuple[str, str]]:
    """Copy what is newer in a listing to `target`; yield each name and what was done: new, newer, same, older.

    Or "refused: ", and why; if keys are given, what none of them signed is refused. Signatures are copied.
    """
    there = dict(target.list(prefix))
    for name, content in source:
        what = _compared(kind, name, content, target, there.get(name), trusted_keys)
        if what in ("new", "newer") and not dry_run:
            if (now := _got(target, name, there.get(name))) != there.get(name):  # written since the listing
                what = _compared(kind, name, content, target, now, trusted_keys)
            if what in ("new", "newer"):
                target.put(name, content)
        yield name, what


def _got(store: Store, name: str, otherwise: bytes | None) -> bytes | None:
    """Return a document, or `otherwise` where it cannot be read, as a folder's file may not be."""
    try:
        return store.get(name)
    except Exception:  # noqa: BLE001 - each kind of store raises its own error, and writing says why
        return otherwise


def _compared(
    kind: Kind[Any], name: str, content: bytes, target: Store, other: bytes | None, trusted_keys: Sequence[object]
) -> str:
    try:
        ours = heading(content, kind, trusted_keys)
    except RefusedError as error:
        return f"refused: {error}"
    if ours.name != name:
        return f"refused: it is {ours.name!r}"
    try:
        theirs = None if other is None else heading(other)
    except RefusedError:
        theirs = None
    if theirs is None or ours.order > theirs.order:
        if other is not None and not is_signed(content) and _is_others(target, other):
            return "refused: it is not signed, and what it would replace is"
        return "new" if theirs is None else "newer"
    return "same" if ours.order == theirs.order else "older"
