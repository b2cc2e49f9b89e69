"""CUDA graphs before default, where eager waits for launches."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import budget, race, roofline, selection
from backend_kwargs.auto.candidates import (
    CUDAGRAPHS,
    GRAPHS_FIRST,
    RaceCandidate,
    rewriting,
)
from backend_kwargs.auto.deadline import OutOfTime
from backend_kwargs.auto.graph_stats import Product
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.request import Request, Tools
from backend_kwargs.auto.roofline import Ceilings, Slack, gain_without_graphs
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import Store
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.rewrites.table import Rewrite
from tests.auto.test_auto_race_steps import NOW, STATS, runner

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPU = replace(STATS, device="cuda")
MANY = replace(GPU, ops=2000)
COPIES = replace(MANY, bytes_written=1.0)
OPERANDS = (torch.empty(8, 16, device="meta"), torch.empty(16, 32, device="meta"))
PRODUCT = Product("mm[]", 1, 1.0, 1.0, 1.0, 2, (torch.mm, OPERANDS, {}))
DEFAULTS = RaceCandidate("default", over=False, complexity=0)


@pytest.fixture
def raced(monkeypatch):
    """Return a race on a GPU whose eager call waits for launches, and the candidates that it meets."""
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: NOW))

    def make(
        *, stats=GPU, device=CUDA, eager_s=0.01, idle=0.5, fixed=None, limits=None, meets=None, rewrites=(), **settings
    ):
        monkeypatch.setattr(selection, "idle_share", lambda call, device: idle)
        monkeypatch.setattr(selection, "seconds_of_traffic", lambda moved, device: moved)
        tools = Tools(lambda name: {}, lambda options: limits or {}, fixed or {}, rewrites)
        request = Request(CapturedGraph(None, ()), RaceSettings(**{"budget_s": 30.0} | settings), pytest.fail, tools)
        left = budget.Budget(request.settings.budget_s, NOW, eager_s)
        made = race._Race.of(request, lambda *_: None, 0.0, None, device, stats, left, {})
        met = []

        def meet(champion, candidate):
            met.append(candidate.name)
            return (meets or {}).get(candidate.name) or champion

        monkeypatch.setattr(made, "_meet", meet, raising=False)
        return made, met

    return make


def graphs(*, recorded):
    return Runner(GRAPHS_FIRST, RaceRow("cudagraphs", dict(CUDAGRAPHS), seconds=1e-3), None, (("code", recorded),))


@pytest.mark.parametrize(
    ("given", "first"),
    [
        pytest.param({}, ["cudagraphs"], id="waits for launches"),
        pytest.param({"idle": 0.15}, ["default"], id="waits little"),
        pytest.param({"idle": 0.15, "stats": MANY}, ["cudagraphs"], id="waits little, long to compile"),
        pytest.param({"idle": 0.05, "stats": MANY}, ["cudagraphs"], id="busy, long to compile, few copies"),
        pytest.param({"idle": 0.05, "stats": COPIES}, ["default"], id="busy, long to compile, many copies"),
        pytest.param({"idle": 0.15, "stats": COPIES}, ["cudagraphs"], id="waits little, long to compile, many copies"),
        pytest.param({"idle": 0.05, "stats": replace(MANY, writes=True)}, ["default"], id="busy, writes its inputs"),
        pytest.param({"eager_s": 3.0, "stats": MANY}, ["cudagraphs"], id="too slow to tell, long to compile"),
        pytest.param({"idle": 0.15, "stats": MANY, "budget_s": 200.0}, ["default"], id="a larger budget"),
        pytest.param({"device": CPU}, ["default"], id="on a CPU"),
        pytest.param({"stats": replace(GPU, random=True)}, ["default"], id="random"),
        pytest.param({"stats": replace(GPU, dynamic=True)}, ["default"], id="symbolic sizes"),
        pytest.param({"eager_s": 3.0}, ["default"], id="too slow to tell"),
        pytest.param({"objective": "memory"}, ["default"], id="memory"),
        pytest.param({"candidates": ("combo_kernels",)}, ["default"], id="named candidates"),
        pytest.param({"fixed": {"triton.cudagraphs": False}}, ["default"], id="the user's option"),
    ],
)
def test_what_is_compiled_first(raced, given, first):
    """CUDA graphs come first only if they may be recorded, and default's own results are not needed."""
    meets = {"cudagraphs": graphs(recorded=True), "default": runner("default")}
    limits = {"triton.cudagraphs": SimpleNamespace(reason="planted")} if given.get("fixed") else {}
    made, met = raced(meets=meets, limits=limits, **given)
    assert made._first(runner("eager")) is meets[first[0]]
    assert met == first


@pytest.mark.parametrize(
    "of_graphs",
    [
        pytest.param(None, id="fails, or slower than eager"),
        pytest.param(graphs(recorded=False), id="nothing recorded"),
    ],
)
def test_default_is_compiled_if_cuda_graphs_cannot_win(raced, of_graphs):
    """Default meets eager where CUDA graphs fail, lose, or record nothing."""
    made, met = raced(meets={"cudagraphs": of_graphs, "default": runner("default")})
    made.codes = {("code",): "cudagraphs"}
    assert made._first(runner("eager")).row.name == "default"
    assert (met, made.codes) == (["cudagraphs", "default"], {})


def test_default_is_a_candidate_after_cuda_graphs(raced, monkeypatch):
    """Default is raced later for what it may gain: all, if the slack is unknown."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: Ceilings(copy=4.0, fill=5.0, half=100.0, single=10.0))
    made, _ = raced()
    made = made.selection
    made.rows = [RaceRow("eager", seconds=1e-3)]
    assert made._default_later(runner("default")) == []
    (unknown,) = made._default_later(graphs(recorded=True))
    assert (unknown.name, unknown.options, unknown.gain, unknown.complexity) == ("default", {}, 1.0, 0)
    made.base = (1e-3, Slack(launches=1e-4, library=0.0, generated=0.0))
    (known,) = made._default_later(graphs(recorded=True))
    assert known.gain == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("written", "eager_s", "gain"),
    [
        pytest.param(0, 1.0, 0.1, id="the replay"),
        pytest.param(4, 1.0, 0.3, id="the replay and copies"),
        pytest.param(4, 3.6, 0.1, id="launches take time"),
        pytest.param(4, 8.0, -1.0, id="launches take longer"),
    ],
)
def test_what_is_gained_without_graphs(monkeypatch, written, eager_s, gain):
    """Without CUDA graphs neither copies nor the replay take time, but launches take a quarter of eager's call."""
    monkeypatch.setattr(roofline, "_ceilings", lambda device: Ceilings(copy=4.0, fill=5.0, half=100.0, single=10.0))
    stats = replace(GPU, bytes_written=written / 10)
    found = gain_without_graphs(1.0, Slack(launches=0.1, library=0.0, generated=0.0), eager_s, stats, CUDA)
    assert found == pytest.approx(gain)


def test_cuda_graphs_are_timed_whatever_the_budget(raced, monkeypatch):
    """CUDA graphs that were compiled first never replace eager untimed, as default does."""
    made, _ = raced(budget_s=0.0)
    monkeypatch.setattr(race, "interleaved", lambda *_, **__: {"champion": [2.0] * 9, "challenger": [1.0] * 9})
    challenger = graphs(recorded=True)
    assert made._beats(challenger, runner("eager", seconds=None))
    assert challenger.row.speedup.median == 2


@torch.no_grad()
def test_without_a_gpu_nothing_is_recorded_and_default_wins(store, monkeypatch, default_wins):
    """A graph that torch does not record, as on a CPU, is decided between eager and default."""
    monkeypatch.setattr(selection.Selection, "graphs_first", lambda self, eager: True)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(2, 8)
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto", budget_s=20))
    torch.testing.assert_close(compiled(x), model(x))
    (decision,) = Store(store).all()
    assert [row.name for row in decision.rows][:3] == ["eager", "cudagraphs", "default"]
    assert {row.name: row.status for row in decision.rows}["default"] == "pass"


@torch.no_grad()
@pytest.mark.parametrize(("gain", "status"), [(0.5, "pass"), (0.01, "skipped")], ids=["worth it", "not worth it"])
def test_a_race_that_cuda_graphs_lead(store, monkeypatch, default_wins, gain, status):
    """After CUDA graphs default is one of the candidates, raced only if it may gain enough; the winner is stored."""
    monkeypatch.setattr(selection.Selection, "graphs_first", lambda self, eager: True)
    monkeypatch.setattr(race.Runner, "replayed", True)  # as on a GPU
    monkeypatch.setattr(selection, "gain_without_graphs", lambda *_: gain)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(2, 8)
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:auto", budget_s=30))
    torch.testing.assert_close(compiled(x), model(x))
    (decision,) = Store(store).all()
    rows = {row.name: row for row in decision.rows}
    assert [*rows][:2] == ["eager", "cudagraphs"]
    assert rows["default"].status == status, rows["default"]
    assert ("triton.cudagraphs" in decision.options) is (status == "skipped")  # default wins if it is raced
    assert decision.lasting


@torch.no_grad()
def test_the_decision_is_stored_where_default_runs_out_of_time(store, monkeypatch):
    """If CUDA graphs won and the budget then ended within default's tuning, the next process does not race again."""
    compiled = race._Race._compiled

    def interrupted(self, options, compiler=""):
        if not options:
            raise OutOfTime
        return compiled(self, options, compiler)

    monkeypatch.setattr(race._Race, "_compiled", interrupted)
    monkeypatch.setattr(selection.Selection, "graphs_first", lambda self, eager: True)
    monkeypatch.setattr(race, "better", lambda *_: True)
    monkeypatch.setattr(race.Runner, "replayed", True)  # as on a GPU
    monkeypatch.setattr(selection, "gain_without_graphs", lambda *_: 0.5)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), torch.randn(2, 8)
    torch.testing.assert_close(torch.compile(model, backend="tmpl-inductor:auto")(x), model(x))
    (decision,) = Store(store).all()
    assert {row.name: row.status for row in decision.rows}["default"] == "timeout"
    assert decision.winner != "eager"


@pytest.mark.parametrize(
    ("eager_s", "champion", "faster", "wins"),
    [
        pytest.param(0.01, "eager", 2.0, True, id="faster than eager"),
        pytest.param(0.01, "eager", 0.8, False, id="slower than eager"),
        pytest.param(1.0, "eager", 0.8, True, id="no time for four calls"),
        pytest.param(0.01, "cudagraphs", 2.0, False, id="against CUDA graphs"),
    ],
)
def test_default_whose_compile_took_the_budget(raced, monkeypatch, eager_s, champion, faster, wins):
    """A few calls show whether eager is faster; default is kept untimed only against an eager call that takes long."""
    made, _ = raced(eager_s=eager_s)
    made.budget.started = NOW - 40.0
    monkeypatch.setattr(race, "interleaved", lambda *_, **__: {"champion": [faster] * 9, "challenger": [1.0] * 9})
    assert made._beats(Runner(DEFAULTS, RaceRow("default"), None, ()), runner(champion)) is wins


@pytest.mark.parametrize(
    ("champion", "wins", "learned"),
    [
        pytest.param("eager", False, True, id="slower than eager"),
        pytest.param("cudagraphs", False, False, id="slower than CUDA graphs"),
        pytest.param("cudagraphs", True, True, id="faster than CUDA graphs"),
    ],
)
def test_what_the_next_candidates_extend(raced, monkeypatch, champion, wins, learned):
    """Default that loses to CUDA graphs leaves their options and slack to be extended; without them it is extended."""
    made, _ = raced()
    challenger, slack_of = Runner(DEFAULTS, RaceRow("default"), None, ()), []
    monkeypatch.setattr(made, "_prepared", lambda *_: challenger, raising=False)
    monkeypatch.setattr(made, "_beats", lambda *_: wins, raising=False)
    monkeypatch.setattr(made.selection, "learn_slack", slack_of.append, raising=False)
    race._Race._meet(made, runner(champion), DEFAULTS)
    assert slack_of == ([challenger] if learned else [])
    assert made.selection.best_row is (challenger.row if learned else None)


def test_the_share_in_which_the_device_is_idle(monkeypatch):
    """The rest of the shortest call, beside the time that the kernels take with their launches queued."""
    monkeypatch.setattr(roofline.measure, "device_seconds", lambda call, device: 0.6)
    monkeypatch.setattr(roofline.measure, "interleave", lambda calls, **_: {"call": [1.2, 0.8, 2.0]})
    assert roofline.idle_share(print, CUDA) == pytest.approx(0.25)


def test_early_rewrites_join_cuda_graphs(raced, monkeypatch):
    """Rewrites that seldom lose and match are part of the first candidate; others are raced later."""
    asked = []

    def matching(names, *_):
        asked.append(names)
        return [rewriting("mine")]

    table = {"mine": Rewrite("early", traced=pytest.fail, early=True), "late": Rewrite("late", traced=pytest.fail)}
    monkeypatch.setattr(selection, "find_rewrite", table.__getitem__)
    monkeypatch.setattr(selection, "candidates_of_rewrites", matching)
    made, _ = raced(rewrites=("late", "mine"))
    made.selection.task = SimpleNamespace(copy=lambda: None)
    assert made.selection.graphs.options == {**CUDAGRAPHS, "rewrites": ["mine"]}
    assert (made.selection.graphs.name, made.selection.graphs.over, asked) == ("cudagraphs", False, [("mine",)])
    assert raced(rewrites=("late",))[0].selection.graphs is GRAPHS_FIRST
    assert raced(rewrites=("mine",), stats=STATS)[0].selection.graphs is GRAPHS_FIRST  # on a CPU


def plain(nbytes, *, static=False):
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if static:
        tensor._dynamo_static_input_type = "guarded"
    return tensor


@pytest.mark.parametrize(
    ("given", "graphs"),
    [
        pytest.param({}, True, id="a rewrite"),
        pytest.param({"operators": ()}, False, id="without an operator"),
        pytest.param({"stats": replace(GPU, dynamic=True)}, False, id="symbolic sizes"),
        pytest.param({"stats": replace(GPU, writes=True)}, False, id="a graph that changes its inputs"),
        pytest.param({"stats": replace(GPU, bytes_written=15.0)}, False, id="large results"),
        pytest.param({"stats": replace(GPU, bytes_written=14.0)}, True, id="as large as they may be"),
        pytest.param({"inputs": (plain(15),)}, False, id="a large input"),
        pytest.param({"inputs": (plain(15, static=True), 15)}, True, id="inputs that are not copied"),
        pytest.param({"device": CPU}, False, id="on a CPU"),
        pytest.param({"objective": "memory"}, False, id="for memory"),
        pytest.param({"fixed": {"triton.cudagraphs": False}}, False, id="the user forbids CUDA graphs"),
        pytest.param({"rows": [RaceRow("cudagraphs", CUDAGRAPHS, "oom")]}, False, id="after CUDA graphs"),
    ],
)
def test_a_rewrite_is_raced_with_cuda_graphs(raced, monkeypatch, given, graphs):
    """At once, where copies take less than 3 % of the best call: launches of its operators could outweigh its gain."""
    operators = given.pop("operators", ("mine::operator",))
    inputs, rows = given.pop("inputs", ()), given.pop("rows", [])
    monkeypatch.setattr(selection, "find_rewrite", lambda name: Rewrite("r", traced=pytest.fail, operators=operators))
    monkeypatch.setattr(selection, "candidates_of_rewrites", lambda *_: [rewriting("mine")])
    monkeypatch.setattr(selection, "candidates_for", lambda *_, **__: [])
    given = {"stats": replace(GPU, bytes_written=0.0), **given}
    made, _ = raced(rewrites=("mine",), **given)
    made.selection.task = SimpleNamespace(copy=lambda: None)
    made.selection.request, made.selection.rows = replace(made.request, graph=CapturedGraph(None, inputs)), rows
    champion = Runner(DEFAULTS, RaceRow("default", seconds=1000.0), None, ())
    (found,) = made.selection.candidates(champion)
    assert found.options == {**(CUDAGRAPHS if graphs else {}), "rewrites": ["mine"]}


REWRITTEN = {**CUDAGRAPHS, "rewrites": ["mine"]}


@pytest.mark.parametrize(
    ("under", "options", "gain"),
    [
        pytest.param({}, REWRITTEN, 1 - (1.0 - 0.9 * 0.2) / 0.9, id="graphs alone may be the reason"),
        pytest.param(dict(CUDAGRAPHS), REWRITTEN, None, id="graphs were there"),
        pytest.param({}, {"rewrites": ["mine"]}, None, id="no graphs"),
        pytest.param({}, dict(CUDAGRAPHS), None, id="no rewrite"),
    ],
)
def test_graphs_without_a_rewrite_that_brought_them(raced, monkeypatch, under, options, gain):
    """They extend what the rewrite has beaten, and are expected to save what launches took there."""
    made, _ = raced()
    made = made.selection
    monkeypatch.setattr(made, "learn_slack", lambda runner: None, raising=False)
    made.best_row = RaceRow("default", {"a": 1, **under}, seconds=1.0)
    made.base = (1.0, Slack(launches=0.2, library=0.0, generated=0.0))
    champion = Runner(rewriting("mine"), RaceRow("mine", {"a": 1, **options}, seconds=0.9), None, ())
    made.extend(champion)
    step = replace(GRAPHS_FIRST, over=True)
    assert made.best_row is champion.row
    assert made.options(step, champion) == {"a": 1, **CUDAGRAPHS, **({} if gain else options)}
    if gain:
        assert made.gain(step, champion) == pytest.approx(gain)


def test_products_are_tuned_where_the_slack_is_known(raced, monkeypatch):
    """Tuning the products that are far from what they need is a candidate once default's slack is known."""
    monkeypatch.setattr(selection, "excess_of", lambda library, device: {PRODUCT: 0.5})
    made = raced()[0].selection
    made.library = {PRODUCT: 1.0}
    assert made._tunings() == []
    made.base = (1.0, Slack(launches=0.0, library=0.5, generated=0.0))
    (found,) = made._tunings()
    assert (found.name, found.options["tuned_products"]) == ("tuned_products", ["8x32x16"])
    made.budget.started = NOW - 29  # no time is left
    assert made._tunings() == []
    made.device, made.budget.started = CPU, NOW
    assert made._tunings() == []
