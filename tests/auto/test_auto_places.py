"""Places raced by themselves before the graph is compiled, as on a GPU: here on a CPU, with planted figures."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

import backend_kwargs
from backend_kwargs import make_backend, trial
from backend_kwargs.auto import candidates, places, process_memory, race, selection, steps
from backend_kwargs.auto.compiling import Compiles
from backend_kwargs.auto.graph_stats import calls_a_library
from backend_kwargs.auto.places import worth_it
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.verdicts import KIND, UNKNOWN, Verdict, Verdicts, check, confirmed_by
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.inductor.lowered import IncompatibleVersionError
from backend_kwargs.cli import app
from backend_kwargs.errors import BackendKwargsWarning
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.fleet.board import Result, Unit
from backend_kwargs.fleet.racing import race_unit
from backend_kwargs.graphs.writes import storages_of, written_memory
from backend_kwargs.interval import Interval
from backend_kwargs.rewrites import Rewrite, register_rewrite, table
from backend_kwargs.rewrites.table import name_of
from backend_kwargs.rewrites.traced import Place, replacing
from backend_kwargs.stores import Store
from backend_kwargs.stores.layered import Layered, reached
from tests.auto.graphs import change, rows_of

FASTER, SLOWER = Verdict(2e-5, 1e-5, Interval(2.0, 1.9, 2.1)), Verdict(1e-5, 2e-5, Interval(0.5, 0.4, 0.6))
WRONG, LITTLE = Verdict(why="attention: fail_accuracy"), Verdict(why="1.0% of a call in eager", is_little=True)
SLIGHTLY = Verdict(1.1e-5, 1e-5, Interval(1.1, 1.09, 1.11))


@pytest.fixture(autouse=True)
def _places_first(monkeypatch, default_wins):
    """Race places first, then nothing but default and rewrites; the last one that is right wins."""
    monkeypatch.setattr(selection.RaceState, "places_first", property(lambda self: not self.named))
    monkeypatch.setattr(race, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    monkeypatch.setattr(candidates, "STEPS", ())
    monkeypatch.setattr(candidates, "installed", lambda: ())


@pytest.fixture
def judged(monkeypatch):
    """Give each place the verdict planted for its rewrite, else UNKNOWN; return the rewrites that were judged."""

    def plant(**verdicts):
        asked = []

        def verdict_of(request, sandbox, standing):
            asked.append(standing.place.rewrite)
            return verdicts.get(standing.place.rewrite, UNKNOWN)

        monkeypatch.setattr(race, "verdict_of", verdict_of)
        return asked

    return plant


class Net(nn.Module):
    """A convolution with ReLU, then a linear layer with GELU's approximation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 16)

    def forward(self, x):
        return F.gelu(self.linear(torch.relu(self.conv(x)).flatten(1)), approximate="tanh")


def raced(model=None, x=None, **options):
    model, x = model or Net().eval(), torch.randn(2, 3, 8, 8) if x is None else x
    compiled = torch.compile(model, backend=make_backend("tmpl-inductor:auto", {"budget_s": 300.0, **options}))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), atol=2e-3, rtol=2e-3)
    (graph,) = backend_kwargs.report(compiled).graphs
    return graph.race


def test_what_is_faster_by_itself_is_compiled_once(store, judged, monkeypatch):
    """The graph is traced once and compiled with the places that won, under one name for several, default is not."""
    asked = judged(convolution=FASTER, linear_activation=FASTER)
    trace, traces = aot_autograd.aot_stage1_graph_capture, []
    monkeypatch.setattr(aot_autograd, "aot_stage1_graph_capture", lambda *args: traces.append(1) or trace(*args))
    decision = raced()
    assert len(traces) == 1
    assert sorted(asked) == ["convolution", "linear_activation"]
    rows = rows_of(store)
    assert [*rows] == ["eager", "rewrites"]
    assert sorted(map(name_of, decision.options["rewrites"])) == ["convolution", "linear_activation"]
    assert rows["rewrites"].rewritten == {"convolution": 1, "linear_activation": 1}
    assert not rows["rewrites"].untried


def test_what_is_lowered_is_judged_where_a_place_of_dynamos_graph_has_won(store, judged):
    """The graph is traced with that place rewritten, and compiled once with what wins in its lowered graph too."""
    asked = judged(shifted=FASTER, linear_activation=FASTER)
    shifted = lambda node, args: shifted_cosine(node, args["input"])  # noqa: E731
    with_rewrite("shifted", shifted)
    try:
        model = nn.Sequential(Sine(), nn.Linear(16, 16), nn.ReLU()).eval()
        decision = raced(model, torch.randn(4, 16), rewrites=["shifted"])
    finally:
        table._registered.pop("shifted")
    assert asked == ["shifted", "linear_activation"]
    assert [*rows_of(store)] == ["eager", "rewrites"]
    assert sorted(map(name_of, decision.options["rewrites"])) == ["linear_activation", "shifted"]


class Sine(nn.Module):
    """The sine of its input."""

    def forward(self, x):
        return torch.sin(x)


def shifted_cosine(node, x):
    moved = node.graph.call_function(torch.sub, (x, math.pi / 2))
    return node.graph.call_function(torch.cos, (moved,))


@pytest.mark.parametrize(
    ("convolution", "rows"),
    [
        pytest.param(FASTER, ["eager", "convolution"], id="one that is faster gives the candidate its name"),
        pytest.param(SLOWER, ["eager", "default"], id="what is slower by itself is not raced"),
        pytest.param(UNKNOWN, ["eager", "default", "convolution"], id="what cannot be judged is raced in the graph"),
    ],
)
def test_what_follows_from_a_verdict(store, judged, convolution, rows):
    """Default is compiled where no place has won, and a rewrite without a verdict after it."""
    judged(convolution=convolution, linear_activation=SLOWER)
    raced()
    assert [*rows_of(store)] == rows


def test_full_effort_races_in_the_graph_what_lost_by_itself(store, judged):
    """What a place shows by itself may not hold in the graph, and there is time to see."""
    judged(convolution=SLOWER, linear_activation=SLOWER)
    raced(effort="full", candidates=None)
    assert {"convolution", "linear_activation"} <= {*rows_of(store)}


def test_a_place_under_the_graphs_own_autocast_is_raced_in_the_graph(store, judged):
    """Alone it would compute in other dtypes than there."""
    asked = judged(shifted=FASTER)
    with_rewrite("shifted", lambda node, args: shifted_cosine(node, args["input"]))

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.sin(x) + 1

    try:
        raced(fn, torch.randn(64), rewrites=["shifted"])
    finally:
        table._registered.pop("shifted")
    assert asked == []
    assert [*rows_of(store)] == ["eager", "default", "shifted"]


def test_without_room_for_what_places_read_the_race_goes_on(store, judged, monkeypatch):
    """Then rewrites are raced in the whole graph."""

    def fails(*_):
        raise torch.OutOfMemoryError("planted")

    judged(convolution=FASTER)
    monkeypatch.setattr(race, "standing", fails)
    raced()
    assert [*rows_of(store)] == ["eager", "default", "convolution", "linear_activation"]


def test_a_report_lists_places(store, judged):
    """What each is by itself, how far from the device's limit, and whether the winner has it."""
    judged(convolution=Verdict(2e-5, 1e-5, Interval(2.0, 1.9, 2.1), limit_s=8e-6), linear_activation=SLOWER)
    race = raced()
    told = race.table.partition("places, each by itself:\n")[2]
    assert [line.partition(": ")[2] for line in told.splitlines()] == [
        "20.0 µs, 2.5x its limit; rewritten 10.0 µs, 2.00x [1.90, 2.10], used",
        "10.0 µs; rewritten 20.0 µs, 0.50x [0.40, 0.60]",
    ]
    assert "convolution 1x, convolution, relu of float32 2x3x8x8, float32 8x3x3x3, float32 8: " in told
    assert [each.place.partition("@")[0] for each in race.places] == ["convolution", "linear_activation"]


def test_doubt_is_settled_by_default(store, judged, monkeypatch):
    """Where the graph calls an operator otherwise than its place alone, default is timed whatever the budget."""
    calls = {"backend_kwargs::conv_relu of (2, 3, 9, 9) (243, 81, 9, 1)": (1, 1e-6)}
    judged(convolution=replace(FASTER, calls=calls), linear_activation=SLOWER)
    told = raced().table
    assert [*rows_of(store)] == ["eager", "convolution", "default"]
    why = f"convolution calls {next(iter(calls))} 1x by what was timed alone, and 0x in the graph"
    assert (rows_of(store)["default"].against, rows_of(store)["default"].reason) == ("convolution", why)
    assert f"; raced since {why}" in told


def test_a_graph_whose_operators_cannot_be_timed_is_in_doubt(store, judged, monkeypatch):
    """Nothing says then that it has what was learnt of its places: default is raced."""

    def failing(*_):
        raise RuntimeError("out of memory")

    judged(convolution=FASTER, linear_activation=SLOWER)
    monkeypatch.setattr(trial, "operator_times", failing)
    raced()
    assert rows_of(store)["default"].reason == "its operators could not be timed"


def test_what_the_graph_calls_as_alone_is_not_in_doubt(store, monkeypatch):
    """A place that is compiled alone notes what it calls, and so does the graph: default is then not compiled."""
    verdict_of, found = race.verdict_of, []

    def faster(*args):
        found.append(replace(verdict_of(*args), speedup=FASTER.speedup))
        return found[-1]

    monkeypatch.setattr(race, "verdict_of", faster)
    monkeypatch.setattr(places, "DEARER", math.inf)
    raced(Apart().eval(), torch.randn(2, 8, 36))
    assert [*rows_of(store)] == ["eager", "linear_activation"]
    ((name, (count, _)),) = found[0].calls.items()
    assert (name, count) == ("backend_kwargs::linear_gelu of (2, 288) (288, 1), (16, 288) (288, 1), (16,) (1,)", 1)


PRODUCT = "aten::mm of (8, 8) (8, 1), (8, 8) (8, 1)"
FIGURES = "A verdict must have seconds, a speedup and counts of calls above 0, and no limit below 0."


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({}, "", id="as alone"),
        pytest.param({PRODUCT: (3, 6e-6)}, "", id="another one is like it"),
        pytest.param({PRODUCT: (2, 1.2e-5)}, "", id="dearer by less than half of what is saved"),
        pytest.param(
            {PRODUCT: (2, 1.6e-5)}, "attention's kernels take 4.0 times as long in the graph as alone", id="dearer"
        ),
        pytest.param(
            {PRODUCT: (1, 2e-6)},
            f"attention calls {PRODUCT} 2x by what was timed alone, and 1x in the graph",
            id="one is missing",
        ),
    ],
)
def test_a_place_in_the_graph_is_compared_with_itself_alone(fresh_dynamo, change, why):
    """By what both call, on which layouts, and how long that takes; what else the graph calls does not matter."""
    alone, whole = (
        {name: (count, count * 2e-6) for name, (count, _) in operators_of(fn).items()}
        for fn in (lambda x: x @ x, lambda x: ((x @ x) @ x).sin() @ x.t())
    )
    assert alone == {PRODUCT: (1, 2e-6)}
    assert (whole[PRODUCT], len(whole)) == ((2, 4e-6), 2)
    chosen = place("attention", count=2)
    assert places.why_unlike_alone([chosen], {chosen: replace(FASTER, calls=alone)}, {**whole, **change}) == why
    written_out = {name: each for name, each in alone.items() if "mm" not in name}
    assert places.why_unlike_alone([chosen], {chosen: replace(FASTER, calls=alone)}, written_out) == ""


def operators_of(fn):
    """Return what a compiled function calls in one call."""
    compiled, x = torch.compile(fn, dynamic=False), torch.ones(8, 8)
    compiled(x)
    return trial.operator_times(lambda: compiled(x), x.device, calls_a_library)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        pytest.param({"attention": 2, "patches": 1}, "", id="all"),
        pytest.param({"attention": 3, "patches": 1}, "", id="more"),
        pytest.param(
            {"attention": 1, "patches": 1}, "attention shows 1x in the code, for 2 places", id="one is missing"
        ),
        pytest.param({"attention": 2}, "patches shows 0x in the code, for 1 places", id="a rewrite is missing"),
    ],
)
def test_what_does_not_show_in_the_code_is_in_doubt(made, why):
    """Each chosen place has to be rewritten, as often as it is there."""
    assert places.why_not_made([place("attention", count=2), place("patches")], made) == why


def test_a_wrong_rewrite_is_not_chosen(store, monkeypatch):
    """A place is checked as any graph is, before it is timed."""
    monkeypatch.setattr(race, "LEAST_SHARE", 0.0)
    seen = []
    of = race.verdict_of
    monkeypatch.setattr(race, "verdict_of", lambda *args: seen.append(of(*args)) or seen[-1])
    with_rewrite("wrong_sine", lambda node, args: node.graph.call_function(torch.cos, (args["input"],)))
    try:
        raced(torch.sin, torch.randn(64), rewrites=["wrong_sine"])
    finally:
        table._registered.pop("wrong_sine")
    assert [each.why.split(":")[:2] for each in seen] == [["wrong_sine", " fail_accuracy"]]
    assert rows_of(store)["wrong_sine"].status == "fail_accuracy"  # raced in the graph too, as it has no verdict


def test_libraries_are_timed_without_a_compile(store, monkeypatch):
    """Where a place calls libraries alone, both forms are called as they are; only if unclear it is compiled."""
    timed, compiled = [], []

    def timed_alone(raced, calls):
        timed.append([call()["output"][0].shape for call in calls])
        return FASTER if len(timed) == 1 else SLOWER

    place_alone = race.place_alone
    monkeypatch.setattr(race, "timed_alone", timed_alone)
    monkeypatch.setattr(race, "place_alone", lambda of, place: compiled.append(place) or place_alone(of, place))
    product = with_rewrite("transposed", multiplied_transposed, targets=(torch.mm,))
    try:
        for width, compiles in ((48, 0), (64, 1)):
            x = torch.randn(32, width)
            raced(lambda x: torch.mm(x, x.t()), x, rewrites=[product], race="always")
            assert len(compiled) == compiles
    finally:
        table._registered.pop(product)
    assert timed[0] == [(32, 32)] * 2


def test_what_is_drawn_for_nothing_needs_no_second_compile(store, monkeypatch):
    """Where no lowered operator draws, compiled code is checked against eager without a compile that draws as eager."""
    drawing = []
    compile_ = Compiles.compile

    def compiled(self, options, compiler=""):
        drawing.append(bool(options.get("fallback_random")))
        return compile_(self, options, compiler)

    monkeypatch.setattr(Compiles, "compile", compiled)

    def skips(x):
        torch.rand([])  # as a layer that is dropped at random, but not in eval mode
        return x.sin() + 1

    raced(skips, torch.randn(64), rewrites=())
    assert drawing == [False]
    torch._dynamo.reset()
    model = nn.Dropout(0.5)
    torch.compile(model, backend=make_backend("tmpl-inductor:auto", budget_s=300.0, rewrites=()))(torch.randn(64, 8))
    assert drawing[1:] == [False, True]


def test_a_wrong_first_candidate_of_a_random_graph_is_followed_by_default(store, judged, monkeypatch):
    """What draws as compiled code does is then default, which is checked by eager's draws in its turn."""
    judged(wrong_sine=FASTER)
    with_rewrite("wrong_sine", lambda node, args: node.graph.call_function(torch.cos, (args["input"],)))
    try:
        compiled = torch.compile(
            lambda x: F.dropout(torch.sin(x)), backend=make_backend("tmpl-inductor:auto", rewrites=["wrong_sine"])
        )
        compiled(torch.randn(64, 8))
    finally:
        table._registered.pop("wrong_sine")
    outcomes = {row.name: row.status for row in rows_of(store).values()}
    assert outcomes == {"wrong_sine": "fail_accuracy", "eager": "pass", "default": "pass"}


def place(rewrite, nodes=(), count=1, inputs=()):
    return Place(rewrite, 1, (), inputs, (), training=False, count=count, nodes=nodes)


OTHER_SIZE = place("attention", inputs=("x0: [2]",))


@pytest.mark.parametrize(
    ("verdicts", "chosen"),
    [
        pytest.param({place("attention"): FASTER}, ["attention", "other"], id="clearly faster: other sizes follow"),
        pytest.param({place("attention"): SLIGHTLY}, ["attention"], id="a little faster"),
        pytest.param({place("attention"): SLOWER}, [], id="slower"),
        pytest.param({place("attention"): FASTER, OTHER_SIZE: SLOWER}, ["attention"], id="each for itself"),
        pytest.param({place("attention"): FASTER, OTHER_SIZE: UNKNOWN}, ["attention", "other"], id="not judged"),
        pytest.param({place("attention"): FASTER, OTHER_SIZE: WRONG}, ["attention"], id="wrong by itself"),
        pytest.param({place("attention"): FASTER, OTHER_SIZE: LITTLE}, ["attention", "other"], id="too little to race"),
        pytest.param({}, [], id="nothing is known"),
    ],
)
def test_which_places_are_chosen(verdicts, chosen):
    """Those that are faster by themselves, and other sizes of a rewrite that was clearly faster wherever timed."""
    names = {place("attention"): "attention", OTHER_SIZE: "other", place("patches"): "patches"}
    assert [names[each] for each in worth_it([*names], verdicts, 0.02)] == chosen


def test_one_rewrite_for_each_operator():
    """Of places that share an operator, the one that saves most is chosen."""
    one, other, apart = (
        place("attention", nodes=(1, 2)),
        place("decode_attention", nodes=(2, 3)),
        place("patches", nodes=(4,)),
    )
    verdicts = {one: SLIGHTLY, other: FASTER, apart: SLIGHTLY}
    assert worth_it([one, other, apart], verdicts, 0.02) == [other, apart]


def multiplied_transposed(node, args):
    transposed = [node.graph.call_method("t", (args[name],)) for name in ("mat2", "input")]
    product = node.graph.call_function(torch.mm, tuple(transposed))
    return node.graph.call_method("t", (product,))


def with_rewrite(name, new_node, targets=(torch.sin,)):
    """Register a rewrite of dynamo's graph."""
    register_rewrite(name, Rewrite(name, traced=replacing(targets, new_node)))
    return name


class Apart(nn.Module):
    """Another model with the linear layer of `Net`, on what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8 * 36, 16)

    def forward(self, x):
        return F.gelu(self.linear(x.flatten(1)), approximate="tanh") * 2


@pytest.mark.parametrize(
    ("then", "options", "times"),
    [
        pytest.param(lambda x: x.cumsum(-1), {}, 0, id="the same is fused with it"),
        pytest.param(lambda x: x.cumsum(-1), {"race": "always"}, 1, id="all is to be raced again"),
        pytest.param(torch.sin, {}, 1, id="something else is fused with it"),
    ],
)
def test_another_model_with_a_place_times_nothing(store, judged, then, options, times):
    """What a place has shown, with what is around it, is read by the next race, which compiles once."""
    asked, model = judged(linear_activation=FASTER), Apart().eval()
    raced(model, torch.randn(2, 8, 36))
    del asked[:]
    torch._dynamo.reset()
    decision = raced(lambda x: then(model(x)), torch.randn(2, 8, 36), **options)
    assert [row.name for row in decision.rows][:2] == ["eager", "linear_activation"]
    assert asked == ["linear_activation"] * times


@pytest.mark.parametrize(
    ("fn", "around"),
    [
        pytest.param(lambda x, y: F.linear(F.gelu(x), y) * 2, "gelu linear mul", id="functions"),
        pytest.param(lambda x, y: F.linear(x, y).t().sigmoid().float(), "linear t sigmoid float_1", id="methods"),
        pytest.param(lambda x, y: F.layer_norm(F.linear(x, y), (8,)).mean(-1), "linear layer_norm mean", id="norms"),
        pytest.param(lambda x, y: F.linear(x[y[0].long()], y), "getitem long getitem_1 linear", id="gathered"),
        pytest.param(lambda x, y: F.pad(F.linear(x.flip(0), y.tril()), (1, 1)), "flip tril linear pad", id="moved"),
        pytest.param(lambda x, y: F.linear(x, y).roll(1, 0).repeat(2, 1), "linear roll repeat", id="moved by methods"),
        pytest.param(lambda x, y: F.linear(x, y).cumsum(0).sin(), "linear", id="scanned"),
        pytest.param(lambda x, y: F.linear(x, y) @ y, "linear", id="another product"),
        pytest.param(lambda x, y: F.linear(x, y).add_(1).sin(), "linear", id="in place"),
        pytest.param(lambda x, y: F.dropout(F.linear(x, y)), "linear", id="drawn"),
        pytest.param(lambda x, y: F.linear(x, y).to("meta").sin(), "linear", id="copied to another device"),
        pytest.param(lambda x, y: F.dropout(F.linear(x, y), training=False), "linear dropout", id="not drawn"),
        pytest.param(lambda x, y: (h := x.cos(), F.linear(h, y)), "linear", id="used elsewhere"),
        pytest.param(lambda x, y: (h := F.linear(x, y) + 1) + h @ y, "linear h", id="needs another product"),
    ],
)
def test_what_is_fused_with_a_place_of_dynamos_graph(fresh_dynamo, fn, around):
    """Functions and methods that call nothing but gathers, pointwise operators, views and reductions; none writes."""
    found = []
    torch.compile(fn, backend=lambda gm, inputs: found.append(gm.graph) or gm.forward)(*torch.randn(2, 8, 8))
    (linear,) = found[0].find_nodes(op="call_function", target=F.linear)
    values = [node.meta["example_value"] for node in found[0].nodes if node.users]
    before = [each._version for each in values]
    seen = places.with_neighbours(place("attention", (linear,))).around
    assert sorted(each.name for each in seen) == sorted(around.split())
    assert [each._version for each in values] == before


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_place_of_dynamos_graph_is_raced_with_its_neighbours(store, monkeypatch, training):
    """Both forms are compiled with them, are right, and are timed."""
    seen, of = [], race.verdict_of
    monkeypatch.setattr(
        race, "verdict_of", lambda *args: seen.append((args[2].fused.gm.graph, of(*args))) or seen[-1][1]
    )
    with_rewrite("shifted", lambda node, args: shifted_cosine(node, args["input"]))
    x = torch.randn(64, 8, requires_grad=training)
    backend = make_backend("tmpl-inductor:auto", budget_s=300.0, rewrites=["shifted"])
    try:
        with torch.set_grad_enabled(training):
            torch.compile(lambda x, y: (torch.sin(x.exp()) * 2) @ y, backend=backend)(x, torch.randn(8, 8))
    finally:
        table._registered.pop("shifted")
    ((graph, verdict),) = seen
    assert [node.name for node in graph.nodes if node.op.startswith("call")] == ["exp", "sin", "mul"]
    assert (verdict.why, verdict.speedup is None) == ("", False)


@pytest.mark.parametrize(
    "options",
    [pytest.param({"epilogue_fusion": False}, id="an option"), pytest.param({"tolerance": 1e-3}, id="auto's")],
)
def test_a_verdict_is_for_the_users_options(store, judged, options):
    """Under other options of Inductor's the place is raced anew; what is asked of a race changes no verdict."""
    asked = judged(linear_activation=FASTER)
    raced(Apart().eval(), torch.randn(2, 8, 36))
    torch._dynamo.reset()
    raced(Apart().eval(), torch.randn(2, 8, 36), **options)
    assert asked == ["linear_activation"] * (2 if "epilogue_fusion" in options else 1)


@pytest.mark.parametrize(
    ("alone", "options", "speedup", "kept"),
    [
        pytest.param(FASTER, {}, 0.5, ["decisions"], id="no whole graph without it is timed"),
        pytest.param(FASTER, {"race": "always"}, 0.5, ["decisions", "verdicts"], id="as tune: default is slower"),
        pytest.param(FASTER, {"effort": "full"}, 0.5, ["decisions", "verdicts"], id="at full effort too"),
        pytest.param(FASTER, {"race": "always"}, 2.0, ["decisions"], id="default is faster"),
        pytest.param(SLOWER, {"effort": "full"}, 0.5, ["decisions"], id="faster in the graph, but not alone"),
    ],
)
def test_what_a_whole_graph_confirms_is_shared(tmp_path, judged, monkeypatch, alone, options, speedup, kept):
    """Until then a verdict stays in folders of this machine; another machine with the place then times nothing."""
    asked, shared, local = judged(linear_activation=alone), InMemory(), tmp_path / "local"
    default = Interval(speedup, 0.9 * speedup, 1.1 * speedup)
    monkeypatch.setattr(steps, "note_figures", noting(default=default, linear_activation=FASTER.speedup))
    decision = raced(Apart().eval(), torch.randn(2, 8, 36), store=[str(local), shared], **options)
    assert sorted({name.partition("/")[0] for name in shared.documents}) == kept
    assert sorted({each.relative_to(local).parts[0] for each in local.rglob("*.json")}) == ["decisions", "verdicts"]
    (row,) = decision.places
    assert row.confirmed is ("verdicts" in kept)
    assert ("confirmed in a whole graph" in decision.table) is row.confirmed
    process_memory.forget_process()
    torch._dynamo.reset()
    raced(Apart().eval(), torch.randn(2, 8, 36) + 1, store=[str(tmp_path / "another"), shared], tolerance=1e-3)
    assert asked == ["linear_activation"] * (1 if row.confirmed else 2)


def test_a_plan_sends_what_is_confirmed_beside_its_decisions(tmp_path, judged, monkeypatch):
    """So the store that its workers fill spares other models the place."""
    judged(linear_activation=FASTER)
    monkeypatch.setattr(steps, "note_figures", noting(default=SLOWER.speedup))
    model = tmp_path / "my_apart.py"
    model.write_text(
        "import torch\nfrom tests.auto.test_auto_places import Apart\n"
        "def build(): return Apart().eval(), torch.ones(2, 8, 36)\n"
    )
    result = msgspec.json.decode(race_unit(msgspec.json.encode(Unit(f"{model}:build", "cpu"))), type=Result)
    assert [name.partition("/")[0] for name in result.documents] == ["decisions", "verdicts"]


def noting(**planted):
    """Note these speedups, and that no other candidate is faster than the champion."""

    def note(challenger, champion, samples):
        row = challenger.row
        row.against, champion.row.seconds, row.seconds = champion.row.name, 1.0, 1.0
        row.speedup = planted.get(row.name, Interval(1.0, 0.9, 1.1))

    return note


SURELY, PATCHES, SLOW = Interval(2.0, 1.9, 2.1), place("patches"), place("convolution")
ALONE = {place("attention", count=2): FASTER, PATCHES: FASTER, SLOW: SLOWER}  # which saves 3e-5 s with the first two
WITHOUT = {"triton.cudagraphs": True}
WITH = {**WITHOUT, "rewrites": [str(place("attention")), str(PATCHES)]}
ONE, HARMFUL = {**WITH, "rewrites": WITH["rewrites"][:1]}, {**WITH, "rewrites": [*WITH["rewrites"], str(SLOW)]}
UNRACED = {**WITH, "rewrites": [*WITH["rewrites"], str(place("scan"))]}


def timed(options, seconds, speedup=None):
    return RaceRow(f"after {seconds}", options, seconds=seconds, speedup=speedup)


@pytest.mark.parametrize(
    ("row", "other", "confirmed"),
    [
        pytest.param(timed(WITH, 8e-5, SURELY), timed(WITHOUT, 1e-4), ["attention", "patches"], id="faster with them"),
        pytest.param(
            timed(WITHOUT, 1e-4, SLOWER.speedup), timed(WITH, 8e-5), ["attention", "patches"], id="slower without"
        ),
        pytest.param(timed(WITH, 8.7e-5, SURELY), timed(WITHOUT, 1e-4), [], id="less than half is gained"),
        pytest.param(timed(HARMFUL, 5e-5, SURELY), timed(WITHOUT, 1e-4), [], id="one of several is slower alone"),
        pytest.param(timed(UNRACED, 5e-5, SURELY), timed(WITHOUT, 1e-4), [], id="one of several was not raced alone"),
        pytest.param(timed(WITH, 9.9e-5, SURELY), timed(ONE, 1e-4), ["patches"], id="one"),
        pytest.param(timed(WITH, 9.9e-5, Interval(1.1, 1.009, 1.2)), timed(ONE, 1e-4), [], id="one, by less than 1 %"),
        pytest.param(timed(ONE, 1e-4, Interval(0.9, 0.8, 0.991)), timed(WITH, 9.9e-5), [], id="the same turned round"),
        pytest.param(timed(HARMFUL, 5e-5, SURELY), timed(WITH, 1e-4), [], id="one that is slower alone"),
        pytest.param(timed(WITHOUT, 5e-5, SURELY), timed(WITH, 1e-4), [], id="slower with them"),
        pytest.param(timed(WITH, 5e-5, SURELY), timed({}, 1e-4), [], id="other options differ too"),
        pytest.param(timed(ONE, 5e-5, SURELY), RaceRow("eager", WITHOUT, seconds=1e-4), [], id="eager"),
    ],
)
def test_which_places_a_comparison_confirms(row, other, confirmed):
    """Those of one candidate that the other lacks, where it is surely faster, by as much as they explain."""
    row.against = other.name
    assert sorted(each.rewrite for each in confirmed_by([row, other], ALONE, 0.01)) == confirmed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"calls": {PRODUCT: (0, 1e-6)}}, FIGURES, id="no call"),
        pytest.param({"calls": {PRODUCT: (-3, 1e-6)}}, FIGURES, id="less than no call"),
        pytest.param({"calls": {PRODUCT: (10**400, 1e-6)}}, FIGURES, id="calls without end"),
        pytest.param({"calls": {PRODUCT: (1, 0.0)}}, FIGURES, id="calls of no time"),
        pytest.param({"limit_s": -1.0}, FIGURES, id="limit"),
        pytest.param({"limit_s": math.nan}, FIGURES, id="limit that is no number"),
        pytest.param({"speedup": Interval(0.5, 1.9, 0.1)}, "A speedup must lie within its interval.", id="interval"),
    ],
)
def test_figures_that_a_race_cannot_compute_with_are_refused(change, why):
    """A verdict from a shared store would else fail each race of a graph with its place."""
    check(FASTER)
    with pytest.raises(ValueError, match=f"^{why}$"):
        check(replace(FASTER, **change))


def test_a_store_that_is_down_is_asked_for_one_place(tmp_path):
    """The other stores have the verdicts of all; no place waits for that store again."""
    down, places_ = Down(), [place("attention", inputs=(str(each),)) for each in range(8)]
    local = reached(str(tmp_path / "local"))
    for each in places_[1:]:
        verdicts_in(local).put({each: FASTER})
    with pytest.warns(BackendKwargsWarning, match="^Store 'down' cannot be read: OSError: it is down. "):
        assert verdicts_in(reached(down), local).find_all(places_) == dict.fromkeys(places_[1:], FASTER)
    assert down.listings <= 2  # twice where it fails before it is waited for


def verdicts_in(*layers):
    return Verdicts(Layered(KIND, {each: Store(each.label) for each in layers}), {"device": "cpu"}, {})


def test_places_are_counted_and_forgotten_with_all_decisions(store, judged, tmp_path):
    """After that each is raced again; what no whole graph has confirmed is not copied to another store."""
    asked = judged(linear_activation=FASTER)
    raced(Apart().eval(), torch.randn(2, 8, 36))
    run = lambda *command: CliRunner().invoke(app, ["decisions", *command]).output.splitlines()  # noqa: E731
    assert run("sync", str(store), str(tmp_path / "b"))[0].startswith("1 refused: it is provisional, and stays on its")
    listed, forgotten = (run(*command, "--store", str(store))[-1] for command in (["list"], ["forget", "--all"]))
    assert listed == "1 place raced alone, which no other model times again; 0 confirmed."
    assert forgotten == "1 forgotten, and 1 place."
    process_memory.forget_process()
    torch._dynamo.reset()
    raced(Apart().eval(), torch.randn(2, 8, 36))
    assert asked == ["linear_activation"] * 2


@pytest.mark.parametrize("spoilt", [{"default_s": -1.0}, {"speedup": None}, {"rewritten_s": "x"}], ids=str)
def test_a_spoilt_verdict_is_not_used(store, judged, spoilt):
    """A verdict from a file must have figures; without, the place is raced."""
    asked = judged(linear_activation=FASTER)
    raced(Apart().eval(), torch.randn(2, 8, 36))
    change(store / "verdicts", **spoilt)
    for each in (store / "decisions").rglob("*.json"):
        each.unlink()
    process_memory.forget_process()
    torch._dynamo.reset()
    with pytest.warns(BackendKwargsWarning, match="is not used"):
        raced(Apart().eval(), torch.randn(2, 8, 36))
    assert asked == ["linear_activation"] * 2


class Down:
    """A store of the user's that fails."""

    label, listings = "down", 0

    def list(self, prefix):
        self.listings += 1
        raise OSError("it is down")


class InMemory:
    """A store of the user's."""

    label = "shared"

    def __init__(self):
        self.documents = {}

    def get(self, name):
        return self.documents.get(name)

    def put(self, name, document):
        self.documents[name] = document

    def list(self, prefix):
        return [each for each in self.documents.items() if each[0].startswith(prefix)]

    def forget(self, name):
        self.documents.pop(name, None)


def test_in_training_the_forward_graph_alone_is_looked_at():
    """The backward graph follows from code that is not there yet, so that nothing is compiled from such a trace."""
    model, x, found = Net(), torch.randn(2, 3, 8, 8), []
    torch.compile(model, backend=lambda gm, inputs: found.append((gm, inputs)) or gm.forward, dynamic=False)(x)
    ((gm, inputs),) = found
    with sandboxed(gm) as sandbox:
        request = make_backend("tmpl-inductor:auto").request(CapturedGraph(gm, inputs))
        compiles = race.begun(request, sandbox).compiles
        with pytest.raises(IncompatibleVersionError, match="it has a backward graph"):
            compiles.trace({})
    assert (len(compiles.lowered), compiles.traces) == (1, [])


def test_each_rewrite_is_known_before_more_places_of_one(store, judged, monkeypatch):
    """The dearer linear layers wait for the convolution, but for one of them."""
    monkeypatch.setattr(race, "LEAST_SHARE", 0.0)
    asked = judged(convolution=FASTER, linear_activation=FASTER)
    layers = nn.Flatten(), nn.Linear(288, 1024), nn.GELU("tanh"), nn.Linear(1024, 1024), nn.GELU("tanh")
    raced(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *layers).eval())
    assert [*sorted(asked[:2]), *asked[2:]] == ["convolution", "linear_activation", "linear_activation"]


@pytest.mark.parametrize("lowered", [False, True], ids=["dynamo's", "lowered"])
def test_the_share_of_a_place_is_not_of_what_eager_does_not_fuse(lowered):
    """A convolution of 1 % of eager's time, beside pointwise operators alone, is a tenth of the call."""

    def fn(x, weight):
        return F.conv1d(x, weight).exp() * 2

    args = torch.randn(1, 2, 8), torch.randn(2, 2, 3)
    graph = (make_fx(fn)(*args) if lowered else symbolic_trace(fn)).graph
    nodes = [node for node in graph.nodes if node.op.startswith("call")]
    seconds = {node: 0.01 if "conv" in node.name else 0.99 / 2 for node in nodes}
    assert places._whole_seconds(seconds) == pytest.approx(0.1)
    assert places._whole_seconds({node: each for node, each in seconds.items() if each > 0.1}) == pytest.approx(0.99)


def test_a_graph_is_run_once_for_all_of_its_places():
    """Places of one rewrite after the other, each in two graphs, take two calls in eager."""
    graphs = [symbolic_trace(lambda x: x.sin().cos()).graph, symbolic_trace(lambda x: x.cos().sin()).graph]
    ops = [[node for node in graph.nodes if node.op.startswith("call")] for graph in graphs]
    found = [Place(name, at, (), (), (), training=False) for name in ("one", "two") for at in range(2)]
    found = [
        replace(each, nodes=(node,), around=(node,))
        for each, node in zip(found, sum(zip(*ops, strict=True), ()), strict=True)
    ]
    calls = []
    alone = places.standing(found, lambda: calls.append(1) or [torch.ones(2)], torch.device("cpu"))
    assert (len(calls), {each.place for each in alone}) == (2, {*found})


def scattered(x, order):
    inverse = torch.zeros_like(order)
    inverse[order] = torch.arange(len(order))
    return x[inverse].cos()


def written_after(x, order):
    found = x.cos()
    x.add_(order)
    return found


def test_what_a_lowered_graph_writes_is_known():
    """Inductor's graphs write to their inputs too, whose fake tensors have another name there."""
    graph = make_fx(lambda x: x.add_(1), tracing_mode="fake")(torch.ones(2)).graph
    (placeholder,) = graph.find_nodes(op="placeholder")
    assert written_memory(graph) == storages_of(placeholder.meta["val"])


@pytest.mark.parametrize("fn", [scattered, written_after])
def test_a_place_reads_what_it_reads_in_the_graph(fresh_dynamo, fn):
    """A place gets its inputs as they are when it reads them, whatever is written before or afterwards."""
    graphs, x, order = [], torch.randn(4), torch.tensor([2, 0, 3, 1])
    expected = fn(x.clone(), order)
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm.forward)(x.clone(), order)
    nodes = [node for node in graphs[0].graph.nodes if node.name in ("getitem", "found") or node.target == "cos"]
    place = Place("contraction", 1, (), (), (), training=False, nodes=(*nodes,), around=(*nodes,))
    inputs = [node.name for node in graphs[0].graph.find_nodes(op="placeholder")]
    named = {"l_x_": x, "l_order_": order}
    (alone,) = places.standing([place], lambda: [named[name].clone() for name in inputs], torch.device("cpu"))
    for form in (alone.bare, alone.fused):
        assert torch.equal(form.gm(*form.example_inputs)[0], expected)
