"""Ranks of a process group share the first round of a race, and the racing rank waits for none that is not there."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

from backend_kwargs.auto import ranks, shared_race
from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.auto.helping import _base_of, _is_fit, _is_left, helping
from backend_kwargs.auto.reporting import table
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.shared_race import Exchange, Offer, Offered, Report, Round, exchange_for, opened
from backend_kwargs.facts.decision import Decision, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.report.decisions import race_of
from tests import forks

A, B, C = (RaceCandidate(name, {name: 1}) for name in "ABC")
BASE = RaceRow("default", seconds=2e-3)
A_ROW = RaceRow("A", {"A": 1}, seconds=9.0, speedup=Interval(0.8, 0.7, 0.9), against="default", began_s=1.0)


@pytest.fixture
def store():
    return torch.distributed.HashStore()


@pytest.fixture
def other(store):
    """The exchange as rank 1 sees it."""
    return Exchange(store, "key", 1)


@pytest.fixture
def shared(store):
    """A round of A, B and C that rank 0 has offered."""
    return round_of(store, A, B, C)


def round_of(store, *candidates):
    given = [(each, each.options, 1.0) for each in candidates]
    return Round.of(Exchange(store, "key", 0), BASE, given, 30.0)


def first(fitting):
    return fitting[0]


def test_what_nobody_has_taken_is_raced_here(shared):
    """Without other ranks, the racing rank races all in its own order."""
    assert [shared.next_of([A, B, C][at:], first) for at in range(3)] == [A, B, C]


def test_what_another_rank_has_taken_is_left_to_it(shared, other):
    """The racing rank goes on with what is free, and has nothing to race while another rank races the last one."""
    other.tell(9, Report(1, better=False, rows=[]))
    assert other.take(0) == 1
    with other.helping():
        assert shared.next_of([A, B], first) is B
        assert other.take(1) == 0
        assert shared.next_of([A], first) is None


def test_what_another_rank_found_no_better_is_its_row(shared, other):
    """The row has the rank, and the time that its speedup means on the racing rank's device."""
    other.take(0)
    other.tell(0, Report(1, better=False, rows=[A_ROW]))
    left = [A, B, C]
    (row,) = shared.settle(left)
    assert left == [B, C]
    assert (row.rank, row.status, row.seconds, row.began_s) == (1, "pass", 2e-3 / 0.8, None)


def test_what_another_rank_found_better_is_raced_first(shared, other):
    """A winner elsewhere is confirmed here; the fastest of several comes first."""
    for at, ratio in ((1, 1.2), (2, 1.5)):
        row = RaceRow("x", speedup=Interval(ratio, ratio, ratio), against="default")
        other.take(at)
        other.tell(at, Report(1, better=True, rows=[row]))
    left = [A, B, C]
    assert shared.settle(left) == []
    assert [shared.next_of(left, first), shared.next_of([A, B], first), shared.next_of([A], first)] == [C, B, A]
    why = "the budget of 30 s is spent; rank 1 measured 1.50x over default, which is not confirmed here"
    assert shared.why(C, "the budget of 30 s is spent") == why


def test_a_rank_that_left_is_not_waited_for(shared, other):
    """What a rank took that reports no more is raced here."""
    other.take(0)
    with other.helping():
        assert shared.next_of([A], first) is None
    assert shared.next_of([A], first) is A


def test_a_rank_that_is_silent_is_not_waited_for(shared, other, monkeypatch):
    """What a rank took that was killed is raced here, once it has counted up no more for GONE_S."""
    now = iter(range(100))
    monkeypatch.setattr(shared_race, "GONE_S", 5)
    monkeypatch.setattr(shared_race.time, "monotonic", lambda: next(now))
    other.take(0)
    looks = 1
    while shared.next_of([A], first) is None:
        looks += 1
    assert looks == 4
    assert shared.why(A, "no time") == "no time; rank 1 took it and has not reported"


def test_a_rank_that_takes_too_long_is_not_waited_for(shared, other, monkeypatch):
    """What a rank took that lives, but hangs in a call, is raced here after a multiple of the predicted time."""
    now = iter(range(100))
    monkeypatch.setattr(shared_race, "GONE_S", 5)
    monkeypatch.setattr(shared_race.time, "monotonic", lambda: next(now))
    other.take(0)
    looks = 1
    while shared.next_of([A], first) is None:
        looks += 1
        other.store.add("key/helper/1/count", 1)
    assert looks == 6


def test_a_store_that_fails_ends_the_sharing(shared, other, log):
    """All is raced here, also what another rank took."""
    other.take(0)
    other.store.set("key/report/0", "{}")
    assert shared.settle([A, B, C]) == []
    assert shared.next_of([A, B, C], first) is A
    assert log.messages == ["The race is shared no more: ValidationError: Object missing required field `rank`"]


def test_options_that_only_this_process_has_are_not_offered(store):
    """A candidate with a function, which JSON cannot represent, is raced here."""
    made = round_of(store, A, RaceCandidate("mine", {"pass": print}), RaceCandidate("inf", {"inf": math.inf}), C)
    assert [each.name for each in Exchange(store, "key", 1).offered().candidates] == ["A", "C"]
    assert made.offered == [A, C]


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(RaceRow("default"), id="not timed"),
        pytest.param(RaceRow("default", {"pass": print}, seconds=2e-3), id="not plain"),
    ],
)
def test_nothing_is_offered_beside_what_ranks_cannot_compile(store, base):
    """Nor beside a base that was not timed."""
    Round.of(Exchange(store, "key", 0), base, [(each, each.options, 1.0) for each in (A, B)], 30.0)
    assert Exchange(store, "key", 1).offered().candidates == []


def test_what_is_offered_is_whole(store):
    """Another rank compiles the candidate's options as they are, by its compiler, and knows how long that may take."""
    other = RaceCandidate("T", {"T": 1}, compiler="tvm", complexity=3)
    given = [(A, {"A": 1, "more": 2}, 4.0), (other, other.options, 5.0)]
    Round.of(Exchange(store, "key", 0), RaceRow("default", {"d": 1}, seconds=2e-3), given, 30.0)
    offer = Exchange(store, "key", 1).offered()
    assert (offer.base, offer.base_options) == ("default", {"d": 1})
    assert offer.candidates == [
        Offered("A", {"A": 1, "more": 2}, A.compiler, A.complexity, 4.0),
        Offered("T", {"T": 1}, "tvm", 3, 5.0),
    ]


def test_a_report_of_a_value_that_json_lacks(shared, other):
    """A candidate that failed says so, also if an option of its row is no JSON."""
    other.tell(0, Report(1, better=False, rows=[RaceRow("A", {"dtype": torch.float16}, "oom", "out of memory")]))
    assert [each.status for each in shared.settle([A])] == ["oom"]


def test_a_row_without_a_speedup_keeps_its_time(shared, other):
    """Of what was not timed against the base nothing else is known."""
    other.tell(0, Report(1, better=False, rows=[RaceRow("A", seconds=5.0), RaceRow("A'", seconds=None)]))
    assert [each.seconds for each in shared.settle([A])] == [5.0, None]


def test_what_was_found_better_is_kept(shared, other):
    """It is raced here until it is taken out, whatever else is reported of it."""
    row = RaceRow("A", speedup=Interval(1.2, 1.1, 1.3), against="default")
    other.tell(0, Report(1, better=True, rows=[row]))
    left = [A]
    shared.settle(left)
    other.tell(0, Report(2, better=False, rows=[row]))
    assert shared.settle(left) == []
    assert left == [A]
    assert shared.better["A"].rank == 1


def test_an_end_that_is_over(store):
    """There is no time before an end in the past."""
    assert Offer("default", {}, 1.0, []).left_s == 0.0


@pytest.mark.parametrize(
    ("predicted_s", "options", "precise", "fit"),
    [
        pytest.param(9.0, {}, None, True, id="in time"),
        pytest.param(11.0, {}, None, False, id="too long"),
        pytest.param(9.0, {"precision": "bf16"}, torch.ones(1), True, id="precision"),
        pytest.param(9.0, {"precision": "bf16"}, "it draws random numbers", False, id="no float64"),
        pytest.param(9.0, {"precise": 1}, "it draws random numbers", True, id="no precision"),
    ],
)
def test_what_a_rank_takes(predicted_s, options, precise, fit):
    """Not what would end too late here, or whose error cannot be measured here."""
    running = SimpleNamespace(budget=SimpleNamespace(left_s=10.0), checks=SimpleNamespace(precise=precise))
    assert _is_fit(running, Offered("A", options, "", 0, predicted_s)) == fit


@pytest.mark.parametrize(("ends", "taken", "left"), [(None, 1, True), (None, 2, False), (1.0, 1, False)])
def test_whether_anything_is_left(store, other, ends, taken, left):
    """A rank that comes when all is taken, or when the time is over, begins nothing."""
    for at in range(taken):
        other.take(at)
    offer = Offer("default", {}, ends, [Offered(name, {}, "", 0, 1.0) for name in "AB"])
    assert _is_left(offer, Exchange(store, "key", 2)) == left


def runner(options, made=None):
    return SimpleNamespace(row=RaceRow("default", options), made=made)


GRAPHS = {"triton.cudagraphs": True}
NO_GRAPHS = {**GRAPHS, "record_cudagraphs": False}
ONE_WAY, BOTH_WAYS = SimpleNamespace(has_other=False), SimpleNamespace(has_other=True)


@pytest.mark.parametrize(
    ("base", "default", "found"),
    [
        pytest.param(("eager", {}), runner({}), "eager", id="eager"),
        pytest.param(("eager", {}), None, "eager", id="eager without default"),
        pytest.param(("default", {}), runner({}), "default", id="default"),
        pytest.param(("default", {}), None, None, id="default, which fails here"),
        pytest.param(("default", {"x": 1}), runner({}), None, id="other options"),
        pytest.param(
            ("graphs", GRAPHS),
            runner(NO_GRAPHS, ONE_WAY),
            None,
            id="one way",
        ),
        pytest.param(
            ("graphs", {"x": 1}),
            runner(NO_GRAPHS, BOTH_WAYS),
            None,
            id="others",
        ),
        pytest.param(
            ("graphs", GRAPHS),
            runner(NO_GRAPHS, BOTH_WAYS),
            ("graphs", GRAPHS),
            id="its code with CUDA graphs",
        ),
    ],
)
def test_what_candidates_are_timed_beside(base, default, found):
    """Eager, default, or default's code the other way; nothing if this rank has none of them."""

    def prepared(candidate, options, eager, make):
        return candidate.name, dict(candidate.options)

    running = SimpleNamespace(prepared=prepared, compiles=SimpleNamespace(other=print))
    offer = Offer(*base, None, [])
    assert _base_of(running, offer, "eager", default) == (default if found == "default" else found)


@pytest.mark.parametrize(("left_s", "least_s"), [(30.0, 25.0), (math.inf, math.inf)])
def test_the_end_is_that_of_the_racing_rank(store, left_s, least_s):
    """Another rank has as much time as is left of the racing rank's budget."""
    given = [(each, each.options, 1.0) for each in (A, B)]
    Round.of(Exchange(store, "key", 0), BASE, given, left_s)
    assert least_s <= Exchange(store, "key", 1).offered().left_s <= left_s


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_is_offered_where_nothing_can_be_shared(store, count):
    """Other ranks are told so, and do not wait."""
    round_of(store, *[A, B, C][:count])
    assert Exchange(store, "key", 1).offered().candidates == []


def test_numbers_that_json_lacks(shared, other):
    """A report with a figure that is infinite is read."""
    row = RaceRow("A", {"A": math.inf}, "fail_accuracy", "infinite", error=math.inf)
    other.tell(0, Report(1, better=False, rows=[row]))
    left = [A]
    assert [(each.status, each.error) for each in shared.settle(left)] == [("fail_accuracy", None)]


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        pytest.param({}, False, id="on a CPU"),
        pytest.param({"share_race": True}, True, id="asked for"),
        pytest.param({"share_race": True, "race": "always"}, True, id="always"),
        pytest.param({"share_race": True, "race": "never"}, False, id="never"),
        pytest.param({"share_race": True, "objective": "memory"}, False, id="memory"),
    ],
)
def test_which_races_are_shared(two_ranks_with, options, shares):
    """On a CPU only if it is asked for, and only races for time."""
    two_ranks_with(torch.distributed.HashStore())
    assert (exchange_for("key", RaceSettings(**options), None, opens=False) is not None) == shares


@pytest.mark.parametrize(
    ("options", "first", "shares"),
    [
        pytest.param({}, "0", True, id="a GPU of its own"),
        pytest.param({}, "1", False, id="another rank's GPU"),
        pytest.param({"share_race": True}, "1", True, id="asked for"),
        pytest.param({"share_race": False}, "0", False, id="refused"),
    ],
)
def test_which_races_are_shared_on_gpus(two_ranks_with, monkeypatch, options, first, shares):
    """None and False differ: by default ranks share that have a GPU each. The racing rank says that it will offer."""
    store = torch.distributed.HashStore()
    two_ranks_with(store)
    monkeypatch.setattr(shared_race, "uuid_of", "GPU {}".format)
    store.set("backend_kwargs/auto/key/device/GPU 0", first)
    for opens in (False, True):
        assert (exchange_for("key", RaceSettings(**options), 0, opens=opens) is not None) == shares
        assert opened("key") == (opens and shares)


def test_two_ranks_on_one_gpu_do_not_share():
    """By default each rank that shares has a GPU of its own, whichever index that has for it."""
    store = torch.distributed.HashStore()
    gpus = ("GPU 0", "GPU 0", "GPU 1", "GPU 1")
    firsts = [Exchange(store, "key", rank).first_on(gpu) for rank, gpu in enumerate(gpus)]
    assert firsts == [True, False, True, False]


def test_a_store_that_cannot_be_reached_shares_nothing(two_ranks_with):
    """The race goes on alone."""
    two_ranks_with(None)
    assert exchange_for("key", RaceSettings(share_race=True), None, opens=True) is None


@pytest.fixture
def two_ranks_with(monkeypatch):
    """Return what makes this process rank 0 of two ranks with the given store."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield lambda store: monkeypatch.setattr(ranks, "_process_group_store", lambda: store)
    dist.destroy_process_group()


def test_the_rank_is_shown():
    """The log, and the page of a report, say which rank timed a row."""
    failed = RaceRow("B", status="oom", reason="out of memory", rank=3)
    timed = RaceRow("A", seconds=2.5e-3, speedup=Interval(0.8, 0.7, 0.9), against="default", rank=1)
    made = Decision("key", "graph", "default", rows=(BASE, timed, failed))
    shown = [" ".join(line.split()) for line in table(made).splitlines()]
    assert shown[2:] == [
        "A 2500.0 µs 0.80x [0.70, 0.90] over default compiled in 0.0 s, by rank 1",
        "B oom: out of memory, by rank 3",
    ]
    assert [lane.reason for lane in race_of(made, "graph").lanes] == ["", "by rank 1", "out of memory; by rank 3"]


NAMES = ("eager", "default", "slow", "quick", "slower")
RANK = "tests/auto/shared_race_of_a_rank.py"


def group(case, world, tmp_path):
    """Run a group of ranks; return what each has seen that was not killed."""
    started = [forks.Fork(RANK, case, rank, world, tmp_path / "init") for rank in range(world)]
    ended = [each.wait() for each in started]
    assert [each.stderr for each in ended if each.returncode not in (0, -signal.SIGKILL)] == []
    return [json.loads(each.stdout) for each in ended if each.stdout]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_a_race(tmp_path, world):
    """Each rank times what it took, the winner is raced by the racing rank, and all compile it."""
    first, *others = group("divided", world, tmp_path)
    assert others == [first] * (world - 1)
    assert (first["winner"], first["options"]) == ("quick", {"size_asserts": False})
    by = {name: rank for name, _, rank, _ in first["rows"]}
    assert by["eager"] is by["default"] is by["quick"] is None
    assert {by["slow"], by["slower"]} & {*range(1, world)}
    assert all(timed for _, status, _, timed in first["rows"] if status == "pass")


def test_a_rank_with_another_graph(tmp_path):
    """Neither rank waits for the other, and each races all of its candidates."""
    for seen in group("another graph", 2, tmp_path):
        assert seen["winner"] == "quick"
        assert [name for name, _, rank, _ in seen["rows"] if rank is None] == [*NAMES]


@pytest.mark.parametrize(("case", "world"), [("killed", 2), ("killed", 4), ("raises", 2)])
def test_a_rank_that_fails_in_the_middle(tmp_path, case, world):
    """What it took is raced by the racing rank, and all that live take one decision."""
    first, *others = group(case, world, tmp_path)
    assert others == [first] * (world - (2 if case == "killed" else 1))
    assert first["winner"] == "quick"
    assert sorted(name for name, *_ in first["rows"]) == sorted(NAMES)
    assert all(rank != 1 for _, _, rank, _ in first["rows"])


def test_a_rank_that_comes_when_all_is_taken(store, shared, other):
    """It compiles nothing in vain."""
    for at in range(3):
        other.take(at)
    assert [*helping(None, Exchange(store, "key", 2))] == []
