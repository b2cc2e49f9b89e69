"""What was decided on another machine with such a device: used after a check, or tried first in a race."""

from dataclasses import replace

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import process_memory, race
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsWarning, warn_once
from backend_kwargs.stores import Store
from tests.auto.conftest import PASS, doubled
from tests.auto.graphs import chain, logged

X = torch.randn(8, 64)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)
    warn_once.cache_clear()


def elsewhere():
    """Become a fresh process on a machine with one thread more."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch._dynamo.reset()
    process_memory.forget_process()


@pytest.fixture
def one_thread(auto, races):
    """Let a step win a race on another machine."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    auto(chain)(X)
    elsewhere()
    return races


def test_another_number_of_threads_is_used_after_a_check(auto, one_thread, threads, log):
    """Under match="device" nothing is raced, and the report says what differs."""
    compiled = auto(chain, match="device")
    assert torch.allclose(compiled(X), chain(X), atol=1e-5)
    assert one_thread.count == 1
    assert logged(log).startswith("auto: one_thread for ")
    assert f"not raced again; threads {threads} (here {threads + 1})" in str(backend_kwargs.report(compiled))


def test_a_tiny_graph_uses_its_own(auto, races, log):
    """What another machine decided for it precedes what it would inherit here."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    for fn in (torch.sin, chain):
        auto(fn)(X)
    elsewhere()
    for fn in (chain, torch.sin):
        auto(fn, match="device")(X)
    assert logged(log).startswith("auto: one_thread for 3 ops")


@pytest.fixture
def compiles(monkeypatch):
    """Note what each check returned."""
    noted, original = [], race.checked
    monkeypatch.setattr(race, "checked", lambda *given: noted.append(original(*given)) or noted[-1])
    return noted


def test_what_was_checked_is_what_serves(auto, one_thread, compiles):
    """The winner is compiled once: its check and its result are of one trace."""
    auto(chain, match="device")(X)
    ((why, compiled),) = compiles
    assert (why, compiled is None) == ("", False)


def test_a_frozen_winner_that_was_checked_serves_its_own_weights_alone(auto, races, compiles):
    """With frozen weights the winner is compiled again, and another module's weights are not its own."""
    races.winner = "default"
    one, other = torch.nn.Linear(64, 8).eval(), torch.nn.Linear(64, 8).eval()

    def applied(module, x):
        return module(x).relu()

    with torch.no_grad():
        auto(applied, freezing=True)(one, X)
        elsewhere()
        compiled = auto(applied, freezing=True, match="device")
        for module in (one, other, one):
            assert torch.allclose(compiled(module, X), applied(module, X), atol=1e-5)
    assert compiles == [("", None)]
    assert races.count == 1


RUNS = []


@torch.library.custom_op("backend_kwargs_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(x.dtype)
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


def counting(x):
    return counted((x * 1.1 + 0.3).sin() * (x - 0.7).cos() + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_winner_runs_once(auto, races, dtype):
    """The check costs two runs of eager, a reference in float64, and one run of the winner."""
    races.winner = "default"
    auto(counting)(X.to(dtype))
    elsewhere()
    RUNS.clear()
    compiled = auto(counting, match="device")
    compiled(X.to(dtype))
    which_inputs_are_written, *eager, reference, winner, served = RUNS
    assert (eager, reference) == ([dtype] * 2, torch.float64)
    assert {which_inputs_are_written, winner, served} == {dtype}
    assert races.count == 1
    assert "not raced again" in str(backend_kwargs.report(compiled))


def test_it_is_checked_once_a_process(auto, one_thread, monkeypatch):
    """A recompile of the same graph uses what was checked."""
    checked = []
    original = race.checked
    monkeypatch.setattr(race, "checked", lambda *given: checked.append(given) or original(*given))
    for _ in range(2):
        auto(chain, match="device")(X)
        torch._dynamo.reset()
    assert len(checked) == 1


def test_by_default_it_is_raced_with_that_winner_first(auto, one_thread, monkeypatch, store):
    """Under match="exact" the race is offered what won elsewhere; both machines' decisions are kept."""
    requests = []
    original = race.race
    monkeypatch.setattr(race, "race", lambda request, tick: requests.append(request) or original(request, tick))
    auto(chain)(X)
    assert [[each.name for each in request.offered] for request in requests] == [["one_thread"]]
    assert len(Catalogue(store).all()) == 2
    elsewhere()
    torch.set_num_threads(torch.get_num_threads() - 1)
    auto(chain)(X)
    assert one_thread.count == 2


def test_never_uses_it_only_if_asked_to(auto, one_thread, log, threads):
    """Under race="never" the reason names what differs, and what would use the decision."""
    auto(chain, race="never")(X)
    differs = f"threads {threads} (here {threads + 1})"
    why = f"race='never', and a decision is stored only for another machine: {differs}; match='device' uses it"
    assert logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)"
    torch._dynamo.reset()
    auto(chain, race="never", match="device")(X)
    assert logged(log).startswith("auto: one_thread for ")


def test_wrong_numbers_are_raced(auto, races, monkeypatch):
    """A winner whose numbers are wrong on this machine is not used, with a warning."""
    backend_kwargs.register_template("wrong", {PASS: doubled, "fx_graph_cache": False})
    races.winner, races.options = "wrong", {}
    auto(chain, ["wrong"])(X)
    elsewhere()
    (decision,) = Catalogue().all()
    assert decision.winner == "wrong"
    races.winner = "eager"
    original = race.checked

    def with_the_pass(request, found):  # a function is nothing that a document could contain
        object.__setattr__(found, "options", {PASS: doubled, "fx_graph_cache": False})
        return original(request, found)

    monkeypatch.setattr(race, "checked", with_the_pass)
    compiled = auto(chain, ["wrong"], match="device")
    with pytest.warns(BackendKwargsWarning) as caught:
        assert torch.allclose(compiled(X), chain(X), atol=1e-5)
    assert races.count == 2
    assert [str(each.message).partition(": ")[0] for each in caught] == [
        "wrong, stored by another machine, is not used"
    ]


def test_eager_needs_no_check(auto, races, monkeypatch):
    """Eager's numbers are right everywhere."""
    auto(chain)(X)
    elsewhere()
    monkeypatch.setattr(race, "checked", pytest.fail)
    assert torch.equal(auto(chain, match="device")(X), chain(X))
    assert races.count == 1


def test_a_decision_names_model_and_sizes(auto, races, store):
    """People find a decision by the class or function that was compiled, and by the sizes and dtypes of its inputs."""
    auto(torch.nn.Sequential(torch.nn.Linear(64, 2), torch.nn.ReLU()))(X)
    torch._dynamo.reset()
    auto(chain)(X.double())
    latest, first = Catalogue(store).all()
    assert (first.model, first.inputs, first.budget_s) == ("Sequential", ("float32 8x64",), 300.0)
    assert (latest.model, latest.inputs) == ("chain", ("float64 8x64",))


def test_a_store_that_never_answers_is_in_the_report(auto, races):
    """It is left out after its deadline, which the report counts."""
    import threading

    waiting = threading.Event()

    class Mute:
        label = "mute"

        def get(self, name):
            waiting.wait()

        def put(self, name, document):
            waiting.wait()

        def list(self, prefix):
            waiting.wait()
            yield from ()

        def forget(self, name):
            waiting.wait()

    compiled = auto(chain, store=Store(Mute(), connect_s=0.1, lookup_s=0.1))
    with pytest.warns(BackendKwargsWarning) as caught:
        assert torch.allclose(compiled(X), chain(X), atol=1e-5)
    waiting.set()
    assert [str(each.message) for each in caught] == [
        "Store 'mute' cannot be read: it did not answer within 0.1 s. It is left out, and tried again for later graphs."
    ]


@pytest.mark.filterwarnings("ignore:Store 'old.sqlite' cannot be read. it is a file")
def test_a_file_of_an_earlier_release_fails_no_compile(auto, races, tmp_path, monkeypatch):
    """It is left out with a warning, and stays as it is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.sqlite").write_bytes(b"as it was")
    assert torch.allclose(auto(chain, store="old.sqlite")(X), chain(X), atol=1e-5)
    assert (tmp_path / "old.sqlite").read_bytes() == b"as it was"


def test_what_an_older_torch_decided_is_raced_first(auto, races, monkeypatch, store):
    """After an upgrade the whole decision of the old release is the first candidate, with all of its options."""
    races.winner, races.options = "no_size_asserts", {"cpp.threads": 1, "size_asserts": False}
    auto(chain)(X)
    (decision,) = Catalogue().all()
    Catalogue(store.parent / "older").add(replace(decision, machine={**decision.machine, "torch": "2.11.0+cpu"}))
    process_memory.forget_process()
    torch._dynamo.reset()
    monkeypatch.undo()
    compiled = auto(chain, store=str(store.parent / "older"))
    assert torch.allclose(compiled(X), chain(X), atol=1e-5)
    older, newer = sorted(Catalogue(store.parent / "older").all(), key=lambda each: str(each.machine["torch"]))
    assert older.machine["torch"] == "2.11.0+cpu"
    assert [(row.name, row.options) for row in newer.rows][2:3] == [("no_size_asserts", dict(races.options))]
    assert newer.rows[2].status in ("pass", "same code")
