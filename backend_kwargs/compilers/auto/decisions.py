"""What races decided, in SQLite: safe under many processes and `kill -9`, set aside where it cannot be read."""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError, said, shown, warn_once

SCHEMA = 1
VARIABLE = "BACKEND_KWARGS_STORE"
FILE = "decisions.sqlite"
WAIT_S = 10.0
NUMBER = int | float
COLUMNS: Mapping[str, Any] = {
    "key": str,
    "graph": str,
    "winner": str,
    "options": dict,
    "rows": list,
    "machine": dict,
    "facts": str,
    "seconds": NUMBER,
    "cut_s": NUMBER,
    "made": NUMBER,
}
ROW: Mapping[str, Any] = {
    "name": str,
    "options": dict,
    "status": str,
    "reason": str,
    "seconds": NUMBER | None,
    "speedup": dict | None,
    "against": str,
    "compile_s": NUMBER,
    "won": bool,
}
INTERVAL: Mapping[str, Any] = {"median": NUMBER, "low": NUMBER, "high": NUMBER}
INSERT = f"INSERT OR REPLACE INTO decisions VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own words
SELECT = f"SELECT {', '.join(COLUMNS)} FROM decisions"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` names the computation whatever its sizes, `options` are the winner's beside those that the user gave, `rows`
    the race's table as plain data, `machine` where it ran, `facts` what the graph held in words, `cut_s` the budget
    that cut the race short (0 where none did), `made` seconds since the epoch.
    """

    key: str
    graph: str
    winner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    facts: str = ""
    seconds: float = 0.0
    cut_s: float = 0.0
    made: float = field(default_factory=time.time)


def checked(values: Mapping[str, Any]) -> Decision:
    """Return the decision that plain data holds, or raise ValueError."""
    _check(values, COLUMNS)
    for row in values["rows"]:
        _check(row, ROW)
        _check(row["speedup"] or dict.fromkeys(INTERVAL, 0), INTERVAL)
    return Decision(**{name: values[name] for name in COLUMNS} | {"rows": tuple(values["rows"])})


def _check(values: Any, types: Mapping[str, Any]) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"no table: {shown(values)}")  # noqa: TRY004 - data, not an argument
    for name, kind in types.items():
        if not isinstance(values.get(name), kind):
            wanted = kind.__name__ if isinstance(kind, type) else kind
            raise ValueError(f"{name} is {wanted}, not {shown(values.get(name))}")  # noqa: TRY004


def packed(decision: Decision) -> list[Any]:
    """Return the decision as SQLite and JSON hold it; raise TypeError where an option's value has no form there."""
    values = asdict(decision)
    values["rows"] = json.dumps(values["rows"], default=repr)  # to be read by people alone
    return [value if isinstance(value, str | float) else json.dumps(value) for value in map(values.get, COLUMNS)]


def unpacked(row: tuple[Any, ...]) -> Decision:
    """Return what `packed` packed; raise ValueError or TypeError where it is something else."""
    values = dict(zip(COLUMNS, row, strict=True))
    return checked({**values, **{name: json.loads(values[name]) for name in ("options", "rows", "machine")}})


def store_path(given: str | None = None) -> Path:
    """Return the file of decisions: as given, or BACKEND_KWARGS_STORE, or in the user's data directory."""
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    from platformdirs import user_data_path

    return user_data_path("backend_kwargs", appauthor=False) / FILE


class Store:
    """The decisions in one file. To write, a file that cannot be read is set aside; looking things up changes nothing.

    A rollback journal and no write-ahead log: that needs memory shared by all processes, which network disks lack, and
    could not be read from a folder that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, key: str) -> Decision | None:
        """Return the decision for `key`, None where there is none."""
        return next(iter(self._select("WHERE key = ?", (key,))), None)

    def all(self, prefix: str = "") -> list[Decision]:
        """Return the decisions whose key begins with `prefix`, the latest first."""
        return self._select("WHERE substr(key, 1, ?) = ? ORDER BY made DESC", (len(prefix), prefix))

    def add(self, *decisions: Decision) -> None:
        """Keep `decisions`, all or none; raise BackendKwargsError where the file cannot be written."""
        with self._writing() as connection:
            connection.executemany(INSERT, map(packed, decisions))

    def put(self, decision: Decision) -> None:
        """Keep `decision`; warn where that cannot be done."""
        try:
            self.add(decision)
        except BackendKwargsError as error:
            warn_once(f"{error} The decision holds in this process alone.")

    def forget(self, keys: list[str]) -> int:
        """Delete the decisions called `keys`; return how many there were."""
        with self._writing() as connection:
            return sum(connection.execute("DELETE FROM decisions WHERE key = ?", (key,)).rowcount for key in keys)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(self._writable()) as connection, connection:
                yield connection
        except (sqlite3.Error, OSError, TypeError) as error:  # TypeError: an option's value that JSON has no form for
            raise BackendKwargsError(f"Cannot write {str(self.path)!r}: {said(error)}.") from error

    def _writable(self, *, again: bool = True) -> sqlite3.Connection:
        try:
            return _connected(self.path, "rwc")
        except sqlite3.OperationalError:  # busy, read-only, no space: the file itself may be sound
            raise
        except sqlite3.DatabaseError as error:
            if not again:
                raise
            self._set_aside(error)
            return self._writable(again=False)

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        with contextlib.suppress(sqlite3.DatabaseError):
            _connected(self.path, "rw").close()
            return  # another process has put a sound one in its place
        aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(aside)
            warn_once(f"The decisions in {str(self.path)!r} were set aside as {aside.name!r}: {said(error)}.")

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Decision]:
        if not self.path.exists():
            return []
        try:
            # Not "ro", which could not undo what a killed writer left; SQLite reads where it may not write.
            with contextlib.closing(_connected(self.path, "rw")) as connection:
                return list(map(unpacked, connection.execute(f"{SELECT} {where}", values)))
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            warn_once(f"Decisions in {str(self.path)!r} cannot be read: {said(error)}.")
            return []


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=WAIT_S)
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, SCHEMA):
            raise sqlite3.DatabaseError(f"its schema is {found}, not {SCHEMA}")  # noqa: TRY301 - closed below
        if not found:
            # What is read before a table is written has one in memory.
            kept = "" if mode == "rwc" else "TEMP "
            connection.execute(f"CREATE {kept}TABLE IF NOT EXISTS decisions ({', '.join(COLUMNS)}, PRIMARY KEY (key))")
            if not kept:
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except BaseException:
        connection.close()
        raise
    return connection
