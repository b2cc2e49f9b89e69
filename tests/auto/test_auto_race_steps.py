"""Each decision within a race by itself: what is worth its time, what is timed, and what is compared with what."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from backend_kwargs import trial
from backend_kwargs.auto import budget, race, result_checks, selection, steps
from backend_kwargs.auto.candidates import UNRECORDED, Costs, RaceCandidate
from backend_kwargs.auto.graph_stats import GraphStats
from backend_kwargs.auto.question import Request
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.steps import Runner, note_figures
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.interval import Interval

CPU = torch.device("cpu")
STATS = GraphStats("cpu", 4, 0, 0, 0, 0, 0, 0.0, 0.0, False, False, False, False)
INPUTS = SimpleNamespace(aliased=False, bytes=8, fresh=tuple)
NOW = 1000.0


@pytest.fixture
def raced(monkeypatch):
    """Return a race that began `spent` seconds ago by a clock that stands, with settings and state of its own."""
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: NOW))

    def make(*, spent=0.0, fixed=None, limits=None, stats=STATS, inputs=INPUTS, state=None, call_s=0.01, **settings):
        given = CapturedGraph(None, ()), RaceSettings(**{"budget_s": 100.0} | settings), pytest.fail
        request = Request(*given, lambda name: {}, lambda options: limits or {}, fixed or {})
        task = SimpleNamespace(inputs=inputs, training=False, copy=lambda: "copy")
        left = budget.Budget(request.settings.budget_s, NOW - spent, call_s)
        checks = result_checks.ResultChecks(task, stats.random, CPU, left, request.settings.tolerance, {})
        compiles = race.Compiles(request, task)
        made = selection.RaceState(request, task, CPU, left, checks, compiles, None, lambda *_: None, 0.0)
        for name, value in {"stats": stats, "default_s": 10.0, **(state or {})}.items():
            setattr(made, name, value)
        return made

    return make


def runner(name="best", call=None, **row):
    candidate = RaceCandidate(name)
    return Runner(candidate, RaceRow(name, **{"seconds": 1.0, "against": "default"} | row), call, ())


STEP = RaceCandidate("step", {"a": 1})
LITTLE = replace(STEP, saves_op_s=0.007)  # for each of four operators, of a second
TRIED = RaceRow("earlier", {"a": 1})
AGAIN = "it would be earlier again"
SPENT = "the budget of 100 s is spent"


@pytest.mark.parametrize(
    ("given", "candidate", "why"),
    [
        pytest.param({}, STEP, "", id="worth it"),
        pytest.param({"state": {"rows": [TRIED]}}, STEP, AGAIN, id="tried"),
        pytest.param({"state": {"rows": [replace(TRIED, status="fail_to_run")]}}, STEP, AGAIN, id="failed"),
        pytest.param({"state": {"rows": [replace(TRIED, status="skipped")]}}, STEP, "", id="skipped before"),
        pytest.param({"state": {"rows": [replace(TRIED, options={})]}}, STEP, "", id="other options"),
        pytest.param({"state": {"rows": [replace(TRIED, compiler="tmpl-tvm")]}}, STEP, "", id="another compiler"),
        pytest.param({"state": {"rows": [RaceRow("eager")]}}, replace(STEP, options={}), "", id="eager has no options"),
        pytest.param({"spent": 100.0}, STEP, SPENT, id="nothing left"),
        pytest.param(
            {"spent": 91.0},
            STEP,
            "it is predicted to exceed the budget: about 10 s of compiling, 9 s are left",
            id="too long",
        ),
        pytest.param(
            {"spent": 90.04},
            STEP,
            "it is predicted to exceed the budget: about 10 s of compiling, 9.9 s are left",
            id="a little too long",
        ),
        pytest.param({"spent": 89.0}, STEP, "", id="just short enough"),
        pytest.param({"spent": 91.0}, LITTLE, "it could save 2.8% at most", id="worth no budget"),
        pytest.param({"spent": 120.0}, LITTLE, "it could save 2.8% at most", id="whatever is left"),
        pytest.param({}, replace(LITTLE, saves_op_s=0.008), "", id="just more than three per cent"),
        pytest.param({"stats": replace(STATS, ops=5)}, LITTLE, "", id="more operators"),
        pytest.param({"spent": 120.0, "candidates": []}, LITTLE, SPENT, id="named, nothing left"),
        pytest.param({"candidates": []}, LITTLE, "", id="named"),
        pytest.param({"objective": "memory"}, LITTLE, "", id="for memory"),
        pytest.param(
            {"fixed": {"a": 2}}, STEP, "it can do nothing here: your options set it otherwise", id="the user's option"
        ),
        pytest.param({"fixed": {"b": 2}}, STEP, "", id="another option of the user's"),
        pytest.param(
            {"limits": {"a": SimpleNamespace(reason="it needs a GPU")}},
            STEP,
            "it can do nothing here: it needs a GPU",
            id="a limit",
        ),
        pytest.param(
            {"limits": {"a": SimpleNamespace(reason="it needs a GPU")}},
            replace(STEP, options={"a": 1, "b": 2}),
            "",
            id="one of two options works",
        ),
        pytest.param({}, replace(STEP, options={}), "", id="no options"),
        pytest.param(
            {"stats": replace(STATS, random=True)},
            replace(STEP, compiler="tmpl-tvm"),
            "it draws other random numbers than Inductor",
            id="another compiler, unfit",
        ),
        pytest.param(
            {"stats": replace(STATS, random=True)},
            replace(STEP, options={"precision": "bf16"}),
            "its error cannot be measured in float64: it draws random numbers",
            id="a precision without a reference",
        ),
    ],
)
def test_what_is_worth_its_time(raced, given, candidate, why):
    """The reason in a skipped row, or none."""
    row = raced(**given).skipped(candidate, runner())
    assert (row.reason if row else "") == why


def test_compiling_takes_half_a_second_at_least(raced):
    """Default may have come out of a cache, which says nothing about how long others take."""
    candidate = RaceCandidate("a", costs=Costs(2.0, op_s=1.0))
    assert raced(state={"default_s": 0.1}).predicted_s(candidate) == 2 * 0.5 + 4
    assert raced(state={"default_s": 3.0}).predicted_s(candidate) == 2 * 3.0 + 4


@pytest.mark.parametrize(
    ("spent", "left_s", "over"),
    [
        pytest.param(0.0, 100.0, False, id="begun"),
        pytest.param(99.0, 1.0, False, id="nearly spent"),
        pytest.param(100.0, 0.0, True, id="spent"),
        pytest.param(110.0, 0.0, True, id="overrun"),
    ],
)
def test_what_the_budget_allows(raced, spent, left_s, over):
    """Nothing is compiled after its end."""
    made = raced(spent=spent).budget
    assert (made.left_s, made.over) == (left_s, over)


@pytest.mark.parametrize(
    ("given", "has"),
    [
        pytest.param({}, True, id="plain"),
        pytest.param({"inputs": SimpleNamespace(aliased=True, bytes=8, fresh=tuple)}, False, id="shared memory"),
        pytest.param({"inputs": SimpleNamespace(aliased=False, bytes=2 << 30, fresh=tuple)}, True, id="two gibibytes"),
        pytest.param(
            {"inputs": SimpleNamespace(aliased=False, bytes=(2 << 30) + 1, fresh=tuple)}, False, id="a byte more"
        ),
        pytest.param({"spent": 99.95}, False, id="no time for ten calls"),
        pytest.param({"spent": 99.85}, True, id="just time for ten calls"),
    ],
)
def test_which_graphs_have_a_reference(raced, monkeypatch, given, has):
    """A result in higher precision takes memory and time, and shows nothing where eager's numbers are others."""
    monkeypatch.setattr(trial, "reference", lambda fn, args, run: (fn, args))
    made = raced(**given).checks
    made.compute_reference()
    assert made.reference == (("copy", ()) if has else None)


@pytest.mark.parametrize(
    ("call_s", "has"), [pytest.param(12.1, True, id="two minutes and a second"), pytest.param(12.2, False, id="longer")]
)
def test_what_default_needs_is_outside_the_budget(raced, monkeypatch, call_s, has):
    """Its reference is computed though only a second of the budget is left, if two minutes more are enough."""
    monkeypatch.setattr(trial, "reference", lambda fn, args, run: (fn, args))
    made = raced(spent=99.0, call_s=call_s)
    with made.budget.uncounted():
        made.checks.compute_reference()
    assert made.checks.reference == (("copy", ()) if has else None)
    assert made.checks.without == ("" if has else "a call in eager takes 12 s")


def test_the_time_of_defaults_check_does_not_count(raced, monkeypatch):
    """What is left of the budget, and its end, are the same before and after."""
    left = raced(spent=99.0).budget
    clock = NOW
    with left.uncounted():
        clock += 50.0
        monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: clock))
    assert left.left_s == 1.0
    assert left.spent_s == 149.0


def test_two_minutes_do_not_count_in_sum(raced, monkeypatch):
    """What default's check takes beyond them is the budget's, and no call of it begins that exceeds both."""
    left, clock = raced(spent=40.0, call_s=1.0).budget, NOW
    allowed = []
    for took in (100.0, 50.0, 20.0):
        with left.uncounted():
            allowed.append([left.allows(calls) for calls in (60, 80, 180)])
            clock += took
            monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda now=clock: now))
    assert allowed == [[True, True, True], [True, True, False], [False, False, False]]
    assert left.left_s == 10.0


@pytest.mark.parametrize(
    ("given", "precise"),
    [
        pytest.param({}, {"output": 1}, id="had"),
        pytest.param({"spent": 99.85}, {"output": 1}, id="just time"),
        pytest.param({"stats": replace(STATS, random=True)}, "it draws random numbers", id="random"),
        pytest.param({"spent": 99.95}, "there is no time for it within budget_s=100; raise budget_s", id="no time"),
    ],
)
def test_the_reference_of_a_lower_precision(raced, monkeypatch, given, precise):
    """What it gives in float64, or why that is not known."""
    monkeypatch.setattr(result_checks, "in_float64", lambda task: {"output": 1})
    assert raced(**given).checks.precise == precise


def test_a_reference_that_fails(raced, monkeypatch):
    """The error is the reason."""

    def fails(task):
        raise RuntimeError("planted")

    monkeypatch.setattr(result_checks, "in_float64", fails)
    assert raced().checks.precise == "RuntimeError: planted"


@pytest.mark.parametrize(
    ("candidate", "best", "champion", "options"),
    [
        pytest.param(RaceCandidate("a", {"a": 1}), None, {"b": 2}, {"a": 1, "b": 2}, id="over the best"),
        pytest.param(RaceCandidate("a", {"a": 1}, over=False), None, {"b": 2}, {"a": 1}, id="alone"),
    ],
)
def test_options_extend_the_best(raced, candidate, best, champion, options):
    """A step's are merged onto the best's; a template stands alone."""
    assert raced(state={"best_row": best}).options(candidate, runner(options=champion)) == options


@pytest.mark.parametrize(("best", "options"), [(None, {"a": 1}), (RaceRow("mine", {"b": 2}), {"a": 1, "b": 2})])
def test_options_never_extend_another_compilers(raced, best, options):
    """Where another compiler is the fastest, a step extends the best of Inductor's, if there is one."""
    champion = runner(options={"trials": 3}, compiler="tmpl-tvm")
    assert raced(state={"best_row": best}).options(RaceCandidate("a", {"a": 1}), champion) == options


def test_figures_of_a_comparison():
    """The challenger's time follows from the champion's by their ratio, and its row names whom it met."""
    champion, challenger = runner("one", seconds=None), runner("two", seconds=None)
    note_figures(challenger, champion, {"champion": [2.0, 4.0, 6.0, 4.0, 4.0], "challenger": [2.0] * 5})
    assert (champion.row.seconds, challenger.row.seconds, challenger.row.against) == (4.0, 2.0, "one")
    assert challenger.row.speedup == Interval(2.0, 1.0, 3.0)
    note_figures(challenger, champion, {"champion": [8.0] * 5, "challenger": [2.0] * 5})
    assert (champion.row.seconds, challenger.row.seconds) == (4.0, 1.0)  # the first time stands


@pytest.mark.parametrize(("eager_s", "warmup"), [(0.1, 3), (0.11, 0)])
def test_slow_calls_are_not_warmed_up(raced, monkeypatch, eager_s, warmup):
    """From a tenth of a second on, the time that is left is for timing."""
    given = []
    monkeypatch.setattr(trial, "interleave", lambda calls, **how: given.append(how["warmup"]) or {})
    steps.interleaved(raced(spent=40.0, call_s=eager_s), runner(), runner(), pytest.fail)
    assert given == [warmup]


def test_an_error_in_eager_is_the_races(raced):
    """Without results of eager there is no race: its error is raised, and no row has it."""

    def fails():
        raise torch.OutOfMemoryError("planted")

    with pytest.raises(torch.OutOfMemoryError, match=r"^planted$"):
        steps.compile_candidate(raced(), runner("eager"), fails, free=False)


@pytest.mark.parametrize(("fails", "wins"), [("champion", True), ("challenger", False)])
def test_who_fails_loses(raced, monkeypatch, fails, wins):
    """Whoever raises while both are timed has the reason in its row, and the other one stays."""

    def interleaved(race, challenger, champion, failed):
        failed(fails, RuntimeError("planted"))
        return {}

    monkeypatch.setattr(steps, "interleaved", interleaved)
    both = {"champion": runner("one"), "challenger": runner("two")}
    made = raced()
    assert race.beats(made, both["challenger"], both["champion"]) is wins
    assert (both[fails].row.status, both[fails].row.reason) == ("fail_to_run", "RuntimeError: planted")
    assert [each.row.status for name, each in both.items() if name != fails] == ["pass"]


@pytest.mark.parametrize(
    ("spent", "call_s", "free", "wins"),
    [
        pytest.param(0.0, 9.0, False, True, id="in time"),
        pytest.param(90.0, 2.6, False, False, id="too little time"),
        pytest.param(500.0, 0.25, False, True, id="a second of calls after the budget"),
        pytest.param(500.0, 0.26, False, False, id="slow calls after the budget"),
        pytest.param(500.0, 9.0, True, True, id="free"),
    ],
)
def test_what_was_compiled_is_timed_while_there_is_time(raced, monkeypatch, spent, call_s, free, wins):
    """Four calls fit into what is left, or take a second at most; both candidates are listed once either way."""
    monkeypatch.setattr(steps, "interleaved", lambda *_: {"champion": [2.0] * 9, "challenger": [1.0] * 9})
    made = raced(spent=spent, call_s=call_s)
    champion, challenger = runner("default"), runner("cudagraphs")
    assert (race.met(made, champion, challenger, free=free) is challenger) == wins
    race.met(made, champion, challenger, free=free)
    assert made.rows == [champion.row, challenger.row]


@pytest.mark.parametrize("free", [True, False], ids=["doubt", "any other candidate"])
def test_what_a_doubt_compiles_is_timed_after_the_budget(raced, monkeypatch, free):
    """However slow its calls are; another candidate that is there then stays untimed."""
    monkeypatch.setattr(steps, "interleaved", lambda *_: {"champion": [2.0] * 9, "challenger": [1.0] * 9})
    made, champion, challenger = raced(spent=500.0, call_s=9.0), runner("rewrites"), runner("default")
    monkeypatch.setattr(race, "prepared", lambda *_, free: challenger)
    best = race.against(made, champion, RaceCandidate("default", over=False), free=free)
    assert best is (challenger if free else champion)


def test_a_call_waits_for_dynamo(monkeypatch):
    """The seconds that dynamo adds are waited for in each call."""
    ticks = count(step=0.01)
    monkeypatch.setattr(selection, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert selection._after_guards(lambda x: x + 1, 0.02, 4) == 5
    assert next(ticks) >= 0.02


def test_a_compile_that_serves_is_not_counted(raced, monkeypatch):
    """What is left of the budget is the same after it, however long it took, and what counts is the rest."""
    left, clock = raced(spent=40.0).budget, NOW
    with left.serving():
        clock += 500.0
        monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: clock))
    assert (left.left_s, left.counted_s, left.spent_s) == (60.0, 40.0, 540.0)


GRAPHS = {"triton.cudagraphs": True}


@pytest.mark.parametrize(
    ("name", "replayed", "raced_before", "other"),
    [
        pytest.param("default", False, False, "cudagraphs", id="default"),
        pytest.param("step", False, False, "step+cudagraphs", id="a step"),
        pytest.param("step", True, False, None, id="CUDA graphs have won"),
        pytest.param("step", False, True, None, id="raced before"),
    ],
)
@pytest.mark.parametrize("spent", [0.0, 500.0], ids=["in time", "after the budget"])
def test_when_code_is_raced_with_cuda_graphs_too(raced, monkeypatch, name, replayed, raced_before, other, spent):
    """It is raced both ways until CUDA graphs have won, and never twice, also where it took the whole budget."""
    monkeypatch.setattr(selection.RaceState, "may_have_graphs", True)
    made = raced(spent=spent)
    if raced_before:
        made.rows.append(RaceRow("cudagraphs", GRAPHS))
    champion = replace(runner(), code=(("code", replayed),))
    step = made.other(RaceCandidate(name, UNRECORDED), champion)
    assert (step and step.name) == other


@pytest.mark.parametrize(
    ("status", "champion", "tried"),
    [
        pytest.param("fail_accuracy", "eager", True, id="refused"),
        pytest.param("fail_accuracy", "default", False, id="something else was refused"),
        pytest.param("pass", "eager", False, id="eager is faster"),
    ],
)
def test_persistent_reductions_are_tried_where_the_code_of_default_is_refused(raced, status, champion, tried):
    """Its loops may have read what other threads had not written yet; persistent reductions have none."""
    made = raced(stats=replace(STATS, device="cuda", reductions=1))
    made.rows.append(RaceRow("default", status=status))
    made.__dict__.update(offered=[], rewriting=[])
    names = [each.name for each in made.candidates(runner(champion))]
    assert ("persistent_reductions" in names) is tried
