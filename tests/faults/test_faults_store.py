"""A store that is wrong, damaged, unreadable or something else never fails a compile, and is never trusted."""

import json
import os
import random
import stat
import time

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto.machine import variant_of
from backend_kwargs.auto.store import KIND, Catalogue, name_of
from backend_kwargs.facts.decision import Decision
from backend_kwargs.stores import Store
from backend_kwargs.stores.documents import Document
from backend_kwargs.stores.layered import Layered, reached
from tests import forks
from tests.auto.graphs import Raw, change
from tests.faults.attempts import TIMES

KEY = "ab" * 32
MADE = Decision(KEY, "graph", "cudagraphs", {"triton.cudagraphs": True}, (), {"gpu": "H200"}, "3 ops", 2.5, 0.0, 1e9)


def raced(auto, races, store):
    """Return a model and its inputs for which `store` contains a decision."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        auto(model)(x)
    assert races.count == 1
    assert store.exists()
    return model, x


# ---- contents of a decision


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
    auto, races, store, begin_anew, winner, options, tmp_path, monkeypatch
):
    """A stored decision for a template that this request does not list is ignored: the graph is raced."""
    monkeypatch.chdir(tmp_path)
    model, x = raced(auto, races, store)
    change(store, winner=winner, options=options)
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
        pytest.param("rows", [{**ROW, "speedup": {"medial": 1.0}}], id="speedup"),
        pytest.param("rows", [{"nale": "default", "sebonds": 1e-4}], id="misspelt"),
        pytest.param("rows", Raw(b"[" * 100_000), id="nested list"),
        pytest.param("options", Raw(b'{"a":' * 5000 + b"1" + b"}" * 5000), id="nested options"),
        pytest.param("rows", [{**ROW, "options": json.loads('{"a":' * 200 + "1" + "}" * 200)}], id="deep"),
        pytest.param("machine", {"gpu": json.loads("[" * 400 + "]" * 400)}, id="deep machine"),
        pytest.param("facts", Raw(b'"\xff\xfe"'), id="no text"),
        pytest.param("seconds", "3", id="no number"),
        pytest.param("winner", None, id="null"),
        pytest.param("rows", Raw(b'[{"name": "default", "seconds": 1e999}]'), id="infinite"),
        pytest.param("seconds", Raw(b"NaN"), id="NaN"),
        pytest.param("options", Raw(b'{"cpp.threads": ' + b"1" * 5000 + b"}"), id="endless number"),
        pytest.param("options", Raw(b'{"\\ud800": 1}'), id="half a character"),
        pytest.param("key", "cd" * 32, id="another key"),
        pytest.param("machine", {"device": "H100"}, id="another device"),
    ],
)
@torch.no_grad()
def test_a_row_that_does_not_parse_is_no_decision(auto, races, store, begin_anew, warned, column, value):
    """Whatever a row contains, the compile continues with one warning and a race."""
    model, x = raced(auto, races, store)
    change(store, **{column: value})
    begin_anew()
    with warned() as messages:
        assert torch.allclose(auto(model)(x), model(x), atol=1e-5)
    assert races.count == 2
    assert len(messages) == 1


@torch.no_grad()
def test_what_is_longer_than_a_document_is_replaced(auto, races, store, begin_anew, warned):
    """A file that is too long is none of the store's: the graph is raced, and what that decides is found again."""
    model, x = raced(auto, races, store)
    change(store, facts="x" * 2**21)
    begin_anew()
    with warned() as messages:
        assert torch.allclose(auto(model)(x), model(x), atol=1e-5)
    assert not messages
    begin_anew()
    auto(model)(x)
    assert races.count == 2


@torch.no_grad()
def test_what_a_row_says_further_is_ignored(auto, races, store, begin_anew):
    """Additional fields of a later release are ignored, and missing ones of an earlier release are accepted."""
    model, x = raced(auto, races, store)
    change(store, rows=[{"name": "default", "won": True, "predicted": 1.0}], later=1)
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
@pytest.mark.filterwarnings("ignore:A graph is compiled without precision")
@torch.no_grad()
def test_a_stored_precision_is_measured(auto, races, store, begin_anew, options, rows, made):
    """Whatever a stored decision contains, max_error is that of the request, and the error is measured here."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    auto(model, precision="bf16", max_error=1e-4)(x)
    change(store, winner="bf16", options=options, rows=rows, made=made)
    begin_anew()
    assert torch.allclose(auto(model, precision="bf16", max_error=1e-4)(x), model(x), rtol=0, atol=1e-6)
    assert races.count == (1 if options == BF16 else 2)


@pytest.mark.parametrize("value", [[["packed"]], [{"packed": 1}], [None], {"packed": 1}, "packed", 1], ids=json.dumps)
@torch.no_grad()
def test_rewrites_of_any_form_are_no_error(auto, races, store, begin_anew, value):
    """A stored list of rewrites that are no names is ignored: the graph is raced."""
    model, x = raced(auto, races, store)
    change(store, options={"rewrites": value})
    begin_anew()
    auto(model)(x)
    assert races.count == 2


# ---- paths


def pipe(folder):
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


def file_as_folder(folder):
    (folder / "file").touch()
    return str(folder / "file" / "store")


def test_a_home_that_nobody_has(auto):
    """It is an error where the backend is made."""
    with pytest.raises(backend_kwargs.BackendKwargsError) as raised:
        auto(torch.relu, store="~nobody_here/decisions")
    assert str(raised.value) == "Store '~nobody_here/decisions' has no place: no home directory is known."


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda folder: f"{folder}/{'x' * 300}", id="long name"),
        pytest.param(lambda folder: f"{folder}/a\0b", id="NUL"),
        pytest.param(pipe, id="pipe"),
        pytest.param(lambda folder: f"{folder}/of_then.sqlite", id="file of an earlier release"),
        pytest.param(file_as_folder, id="file as folder"),
        pytest.param(lambda folder: "/proc/decisions", id="proc"),
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
    layered = Layered(KIND, {reached(str(tmp_path / "closed")): Store()})
    with warned() as messages:
        os.seteuid(65534)
        try:
            assert layered.newest(layered.looked_up("decisions/cpu/", KEY[:16])) == {}
            layered.put("decisions/cpu/", (KEY[:16], Document(name_of(MADE), MADE)))
        finally:
            os.seteuid(0)
    assert len(messages) == 1
    assert ": PermissionError: " in messages[0]


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
        Catalogue().add(MADE)
        Catalogue(tmp_path / "team").add(MADE)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    file = f"{KEY}.{variant_of(MADE.machine)}.json"
    assert {name: oct(mode) for name, mode in modes.items() if name in ("data", "backend_kwargs", "team")} == {
        "data": "0o755",
        "backend_kwargs": "0o700",
        "team": "0o755",
    }
    (own,) = (tmp_path / "data").rglob(file)
    (named,) = (tmp_path / "team").rglob(file)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (own, named)] == [0o600, 0o644]


# ---- damage


@torch.no_grad()
def test_flipped_bits(auto, races, store, begin_anew, warned):
    """A document with a bit that is another is not used: its SHA-256 tells."""
    model, x = raced(auto, races, store)
    (file,) = store.rglob("*.json")
    whole, chance = file.read_bytes(), random.Random(1)
    for count in range(1, 6):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(7)
        file.write_bytes(flipped)
        begin_anew()
        with warned() as messages:
            assert torch.allclose(auto(model)(x), model(x), atol=1e-5)
        assert (races.count, len(messages)) == (count + 1, 1)


# ---- many at once

WRITER = f"""
import sys
from {Decision.__module__} import Decision
from {Catalogue.__module__} import Catalogue
for at in range(100_000):
    Catalogue(sys.argv[1]).add(Decision(f"{{sys.argv[2]}}-{{at}}", "graph", "default"))
    print(at, flush=True)
"""


def test_killed_writers_lose_nothing(store):
    """Everything that killed writers confirmed is in the store."""
    chance, confirmed = random.Random(3), set()
    for at in range(3 * TIMES):
        writer = forks.Fork("-c", WRITER, store, at, stderr=None)
        confirmed |= {f"{at}-{writer.stdout.readline().strip()}"}
        time.sleep(chance.random() / 5)
        writer.kill()
        lines = writer.communicate()[0].splitlines(keepends=True)
        confirmed |= {f"{at}-{line.strip()}" for line in lines if line.endswith("\n")}
    assert confirmed <= {each.key for each in Catalogue(store).all()}
