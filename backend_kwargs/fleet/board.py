"""What a shared store knows of units: which are done, how long each took, and who works on it."""

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from backend_kwargs.auto import store as decisions
from backend_kwargs.auto import verdicts
from backend_kwargs.errors import error_text
from backend_kwargs.files.retries import retried
from backend_kwargs.fleet import units
from backend_kwargs.fleet.units import UNITS, Result, Unit, UnitDocument, document_of, name_of, read, releases_differ
from backend_kwargs.stores import Claims, Documents, Store
from backend_kwargs.stores.documents import Document, Kind, RefusedError, decoded, is_name
from backend_kwargs.stores.layered import put

logger = logging.getLogger("backend_kwargs.fleet")

CLAIMS = "claims/"
LEASE_S = 60.0  # after which a unit is free again whose process was killed; renewed three times as often
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between tries to put what came of a unit

State: TypeAlias = Literal["ended", "elsewhere", "ours"]


class UnitClaims:
    """The store as the processes that tune together see it; safe in threads.

    `here` are this process's releases; `words` words the store's errors without its password. `devices` names the
    devices that would run a unit, none if that is not known.
    """

    def __init__(
        self,
        store: Documents,
        here: Mapping[str, str | None],
        words: Callable[[BaseException], str] = error_text,
        devices: Callable[[Unit], Collection[str]] = lambda unit: (),
    ) -> None:
        self.store, self.here, self.words, self.devices = store, here, words, devices
        self.claims = store if isinstance(store, Claims) else None
        self.token = uuid.uuid4().hex.encode()
        self.held: set[str] = set()
        self._one = threading.RLock()

    def known(self) -> dict[str, UnitDocument]:
        """Return the documents that the store has of units, by name."""
        with self._one:
            found = {name: read(name, content) for name, content in self.store.list(UNITS)}
        return {name: document for name, document in found.items() if document}

    def done(self, known: Mapping[str, UnitDocument]) -> dict[str, UnitDocument]:
        """Return those of the units that need no race: they serve here, and the store has all of their decisions."""
        serving = {name: document for name, document in known.items() if self._serves(document)}
        folders = {f"{each.rpartition('/')[0]}/" for document in serving.values() for each in document.decisions}
        with self._one:
            there = {
                name
                for folder in folders
                if is_name(f"{folder}a")
                for name, content in self.store.list(folder)
                if _is_decision(name, content)
            }
        return {name: document for name, document in serving.items() if there.issuperset(document.decisions)}

    def _serves(self, document: UnitDocument) -> bool:
        """Return whether a unit did not fail, and ran on such a device, under the torch that is installed here."""
        devices = self.devices(document.unit)
        is_like = not devices or document.device_name in devices
        return is_like and not document.failed and not releases_differ(document, self.here)

    def take(self, unit: Unit, *, failed_too: bool = True) -> State:
        """Claim a unit that is not done, or that failed before if `failed_too`; "ours" if this process is to run it."""
        with self._one:
            if self._ended(unit, failed_too):
                return "ended"
            claim = _claim_of(unit)
            if self.claims and not self.claims.claim(claim, self.token, LEASE_S):
                return "elsewhere"
            self.held.add(claim)
            # It may have ended between the look and the claim.
            if self._ended(unit, failed_too):
                self.release(unit)
                return "ended"
            return "ours"

    def _ended(self, unit: Unit, failed_too: bool) -> bool:
        name = name_of(unit)
        document = read(name, content) if (content := self.store.get(name)) else None
        if document is None:
            return False
        if document.failed:
            return not failed_too
        return self._serves(document) and all(
            is_name(each) and _is_decision(each, self.store.get(each)) for each in document.decisions
        )

    def record(self, unit: Unit, result: Result) -> str:
        """Keep what came of a unit, its decisions first; return why the store did not take it, or ""."""
        of = Store.of(unit.options.get("store"))

        def keep() -> None:
            with self._one:
                for name, content in result.documents.items():
                    kind: Kind[Any] = verdicts.KIND if name.startswith(verdicts.FOLDER) else decisions.KIND
                    document = decoded(kind, name, content)
                    kept = replace(document, label=of.label, generation=max(document.generation, of.min_generation))
                    put(kind, self.store, kept, of.signing_key)
                put(units.KIND, self.store, Document(name_of(unit), document_of(unit, result)), of.signing_key)
                self.release(unit)

        try:
            retried(keep, lambda error: True, PAUSES_S)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            return f"the store {self.store.label} did not take what came of it: {self.words(error)}"
        return ""

    def release(self, unit: Unit) -> None:
        """Let others claim a unit that this process has claimed; where the store is away, its lease ends by itself."""
        self._release(_claim_of(unit))

    def _release(self, claim: str) -> None:
        with self._one:
            if claim in self.held:
                self.held.discard(claim)
                try:
                    # Unless its lease ended and another process has it.
                    if self.claims and self.claims.renew(claim, self.token, LEASE_S):
                        self.store.forget(claim)
                except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
                    logger.warning("%s is claimed until its lease ends: %s.", claim, self.words(error))

    def renew(self) -> None:
        """Extend the leases of the units that this process runs."""
        for claim in tuple(self.held):
            try:
                with self._one:
                    if self.claims and claim in self.held and not self.claims.renew(claim, self.token, LEASE_S):
                        logger.warning("Another process took %s, whose lease had ended; it is raced twice.", claim)
                        self.held.discard(claim)
            except Exception as error:  # noqa: BLE001 - the store may be back before the lease ends
                logger.warning("The lease of %s could not be renewed: %s.", claim, self.words(error))

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew the leases in a thread, and release at exit what is still held."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(LEASE_S / 3):
                self.renew()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            for claim in tuple(self.held):
                self._release(claim)


def _is_decision(name: str, content: bytes | None) -> bool:
    """Return whether this is a decision, and not what `decisions forget` leaves in place of one."""
    try:
        return content is not None and decoded(decisions.KIND, name, content).body is not None
    except RefusedError:
        return False


def _claim_of(unit: Unit) -> str:
    return f"{CLAIMS}{unit.key}"
