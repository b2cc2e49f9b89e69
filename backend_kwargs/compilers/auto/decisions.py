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

from backend_kwargs.errors import BackendKwargsError, said, warn_once

SCHEMA = 1
VARIABLE = "BACKEND_KWARGS_STORE"
FILE = "decisions.sqlite"
WAIT_S = 10.0
COLUMNS = ("key", "graph", "winner", "options", "rows", "machine", "facts", "seconds", "made")
INSERT = f"INSERT OR REPLACE INTO decisions VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own words
SELECT = f"SELECT {', '.join(COLUMNS)} FROM decisions"  # noqa: S608


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` names the computation whatever its sizes, `options` are the winner's beside those that the user gave, `rows`
    the race's table as plain data, `machine` where it ran, `facts` what the graph held in words, `made` seconds since
    the epoch.
    """

    key: str
    graph: str
    winner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    facts: str = ""
    seconds: float = 0.0
    made: float = field(default_factory=time.time)


def store_path(given: str | None = None) -> Path:
    """Return the file of decisions: as given, or BACKEND_KWARGS_STORE, or in the user's data directory."""
    named = given or os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    from platformdirs import user_data_path

    return user_data_path("backend_kwargs", appauthor=False) / FILE


class Store:
    """The decisions in one file. A file that cannot be read is set aside; one that cannot be written is told once."""

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
            connection.executemany(INSERT, map(_row, decisions))

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
            with self._open() as connection:
                yield connection
        except (sqlite3.Error, OSError, TypeError) as error:  # TypeError: an option's value that JSON has no form for
            raise BackendKwargsError(f"Cannot write {str(self.path)!r}: {said(error)}.") from error

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Decision]:
        if not self.path.exists():
            return []
        try:
            with self._open() as connection:
                found = connection.execute(f"{SELECT} {where}", values).fetchall()
            return [_decision(row) for row in found]
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            warn_once(f"Decisions in {str(self.path)!r} cannot be read: {said(error)}.")
            return []

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = self._connected()
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def _connected(self) -> sqlite3.Connection:
        try:
            return _connect(self.path)
        except sqlite3.OperationalError:  # busy, read-only, no space: the file itself may be sound
            raise
        except sqlite3.DatabaseError as error:
            aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
            self.path.replace(aside)
            warn_once(f"The decisions in {str(self.path)!r} were set aside as {aside.name!r}: {said(error)}.")
            return _connect(self.path)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=WAIT_S)
    try:
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found > SCHEMA:
            raise sqlite3.DatabaseError(f"its schema is {found}, not {SCHEMA} or less")  # noqa: TRY301 - closed below
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS decisions ({', '.join(COLUMNS)}, PRIMARY KEY (key))")
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
    except BaseException:
        connection.close()
        raise
    return connection


def _row(decision: Decision) -> list[Any]:
    values = asdict(decision)
    values["rows"] = json.dumps(values["rows"], default=repr)  # to be read by people alone
    return [value if isinstance(value, str | float) else json.dumps(value) for value in map(values.get, COLUMNS)]


def _decision(row: tuple[Any, ...]) -> Decision:
    values = dict(zip(COLUMNS, row, strict=True))
    read = {name: json.loads(values[name]) for name in ("options", "rows", "machine")}
    return Decision(**{**values, **read, "rows": tuple(read["rows"])})
