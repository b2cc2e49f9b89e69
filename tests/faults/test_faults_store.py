"""A store that is wrong, damaged, locked or another program's never fails a compile, and is never trusted."""

import contextlib
import json
import os
import random
import sqlite3
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from backend_kwargs.auto import decide
from backend_kwargs.auto.decide import Decision, Store
from backend_kwargs.auto.store import SCHEMA
from tests.faults.attempts import TIMES

KEY = "ab" * 32
MADE = Decision(KEY, "graph", "cudagraphs", {"triton.cudagraphs": True}, (), {"gpu": "H200"}, "3 ops", 2.5, 0.0, 1e9)
COLUMNS = "key, graph, winner, options, rows, machine, facts, seconds, cut_s, made"
OURS = f"CREATE TABLE decisions ({COLUMNS}, fixed, PRIMARY KEY (key));"


def decision(at, **changed):
    return replace(MADE, key=f"{at:064}", facts="x" * 400, **changed)


def raced(auto, races, store):
    """Return a model and its inputs for which `store` contains a decision."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        auto(model)(x)
    assert races.count == 1
    assert store.exists()
    return model, x


# ---- contents of a row


@pytest.mark.parametrize(
    ("winner", "options"),
    [
        pytest.param("freezing", {"freezing": True}, id="freezing"),
        pytest.param("freezing+fast_compile", {"freezing": True}, id="two"),
        pytest.param("debug", {"trace.enabled": True}, id="debug"),
        pytest.param("auto", {"auto": True}, id="auto"),
        pytest.param("default", {"freezing": True}, id="options of another"),
    ],
)
@torch.no_grad()
def test_a_template_that_was_not_asked_for_is_not_followed(
    auto, races, store, execute, begin_anew, winner, options, tmp_path, monkeypatch
):
    """A stored decision for a template that this request does not list is ignored: the graph is raced."""
    monkeypatch.chdir(tmp_path)
    model, x = raced(auto, races, store)
    execute("UPDATE decisions SET winner = ?, options = ?", (winner, json.dumps(options)))
    begin_anew()
    compiled = auto(model)
    compiled(x)
    assert races.count == 2
    model[0].weight.mul_(2)
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert not list(tmp_path.glob("torch_compile_debug"))


ROW = {"name": "default", "status": "pass", "seconds": 1e-4, "speedup": {"median": 1.0, "low": 1.0, "high": 1.0}}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("rows", json.dumps([{**ROW, "speedup": {"medial": 1.0}}]), id="speedup"),
        pytest.param("rows", json.dumps([{"nale": "default", "sebonds": 1e-4}]), id="misspelt"),
        pytest.param("rows", "[" * 100_000, id="nested list"),
        pytest.param("options", '{"a":' * 5000 + "1" + "}" * 5000, id="nested options"),
        pytest.param("rows", json.dumps([{**ROW, "options": json.loads('{"a":' * 200 + "1" + "}" * 200)}]), id="deep"),
        pytest.param("machine", json.dumps({"gpu": json.loads("[" * 400 + "]" * 400)}), id="deep machine"),
        pytest.param("facts", b"\xff\xfe", id="no text"),
        pytest.param("seconds", b"\xff", id="no number"),
        pytest.param("winner", None, id="null"),
        pytest.param("rows", '[{"name": "default", "seconds": 1e999}]', id="infinite"),
        pytest.param("options", '{"cpp.threads": ' + "1" * 5000 + "}", id="endless number"),
        pytest.param("options", '{"\\ud800": 1}', id="half a character"),
    ],
)
@torch.no_grad()
def test_a_row_that_does_not_parse_is_no_decision(auto, races, store, execute, begin_anew, warned, column, value):
    """Whatever a row contains, the compile continues with one warning and a race."""
    model, x = raced(auto, races, store)
    execute(f"UPDATE decisions SET {column} = ?", (value,))
    begin_anew()
    with warned() as messages:
        assert torch.allclose(auto(model)(x), model(x), atol=1e-5)
    assert races.count == 2
    assert len(messages) == 1


@torch.no_grad()
def test_what_a_row_says_further_is_ignored(auto, races, store, execute, begin_anew):
    """Additional fields of a later release are ignored, and missing ones of an earlier release are accepted."""
    model, x = raced(auto, races, store)
    execute("UPDATE decisions SET rows = ?", (json.dumps([{"name": "default", "won": True, "predicted": 1.0}]),))
    begin_anew()
    auto(model)(x)
    assert races.count == 1


BF16 = {"precision": "bf16", "max_error": 1e-4}
CLAIMED = [{"name": "bf16", "won": True, "options": BF16, "error": 0.0, "max_error": 1e-4}]


@pytest.mark.parametrize(
    ("options", "rows", "made"),
    [
        pytest.param(BF16, [], 4e9, id="made in the future, without rows"),
        pytest.param(BF16, CLAIMED, 4e9, id="made in the future, with a measured error"),
        pytest.param({"precision": "bf16"}, [], 0.0, id="without a bound"),
        pytest.param({**BF16, "max_error": 0.5}, [], 0.0, id="with another bound"),
        pytest.param({**BF16, "max_error": None}, [], 0.0, id="with no bound"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot act fully here", "ignore:A graph is compiled without precision")
@torch.no_grad()
def test_a_stored_precision_is_measured(auto, races, store, execute, begin_anew, options, rows, made):
    """Whatever a stored decision contains, max_error is that of the request, and the error is measured here."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    auto(model, precision="bf16", max_error=1e-4)(x)
    change = "UPDATE decisions SET winner = 'bf16', options = ?, rows = ?, made = ?"
    execute(change, (json.dumps(options), json.dumps(rows), made))
    begin_anew()
    assert torch.allclose(auto(model, precision="bf16", max_error=1e-4)(x), model(x), rtol=0, atol=1e-6)
    assert races.count == (1 if options == BF16 else 2)


@pytest.mark.parametrize("value", [[["packed"]], [{"packed": 1}], [None], {"packed": 1}, "packed", 1], ids=json.dumps)
@torch.no_grad()
def test_rewrites_of_any_form_are_no_error(auto, races, store, execute, begin_anew, value):
    """A stored list of rewrites that are no names is ignored: the graph is raced."""
    model, x = raced(auto, races, store)
    execute("UPDATE decisions SET options = ?", (json.dumps({"rewrites": value}),))
    begin_anew()
    auto(model)(x)
    assert races.count == 2


def test_flipped_bits(store, execute, warned):
    """A flipped bit raises no error and loses at most its page; the next write keeps the rest.

    A store whose schema no longer reads as ours is left as it is.
    """
    chance = random.Random(17)
    Store(store).add(*map(decision, range(40)))
    whole = store.read_bytes()
    schema = whole.find(b"tabledecisions"), whole.find(b"\0" * 8, whole.find(b"sqlite_autoindex"))
    kept = []
    for _ in range(60 * TIMES):
        flipped = bytearray(whole)
        at = chance.randrange(100, len(whole))
        flipped[at] ^= 1 << chance.randrange(8)
        for path in store.parent.iterdir():
            path.unlink()
        store.write_bytes(flipped)
        decide.forget_process()
        with warned():
            found = len(Store(store).all())
            Store(store).put(MADE)
            kept.append(len(Store(store).all()))
        assert kept[-1] >= found
        assert kept[-1] >= 1 or schema[0] <= at < schema[1] + 8, at
    assert sum(each >= 30 for each in kept) >= 0.9 * len(kept)


def test_a_broken_page_hides_no_other(store, warned):
    """The readable rows of a damaged store are read, and copied to its replacement."""
    Store(store).add(*map(decision, range(60)))
    held = bytearray(store.read_bytes())
    size = int.from_bytes(held[16:18], "big")
    with contextlib.closing(sqlite3.connect(store)) as connection:
        leaf = connection.execute("SELECT rootpage FROM sqlite_master WHERE type = 'table'").fetchone()[0] + 3
    held[leaf * size : (leaf + 1) * size] = b"\xff" * size
    store.write_bytes(held)
    with warned():
        assert 40 <= len(Store(store).all()) < 60
        Store(store).put(MADE)
        assert 41 <= len(Store(store).all()) < 61
    assert Store(store).find(KEY) == MADE
    assert len(list(store.parent.glob("*.unreadable-*"))) == 1


def test_a_row_that_is_no_text_hides_no_other(store, execute, warned):
    """Invalid UTF-8 loses only its own row."""
    Store(store).add(*map(decision, range(3)))
    execute("UPDATE decisions SET facts = CAST(x'fffe' AS TEXT) WHERE key = ?", (f"{1:064}",))
    with warned() as messages:
        assert len(Store(store).all()) == 2
    assert len(messages) == 1


# ---- paths


def long_name(folder):
    return str(folder / ("x" * 300))


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def file_as_folder(folder):
    (folder / "file").touch()
    return str(folder / "file" / "store.sqlite")


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(long_name, id="long name"),
        pytest.param(lambda folder: "~nobody_here/decisions.sqlite", id="unknown home"),
        pytest.param(lambda folder: f"{folder}/a\0b", id="NUL"),
        pytest.param(pipe, id="pipe"),
        pytest.param(str, id="folder"),
        pytest.param(file_as_folder, id="file as folder"),
        pytest.param(lambda folder: "/proc/decisions.sqlite", id="proc"),
        pytest.param(lambda folder: "/dev/full", id="device"),
    ],
)
@torch.no_grad()
def test_a_store_that_cannot_be(auto, races, tmp_path, monkeypatch, warned, place):
    """A path that cannot be a store causes one warning; the graph is raced, and the process keeps the decision."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    at = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    x = torch.randn(4, 8)
    with warned() as messages:
        for _ in range(2):
            assert torch.equal(auto(torch.relu, store=at)(x), torch.relu(x))
            torch._dynamo.reset()
    assert (len(messages), races.count) == (1, 1)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else for a while")
def test_a_folder_that_may_not_be_entered(tmp_path, warned):
    """A folder without permission causes a warning, not an error."""
    (tmp_path / "closed").mkdir(mode=0o700)
    held = Store(tmp_path / "closed" / "decisions.sqlite")
    with warned() as messages:
        os.seteuid(65534)
        try:
            assert held.find(KEY) is None
            held.put(MADE)
        finally:
            os.seteuid(0)
    assert len(messages) == 1


@torch.no_grad()
def test_nobody_at_home(auto, races, tmp_path, monkeypatch, warned):
    """Without HOME and an entry in passwd, as in a container, no folder called ~ is created."""
    for name in ("HOME", "XDG_DATA_HOME", "BACKEND_KWARGS_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    monkeypatch.chdir(tmp_path)
    x = torch.randn(4, 8)
    with warned() as messages:
        assert torch.equal(auto(torch.relu)(x), torch.relu(x))
    assert len(messages) == 1
    assert "no home directory is known" in messages[0]
    assert not list(tmp_path.iterdir())


def test_what_is_created_is_the_users_alone(tmp_path, monkeypatch):
    """Only the user can read the default store and its folder; a store named by the user follows the umask."""
    monkeypatch.delenv("BACKEND_KWARGS_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    before = os.umask(0o022)
    try:
        decide.open_store().put(MADE)
        decide.open_store(str(tmp_path / "team" / "named.sqlite")).put(MADE)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        "data": 0o755,
        "backend_kwargs": 0o700,
        "decisions.sqlite": 0o600,
        "team": 0o755,
        "named.sqlite": 0o644,
    }


def test_what_exists_keeps_its_mode(store, warned):
    """The permissions of an existing store are kept, also if a damaged file is replaced."""
    Store(store).add(*map(decision, range(40)))
    store.chmod(0o664)
    Store(store).put(MADE)
    assert stat.S_IMODE(store.stat().st_mode) == 0o664
    held = bytearray(store.read_bytes())
    held[2 * 4096 : 3 * 4096] = b"\xff" * 4096
    store.write_bytes(held)
    with warned():
        Store(store).put(MADE)
    assert stat.S_IMODE(store.stat().st_mode) == 0o664


# ---- who else has it


def test_a_lock_costs_little(store, monkeypatch, warned):
    """After one timeout on another process's lock, all further waits share a tenth of a second."""
    module, waits = sys.modules[Store.__module__], []
    connection = module._connection
    monkeypatch.setattr(module, "WAIT_S", 0.5)
    monkeypatch.setattr(module, "_connection", lambda uri, left: waits.append(left) or connection(uri, left))
    Store(store).put(MADE)
    waits.clear()
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other, warned() as messages:
        other.execute("BEGIN EXCLUSIVE")
        for at in range(20):
            Store(store).find(KEY)
            Store(store).put(decision(at))
    first, second, *later = filter(None, waits)  # some connections never wait
    assert (first, second) == (0.5, module.LATER_S)
    assert later == sorted(later, reverse=True)
    assert waits[-1] == 0.0
    assert len(messages) == 1


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("CREATE TABLE notes (text); PRAGMA user_version = 1;", id="schema 1"),
        pytest.param("CREATE TABLE notes (text); PRAGMA user_version = 2;", id="schema 2"),
        pytest.param("CREATE TABLE notes (text); PRAGMA user_version = 3;", id="schema 3"),
        pytest.param("CREATE TABLE decisions (key, what); PRAGMA user_version = 2;", id="a table of that name"),
        pytest.param(f"{OURS} PRAGMA user_version = 2; PRAGMA application_id = 7;", id="another application"),
        pytest.param("PRAGMA application_id = 7;", id="empty"),
        pytest.param("PRAGMA user_version = 9;", id="empty with a schema"),
        pytest.param("CREATE VIEW decisions AS SELECT 1 AS key", id="a view"),
    ],
)
def test_another_programs_database_is_left_alone(store, execute, warned, script):
    """A database that is not a store is neither written, nor renamed, nor read."""
    execute(script)
    before = store.read_bytes()
    with warned() as messages:
        assert Store(store).find(KEY) is None
        Store(store).put(MADE)
    assert store.read_bytes() == before
    assert [path.name for path in store.parent.iterdir()] == [store.name]
    assert len(messages) == 1


@pytest.mark.parametrize("schema", [1, 2])
def test_a_damaged_store_of_an_older_release_is_known_by_its_header(store, warned, schema):
    """A damaged file of a release without application id is set aside, and a new store replaces it."""
    with contextlib.closing(sqlite3.connect(store)) as connection:
        columns = f"{COLUMNS}{', fixed' if schema == 2 else ''}"
        connection.executescript(
            f"CREATE TABLE decisions ({columns}, PRIMARY KEY (key)); PRAGMA user_version = {schema};"
        )
    written = bytearray(store.read_bytes())
    written[100] = 0xEE  # what kind of page the first one is
    store.write_bytes(written)
    with warned():
        Store(store).put(MADE)
    assert Store(store).find(KEY) == MADE
    assert len(list(store.parent.glob("*.unreadable-*"))) == 1


@pytest.mark.parametrize("content", [b"just notes\n" * 100, b"x", b"SQLite format 3\0" + b"\0" * 200], ids=len)
def test_a_file_that_is_no_database_is_left_alone(store, warned, content):
    """A text file given by mistake is not changed."""
    store.write_bytes(content)
    with warned():
        assert Store(store).find(KEY) is None
        Store(store).put(MADE)
    assert store.read_bytes() == content
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_a_newer_store_is_read_and_not_written(store, execute, warned):
    """A store of a later release is read, but not changed."""
    Store(store).put(MADE)
    later = f"PRAGMA user_version = {SCHEMA + 1}"
    execute(f"ALTER TABLE decisions ADD COLUMN more DEFAULT 1; CREATE TABLE further (what); {later}")
    before = store.read_bytes()
    assert Store(store).find(KEY) == MADE
    with warned() as messages:
        Store(store).put(decision(1))
    assert "a newer release of backend-kwargs wrote it" in messages[0]
    assert store.read_bytes() == before
    assert [path.name for path in store.parent.iterdir()] == [store.name]


LOOK = f"""
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from {Store.__module__} import Store
print(Store(Path(sys.argv[1])).find("ab" * 32))
"""
ENDLESS = (
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
    "SELECT x AS key, 1 AS graph, 1 AS winner, 1 AS options, 1 AS rows, 1 AS machine, 1 AS facts, 1 AS seconds, "
    "1 AS cut_s, 1 AS made, 1 AS fixed FROM n"
)
DISGUISED = (
    f"PRAGMA writable_schema = 1; INSERT INTO sqlite_master VALUES ('table', 'decisions', 'decisions', 2, "
    f"'CREATE VIEW decisions AS {ENDLESS}');"
)


@pytest.mark.parametrize("script", [f"CREATE VIEW decisions AS {ENDLESS};", DISGUISED], ids=["view", "disguised"])
def test_an_endless_view_ends(store, execute, script):
    """An endless view is not read."""
    execute(f"{script} PRAGMA user_version = 2; PRAGMA application_id = {0x626B7761}")
    done = subprocess.run([sys.executable, "-c", LOOK, store], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("None\n", 0)


def test_a_trigger_is_found(store, execute, warned):
    """A store with a trigger that drops writes counts as another program's; the warning says that nothing is kept."""
    Store(store).put(MADE)
    execute("CREATE TRIGGER drops BEFORE INSERT ON decisions BEGIN SELECT RAISE(IGNORE); END")
    with warned() as messages:
        Store(store).put(decision(1))
    assert len(messages) == 1


def test_a_value_that_is_too_long_hides_no_other(store, execute, warned):
    """A row of hundreds of megabytes is not read."""
    Store(store).add(*map(decision, range(3)))
    execute("UPDATE decisions SET facts = zeroblob(20000000) WHERE key = ?", (f"{1:064}",))
    with warned():
        assert len(Store(store).all()) == 2


# ---- many at once

WRITER = f"""
import sys
from pathlib import Path
from {Decision.__module__} import Decision
from {Store.__module__} import Store
for at in range(100_000):
    Store(Path(sys.argv[1])).add(Decision(f"{{sys.argv[2]}}-{{at}}", "graph", "default"))
    print(at, flush=True)
"""


def test_killed_writers_lose_nothing(store):
    """Everything that killed writers confirmed is in the store."""
    chance, confirmed = random.Random(3), set()
    for at in range(3 * TIMES):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, store, str(at)], stdout=-1, text=True)
        confirmed |= {f"{at}-{writer.stdout.readline().strip()}"}
        time.sleep(chance.random() / 5)
        writer.kill()
        lines = writer.communicate()[0].splitlines(keepends=True)
        confirmed |= {f"{at}-{line.strip()}" for line in lines if line.endswith("\n")}
    assert confirmed <= {each.key for each in Store(store).all()}
