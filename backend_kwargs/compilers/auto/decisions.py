"""What races decided, in SQLite: safe under many processes and `kill -9`, set aside where it cannot be read."""

import contextlib
import json
import os
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from backend_kwargs.errors import BackendKwargsError, said, shown, warn_once

SCHEMA = 2
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
    "fixed": dict,  # since schema 2
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
    "peak_bytes": NUMBER | None,
    "won": bool,
}
INTERVAL: Mapping[str, Any] = {"median": NUMBER, "low": NUMBER, "high": NUMBER}
SELECT = "SELECT * FROM decisions"
BEGINS = "WHERE substr(key, 1, ?) = ? ORDER BY made DESC"
INSERT = f"INSERT OR REPLACE INTO decisions VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own words


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` names the computation whatever its sizes, `options` are the winner's beside those that the user gave, `rows`
    the race's table as plain data, `machine` where it ran, `facts` what the graph held in words, `cut_s` the budget
    that cut the race short (0 where none did), `made` seconds since the epoch. `fixed` are the options that the user
    gave, as `plain` leaves them: an export holds them, and nothing is compiled under them.
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
    fixed: Mapping[str, Any] = field(default_factory=dict)


def has_form(value: Any) -> bool:
    """Tell whether a file can hold an option's value: a text, a number, or a list of these."""
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, list) else [value]))


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with None for each value that a file cannot hold."""
    return {name: value if has_form(value) else None for name, value in options.items()}


def checked(values: Mapping[str, Any]) -> Decision:
    """Return the decision that plain data holds, or raise ValueError."""
    _check(values, COLUMNS)
    for row in values["rows"]:
        _check(row, ROW)
        _check(row["speedup"] or dict.fromkeys(INTERVAL, 0), INTERVAL)
    for name, kind in COLUMNS.items():
        if kind is NUMBER and not abs(values[name]) <= sys.float_info.max:
            raise ValueError(f"{name} is a finite number, not {shown(values[name])}")
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
    return [_packed(values[name]) for name in COLUMNS]


def _packed(value: Any) -> str | float:
    if isinstance(value, int | float):
        return float(value)
    return value if isinstance(value, str) else json.dumps(value)


def unpacked(row: tuple[Any, ...]) -> Decision:
    """Return what `packed` packed; raise ValueError or TypeError where it is something else."""
    values = dict(zip(COLUMNS, (*row, "{}")[: len(COLUMNS)], strict=True))  # schema 1 ends before `fixed`
    return checked({**values, **{name: json.loads(values[name]) for name in ("options", "rows", "machine", "fixed")}})


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
        return next(iter(self._sound(self._rows("WHERE key = ?", (key,)))), None)

    def all(self, prefix: str = "") -> list[Decision]:
        """Return the decisions whose key begins with `prefix`, the latest first."""
        return self._sound(self._rows(BEGINS, (len(prefix), prefix)))

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, also of what cannot be read."""
        return [key for key, *_ in self._rows(BEGINS, (len(prefix), prefix))]

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

    def forget(self, keys: Iterable[str]) -> int:
        """Delete the decisions called `keys`; return how many there were."""
        with self._writing() as connection:
            return sum(connection.execute("DELETE FROM decisions WHERE key = ?", (key,)).rowcount for key in keys)

    def clear(self) -> int:
        """Delete all decisions, also what cannot be read; return how many there were."""
        with self._writing() as connection:
            return connection.execute("DELETE FROM decisions").rowcount

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
            return _connected(self.path, "rwc", whole=True)
        except sqlite3.OperationalError:  # busy, read-only, no space: the file itself may be sound
            raise
        except sqlite3.DatabaseError as error:
            if not again:
                raise
            self._set_aside(error)
            return self._writable(again=False)

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        try:
            _connected(self.path, "rw", whole=True).close()
        except sqlite3.OperationalError:  # busy: it can be used
            return
        except sqlite3.DatabaseError:
            pass
        else:  # another process has put a sound one in its place
            return
        aside = self.path.with_name(f"{self.path.name}.unreadable-{time.time_ns()}")
        with contextlib.suppress(FileNotFoundError):
            self.path.replace(aside)
            warn_once(f"The decisions in {str(self.path)!r} were set aside as {aside.name!r}: {said(error)}.")

    def _rows(self, where: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        try:
            # Not "ro", which could not undo what a killed writer left; SQLite reads where it may not write.
            with contextlib.closing(_connected(self.path, "rw")) as connection:
                return connection.execute(f"{SELECT} {where}", values).fetchall()
        except (sqlite3.Error, OSError) as error:
            warn_once(f"Decisions in {str(self.path)!r} cannot be read: {said(error)}.")
            return []

    def _sound(self, rows: list[tuple[Any, ...]]) -> list[Decision]:
        """Return the decisions of `rows`, but for those that hold something else, of which one warning tells."""
        sound: list[Decision] = []
        broken: dict[str, Exception] = {}
        for row in rows:
            try:
                sound.append(unpacked(row))
            except (ValueError, TypeError) as error:
                broken[str(row[0])[:12]] = error
        if broken:
            why = said(next(iter(broken.values())))
            warn_once(f"Decisions {', '.join(broken)} in {str(self.path)!r} cannot be read: {why}.")
        return sound


def _connected(path: Path, mode: str, *, whole: bool = False) -> sqlite3.Connection:
    """Return a connection to a store; where `whole`, only if each page of the file is sound."""
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=WAIT_S)
    try:
        found = _schema(connection)
        if found not in range(SCHEMA + 1):
            raise sqlite3.DatabaseError(f"its schema is {found}, not {SCHEMA}")  # noqa: TRY301 - closed below
        # Asked again, as another process may have begun the file meanwhile.
        if not found and _holds_tables(connection) and not (found := _schema(connection)):
            # By this kind of error the file stays where it is.
            raise sqlite3.OperationalError("it is another program's database")  # noqa: TRY301 - closed below
        if whole and (told := _pragma(connection, "integrity_check(1)")) != "ok":
            raise sqlite3.DatabaseError(told)  # noqa: TRY301 - closed below
        if found < SCHEMA and mode == "rwc":
            _bring_up_to_date(connection)
        elif not found:  # what is read before a table is written has one in memory
            connection.execute(f"CREATE TEMP TABLE decisions ({', '.join(COLUMNS)})")
    except BaseException:
        connection.close()
        raise
    return connection


def _schema(connection: sqlite3.Connection) -> int:
    return int(_pragma(connection, "user_version"))


def _pragma(connection: sqlite3.Connection, name: str) -> Any:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def _holds_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table'").fetchone() is not None


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Give a new file its table, and that of an older one the columns it lacks."""
    connection.execute("BEGIN IMMEDIATE")  # another process may be about to do the same
    connection.execute(f"CREATE TABLE IF NOT EXISTS decisions ({', '.join(COLUMNS)}, PRIMARY KEY (key))")
    held = [column for _, column, *_ in connection.execute("PRAGMA table_info(decisions)")]
    for name in COLUMNS:
        if name not in held:
            connection.execute(f"ALTER TABLE decisions ADD COLUMN {name} DEFAULT '{{}}'")
    connection.execute(f"PRAGMA user_version = {SCHEMA}")
    connection.commit()
