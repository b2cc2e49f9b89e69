"""Which way of a graph serves is decided by the calls that are made: what is timed, what serves, and what is left."""

import gc
import threading
import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto import alternating, process_memory, race
from backend_kwargs.auto.alternating import AS_RACED, WARM_UPS, WITH, WITHOUT, Alternation, Ways
from backend_kwargs.auto.candidates import WITH_GRAPHS, toggled
from backend_kwargs.auto.compiling import Compiles
from backend_kwargs.auto.process_memory import LONGEST_S
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backends.inductor.lowered import ForwardPasses
from backend_kwargs.facts.decision import EAGER, RaceRow
from backend_kwargs.torch_internals.dynamo import AHEAD
from backend_kwargs.torch_internals.functorch import is_autograd_function

ENOUGH = 2500  # calls, after which each alternation here has ended


@dataclass
class Planted:
    """Graphs whose calls take the seconds that a test says, by a clock of its own."""

    now: float = 0.0
    ran: list[tuple[int, str]] = field(default_factory=list)  # graph and way of each call
    told: list[tuple[str, str]] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)  # whether backward passes went the way of their forward pass

    def __post_init__(self):
        self.alternation = Alternation(clock=lambda: self.now)
        self.entries = []

    def graph(self, raced=WITH, *, fails="", repeats=True, is_clear=False, devices=(), passes=None, **seconds):
        """Add a graph; `raced` is the way that won its race, or "eager" for a third one."""
        number = len(self.entries)

        def call(way):
            def run(x):
                self.now += seconds.get(way.partition(" ")[0], 0.01)
                self.ran.append((number, way))
                if way == fails:
                    raise RuntimeError("planted")
                return x if passes is None else Noted.apply(x, calls, way, self, passes)

            return run

        calls = {way: call(way) for way in (WITHOUT, WITH, EAGER)}
        calls[AS_RACED] = calls[raced]
        rows = {way: RaceRow(raced if way == AS_RACED else way) for way in (WITHOUT, WITH, AS_RACED)}
        ways = Ways(calls, calls.__getitem__, rows, devices, is_clear, repeats, passes)
        ways.decided = lambda row, why: self.told.append((row.name, why))
        self.entries.append(self.alternation.join(ways))
        return calls

    def run(self, count=ENOUGH):
        """Make calls, each of all graphs."""
        for _ in range(count):
            for entry in self.entries:
                entry(1)

    @property
    def winners(self):
        return [name for name, _ in self.told]


class Noted(torch.autograd.Function):
    """An operator whose backward pass notes whether it goes the way of its forward pass."""

    @staticmethod
    def forward(ctx, x, calls, way, planted, passes):
        passes.nodes.add(ctx)
        ctx.save_for_backward(x)
        ctx.planted, ctx.calls, ctx.way = planted, calls, way
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        present = ctx.planted.told[0][0] if ctx.planted.told else ctx.planted.alternation.way
        ctx.planted.same.append(ctx.calls[present] is ctx.calls[ctx.way])
        return grad * 2, None, None, None, None


@pytest.fixture
def planted():
    return Planted()


# ---- what serves


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        pytest.param({"with": 0.008}, WITH, id="with"),
        pytest.param({"without": 0.008}, WITHOUT, id="without"),
        pytest.param({"with": 0.00995}, WITHOUT, id="within the slack"),
        pytest.param({"with": 0.0098}, WITH, id="beyond the slack"),
        pytest.param({"with": 0.0}, WITH, id="a clock that stands still"),
    ],
)
def test_the_faster_way_serves(planted, seconds, winner):
    """CUDA graphs serve if they are faster by more than the slack, and otherwise what takes less memory."""
    planted.graph(**seconds)
    planted.run()
    assert planted.winners == [winner]


@pytest.mark.parametrize(
    ("gain", "expected"),
    [pytest.param(1.02, (WITH, False), id="beyond the slack"), pytest.param(1.004, (WITHOUT, False), id="within it")],
)
def test_where_more_rounds_are_left_out_the_median_decides(gain, expected):
    """An interval on both sides of the slack asks for more rounds; without them the median gain counts."""
    noise = [1.0, 1.03, 0.97, 1.02, 0.98, 1.01, 0.99]
    assert alternating.fastest({WITHOUT: [gain * each for each in noise], WITH: [1.0] * 7}) == expected


@pytest.mark.parametrize(
    ("second", "winners"),
    [
        pytest.param({"with": 0.02, "without": 0.01}, [WITH, WITHOUT], id="as raced"),
        pytest.param({"with": 0.001, "without": 0.01}, [WITH, WITH], id="with"),
    ],
)
def test_what_the_races_chose_is_a_way_too(planted, second, winners):
    """Where two graphs of a call won in different ways, both in these ways are timed against both in one."""
    planted.graph(WITH, **{"with": 0.01, "without": 0.015})
    planted.graph(WITHOUT, **second)
    planted.run()
    assert planted.winners == winners


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [pytest.param({"with": 0.005}, WITH, id="with"), pytest.param({"eager": 0.005}, EAGER, id="eager")],
)
def test_eager_serves_only_if_it_is_faster_in_the_calls(planted, seconds, winner):
    """A graph where eager won is called in eager in one of the ways."""
    planted.graph(EAGER, **seconds)
    planted.run()
    assert planted.winners == [winner]


def test_what_was_found_is_told(planted):
    """The outcome names the median of each way."""
    planted.graph(**{"with": 0.008})
    planted.run()
    assert planted.told == [(WITH, "without CUDA graphs 10 ms, with CUDA graphs 8 ms")]


# ---- what is timed


@pytest.mark.parametrize("order", [pytest.param([0, 1, 2], id="once"), pytest.param([0, 0, 0, 1], id="loop")])
def test_the_graphs_of_a_call_run_the_same_way(planted, order):
    """A call begins with a graph that is called again after all others, not with each one of a loop in the model."""
    for _ in {*order}:
        planted.graph()
    planted.entries = [planted.entries[at] for at in order]
    planted.run(300)
    of_calls = [planted.ran[at : at + len(order)] for at in range(0, len(planted.ran), len(order))]
    assert all(len({way for _, way in call}) == 1 for call in of_calls)
    assert {way for _, way in planted.ran} == {WITH, WITHOUT}


def test_blocks_are_equal_and_their_order_is_random(planted):
    """Each round has a block of as many calls for each way, after the warm-up."""
    planted.graph()
    planted.run(1 + 2 * (WARM_UPS + 1) + 60)
    sizes = [(way, len([*those])) for way, those in groupby(way for _, way in planted.ran)]
    assert sizes[:3] == [(WITH, 1), (WITHOUT, WARM_UPS + 1), (WITH, WARM_UPS + 1 + 6)]
    assert {size for _, size in sizes[3:-1]} == {6, 12}


def test_warm_up_calls_are_not_timed(planted):
    """The first calls of a way, and the first of each block, may take any time."""
    seconds = {"with": 0.008}
    planted.graph(**seconds)
    ran = planted.ran
    for _ in range(ENOUGH):
        early = planted.now < 100
        planted.run(1)
        if early and (len(ran) < 2 or ran[-2][1] != ran[-1][1]):
            planted.now += 0.05
    assert planted.winners == [WITH]


def test_a_graph_that_comes_later_begins_it_anew(planted):
    """What was timed without a graph of the call does not count."""
    planted.graph(**{"with": 0.02})
    planted.run(65)
    planted.graph(**{"with": 0.001, "without": 0.1})
    planted.run()
    assert planted.winners == [WITH, WITH]


# ---- how it ends


def test_nothing_is_left_in_the_path_of_a_call(planted):
    """What dynamo calls then calls what serves, by a partial that has no frame of its own."""
    calls = planted.graph(**{"with": 0.008})
    planted.run()
    (entry,) = planted.entries
    assert (entry.func, entry.args, entry.keywords) == (calls[WITH], (), {})


def test_time_ends_it(planted):
    """Slow calls end it, and then what the race chose serves."""
    planted.graph(WITH, **{"with": 20.0, "without": 10.0})
    planted.run(20)
    assert planted.told == [(WITH, "")]


@pytest.mark.parametrize("joined", [pytest.param(0, id="alone"), pytest.param(1, id="another joins")])
def test_a_graph_that_is_called_no_more_is_left_out(planted, joined):
    """After some time it serves as it was raced, and the others are timed without it."""
    planted.graph(WITHOUT)
    planted.graph(WITHOUT)
    planted.run(3)
    planted.entries[0](1)
    for _ in range(joined):
        planted.graph(**{"with": 0.008})
    gone = planted.entries.pop(1)
    planted.run(4000)
    gone(1)
    assert planted.ran[-1] == (1, WITHOUT)
    assert planted.told[0] == (WITHOUT, "")
    assert [bool(why) for _, why in planted.told[1:]] == [True] * (1 + joined)


def test_each_graph_serves_also_where_one_cannot_be_stored(planted):
    """An error or an interrupt while the outcome of a graph is noted leaves no other graph without what serves."""
    made = [planted.graph(without=0.02) for _ in range(2)]
    planted.alternation.graphs[0].decided = lambda row, why: 1 / 0
    with pytest.raises(ZeroDivisionError):
        planted.run()
    assert [entry.func for entry in planted.entries] == [calls[WITH] for calls in made]


@pytest.mark.parametrize("ends", [pytest.param(False, id="left out"), pytest.param(True, id="ended")])
def test_a_call_that_waited_is_served(planted, ends):
    """A call in another thread that began before its graph came to serve, and then had to wait, is made as raced."""
    planted.graph(WITHOUT)
    planted.graph(WITHOUT)
    waiting = planted.entries.pop(1)
    waiting = partial(waiting.func, *waiting.args)
    if ends:
        planted.alternation.end()
    else:
        planted.run(300)
        planted.now += 40
        planted.run(1)
    assert waiting(1) == 1
    assert planted.ran[-1] == (1, WITHOUT)


def test_a_graph_that_joins_as_all_end_is_served(planted):
    """Another thread may end it while this one compiles."""
    planted.graph()
    planted.alternation.end()
    planted.graph(WITHOUT)
    planted.run(2)
    assert planted.told == [(WITH, ""), (WITHOUT, "")]
    assert planted.ran == [(0, WITH), (1, WITHOUT)] * 2


def test_an_interrupt_as_it_ends_leaves_each_graph_callable(planted):
    """A graph whose turn to serve had not come serves at its next call."""
    for _ in range(2):
        planted.graph(without=0.02)
    first = planted.alternation.graphs[0]
    keep, first.keep = first.keep, lambda way: 1 / 0
    with pytest.raises(ZeroDivisionError):
        planted.alternation.end()
    first.keep = keep
    planted.run(1)
    assert planted.ran == [(0, WITH), (1, WITH)]


def test_an_error_of_a_call_within_which_all_end_is_the_users(planted):
    """The error is raised as it is."""
    calls = planted.graph()

    def ending(x):
        planted.alternation.end()
        return calls[WITH](x) / 0

    planted.alternation.graphs[0].calls = dict.fromkeys((WITH, WITHOUT, AS_RACED), ending)
    entry = planted.entries[0]
    with pytest.raises(ZeroDivisionError):
        entry.func(entry.args[0], ending, 1)


def test_several_threads_end_it(planted):
    """Calls in another thread leave what the race chose."""
    planted.graph(without=0.001)
    planted.run(20)
    thread = threading.Thread(target=planted.run, args=(2,))
    thread.start()
    thread.join()
    assert planted.told == [(WITH, "")]


def test_a_seal_ends_it(planted):
    """While a function is sealed its calls run one way."""
    planted.graph(without=0.001)
    planted.run(20)
    token = AHEAD.set(True)
    planted.run(1)
    AHEAD.reset(token)
    assert planted.told == [(WITH, "")]
    ended, planted.alternation = weakref.ref(planted.alternation), None
    assert ended() is None


def test_it_takes_memory_for_all_ways(planted, monkeypatch):
    """Where a device of any graph has no room, the other way is never called."""
    monkeypatch.setattr(alternating, "has_room", lambda device: device.type == "cpu")
    for device in ("cpu", "meta"):
        planted.graph(without=0.001, devices=[torch.device(device)])
    planted.run(3)
    assert planted.told == [(WITH, "")] * 2
    assert {way for _, way in planted.ran} == {WITH}


@pytest.mark.parametrize(
    ("raced", "ways"),
    [
        pytest.param([WITH, WITH], {WITH}, id="agree"),
        pytest.param([WITH, WITHOUT], {WITH, WITHOUT}, id="differ"),
        pytest.param([EAGER, EAGER], {EAGER, WITH, WITHOUT}, id="eager"),
    ],
)
def test_what_all_races_tell_clearly_is_not_tried(planted, raced, ways):
    """Calls alternate only where races differ, or one of them was close."""
    for each in raced:
        planted.graph(each, is_clear=True)
    planted.run()
    assert {way for _, way in planted.ran} == ways


# ---- training


def one(call, x, step):
    call(x).backward()


def two(call, x, step):
    loss = call(x)
    (loss + call(x) if step % 3 else loss).backward()


def kept(call, x, step):
    loss = call(x)
    loss.backward()
    x.kept = [*getattr(x, "kept", ()), loss]


def none(call, x, step):
    loss = call(x)
    if step % 3:
        loss.backward()


def accumulated(call, x, step):
    for _ in range(2):
        call(x).backward()


def overlapping(call, x, step):
    for loss in [call(x) for _ in range(3)]:
        loss.backward()


def retained(call, x, step):
    loss = call(x)
    loss.backward(retain_graph=True)
    loss.backward()


def failing(call, x, step):
    if step % 3 == 2:
        loss = call(x)
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    call(x).backward()


def evaluated(call, x, step):
    if step % 3 == 2:
        with torch.no_grad():
            call(x)
    call(x).backward()


LOOPS = [
    pytest.param(each, id=each.__name__) for each in (one, two, kept, none, accumulated, overlapping, retained, failing)
]


@pytest.mark.parametrize("step", LOOPS)
def test_a_backward_pass_runs_as_its_forward_pass_did(planted, step):
    """No call begins another way while a backward pass is pending; in training all graphs run in one."""
    for _ in range(2):
        planted.graph(WITH, passes=ForwardPasses(), without=0.02)
    x = torch.ones((), requires_grad=True)
    for at in range(ENOUGH):
        step(lambda x: planted.entries[1](planted.entries[0](x)), x, at)
    assert all(planted.same)
    assert len(planted.same) > ENOUGH
    assert {way for _, way in planted.ran} == {WITH, WITHOUT}
    assert planted.winners == [WITH, WITH]
    first, second = ([way for graph, way in planted.ran if graph == number] for number in (0, 1))
    assert first[3:] == second[3:]


def test_where_races_of_training_differ_each_graph_stays_as_raced(planted):
    """A mixture is not timed in training, so that it is not replaced by what may be slower."""
    for each in (WITH, WITHOUT):
        planted.graph(each, passes=ForwardPasses(), without=0.02)
    for _ in range(3):
        planted.entries[1](planted.entries[0](torch.ones((), requires_grad=True))).backward()
    assert planted.winners == [WITH, WITHOUT]
    assert set(planted.ran) == {(0, WITH), (1, WITHOUT)}


def test_a_way_whose_backward_pass_fails_is_given_up(planted):
    """A step that fails is short, and would win: what was raced serves from the next call on."""
    passes = ForwardPasses()
    planted.graph(WITH, passes=passes)
    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        planted.entries[0](x).backward()
    loss = planted.entries[0](x)
    assert planted.alternation.way == WITHOUT
    with pytest.raises(ZeroDivisionError):
        passes.backward(lambda node: 1 / 0, None)
    planted.entries[0](x)
    assert loss.requires_grad  # its node is alive, and pending
    assert planted.told == [(WITH, "")]


def test_what_ends_a_recomputation_is_no_failure(planted):
    """A checkpoint ends what it computes again by an exception, which it gets; the calls alternate further."""
    planted.graph(WITH, passes=ForwardPasses())
    x = torch.ones((), requires_grad=True)
    for _ in range(20):
        torch.utils.checkpoint.checkpoint(lambda x: planted.entries[0](x).sin(), x, use_reentrant=False).backward()
    assert {way for _, way in planted.ran} == {WITH, WITHOUT}


def test_a_backward_pass_that_is_always_pending_ends_by_time(planted):
    """The present way serves after twice the longest time, since the backward pass that is pending needs it."""
    planted.graph(WITH, passes=ForwardPasses(), without=1.0)
    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        planted.entries[0](x).backward()
    pending = planted.entries[0](x)
    for _ in range(3):
        pending, last = planted.entries[0](x), pending
        last.backward()
        planted.now += LONGEST_S
    pending.backward()
    assert planted.told == [(WITHOUT, "")]
    assert all(planted.same)


def test_a_pending_backward_pass_keeps_its_way_at_a_reset(planted):
    """What the present way needs is kept where all must end at once."""
    planted.graph(WITH, passes=ForwardPasses(), without=0.001)
    x = torch.ones((), requires_grad=True)
    for _ in range(2):
        planted.entries[0](x).backward()
    loss = planted.entries[0](x)
    planted.alternation.end()
    loss.backward()
    assert planted.told == [(WITHOUT, "")]


# ---- errors


def test_a_way_that_fails_is_given_up(planted):
    """The call is made again as it was raced, which serves from then on."""
    planted.graph(fails=WITHOUT)
    planted.run(3)
    assert planted.ran == [(0, WITH), (0, WITHOUT), (0, WITH), (0, WITH)]
    assert planted.told == [(WITH, "")]


def test_a_call_that_writes_is_not_made_again(planted):
    """Its error is the user's to see; what was raced serves from then on."""
    planted.graph(fails=WITHOUT, repeats=False)
    planted.run(1)
    with pytest.raises(RuntimeError, match=r"^planted$"):
        planted.run(1)
    planted.run(1)
    assert planted.told == [(WITH, "")]


def test_errors_of_what_was_raced_are_the_users(planted):
    """They are raised once, and change nothing."""
    planted.graph(fails=WITH)
    with pytest.raises(RuntimeError, match=r"^planted$"):
        planted.run(1)
    assert planted.ran == [(0, WITH)]


@pytest.mark.parametrize(
    ("winner", "training", "tried"),
    [(EAGER, False, True), (EAGER, True, False), (WITH, False, True), (WITH, True, True), ("another", False, False)],
)
def test_where_eager_won_training_does_not_alternate(winner, training, tried):
    """In inference the best code is tried again by the calls, in training only if it has won its race."""
    options = WITH_GRAPHS.options
    rows = [RaceRow(WITH, options), RaceRow(WITHOUT, toggled(options))]
    state = SimpleNamespace(
        leading=SimpleNamespace(row=rows[0], made=SimpleNamespace(has_other=True)),
        rows=rows,
        stats=SimpleNamespace(training=training),
        request=SimpleNamespace(of_several=True),
        compiles=SimpleNamespace(ways=lambda *_, is_clear: "ways"),
    )
    assert race.ways_of(state, RaceRow(winner)) == ("ways" if tried else None)


# ---- real graphs


class Broken(torch.nn.Module):
    """A model of two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x):
        y = self.first(x).softmax(-1)
        torch._dynamo.graph_break()
        return (self.second(y) ** 2).sum()


@pytest.fixture
def short(monkeypatch):
    """End after few calls, whatever they take."""
    for name, value in {"WARM_UPS": 1, "MOST_CALLS": 2, "LEAST_ROUNDS": 1, "MOST_ROUNDS": 1, "LONGEST_S": 1e9}.items():
        monkeypatch.setattr(alternating, name, value)


@pytest.fixture
def both(monkeypatch):
    """Let graphs take part on a CPU, where the same code is what is called "with CUDA graphs" too."""

    def in_both(raced, winner):
        best = raced.leading
        pair = {WITHOUT: best.row, WITH: replace(best.row, name="cudagraphs")}
        return raced.compiles.ways(best.made, {**pair, AS_RACED: winner}, is_clear=False)

    monkeypatch.setattr(race, "ways_of", in_both)


@pytest.mark.usefixtures("short", "both")
@pytest.mark.parametrize("way", [WITHOUT, AS_RACED, WITH])
@pytest.mark.parametrize("winner", [pytest.param("default", id="compiled"), pytest.param("eager", id="eager")])
@torch.no_grad()
def test_each_call_is_right(auto, store, monkeypatch, way, winner):
    """Each call gives eager's results: while ways alternate, whichever serves, and afterwards."""
    monkeypatch.setattr(race, "better", lambda new, old, objective: new.row.name == winner)
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    monkeypatch.setattr(alternating, "fastest", lambda samples: (way if way in samples else WITHOUT, True))
    model, x = Broken(), torch.randn(8, 32)
    fn, want = auto(model, race="always"), model(x)
    for _ in range(30):
        torch.testing.assert_close(fn(x), want)
    assert not process_memory.memory().alternations
    found = Catalogue(store).all()
    served = {WITHOUT: "default", AS_RACED: winner, WITH: "cudagraphs"}[
        way if winner == "eager" or way == WITH else WITHOUT
    ]
    assert {each.winner for each in found} == {served}


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_what_lost_is_freed(auto, monkeypatch):
    """Once it has ended nothing holds the compiled graphs of a version beside those that serve."""
    graphs, original = [], Compiles.ways

    def ways(self, candidate, *args, **kwargs):
        graphs.extend(weakref.ref(graph) for graph in candidate.whole.graphs)
        return original(self, candidate, *args, **kwargs)

    monkeypatch.setattr(Compiles, "ways", ways)
    model, x = Broken(), torch.randn(8, 32)
    fn = auto(model, race="always")
    fn(x)
    assert all(each() is not None for each in graphs)
    gc.disable()
    try:
        while process_memory.memory().alternations:
            fn(x)
        assert {each() for each in graphs} == {None}
    finally:
        gc.enable()


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_a_default_device_changes_nothing(auto):
    """Calls under a default device are compared too."""
    model, x = Broken(), torch.randn(8, 32)
    fn = auto(model, race="always")
    with torch.device("meta"):
        for _ in range(30):
            torch.testing.assert_close(fn(x), model(x))
    assert not process_memory.memory().alternations


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_a_report_has_the_code_and_what_was_found(auto):
    """While ways alternate the report tells of the race, and afterwards what the calls have shown too."""
    fn, x = auto(Broken(), race="always"), torch.randn(8, 32)
    fn(x)
    before = bk.report(fn)
    assert "by the calls that were made" not in str(before)
    assert all(graph.codes for graph in before.graphs if graph.race.winner != EAGER)
    for _ in range(30):
        fn(x)
    lines = [line.strip() for line in str(bk.report(fn)).splitlines() if "by the calls that were made" in line]
    assert [line.partition(": ")[0] for line in lines] == ["chosen by the calls that were made"] * 2


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_what_is_stored_names_the_way_that_won(auto, store):
    """The race's decision is stored at once, and replaced at the end; the next process finds that one."""
    model, x = Broken(), torch.randn(8, 32)
    fn = auto(model)
    fn(x)
    assert [each.calls for each in Catalogue(store).all()] == ["", ""]
    for _ in range(30):
        fn(x)
    found = Catalogue(store).all()
    assert all(each.calls for each in found)
    process_memory.forget_process()
    torch._dynamo.reset()
    fn = auto(model)
    fn(x)
    assert not process_memory.memory().alternations
    assert {graph.race.winner for graph in bk.report(fn).graphs} == {each.winner for each in found}


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_a_reset_ends_it(auto):
    """What was there before is called no more, and its ways are freed; what is compiled anew alternates by itself."""
    fn, x = auto(Broken(), race="always"), torch.randn(8, 32)
    fn(x)
    before = process_memory.memory().alternations.valuerefs()
    torch._dynamo.reset()
    assert [each() for each in before] == [None]
    fn(x)
    assert process_memory.memory().alternations


class Cached(torch.nn.Module):
    """A model that keeps a tensor of its first call, so that its second one is compiled anew."""

    def __init__(self):
        super().__init__()
        self.inner, self.kept = torch.nn.Linear(32, 32), {}

    def forward(self, x):
        if "bias" not in self.kept:
            self.kept["bias"] = self.inner.weight.sum(0)
        y = self.inner(x) + self.kept["bias"]
        torch._dynamo.graph_break()
        return y.softmax(-1) @ self.inner.weight


@pytest.mark.usefixtures("short", "both")
@torch.no_grad()
def test_what_is_compiled_anew_joins_the_others(auto):
    """All graphs of a function alternate together, also those that a later call has compiled."""
    fn, x = auto(Cached(), race="always"), torch.randn(8, 32)
    fn(x)
    (alternation,) = process_memory.memory().alternations.values()
    before = len(alternation.graphs)
    fn(x)
    assert [*process_memory.memory().alternations.values()] == [alternation]
    assert len(alternation.graphs) > before


def autograd_functions():
    """Return the classes of autograd functions that AOTAutograd has made."""
    return [each for each in gc.get_objects() if issubclass(type(each), type) and is_autograd_function(each)]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo reads it
@pytest.mark.usefixtures("short", "both")
@pytest.mark.parametrize("step", [*LOOPS[:6], pytest.param(evaluated, id="evaluated")])
def test_each_step_of_training_is_right(auto, monkeypatch, step):
    """Gradients are eager's, in each step; evaluation alternates by itself. What notes forward passes goes."""
    monkeypatch.setattr(race, "better", lambda new, old, objective: new.row.name == "default")
    monkeypatch.setattr(race, "is_slower", lambda best, eager: False)
    model, x = Broken(), torch.randn(8, 32)
    fn, trained, before = auto(model, race="always"), False, {*map(id, autograd_functions())}
    for at in range(35):
        seen = []
        for call in (model, fn):
            model.zero_grad()
            step(call, x, at)
            seen.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*seen)
        alive = [[each.passes for each in those.graphs] for those in process_memory.memory().alternations.values()]
        assert all(len({passes is None for passes in each}) == 1 for each in alive)
        if any(passes is not None for each in alive for passes in each):
            new = [each for each in autograd_functions() if id(each) not in before]
            trained |= any(isinstance(each.forward, partial) and isinstance(each.backward, partial) for each in new)
    assert trained
    assert not any(passes is not None for each in alive for passes in each)
    kept = [each for each in autograd_functions() if id(each) not in before]
    assert kept
    assert not [each for each in kept if isinstance(each.forward, partial) or isinstance(each.backward, partial)]
