"""The store's limits: how long it waits, how much it reads, and which files it takes for its own."""

import contextlib
import os
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from backend_kwargs.auto import store as module
from backend_kwargs.auto.decision import COLUMNS, packed
from backend_kwargs.auto.store import APPLICATION_ID, TABLE, Store
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from tests.auto.graphs import KEY, MADE, spoil


def test_how_long_it_waits_for_a_lock(store, monkeypatch):
    """Ten seconds the first time; then a tenth of a second for all later locks together, until that is forgotten."""
    Store(store).add(MADE)
    now, waits, lasts = [0.0], [], [10.0, 0.04, 0.5, 0.0, 10.0]

    class Busy:
        def execute(self, statement):
            now[0] += lasts[len(waits) - 1]
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error

    @contextlib.contextmanager
    def connection(name, wait_s):
        waits.append(round(wait_s, 6))
        yield Busy()

    monkeypatch.setattr(module, "_connection", connection)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for _ in range(4):
        with pytest.raises(sqlite3.OperationalError), Store(store)._connected("rw", "BEGIN"):
            pass
    module.forget_trouble()
    with pytest.raises(sqlite3.OperationalError), Store(store)._connected("rw", "BEGIN"):
        pass
    assert waits == [10.0, 0.1, 0.06, 0.0, 10.0]
    module.forget_trouble()


def test_limits_of_a_connection():
    """A value has at most 16 MiB, and statements end after ten thousand looks at them."""
    with module._connection(":memory:", 0) as connection:
        assert connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) == 16 * 2**20
        connection.looks = 9_999
        assert [connection.look(), connection.look()] == [False, True]
        assert connection.execute("SELECT 'text'").fetchone() == (b"text",)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


@pytest.mark.parametrize(
    ("looks", "raised"),
    [
        pytest.param(0, KeyboardInterrupt, id="at Ctrl-C"),
        pytest.param(module.LOOKS + 1, sqlite3.OperationalError, id="after too long"),
    ],
)
def test_why_a_statement_stopped(looks, raised):
    """SQLite gives one error for both; the number of looks tells them apart."""
    with module._connection(":memory:", 0) as connection:
        connection.looks = looks
        connection.set_progress_handler(lambda: 1, 1)
        with pytest.raises(raised):
            connection.rows("SELECT 1")


def test_it_gives_up_on_a_file_that_stays_damaged(store, monkeypatch):
    """After five tries to replace it the write fails."""
    mended = []

    def damaged(*_, **__):
        raise module.DamagedError("planted")

    monkeypatch.setattr(Store, "_connected", damaged)
    monkeypatch.setattr(Store, "_mend", lambda self, error, inode: mended.append(str(error)))
    with pytest.raises(BackendKwargsError, match="OperationalError: it is damaged again and again"):
        Store(store).add(MADE)
    assert mended == ["planted"] * 5


@pytest.mark.parametrize("size", [1, 99, 100, 101])
def test_a_file_as_short_as_a_header_is_left_alone(store, size):
    """SQLite would take a shorter one for an empty database."""
    store.write_bytes(b"\1" * size)
    with pytest.raises(BackendKwargsError, match="it is not a store of decisions and was not changed"):
        Store(store).add(MADE)
    assert store.read_bytes() == b"\1" * size


def header(*, application=0, schema=0):
    """Return the first hundred bytes of a database."""
    made = bytearray(100)
    made[60:64], made[68:72] = schema.to_bytes(4, "big"), application.to_bytes(4, "big")
    return bytes(made)


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        pytest.param(header(application=APPLICATION_ID), True, id="its number"),
        pytest.param(header(application=APPLICATION_ID + 1, schema=1) + TABLE, False, id="another's number"),
        pytest.param(header(schema=1) + TABLE, True, id="the first release's"),
        pytest.param(header(schema=3) + TABLE, True, id="a later schema"),
        pytest.param(header(schema=4) + TABLE, False, id="no schema"),
        pytest.param(header(schema=0) + TABLE, False, id="without a schema"),
        pytest.param(header(schema=1) + TABLE[:-1], False, id="another table"),
        pytest.param(header(schema=1).ljust(2**16 - len(TABLE)) + TABLE, True, id="a table in the first pages"),
        pytest.param(header(schema=1).ljust(2**16 - len(TABLE) + 1) + TABLE, False, id="a table far behind"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_by_what_a_damaged_store_is_known(tmp_path, content, ours):
    """By the number in its header; one of the first releases by its schema and its table."""
    (tmp_path / "file").write_bytes(content)
    assert module._looks_ours(tmp_path / "file") is ours


@pytest.mark.parametrize("private", [False, True])
def test_whose_files_are(tmp_path, private):
    """In the user's data folder both are the user's alone; elsewhere the process's mask decides."""
    mask = os.umask(0o022)
    path = tmp_path / "folder" / "file"
    Store(path, private=private).add(MADE)
    os.umask(mask)
    modes = [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)]
    others = [mode & 0o077 for mode in modes]
    assert others == ([0, 0] if private else [0o055, 0o044])


def test_a_misspelled_path_makes_no_folders(tmp_path):
    """Only the last folder of a store that the user names is made; those of the user's data folder all are."""
    with pytest.raises(BackendKwargsError) as raised:
        Store(tmp_path / "misspelled" / "folder" / "file").add(MADE)
    assert str(raised.value).startswith(f"Cannot write '{tmp_path}/misspelled/folder/file': ")
    assert not (tmp_path / "misspelled").exists()
    Store(tmp_path / "data" / "folder" / "file", private=True).add(MADE)


def test_a_new_store_is_marked(store):
    """Its header has the number and the schema by which later releases know it."""
    Store(store).add(MADE)
    with sqlite3.connect(store) as connection:
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    connection.close()
    assert found == [0x626B7761, 3]


def test_which_keys_begin_so(store):
    """Keys are found by their first letters, also where the row cannot be read, the latest first."""
    Store(store).add(*(replace(MADE, key=key * 32, made=made) for key, made in (("aa", 1.0), ("ab", 3.0), ("cd", 2.0))))
    with sqlite3.connect(store) as connection:
        connection.execute("UPDATE decisions SET rows = '3' WHERE key LIKE 'aa%'")
    connection.close()
    assert [key[:2] for key in Store(store).keys("")] == ["ab", "cd", "aa"]
    assert [key[:2] for key in Store(store).keys("a")] == ["ab", "aa"]
    assert Store(store).forget(["aa" * 32, "xx"]) == 1
    assert Store(store).clear() == 2


def test_one_decision_of_several_that_cannot_be_written(store):
    """All are stored or none is."""
    Store(store).add(MADE)
    with pytest.raises(BackendKwargsError, match=r"^Cannot write .*: TypeError: .* not JSON serializable"):
        Store(store).add(replace(MADE, key="cd" * 32), replace(MADE, key="ef" * 32, options={"x": print}))
    assert Store(store).keys("") == [KEY]


def test_a_home_that_nobody_knows(monkeypatch):
    """A path that begins with ~ after expansion names no file."""
    with pytest.raises(BackendKwargsError, match="no home directory is known for '~nobody'"):
        Store(Path("~nobody/file")).add(MADE)


def test_the_columns_of_each_release():
    """Those that later schemas added come last, and have a value in earlier rows."""
    assert {schema: len(columns) for schema, columns in module.COLUMNS_OF.items()} == {1: 10, 2: 11, 3: 12}
    assert all(columns == COLUMNS[: len(columns)] for columns in module.COLUMNS_OF.values())
    assert module.EMPTY == {"fixed": "{}", "compiler": ""}


@pytest.mark.parametrize(
    ("scanned", "last", "looked"),
    [
        pytest.param([], 10**6, range(1, 100_001), id="as many as may be"),
        pytest.param([], 3, [1, 2, 3], id="up to the last"),
        pytest.param([3, 5], None, [1, 2, 4, 6], id="one after those found"),
        pytest.param([3, 5], 4, [1, 2, 4, 6], id="the last is before those found"),
        pytest.param([], None, [1], id="none found"),
    ],
)
def test_which_rows_are_looked_up_one_by_one(monkeypatch, scanned, last, looked):
    """Where no scan of a damaged file ends, each row up to the last, or to the hundred-thousandth."""
    found = []

    class Broken:
        def execute(self, statement):
            if "WHERE rowid" in statement:
                found.append(int(statement.split()[-1]))
                return
            yield from ((rowid, *packed(MADE)) for rowid in scanned)
            raise sqlite3.DatabaseError("planted")

        def rows(self, statement):
            if last is None:
                raise sqlite3.DatabaseError("planted")
            return [(last,)]

    monkeypatch.setattr(module, "_connection", lambda name, wait_s: contextlib.nullcontext(Broken()))
    monkeypatch.setattr(module, "_schema", lambda connection: 3)
    monkeypatch.setattr(module, "_columns", lambda connection: COLUMNS)
    assert len(module._readable(Path("/store"))) == len(scanned)
    assert found == [*looked]


def test_rows_that_are_no_decisions_are_not_kept(store):
    """A damaged file is replaced by one with its decisions; a row of other types is none."""
    Store(store).add(MADE, replace(MADE, key="cd" * 32))
    spoil(store, KEY)
    assert [row["key"] for row in module._readable(store)] == [b"cd" * 32]


def test_the_copy_of_a_damaged_store_is_nobody_elses(store, monkeypatch):
    """While it is made, before it has the mode of the file that it replaces, only the user may read it."""
    Store(store).add(MADE)
    seen, copymode, mask = [], shutil.copymode, os.umask(0o022)

    def noted(path, beside):
        seen.append(stat.S_IMODE(beside.stat().st_mode))
        copymode(path, beside)

    monkeypatch.setattr(module.shutil, "copymode", noted)
    with pytest.warns(BackendKwargsWarning, match="A new one has the 1 decisions that can be read"):
        Store(store)._mend(module.DamagedError("planted"), store.stat().st_ino)
    os.umask(mask)
    assert (seen, stat.S_IMODE(store.stat().st_mode)) == ([0o600], 0o644)
    assert Store(store).find(KEY) == MADE


def test_a_damaged_store_where_files_have_no_links(store, monkeypatch):
    """It is renamed, with its content, and a new one has its decisions."""

    def refuse(*_):
        raise OSError("no links here")

    Store(store).add(MADE)
    content = store.read_bytes()
    monkeypatch.setattr(module.os, "link", refuse)
    with pytest.warns(BackendKwargsWarning, match="A new one has the 1 decisions that can be read"):
        Store(store)._mend(module.DamagedError("planted"), store.stat().st_ino)
    (aside,) = [each for each in store.parent.iterdir() if each != store]
    assert aside.read_bytes() == content
    assert [each.key for each in Store(store).all()] == [MADE.key]
