"""The store of decisions: what it keeps, and what happens if a disk or a process fails."""

import json
import os
import signal
import time
from dataclasses import asdict, replace

import pytest
import torch

from backend_kwargs.auto import process_memory
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsError, BackendKwargsWarning
from backend_kwargs.facts.decision import Decision, RaceRow, as_json, has_form, parsed, plain
from backend_kwargs.interval import Interval
from backend_kwargs.stores.opening import opened
from tests import forks
from tests.auto.graphs import KEY, MADE, spoil

pytestmark = pytest.mark.noise

WRITER = """
import sys
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.stores.opening import opened
from backend_kwargs.facts.decision import Decision
store = Catalogue(sys.argv[1])
for at in range(int(sys.argv[3])):
    store.add(Decision(f"{sys.argv[2]}-{at}", "graph", "default"))
    print(at, flush=True)
"""


def test_a_store_makes_its_folder(tmp_path):
    """A decision is stored even if the folder does not exist yet."""
    store = Catalogue(tmp_path / "decisions")
    store.add(MADE)
    assert store.all(KEY) == [MADE]


def test_keeps_what_it_is_given(store):
    """A decision that is written is read back unchanged."""
    Catalogue(store).add(MADE)
    assert Catalogue(store).all(KEY) == [MADE]


def test_knows_nothing_without_a_file(store):
    """A look-up does not create a file."""
    assert Catalogue(store).all(KEY) == []
    assert not store.exists()


def test_lists_the_latest_first(store):
    """Decisions are listed latest first: all, or those whose key starts with a prefix."""
    Catalogue(store).add(MADE, replace(MADE, key="cd" * 32, made=2e9))
    assert [each.key[:2] for each in Catalogue(store).all()] == ["cd", "ab"]
    assert [each.key[:2] for each in Catalogue(store).all("ab")] == ["ab"]


def test_the_path_is_given_or_from_the_environment(tmp_path, monkeypatch):
    """`store=` overrides the environment variable, which overrides the user's data folder."""
    assert opened(str(tmp_path)).store.path == tmp_path
    assert opened().store.path != tmp_path
    monkeypatch.delenv("BACKEND_KWARGS_STORE")
    assert opened().store.path.name == "backend_kwargs"


def test_a_broken_document_hides_no_other(store):
    """One that cannot be read is named in a warning."""
    Catalogue(store).add(MADE, replace(MADE, key="cd" * 32))
    spoil(store, "cd" * 32)
    with pytest.warns(
        BackendKwargsWarning, match="cdcdcd.* its decision is not valid: ValidationError: Expected `float`"
    ):
        assert [each.key for each in Catalogue(store).all()] == [KEY]


def test_keeps_that_an_option_has_no_form(store):
    """A function among the user's options does not prevent a decision from being stored; only its name is kept."""
    Catalogue(store).add(replace(MADE, fixed=plain({"cpp.threads": 1, "post_grad_custom_post_pass": print})))
    assert Catalogue(store).all(KEY)[0].fixed == {"cpp.threads": 1, "post_grad_custom_post_pass": None}


def test_a_store_that_cannot_be_written_is_an_error(tmp_path):
    """People are told at once."""
    (tmp_path / "file").touch()
    with pytest.raises(BackendKwargsError) as e:
        Catalogue(tmp_path / "file" / "store").add(MADE)
    assert str(e.value) == f"Store '{tmp_path}/file/store' cannot be made: there is no folder '{tmp_path}/file'."


def test_two_processes_write_at_once(store):
    """Two concurrent writers both find all of their decisions."""
    writers = [forks.Fork("-c", WRITER, store, name, 40, stderr=None) for name in "ab"]
    assert [writer.communicate() and writer.returncode for writer in writers] == [0, 0]
    assert len(Catalogue(store).all()) == 80


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
    ended = [racer.completed() for racer in racers]
    assert [each.returncode for each in ended] == [0, 0]
    assert not [each.stderr for each in ended if "BackendKwargsWarning" in each.stderr]
    assert len(Catalogue(store).all()) == 1


def test_survives_kill_9(store):
    """Everything that a killed writer confirmed is in the store, which still works."""
    writer = forks.Fork("-c", WRITER, store, "a", 100_000, stderr=None)
    confirmed = [int(writer.stdout.readline()) for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    assert {f"a-{at}" for at in confirmed} <= {each.key for each in Catalogue(store).all()}
    Catalogue(store).add(MADE)


def test_nothing_is_compiled_under_the_users_options_of_a_file(auto, races, store):
    """The user's options in a stored decision are only for export; the current user's options apply."""
    races.winner, races.options = "one_thread", {"cpp.threads": 1}
    x = torch.randn(8, 64)
    auto(torch.relu)(x)
    (decision,) = Catalogue(store).all()
    Catalogue(store).add(replace(decision, fixed={"cpp.cxx": "/tmp/evil", "fx_graph_cache": False}))
    torch._dynamo.reset()
    process_memory.forget_process()
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


WIDE, FAR, TIE = Interval(4.64, 0.05, 8.85), Interval(4.64, 1.1, 8.85), Interval(1.0, 0.95, 1.05)
OF_EAGER = RaceRow("eager", seconds=2.0)


def default(speedup, **changed):
    return RaceRow("default", **{"seconds": 1.0, "speedup": speedup, "against": "eager", "won": True} | changed)


@pytest.mark.parametrize(
    ("rows", "changed", "doubts"),
    [
        pytest.param((), {}, [], id="no rows"),
        pytest.param((OF_EAGER, default(FAR)), {}, [], id="wide and above 1"),
        pytest.param((OF_EAGER, default(TIE)), {}, [], id="a tie"),
        pytest.param((OF_EAGER, default(WIDE)), {}, ["noisy"], id="noise"),
        pytest.param((OF_EAGER, default(WIDE, won=False), replace(OF_EAGER, won=True)), {}, ["noisy"], id="eager"),
        pytest.param(
            (OF_EAGER, default(WIDE, won=False), RaceRow("a", seconds=0.5, speedup=FAR, against="default", won=True)),
            {},
            ["noisy"],
            id="noise on the way to eager",
        ),
        pytest.param(
            (OF_EAGER, default(FAR), RaceRow("a", seconds=0.5, speedup=WIDE, against="default")),
            {},
            [],
            id="noise of a loser",
        ),
        pytest.param(
            (OF_EAGER, RaceRow("default", status="skipped"), default(WIDE)),
            {},
            ["noisy"],
            id="a name that is twice there",
        ),
        pytest.param((RaceRow("eager"), default(None, seconds=None)), {}, ["untimed"], id="not timed"),
        pytest.param(
            (RaceRow("eager", won=True), default(None, status="fail_to_compile", won=False)), {}, [], id="eager alone"
        ),
        pytest.param((OF_EAGER, default(FAR)), {"cut_s": 5.0}, ["cut"], id="cut"),
        pytest.param((OF_EAGER, default(FAR), RaceRow("a", status="skipped")), {}, [], id="skipped"),
        pytest.param((OF_EAGER, default(FAR), RaceRow("a", status="skipped", untried=True)), {}, ["cut"], id="untried"),
        pytest.param((OF_EAGER, default(FAR), RaceRow("a", status="timeout")), {}, ["cut"], id="interrupted"),
        pytest.param(
            (RaceRow("eager", won=True), RaceRow("default", status="unchecked")),
            {},
            ["unchecked", "cut"],
            id="unchecked",
        ),
        pytest.param(
            (RaceRow("eager", won=True), RaceRow("default", status="uncheckable")),
            {},
            ["uncheckable"],
            id="uncheckable",
        ),
        pytest.param((OF_EAGER, default(FAR), RaceRow("a", status="uncheckable")), {}, [], id="a step is uncheckable"),
        pytest.param(
            (OF_EAGER, RaceRow("default", status="unchecked"), RaceRow("step", seconds=1.0, won=True)),
            {},
            ["unchecked", "cut"],
            id="not checked, a step passed",
        ),
        pytest.param((OF_EAGER, default(FAR), RaceRow("a", status="unchecked")), {}, ["cut"], id="a step not checked"),
        pytest.param((RaceRow("default"),), {}, [], id="default passed"),
        pytest.param((RaceRow("default", status="fail_accuracy"),), {}, [], id="default is wrong"),
        pytest.param((RaceRow("default", status="fail_to_run"),), {}, ["failed"], id="default failed"),
        pytest.param((RaceRow("default", status="oom"),), {}, ["failed"], id="no memory"),
        pytest.param((RaceRow("default", status="timeout"),), {}, ["failed", "cut"], id="no time"),
        pytest.param((RaceRow("".join(("def", "ault")), status="oom"),), {}, ["failed"], id="a name that was read"),
        pytest.param((RaceRow("default", status="unavailable"),), {}, ["failed"], id="not installed"),
        pytest.param((RaceRow("default"), RaceRow("step", status="oom")), {}, [], id="a step failed"),
        pytest.param(
            (RaceRow("eager"), RaceRow("cudagraphs"), RaceRow("default", status="oom")), {}, [], id="default came later"
        ),
        pytest.param(
            (RaceRow("default", status="fail_to_run"), RaceRow("onnxruntime", compiler="onnxruntime")),
            {},
            ["failed"],
            id="another compiler is left",
        ),
    ],
)
def test_what_is_open(rows, changed, doubts):
    """What rests on default's failure, on numbers that nobody checked, on no time or on noise is provisional."""
    made = replace(MADE, rows=rows, **changed)
    assert [*made.doubts] == doubts
    assert made.provisional is bool(doubts)


@pytest.mark.parametrize(
    ("status", "kept"), [pytest.param("unchecked", False, id="no time"), pytest.param("uncheckable", True, id="no way")]
)
def test_what_is_not_checked_is_kept_if_time_would_not_help(status, kept):
    """Then no other process races it again, and one without time uses it."""
    made = replace(MADE, rows=(RaceRow("eager", won=True), RaceRow("default", status=status)))
    assert (made.provisional, made.is_judged, made.is_unsure) == (True, kept, not kept)


def test_a_decision_as_json():
    """It is read back; odd values of rows are written for people, and options that JSON cannot hold are refused."""
    assert parsed(json.loads(as_json(MADE))) == MADE
    assert "built-in function print" in as_json(replace(MADE, rows=(RaceRow("a", {"x": print}),)))
    with pytest.raises(ValueError, match="Out of range float"):
        as_json(replace(MADE, options={"x": float("nan")}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        as_json(replace(MADE, options={"x": print}))


def test_a_decision_is_of_now():
    """Its time is when it was made, and it was not cut unless that is said."""
    before = time.time()
    made = Decision("key", "graph", "step")
    assert before <= made.made <= time.time()
    assert (made.seconds, made.cut_s, made.compiler) == (0.0, 0.0, "")


def test_a_row_has_no_figures_at_first():
    """A candidate that has not been compiled has taken no time, was not measured and has not won."""
    figures = {name: value for name, value in asdict(RaceRow("step")).items() if value not in (None, "", {})}
    assert figures == {"name": "step", "status": "pass", "compile_s": 0.0, "won": False, "untried": False}
