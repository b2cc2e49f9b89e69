"""The sources of a decision by themselves: what is settled, inherited, and what can be saved."""

from dataclasses import replace

import pytest
import torch
from torch.fx import symbolic_trace

from backend_kwargs.auto import decide, process_memory
from backend_kwargs.auto.question import Question, Request, savable
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.options.templates import find_template
from tests.auto.graphs import chain

pytestmark = pytest.mark.noise

LARGE = torch.zeros(1 << 19)  # two mebibytes: not tiny
ROWS = (RaceRow("cudagraphs", won=True),)


def sine(x):
    return torch.sin(x)


def question(*inputs, fixed=None, fn=chain, **settings):
    """Return the question about one graph."""
    given = CapturedGraph(symbolic_trace(fn), inputs or (LARGE,)), RaceSettings(**settings), pytest.fail
    return Question(Request(*given, lambda name: find_template(name).options, lambda options: {}, fixed or {}))


def remember(asked, key="other", winner="cudagraphs", **changed):
    """Let this process have raced a graph in the question's scope."""
    key = asked.key if key == "own" else key
    options = {"triton.cudagraphs": True} if winner == "cudagraphs" else {}
    made = Decision(key, **{"graph": asked.graph, "winner": winner, "options": options, "rows": ROWS} | changed)
    process_memory.memory().decisions[asked.slot if key == asked.key else (asked.scope, key)] = made
    return made


@pytest.mark.parametrize(
    ("cut_s", "settings", "settled"),
    [
        pytest.param(0.0, {"budget_s": 1e9}, True, id="not cut"),
        pytest.param(20.0, {"budget_s": 20.0}, True, id="cut by as large a budget"),
        pytest.param(20.0, {"budget_s": 19.0}, True, id="cut by a larger budget"),
        pytest.param(20.0, {"budget_s": 21.0}, False, id="cut by a smaller budget"),
        pytest.param(0.0, {"race": "always"}, False, id="always"),
    ],
)
def test_what_is_settled(cut_s, settings, settled):
    """A decision stands unless a larger budget may improve it."""
    asked = question(**settings)
    made = remember(asked, asked.key, cut_s=cut_s)
    assert decide.settled(asked) == (decide.Answer(made) if settled else None)


WIDE = Interval(4.64, 0.05, 8.85)
NOISY = (RaceRow("eager", seconds=1.0), RaceRow("cudagraphs", {}, seconds=0.2, speedup=WIDE, against="eager", won=True))
CUT = (*ROWS, RaceRow("max_autotune", status="skipped", untried=True, predicted_s=40.0))


def stored(rows, **settings):
    """Return a question, and what the store has for it from another process."""
    asked = question(**settings)
    options = {"triton.cudagraphs": True}
    made = Decision(asked.key, asked.graph, "cudagraphs", options, rows, asked.here, seconds=10.0, cut_s=20.0)
    asked.store.put(made)
    process_memory.forget_process()
    return question(**settings), made


@pytest.mark.parametrize(
    ("rows", "settings", "settled"),
    [
        pytest.param(NOISY, {"budget_s": 20.0}, False, id="noise"),
        pytest.param(NOISY, {"budget_s": 0.0}, True, id="noise, no time"),
        pytest.param(CUT, {"budget_s": 20.0}, True, id="cut"),
        pytest.param(CUT, {"budget_s": 60.0}, False, id="cut, more time"),
    ],
)
def test_what_another_process_left_open(rows, settings, settled):
    """A provisional decision is raced again by a process that has time; one that was only cut, with a larger budget."""
    asked, made = stored(rows, **settings)
    assert decide.settled(asked) == (decide.Answer(made) if settled else None)


@pytest.mark.parametrize(
    ("rows", "winner", "facts"),
    [
        pytest.param(CUT, "cudagraphs", "", id="cut"),
        pytest.param(
            NOISY,
            "default",
            "the stored decision is provisional: the timings that chose it are noise; its budget of 20 s ended it; "
            "race it again with more time, or on an idle machine; budget_s=30 would try all",
            id="noise",
        ),
    ],
)
def test_never_uses_what_was_checked_and_timed(rows, winner, facts):
    """Of a race that was cut the winner; not one that noise chose."""
    asked, _ = stored(rows, race="never", budget_s=60.0)
    found = decide.first_answer(asked)
    assert (found.decision.winner, found.decision.facts) == (winner, facts)


def test_no_other_machine_is_offered_a_provisional_decision():
    """Neither as one that is near, nor to race."""
    asked, made = stored(CUT, match="device")
    asked.store.put(replace(made, machine=made.machine | {"threads": 77}))
    assert asked.store.near(asked.key) == []


SIZES = "it was raced for 3 other sizes"
SPENT = "the process has spent its 600 s on races"
TINY = "it is tiny"
OWN = {"key": "own", "winner": "default", "cut_s": 1.0}


def heir(asked):
    """Return the decision that a question inherits, None if its graph is to be raced."""
    return found.decision if (found := decide.inherited(asked)) else None


@pytest.mark.parametrize(
    ("inputs", "raced", "spent", "settings", "winner", "facts"),
    [
        pytest.param((LARGE,), [], [], {}, None, None, id="nothing raced"),
        pytest.param((LARGE,), [{}] * 2, [], {}, None, None, id="two other sizes"),
        pytest.param((LARGE,), [{}] * 3, [], {}, "cudagraphs", SIZES, id="three other sizes"),
        pytest.param((LARGE,), [{}] * 3, [], {"race": "always"}, None, None, id="three other sizes, always"),
        pytest.param((LARGE,), [{}] * 3, [], {"most_races": 4}, None, None, id="four may be"),
        pytest.param((LARGE,), [OWN], [], {"most_races": 1}, None, None, id="its own, cut"),
        pytest.param((LARGE,), [OWN, *[{}] * 3], [], {}, "cudagraphs", SIZES, id="its own, cut, and three other sizes"),
        pytest.param((LARGE,), [{"graph": "x"}] * 9, [], {}, None, None, id="other graphs"),
        pytest.param((LARGE,), [{"rows": ()}] * 9, [], {}, None, None, id="not raced themselves"),
        pytest.param((LARGE,), [], [300.0, 299.0], {}, None, None, id="budget of the process"),
        pytest.param((LARGE,), [], [300.0, 300.0], {}, "default", SPENT, id="spent"),
        pytest.param((LARGE,), [{}], [600.0], {}, "cudagraphs", SPENT, id="spent, another size"),
        pytest.param((LARGE,), [{"graph": "x"}], [600.0], {}, "default", SPENT, id="spent, another graph"),
        pytest.param((LARGE,), [], [600.0], {"race": "always"}, "default", SPENT, id="spent, always"),
    ],
)
def test_what_is_inherited(inputs, raced, spent, settings, winner, facts):
    """The winner of other sizes, where a race is not worth its time or there is none left."""
    asked = question(*inputs, **settings)
    for at, changed in enumerate(raced):
        remember(asked, **{"key": f"key {at}"} | changed)
    process_memory.memory().race_seconds += spent
    found = heir(asked)
    assert (found and found.winner, found and found.facts) == (winner, facts)
    if found:
        assert (found.key, found.graph, found.rows) == (asked.key, asked.graph, ())


@pytest.mark.parametrize(
    ("raced", "settings", "winner"),
    [
        pytest.param([], {}, None, id="nothing raced"),
        pytest.param([{"graph": "x"}], {}, "cudagraphs", id="another graph"),
        pytest.param([{"graph": "x", "winner": "eager"}], {}, "default", id="another graph, which eager won"),
        pytest.param([{"winner": "eager"}], {}, "eager", id="another size, which eager won"),
        pytest.param([{}, {"graph": "x", "winner": "aten"}], {}, "cudagraphs", id="another size before another graph"),
        pytest.param([{}, {"winner": "aten"}], {}, "aten", id="the latest"),
        pytest.param([{"graph": "x"}], {"race": "always"}, None, id="always"),
    ],
)
def test_what_a_tiny_graph_inherits(raced, settings, winner):
    """The winner of its other sizes, else that of the last graph that was compiled."""
    asked = question(torch.zeros(2), fn=sine, **settings)
    for at, changed in enumerate(raced):
        remember(asked, f"key {at}", **changed)
    found = heir(asked)
    assert (found and found.winner) == winner
    assert found is None or found.facts == TINY


def test_scopes_keep_apart():
    """A graph raced under other settings, or on another store, is not inherited from."""
    asked, other = question(torch.zeros(2), fn=sine), question(torch.zeros(2), fn=sine, effort="full")
    remember(other, graph="x")
    assert heir(asked) is None


def row(name, seconds, **changed):
    return RaceRow(name, **{"seconds": seconds, "options": {}} | changed)


@pytest.mark.parametrize(
    ("rows", "fixed", "winner"),
    [
        pytest.param(
            [row("eager", 1.0), row("default", 2.0), row("cpp_wrapper", 1.5, options={"cpp_wrapper": True})],
            {},
            "cpp_wrapper",
            id="the fastest",
        ),
        pytest.param(
            [row("eager", 1.0), row("default", 2.0), row("tmpl-tvm", 1.0, compiler="tmpl-tvm")],
            {},
            "default",
            id="no other compiler",
        ),
        pytest.param(
            [row("default", 2.0), row("cudagraphs", 1.0, options={"triton.cudagraphs": True})],
            {},
            "default",
            id="no copies",
        ),
        pytest.param(
            [row("default", 2.0), row("cudagraphs", 1.0, options={"triton.cudagraphs": True})],
            {"clone_outputs": False},
            "cudagraphs",
            id="without copies",
        ),
        pytest.param(
            [row("default", 2.0), row("aten", 1.0, options={"cpp.cxx": "x"})],
            {},
            "default",
            id="no option that none sets",
        ),
        pytest.param(
            [row("default", 2.0), row("cpp_wrapper", None, options={"cpp_wrapper": True})],
            {},
            "default",
            id="not timed",
        ),
        pytest.param([row("default", 2.0), row("cpp_wrapper", 1.0, status="oom")], {}, "default", id="failed"),
        pytest.param([row("eager", 1.0), row("default", 2.0, status="fail_accuracy")], {}, "eager", id="none passed"),
        pytest.param([], {}, "default", id="not raced"),
    ],
)
def test_what_aot_compile_can_save(rows, fixed, winner):
    """The fastest that passed, is Inductor's, and copies nothing; eager where nothing passed."""
    asked = question(fixed=fixed)
    made = Decision(asked.key, asked.graph, "eager", rows=tuple(rows))
    found = savable(asked, made)
    assert (found.winner, found.compiler) == (winner, "")


@pytest.mark.parametrize(
    ("chosen", "stays"),
    [
        pytest.param(Decision("k", "g", "default"), True, id="default"),
        pytest.param(Decision("k", "g", "tmpl-tvm", compiler="tmpl-tvm"), False, id="another compiler"),
        pytest.param(Decision("k", "g", "cudagraphs", {"triton.cudagraphs": True}), False, id="copies"),
        pytest.param(Decision("k", "g", "cudagraphs", {"triton.cudagraphs": False}), True, id="no CUDA graphs"),
    ],
)
def test_which_winner_can_be_saved(chosen, stays):
    """What aot_compile() writes is a compiled graph of Inductor's alone: in place of any other stands default."""
    assert savable(question(), chosen) == (
        chosen if stays else replace(chosen, winner="default", options={}, compiler="")
    )


def test_what_is_loaded_precedes_the_store(store):
    """Decisions that came with another process's cache artifacts are used; those that do not last are not."""
    asked = question()
    made = Decision(asked.key, asked.graph, "cudagraphs", {"triton.cudagraphs": True}, ROWS, asked.here)
    Catalogue(store).add(replace(made, winner="default", options={}))
    process_memory.load_decisions([made])
    assert asked.remembered() == made
    assert process_memory.settled_decisions() == [made]
    process_memory.forget_process()
    assert asked.remembered().winner == "default"
    process_memory.forget_process()
    process_memory.load_decisions([replace(made, rows=(RaceRow("default", status="oom"),))])
    assert asked.remembered() is None


def test_nothing_decided_is_put_back():
    """Inside, races begin without any decision; after it, the process has those from before."""
    asked = question()
    made = remember(asked, asked.key)
    with process_memory.nothing_decided():
        assert asked.remembered() is None
        remember(asked, asked.key, winner="default")
        assert process_memory.memory().store.is_dir()
        inner = process_memory.memory().store
    assert asked.remembered() == made
    assert not inner.exists()
