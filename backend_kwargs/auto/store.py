"""The decisions in stores: a document for each, named by the device's type, the key, and what is near.

A name is "decisions/<device>/<key>.<variant>.json": a key has the decisions of machines that differ in what is near, so
that one with 16 threads and one with 32 do not take turns at replacing each other's.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from backend_kwargs.auto import verdicts
from backend_kwargs.auto.machine import Machine, device_of, difference, nearly, variant_of
from backend_kwargs.errors import error_text, printable, warn_once
from backend_kwargs.facts.decision import Decision, check
from backend_kwargs.stores import Documents, Store
from backend_kwargs.stores.documents import Document, EarlierError, Kind, RefusedError, decoded, encoded, readable
from backend_kwargs.stores.folder import Folder
from backend_kwargs.stores.layered import Body, Layered, LookedUp, check_replaces, is_own, put
from backend_kwargs.stores.opening import opened

FOLDER = "decisions/"
COMPUTATION = 16  # digits of a key that stand for the computation at any sizes


def folder_of(there: Machine) -> str:
    """Return the prefix of the names of what was decided on such a device."""
    return f"{FOLDER}{device_of(there)}/"


def name_of(decision: Decision) -> str:
    """Return the name of a decision's document."""
    return name_on(decision.machine, decision.key)


def name_on(there: Machine, key: str) -> str:
    """Return the name of the document with the decision for `key` of such a machine."""
    return f"{folder_of(there)}{key}.{variant_of(there)}.json"


# Before schema 2, keys held what was estimated and the sources of rewrites: no graph has such a key any more.
KIND = Kind("decision", Decision, schema=2, oldest=2, check=check, stays=attrgetter("provisional"), named=name_of)


@dataclass(frozen=True)
class DecisionStore:
    """The decisions for one machine and one graph, in stores that never fail a compile and are asked once."""

    layered: Layered[Decision]
    here: Machine
    _looked_up: dict[str, LookedUp] = field(default_factory=dict)  # for this graph, by computation

    def begin(self) -> None:
        """Begin to fetch what was decided on such a device."""
        self.layered.begin(folder_of(self.here), COMPUTATION)

    def find(self, key: str) -> Decision | None:
        """Return the decision for `key` of a machine like this one, None if there is none."""
        return next(iter(self.of_computation(key, name_on(self.here, key).__eq__)), None)

    def near(self, key: str) -> list[Decision]:
        """Return the settled decisions for `key` of other machines with such a device, the nearest first."""
        exact, start = f".{variant_of(self.here)}.json", f"{folder_of(self.here)}{key}."
        found = self.of_computation(key, lambda name: name.startswith(start) and not name.endswith(exact))
        found = [each for each in found if not each.provisional]
        return sorted(found, key=lambda each: (len(nearly(each.machine, self.here)), -each.made))

    def put(self, decision: Decision) -> None:
        """Keep `decision` in every store that can be written."""
        try:
            json.dumps(decision.options, allow_nan=False)
            document = Document(name_of(decision), decision)
            encoded(KIND, document)
        except (TypeError, ValueError) as error:
            warn_once(f"A decision for {printable(decision.winner)} cannot be stored: {error_text(error)}.")
            return
        self.layered.put(folder_of(decision.machine), (decision.key[:COMPUTATION], document))
        self._looked_up.clear()

    def of_computation(self, key: str, only: Callable[[str], bool] = lambda name: True) -> list[Decision]:
        """Return the decisions for the computation of `key` at any sizes, on such a device; `only` those so named."""
        start = key[:COMPUTATION]
        if start not in self._looked_up:
            self._looked_up[start] = self.layered.looked_up(folder_of(self.here), start)
        found = self.layered.newest(self._looked_up[start], only)
        bodies = [each.body for each in found.values() if each.body is not None]
        return [replace(each, differs=difference(each.machine, self.here)) for each in bodies]


class Catalogue:
    """The decisions of a whole store, for people: errors are raised.

    A document that cannot be used is listed in `refused`; if `warns`, with a warning.
    """

    def __init__(
        self, given: "str | Path | Documents | Store | None" = None, *, must_exist: bool = False, warns: bool = True
    ) -> None:
        self._of, self._warns = Store.of(given), warns
        self._opened = opened(self._of, must_exist=must_exist)
        self.refused: dict[str, RefusedError] = {}  # documents of the last reading, by name

    @property
    def label(self) -> str:
        """The store's name."""
        return self._opened.store.label

    @property
    def earlier(self) -> list[str]:
        """The names of what was found of earlier releases, which is not read."""
        return [name for name, error in self.refused.items() if isinstance(error, EarlierError)]

    def all(self, prefix: str = "", folder: str = FOLDER) -> list[Decision]:
        """Return the decisions in a folder whose keys begin with `prefix`, latest first."""
        self.refused.clear()
        found = [each for each in self._bodies(KIND, folder).values() if each.key.startswith(prefix)]
        return sorted(found, key=lambda each: each.made, reverse=True)

    def check_replaces(self) -> None:
        """Raise if another decision could not be kept in the place of one that is signed."""
        with self._opened.doing("write") as store:
            for _, content in store.list(FOLDER):
                check_replaces(store, readable(content), self._of.signing_key)

    def takes(self, decision: Decision) -> bool:
        """Return whether the store may have a decision: a provisional one stays in folders of this machine."""
        return not KIND.stays(decision) or isinstance(self._opened.store, Folder)

    def add(self, *decisions: Decision) -> None:
        """Keep those `decisions` that the store takes, as newer than what is there."""
        with self._opened.doing("write") as store:
            for decision in filter(self.takes, decisions):
                put(KIND, store, Document(name_of(decision), decision), self._of.signing_key)

    def places(self) -> dict[str, verdicts.Verdict]:
        """Return what is known of places that were raced by themselves, by name."""
        return self._bodies(verdicts.KIND, verdicts.FOLDER)

    def forget(self, prefix: str = "", kind: Kind[Any] = KIND, folder: str = FOLDER) -> int:
        """Put a tombstone in place of what begins with `prefix`, also where it cannot be read; return how many."""
        with self._opened.doing("read") as store:
            listed = ((name, readable(content)) for name, content in store.list(folder))
            there = {name for name, read in listed if read is None or read.body is not None}
        names = {name for name in there if name.rpartition("/")[2].startswith(prefix)}
        with self._opened.doing("write") as store:
            for name in names:
                put(kind, store, Document(name, None), self._of.signing_key)
        return len(names)

    def _bodies(self, kind: Kind[Body], folder: str) -> dict[str, Body]:
        """Return what lies below a folder and may be used here, by name."""
        found = {}
        with self._opened.doing("read") as store:
            trusted = () if is_own(store) else self._of.trusted_keys
            for name, content in store.list(folder):
                try:
                    if (body := decoded(kind, name, content, trusted, self._of.min_generation).body) is not None:
                        found[name] = body
                except RefusedError as error:
                    self.refused[name] = error
                    if self._warns and not isinstance(error, EarlierError):
                        warn_once(f"{printable(name)}: {printable(str(error))}")
        return found
