"""The store of decisions, in SQLite: safe with many processes and `kill -9`; its errors never fail a compile.

It has a rollback journal: a write-ahead log needs shared memory, which network disks lack, and cannot be read from a
read-only folder. A writer does everything in one transaction, the check of all pages too.
"""

import contextlib
import os
import shutil
import sqlite3
import stat
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from backend_kwargs.auto.decision import COLUMNS, packed, unpacked
from backend_kwargs.errors import BackendKwargsError, error_text, printable, warn_once
from backend_kwargs.facts.decision import Decision
from backend_kwargs.torch_internals.replacing import undone

VARIABLE = "BACKEND_KWARGS_STORE"
FILE = "decisions.sqlite"
SCHEMA = 3
APPLICATION_ID = 0x626B7761  # "bkwa", in the header of each store; 0 in those of the first releases
COLUMNS_OF = {1: COLUMNS[:10], 2: COLUMNS[:11], 3: COLUMNS}  # by schema
EMPTY = {"fixed": "{}", "compiler": ""}  # the value of a later column in earlier rows
WAIT_S = 10.0  # to wait for a lock
LATER_S = 0.1  # for all later locks of a process together, after one wait timed out
LONGEST = 16 << 20  # bytes of a value
LOOK_EVERY, LOOKS = 10_000, 10_000  # instructions of SQLite's virtual machine: some seconds
MOST_LOOKUPS = 100_000
MOST_TRIES = 5
HEADER = 100  # bytes of an SQLite file before anything else
FOREIGN = "it is not a store of decisions and was not changed; name another file"
BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_TOOBIG)
TABLE = f"CREATE TABLE decisions ({', '.join(COLUMNS_OF[1])}".encode()
CREATES = (b"CREATE TABLE ", b"CREATE INDEX ", b"CREATE UNIQUE INDEX ")
INSERT = f"INSERT OR REPLACE INTO decisions ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608 - of our own words
BEGINS = "WHERE substr(key, 1, ?) = ? ORDER BY made DESC"
TROUBLE = (sqlite3.Error, OSError, ValueError, TypeError)

Held = dict[str, Any]  # a row by column, with text as bytes

# By path, for this process: the seconds that it still waits for locks, and the problems it has warned of.
_patience: dict[Path, float] = {}
_warned: set[Path] = set()


class NotOursError(ValueError):
    """The file is not a store that this release may write."""


class DamagedError(sqlite3.DatabaseError):
    """The store has a page that cannot be read."""


def forget_trouble() -> None:
    """Forget which stores had problems."""
    _patience.clear()
    _warned.clear()


def open_store(given: str | None = None, *, strict: bool = False) -> "Store":
    """Return the store at `given`, or at BACKEND_KWARGS_STORE, or in the user's data directory.

    A `strict` one raises if it cannot be read; others warn, since `auto` can race again.
    """
    if named := given or os.environ.get(VARIABLE):
        path = Path(os.path.expanduser(named))  # noqa: PTH111 - pathlib's raises if a home is unknown
        return Store(path, strict=strict)
    from platformdirs import user_data_path

    try:
        folder = user_data_path("backend_kwargs", appauthor=False)
    except RuntimeError:  # platformdirs finds no home; its earlier releases return "~/..."
        folder = Path("~")
    return Store(folder / FILE, private=True, strict=strict)


class Store:
    """The decisions in one file. Reading changes nothing; a damaged file is replaced at the next write.

    The journal is a rollback journal, not a write-ahead log: the latter needs shared memory, which network disks lack,
    and cannot be read from a read-only folder. If `private`, files are created readable by the user only.
    """

    def __init__(self, path: Path, *, private: bool = False, strict: bool = False) -> None:
        self.path = path
        self.private = private
        self.strict = strict

    def find(self, key: str) -> Decision | None:
        """Return the decision for `key`, None if there is none."""
        return next(iter(self._sound(self._rows("WHERE key = ?", (key,)))), None)

    def of_computation(self, graph: str) -> list[Decision]:
        """Return the decisions for this computation at any sizes, on any machine."""
        return self._sound(self._rows("WHERE graph = ?", (graph,)))

    def all(self, prefix: str = "") -> list[Decision]:
        """Return the decisions whose keys begin with `prefix`, latest first."""
        return self._sound(self._rows(BEGINS, (len(prefix), prefix)))

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, also those of rows that cannot be read."""
        return [_key(row) for row in self._rows(BEGINS, (len(prefix), prefix))]

    def add(self, *decisions: Decision) -> None:
        """Store `decisions`, all or none; raise BackendKwargsError if the file cannot be written."""
        with self._writing() as connection:
            connection.executemany(INSERT, map(packed, decisions))

    def put(self, decision: Decision) -> None:
        """Store `decision`; warn if that fails."""
        try:
            self.add(decision)
        except BackendKwargsError as error:
            self._warn(f"{error} Decisions are kept in this process only.")

    def forget(self, keys: Iterable[str]) -> int:
        """Delete the decisions with these keys; return how many there were."""
        delete = "DELETE FROM decisions WHERE key = CAST(? AS TEXT)"  # of bytes, since a broken key may not be UTF-8
        with self._writing() as connection:
            return sum(connection.execute(delete, (key.encode(errors="surrogateescape"),)).rowcount for key in keys)

    def clear(self) -> int:
        """Delete all decisions, also those that cannot be read; return how many there were."""
        with self._writing() as connection:
            return connection.execute("DELETE FROM decisions").rowcount

    # ---- reading

    def _rows(self, where: str, values: Sequence[object]) -> list[Held]:
        try:
            if not self._size():
                return []
            # Not "ro", which cannot roll back a killed writer's journal; SQLite falls back to reading without write
            # access.
            with self._connected("rw", "BEGIN") as connection:
                return _selected(connection, where, values)
        except TROUBLE as error:
            salvaged = _readable(self.path) if _is_damage(error) else []
            if self.strict and not salvaged:
                raise BackendKwargsError(f"Cannot read {str(self.path)!r}: {_why(error)}.") from error
            self._warn(f"Decisions in {str(self.path)!r} cannot be read: {_why(error)}. auto continues without them.")
            with _connection(":memory:", 0) as connection:
                connection.execute(f"CREATE TABLE decisions ({', '.join(COLUMNS)})")
                connection.executemany(INSERT, map(_values, salvaged))
                return _selected(connection, where, values)

    def _sound(self, rows: list[Held]) -> list[Decision]:
        """Return the valid decisions among `rows`; one warning names the others."""
        sound: list[Decision] = []
        broken: dict[str, Exception] = {}
        for row in rows:
            try:
                sound.append(unpacked(row))
            except ValueError as error:
                broken[printable(_key(row)[:12])] = error
        if broken:
            why = next(iter(broken.values()))
            warn_once(f"Decisions {', '.join(broken)} in {str(self.path)!r} cannot be read: {why}.")
        return sound

    # ---- writing

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with undone() as stack, self._writable(stack) as connection:
                yield connection
        except TROUBLE as error:  # TypeError: JSON cannot represent an option's value
            raise BackendKwargsError(f"Cannot write {str(self.path)!r}: {_why(error)}.") from error

    def _writable(self, stack: ExitStack) -> "_Connection":
        """Return a connection with the write lock, to a file that is not damaged; `stack` closes it."""
        for _ in range(MOST_TRIES):
            self._create()
            inode = self._inode()
            try:
                connection = stack.enter_context(self._connected("rw", "BEGIN IMMEDIATE", whole=True))
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):  # busy, read-only, no space: the file itself may be sound
                    raise
                self._mend(error, inode)
                continue
            if inode == self._inode():
                return connection
            stack.close()  # another process has replaced the file meanwhile
        raise sqlite3.OperationalError("it is damaged again and again")

    def _create(self) -> None:
        folder = self._located().parent
        if not folder.is_dir():
            # One folder at most is made for a name that the user gives, which may be misspelled.
            if self.private:
                folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700 if self.private else 0o777)
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if self.private else 0o666))

    def _mend(self, error: sqlite3.Error, inode: int) -> None:
        """Replace a damaged file by one with all rows that can be read; the damaged file is kept next to it."""
        rows = _readable(self.path)
        stamp = f"{os.getpid()}-{time.time_ns()}"
        aside = self.path.with_name(f"{self.path.name}.unreadable-{stamp}")
        beside = self.path.with_name(f".{self.path.name}.{stamp}")
        try:
            with Store(beside, private=True)._writing() as connection:
                connection.executemany(INSERT, map(_values, rows))
            shutil.copymode(self.path, beside)
            if inode != self._inode():  # another process has replaced it
                return
            _keep(self.path, aside)
            beside.replace(self.path)
        finally:
            beside.unlink(missing_ok=True)
        warn_once(
            f"The store {str(self.path)!r} is damaged ({_why(error)}). A new one has the {len(rows)} decisions that "
            f"can be read; the damaged file is now {aside.name!r}."
        )

    # ---- the file

    def _located(self) -> Path:
        """Return the path if it can name a file; else raise."""
        if str(self.path).startswith("~"):  # expanduser() could not expand it
            raise ValueError(f"no home directory is known for {self.path.parts[0]!r}")
        return self.path

    def _size(self) -> int:
        try:
            found = self._located().stat()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        if not stat.S_ISREG(found.st_mode):
            raise NotOursError("it is not a regular file")
        if 0 < found.st_size < HEADER:  # SQLite would overwrite it
            raise NotOursError(FOREIGN)
        return found.st_size

    def _inode(self) -> int:
        return self.path.stat().st_ino

    @contextlib.contextmanager
    def _connected(self, mode: str, begin: str, *, whole: bool = False) -> Iterator["_Connection"]:
        """Connect in a transaction, to an empty file or a store; if `whole`, one that may be written."""
        self._size()
        left, began = _patience.get(self.path, WAIT_S), time.monotonic()
        with _connection(f"{self.path.absolute().as_uri()}?mode={mode}", left) as connection:
            try:
                connection.execute(begin)
                schema = _schema(connection)
                if whole:
                    _prepare(connection, schema)
            except TROUBLE as error:
                if isinstance(error, sqlite3.OperationalError) and _code(error) in BUSY:
                    waited = time.monotonic() - began
                    _patience[self.path] = LATER_S if left == WAIT_S else max(left - waited, 0.0)
                if _is_damage(error) and not _looks_ours(self.path):
                    raise NotOursError(FOREIGN) from None
                raise
            yield connection

    def _warn(self, message: str) -> None:
        """Warn of the first problem with this file."""
        if self.path not in _warned:
            _warned.add(self.path)
            warn_once(message)


class _Connection(sqlite3.Connection):
    """A connection whose statements stop after some seconds of work, or at Ctrl-C, which SQLite would swallow."""

    looks = 0

    def look(self) -> bool:
        self.looks += 1
        return self.looks > LOOKS

    def rows(self, statement: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        try:
            return self.execute(statement, values).fetchall()
        except sqlite3.OperationalError as error:
            if _code(error) == sqlite3.SQLITE_INTERRUPT and self.looks <= LOOKS:
                raise KeyboardInterrupt from None
            raise


@contextlib.contextmanager
def _connection(name: str, wait_s: float) -> Iterator[_Connection]:
    with undone() as stack:
        connection = stack.enter_context(closing(sqlite3.connect(name, uri=True, timeout=wait_s, factory=_Connection)))
        connection.isolation_level = None  # transactions begin only with BEGIN
        connection.text_factory = bytes  # so that a text that is not UTF-8 affects only its own row
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        # A weak reference, so that a connection lost to a Ctrl-C is closed at once and its lock released.
        watched: Any = weakref.proxy(connection)
        connection.set_progress_handler(partial(_Connection.look, watched), LOOK_EVERY)
        yield connection


def _schema(connection: _Connection) -> int:
    """Return the schema of a store, 0 for an empty file; raise NotOursError if the file is anything else.

    Called before any other SELECT: a view called `decisions` could run forever, and a trigger could drop rows.
    """
    found = connection.rows("SELECT rootpage, sql FROM sqlite_master")
    application, schema = (_pragma(connection, each) for each in ("application_id", "user_version"))
    if not (found or application or schema):
        return schema
    columns = _columns(connection)
    # By the SQL text, as SQLite decides: `type` may contain anything. Views, triggers and virtual tables have no page.
    strange = any(not page or (sql is not None and not sql.startswith(CREATES)) for page, sql in found)
    ours = application == APPLICATION_ID and schema and set(COLUMNS_OF[1]) <= set(columns)
    of_before = application == 0 and COLUMNS_OF.get(schema) == columns
    if strange or not (ours or of_before):
        raise NotOursError(FOREIGN)
    return schema


def _pragma(connection: _Connection, name: str) -> int:
    return int(connection.rows(f"PRAGMA {name}")[0][0])


def _columns(connection: _Connection) -> tuple[str, ...]:
    """Return the columns that store values, without generated ones, which compute them."""
    found = connection.rows("PRAGMA table_xinfo(decisions)")
    return tuple(name.decode(errors="replace") for _, name, *_, hidden in found if not hidden)


def _prepare(connection: _Connection, schema: int) -> None:
    """Check the whole file; create the table in a new one, and add what an older store lacks."""
    if schema > SCHEMA:
        raise NotOursError("a newer release of backend-kwargs wrote it; update this one, or name another file")
    if (problem := connection.rows("PRAGMA integrity_check(1)")[0][0]) != b"ok":
        raise DamagedError(problem.decode(errors="replace"))
    connection.execute(f"CREATE TABLE IF NOT EXISTS decisions ({', '.join(COLUMNS)}, PRIMARY KEY (key))")
    held = _columns(connection)
    for name in COLUMNS:
        if name not in held:
            connection.execute(f"ALTER TABLE decisions ADD COLUMN {name} DEFAULT '{EMPTY[name]}'")
    for name, value in (("application_id", APPLICATION_ID), ("user_version", SCHEMA)):
        if _pragma(connection, name) != value:
            connection.execute(f"PRAGMA {name} = {value}")


def _selected(connection: _Connection, where: str, values: Sequence[object]) -> list[Held]:
    held = _columns(connection)
    names = [name for name in COLUMNS if name in held]
    if not names:
        return []
    rows = connection.rows(f"SELECT {', '.join(names)} FROM decisions {where}", values)  # noqa: S608 - our own words
    return [dict(zip(names, row, strict=True)) for row in rows]


def _readable(path: Path) -> list[Held]:
    """Return the rows with decisions that can be read from a file with unreadable pages."""
    found: dict[int, Held] = {}
    with contextlib.suppress(*TROUBLE), _connection(f"{path.absolute().as_uri()}?mode=rw", 0) as at:
        _schema(at)
        names = [name for name in COLUMNS if name in _columns(at)]
        select = f"SELECT rowid, {', '.join(names)} FROM decisions"  # noqa: S608 - our own words

        def read(clause: str) -> None:
            with contextlib.suppress(sqlite3.DatabaseError):
                for rowid, *row in at.execute(f"{select} {clause}"):
                    found[rowid] = dict(zip(names, row, strict=True))

        read("ORDER BY rowid")
        read("ORDER BY rowid DESC")
        # Each remaining row by itself: the path to it may avoid the broken pages.
        last = max(found, default=0) + 1
        with contextlib.suppress(sqlite3.DatabaseError):
            last = max(last, int(at.rows("SELECT max(rowid) FROM decisions")[0][0] or 0))
        for rowid in range(1, min(last, MOST_LOOKUPS) + 1):
            if rowid not in found:
                read(f"WHERE rowid = {rowid}")
    return [row for row in found.values() if _is_sound(row)]


def _is_sound(row: Held) -> bool:
    try:
        unpacked(row)
    except ValueError:
        return False
    return True


def _values(row: Held) -> list[object]:
    """Return a row as it was read, with texts as str, for INSERT."""
    values = [row.get(name, b"{}") for name in COLUMNS]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def _key(row: Held) -> str:
    key = row["key"]
    return key.decode(errors="surrogateescape") if isinstance(key, bytes) else str(key)


def _keep(path: Path, aside: Path) -> None:
    """Rename a damaged file to `aside`, with a killed writer's journal, which must not apply to another file."""
    try:
        os.link(path, aside)  # a link first, so that a file always exists at `path`
    except OSError:  # not every file system has links
        path.replace(aside)
    with contextlib.suppress(FileNotFoundError):
        Path(f"{path}-journal").replace(f"{aside}-journal")


def _looks_ours(path: Path) -> bool:
    """Return whether a file that SQLite cannot read is a store, by its first bytes."""
    with path.open("rb") as file:
        head = file.read(1 << 16)
    application, schema = (int.from_bytes(head[at : at + 4], "big") for at in (68, 60))
    return application == APPLICATION_ID or (application == 0 and schema in COLUMNS_OF and TABLE in head)


def _code(error: BaseException) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_damage(error: BaseException) -> bool:
    return isinstance(error, DamagedError) or _code(error) in DAMAGE


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, NotOursError) else error_text(error)
