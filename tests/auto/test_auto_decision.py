"""The store of decisions: what it keeps, and what happens if a disk or a process fails."""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch

from backend_kwargs.auto import decide
from backend_kwargs.auto.decision import COLUMNS, has_form, packed, parsed, plain, unpacked
from backend_kwargs.auto.store import Store, open_store
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.facts.decision import Decision, RaceRow
from tests import forks
from tests.auto.graphs import KEY, MADE, spoil

WRITER = """
import sys
from pathlib import Path
from backend_kwargs.auto.decision import Decision
from backend_kwargs.auto.store import Store
store = Store(Path(sys.argv[1]))
for at in range(int(sys.argv[3])):
    store.add(Decision(f"{sys.argv[2]}-{at}", "graph", "default"))
    print(at, flush=True)
"""


def test_a_store_makes_its_folder(tmp_path):
    """A decision is stored even if the folder does not exist yet."""
    store = Store(tmp_path / "backend_kwargs" / "decisions.sqlite")
    store.add(MADE)
    assert store.find(KEY) == MADE


def test_keeps_what_it_is_given(store):
    """A decision that is written is read back unchanged."""
    Store(store).put(MADE)
    assert Store(store).find(KEY) == MADE


def test_knows_nothing_without_a_file(store):
    """A look-up does not create a file."""
    assert Store(store).find(KEY) is None
    assert not store.exists()


def test_lists_the_latest_first(store):
    """Decisions are listed latest first: all, or those whose key starts with a prefix."""
    Store(store).add(MADE, replace(MADE, key="cd" * 32, made=2e9))
    assert [each.key[:2] for each in Store(store).all()] == ["cd", "ab"]
    assert [each.key[:2] for each in Store(store).all("ab")] == ["ab"]


def test_the_path_is_given_or_from_the_environment(tmp_path, monkeypatch):
    """`store=` overrides the environment variable, which overrides the user's data folder."""
    assert open_store(str(tmp_path)).path == tmp_path
    assert open_store().path != tmp_path
    monkeypatch.delenv("BACKEND_KWARGS_STORE")
    assert open_store().path.name == "decisions.sqlite"


def damaged(path):
    """Overwrite the page of a store that contains its keys; the header stays valid."""
    Store(path).add(*(replace(MADE, key=f"{at:064}", facts="x" * 400) for at in range(40)))
    held = bytearray(path.read_bytes())
    page = int.from_bytes(held[16:18], "big")
    held[2 * page : 3 * page] = b"\xff" * page
    path.write_bytes(held)


def test_a_page_that_is_damaged_is_found(store):
    """A file that opens and turns out to be damaged later is also set aside; otherwise no decision could be stored."""
    damaged(store)
    with pytest.warns(BackendKwargsWarning, match=r"is damaged .* the damaged file is now .*unreadable"):
        Store(store).put(MADE)
    assert Store(store).find(KEY) == MADE
    assert len(list(store.parent.glob("*.unreadable-*"))) == 1


def test_another_programs_database_is_left_alone(store):
    """A database with other tables is neither changed nor renamed, and the warning says why."""
    with contextlib.closing(sqlite3.connect(store)) as other:
        other.executescript("CREATE TABLE decisions (what)")
    before = store.read_bytes()
    with pytest.warns(BackendKwargsWarning, match="it is not a store of decisions and was not changed"):
        Store(store).put(MADE)
    assert [path.name for path in store.parent.iterdir()] == [store.name]
    assert store.read_bytes() == before


def test_looking_up_leaves_an_unreadable_file(store):
    """A look-up in an unreadable file warns and changes nothing."""
    store.write_bytes(b"no database " * 100)
    with pytest.warns(
        BackendKwargsWarning, match=r"cannot be read: it is not a store of decisions and was not changed"
    ):
        assert Store(store).find(KEY) is None
    assert [path.name for path in store.parent.iterdir()] == [store.name]


def test_reads_a_folder_that_cannot_be_written(store):
    """A store in a read-only folder is read."""
    Store(store).put(MADE)
    store.chmod(0o444)
    store.parent.chmod(0o555)
    assert Store(store).find(KEY) == MADE
    store.parent.chmod(0o755)


def test_a_file_begun_by_another_process_is_empty(store):
    """A file without a table, which another process is creating, counts as empty, without a warning."""
    store.touch()
    assert Store(store).find(KEY) is None


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        pytest.param("options", "[]", "Expected `object`, got `array` - at `$.options`", id="options"),
        pytest.param("rows", '[{"name": 1}]', "Expected `str`, got `int` - at `$.rows[0].name`", id="row"),
        pytest.param("rows", "[3]", "Expected `object`, got `int` - at `$.rows[0]`", id="no row"),
        pytest.param("made", "long ago", "Expected `float`, got `str` - at `$.made`", id="number"),
    ],
)
def test_a_row_of_other_types_warns(store, column, value, why):
    """A row with wrong types is not a decision, and warns instead of failing the compile."""
    Store(store).put(MADE)
    with sqlite3.connect(store) as connection:
        connection.execute(f"UPDATE decisions SET {column} = ?", (value,))
    connection.close()
    with pytest.warns(BackendKwargsWarning) as warned:
        assert Store(store).find(KEY) is None
    assert str(warned[0].message) == f"Decisions {KEY[:12]} in {str(store)!r} cannot be read: ValidationError: {why}."


def test_a_broken_row_hides_no_other(store):
    """One warning names the rows that cannot be read; the others are read."""
    Store(store).add(MADE, *(replace(MADE, key=each * 32, made=2e9) for each in ("cd", "ef")))
    spoil(store, "cd" * 32)
    spoil(store, "ef" * 32)
    with pytest.warns(BackendKwargsWarning) as warned:
        assert Store(store).all() == [MADE]
    why = "ValidationError: Expected `float`, got `str` - at `$.seconds`"
    assert [str(each.message) for each in warned] == [
        f"Decisions {'cd' * 6}, {'ef' * 6} in {str(store)!r} cannot be read: {why}."
    ]


@pytest.mark.parametrize("name", ["seconds", "cut_s", "made"])
def test_whole_numbers_are_read_back(store, name):
    """A float option given as a whole number is stored as a number."""
    whole = replace(MADE, **{name: 3})
    Store(store).put(whole)
    assert Store(store).find(KEY) == whole


OLDER = """
CREATE TABLE decisions (key, graph, winner, options, rows, machine, facts, seconds, cut_s, made, PRIMARY KEY (key));
PRAGMA user_version = 1;
"""


@pytest.fixture
def older(store):
    """Return a store with the schema from before the user's options were kept, with one decision."""
    connection = sqlite3.connect(store)
    connection.executescript(OLDER)
    connection.execute(f"INSERT INTO decisions VALUES ({', '.join('?' * 10)})", packed(MADE)[:10])
    connection.commit()
    connection.close()
    return store


def test_an_older_store_is_read_as_it_is(older):
    """A look-up reads an earlier release's store, even in a read-only folder."""
    before = older.read_bytes()
    assert Store(older).all() == [MADE]
    assert older.read_bytes() == before


def test_an_older_store_is_written(older):
    """The first new decision upgrades an older store, which keeps its rows."""
    pinned = replace(MADE, key="cd" * 32, made=2e9, fixed={"epilogue_fusion": True})
    Store(older).put(pinned)
    assert Store(older).all() == [pinned, MADE]


def test_of_two_that_bring_a_store_up_to_date_both_write(older):
    """If two processes upgrade a store at once, the one that waited finds it upgraded, and both write."""
    first = sqlite3.connect(older)
    first.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor() as pool:
        second = pool.submit(Store(older).add, replace(MADE, key="cd" * 32, made=2e9))
        time.sleep(0.3)
        first.execute("ALTER TABLE decisions ADD COLUMN fixed DEFAULT '{}'")
        first.execute("PRAGMA user_version = 2")
        first.commit()
        first.close()
        second.result()
    assert [each.key[:2] for each in Store(older).all()] == ["cd", "ab"]


def test_keeps_that_an_option_has_no_form(store):
    """A function among the user's options does not prevent a decision from being stored; only its name is kept."""
    Store(store).put(replace(MADE, fixed=plain({"cpp.threads": 1, "post_grad_custom_post_pass": print})))
    assert Store(store).find(KEY).fixed == {"cpp.threads": 1, "post_grad_custom_post_pass": None}


def test_a_store_that_cannot_be_written_warns(tmp_path):
    """If the folder cannot be created, the decision applies in this process only, with a warning."""
    (tmp_path / "file").touch()
    with pytest.warns(BackendKwargsWarning, match="Decisions are kept in this process only"):
        Store(tmp_path / "file" / "store").put(MADE)


def test_two_processes_write_at_once(store):
    """Two concurrent writers both find all of their decisions."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, store, name, "40"], stdout=-1) for name in "ab"]
    assert [writer.communicate() and writer.returncode for writer in writers] == [0, 0]
    assert len(Store(store).all()) == 80


RACER = """
import torch

def chain(x):
    return torch.relu(x * 2 + 1).sum(-1)

x = torch.arange(512.0).reshape(8, 64)
compiled = torch.compile(chain, backend="tmpl-inductor:auto", options={"candidates": ["eager_numerics"]})
assert torch.allclose(compiled(x), chain(x))
"""


def test_two_processes_race_at_once(store):
    """Two processes that race at once get right results, without warnings, and the graph's decision is stored."""
    racers = [forks.Fork("-c", RACER) for _ in range(2)]
    ended = [racer.wait() for racer in racers]
    assert [each.returncode for each in ended] == [0, 0]
    assert not [each.stderr for each in ended if "BackendKwargsWarning" in each.stderr]
    assert len(Store(store).all()) == 1


def test_survives_kill_9(store):
    """Everything that a killed writer confirmed is in the store, which still works."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, store, "a", "100000"], stdout=-1, text=True)
    confirmed = [int(writer.stdout.readline()) for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert {f"a-{at}" for at in confirmed} <= {each.key for each in Store(store).all()}
    Store(store).add(MADE)


def test_nothing_is_compiled_under_the_users_options_of_a_file(auto, races, store):
    """The user's options in a stored decision are only for export; the current user's options apply."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    x = torch.randn(8, 64)
    auto(torch.relu)(x)
    (decision,) = Store(store).all()
    Store(store).put(replace(decision, fixed={"cpp.cxx": "/tmp/evil", "fx_graph_cache": False}))
    torch._dynamo.reset()
    decide.forget_process()
    assert torch.equal(auto(torch.relu)(x), torch.relu(x))
    assert races.count == 1


def nested(levels, made=dict):
    """Return lists or mappings in each other."""
    value = 1
    for _ in range(levels):
        value = {"a": value} if made is dict else [value]
    return value


@pytest.mark.parametrize("made", [dict, list])
@pytest.mark.parametrize("name", ["options", "fixed", "rows"])
@pytest.mark.parametrize(("levels", "read"), [pytest.param(7, True, id="eight"), pytest.param(8, False, id="nine")])
def test_how_deep_an_option_may_be(made, name, levels, read):
    """Options of eight levels are read, with the mapping of all options as the first; deeper ones are refused."""
    options = {"x": 1, "deep": nested(levels, made), "y": 2}
    given = [{"name": "step"}, {"name": "step", "options": options}] if name == "rows" else options
    values = {"key": KEY, "graph": "graph", "winner": "step", name: given}
    if read:
        held = getattr(parsed(values), name)
        assert (held[1].options if name == "rows" else held) == options
        return
    where = "options of a row" if name == "rows" else name
    with pytest.raises(ValueError, match=f"^{where} must be at most 8 levels deep\\.$"):
        parsed(values)


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        pytest.param("text", True, id="text"),
        pytest.param(1.5, True, id="number"),
        pytest.param(True, True, id="boolean"),
        pytest.param(["a", 1], True, id="list"),
        pytest.param(("a", 1), True, id="tuple"),
        pytest.param([], True, id="nothing"),
        pytest.param(["a", None], False, id="list with none"),
        pytest.param({"a": 1}, False, id="mapping"),
        pytest.param(None, False, id="none"),
        pytest.param([["a"]], False, id="nested"),
        pytest.param(print, False, id="function"),
    ],
)
def test_what_a_file_can_hold(value, kept):
    """A text, a number, or a list of these; of any other option a file has the name."""
    assert has_form(value) is kept
    assert plain({"x": value, "y": 1}) == {"x": value if kept else None, "y": 1}


@pytest.mark.parametrize(
    ("rows", "lasting"),
    [
        pytest.param((), True, id="none"),
        pytest.param((RaceRow("default"),), True, id="default passed"),
        pytest.param((RaceRow("default", status="fail_accuracy"),), True, id="default is wrong"),
        pytest.param((RaceRow("default", status="fail_to_run"),), False, id="default failed"),
        pytest.param((RaceRow("default", status="oom"),), False, id="no memory"),
        pytest.param((RaceRow("default", status="timeout"),), False, id="no time"),
        pytest.param((RaceRow("".join(("def", "ault")), status="timeout"),), False, id="a name that was read"),
        pytest.param((RaceRow("default", status="unavailable"),), False, id="not installed"),
        pytest.param((RaceRow("default"), RaceRow("step", status="oom")), True, id="a step failed"),
        pytest.param(
            (RaceRow("eager"), RaceRow("cudagraphs"), RaceRow("default", status="timeout")),
            True,
            id="default came later",
        ),
        pytest.param((RaceRow("eager"), RaceRow("default", status="timeout")), False, id="eager is left"),
        pytest.param(
            (RaceRow("default", status="fail_to_run"), RaceRow("onnxruntime", compiler="onnxruntime")),
            False,
            id="another compiler is left",
        ),
    ],
)
def test_which_decisions_last(rows, lasting):
    """One that rests on default's failure is for this process, where that happened; not if CUDA graphs came first."""
    assert replace(MADE, rows=rows).lasting is lasting


def test_a_decision_as_columns():
    """Numbers are floats, texts are texts, and all else is JSON; a row's odd values are written for people."""
    made = replace(MADE, seconds=3, rows=(RaceRow("a", {"x": print}),))
    columns = dict(zip(COLUMNS, packed(made), strict=True))
    assert (columns["seconds"], type(columns["seconds"])) == (3.0, float)
    assert (columns["winner"], columns["options"]) == ("cudagraphs", '{"triton.cudagraphs": true}')
    assert "built-in function print" in columns["rows"]
    with pytest.raises(ValueError, match="Out of range float"):
        packed(replace(made, options={"x": float("nan")}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        packed(replace(made, options={"x": print}))


def test_columns_as_a_decision():
    """Text may come as bytes, and columns that an older store lacks are empty."""
    columns = {name: value for name, value in zip(COLUMNS, packed(MADE), strict=True) if name != "fixed"}
    assert unpacked({**columns, "winner": b"cudagraphs"}) == MADE
    with pytest.raises(ValueError, match=r"^ValueError: b'.xff' is not UTF-8$"):
        unpacked({**columns, "winner": b"\xff"})


def test_a_decision_is_of_now():
    """Its time is when it was made, and it was not cut unless that is said."""
    before = time.time()
    made = Decision("key", "graph", "step")
    assert before <= made.made <= time.time()
    assert (made.seconds, made.cut_s, made.compiler) == (0.0, 0.0, "")


def test_a_row_has_no_figures_at_first():
    """A candidate that has not been compiled has taken no time, was not measured and has not won."""
    figures = {name: value for name, value in asdict(RaceRow("step")).items() if value not in (None, "", {})}
    assert figures == {"name": "step", "status": "pass", "compile_s": 0.0, "won": False}
