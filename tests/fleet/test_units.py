"""Units: what makes one another unit, what is stored of it, where it may run, and how a plan is summed up."""

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace

import pytest

from backend_kwargs.facts.decision import Decision, RaceRow, Unraced
from backend_kwargs.fleet.board import KIND as UNIT_KIND
from backend_kwargs.fleet.board import Result, Unit, UnitClaims, UnitDocument, is_named, name_of, read, releases_differ
from backend_kwargs.fleet.racing import Tuned, _not_kept
from backend_kwargs.fleet.scheduling import Device, Ended, LocalPool, Queue, Summary, expected
from backend_kwargs.interval import Interval
from backend_kwargs.stores.documents import Document, encoded
from tests.fleet.stores import Claimed, Documents, written

UNIT = Unit("m.py:build", "cpu")
HERE = {"torch": "2.13.0"}

CHANGES = {
    "model": "m.py:other",
    "device": "cuda",
    "sizes": {"batch": 1},
    "dtype": "bfloat16",
    "threads": 1,
    "effort": "full",
    "candidates": (),
    "budget_s": 1.0,
    "options": {"freezing": True},
    "source": "ab",
}


def test_each_field_of_a_unit_is_in_its_key():
    """But for the time that it may take, which changes nothing of what is decided."""
    assert {*CHANGES, "limit_s"} == {*Unit.__struct_fields__}
    fields = {name: getattr(UNIT, name) for name in Unit.__struct_fields__}
    keys = [UNIT.key, *(Unit(**fields | {name: value}).key for name, value in CHANGES.items())]
    assert len({*keys}) == len(keys)
    assert Unit(**fields | {"limit_s": 5.0}).key == UNIT.key
    two = [Unit("m", "cpu", sizes=each) for each in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    assert two[0].key == two[1].key


def test_how_long_a_unit_may_take():
    """Ten budgets and ten minutes, unless the plan says it; 0 is said."""
    assert [Unit("m", "cpu", budget_s=3.0, limit_s=limit).most_s for limit in (None, 7.0, 0.0)] == [630.0, 7.0, 0.0]


def test_a_unit_for_people():
    """What is left to its default is left out."""
    assert UNIT.label == "m.py:build  cpu"
    whole = Unit("m.py:build", "cpu", {"batch": 8, "rows": 2}, "bfloat16", 4)
    assert whole.label == "m.py:build  batch=8, rows=2  bfloat16  cpu  4 threads"


@pytest.mark.parametrize(
    ("then", "differ"), [("2.13.1+cpu", False), ("2.13", False), ("2.1.3", True), ("2.12.0", True), (None, True)]
)
def test_a_unit_of_another_torch(then, differ):
    """The first two numbers of the release count."""
    releases = {} if then is None else {"torch": then}
    assert releases_differ(UnitDocument(unit=UNIT, releases=releases), HERE) == differ


def test_a_document_under_another_units_name_is_none():
    """Whoever writes to the store may have put it there."""
    document = written(UnitDocument(unit=UNIT))
    assert read(name_of(UNIT), document).unit == UNIT
    other = name_of(Unit("other", "cpu"))
    assert read(other, document) is None
    assert read(other, encoded(UNIT_KIND, Document(other, UnitDocument(unit=UNIT)))) is None


@pytest.mark.parametrize(
    ("name", "device", "named"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", True),
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA H100 80GB HBM3", "H200", False),
        ("NVIDIA A100", "cudax", False),
    ],
)
def test_names_of_gpus(name, device, named):
    """A part of the name in any case, or "cuda" for all."""
    assert is_named(name, device) == named


# ---- what is kept


def test_what_failed_teaches_nothing():
    """How long a failed unit took says nothing of what it will take, or of others."""
    failed, other = UnitDocument(unit=UNIT, seconds=99.0, failed="no weights"), Unit("other", "cpu", budget_s=7.0)
    assert expected([UNIT, other], {name_of(UNIT): failed}) == {UNIT.key: 300.0, other.key: 7.0}
    taught = UnitDocument(unit=Unit("third", "cpu"), seconds=5.0)
    known = {name_of(UNIT): failed, name_of(taught.unit): taught}
    assert expected([UNIT, other], known) == {UNIT.key: 5.0, other.key: 5.0}


def test_times_of_another_device_are_of_another_model():
    """What a model took on a GPU is only what anything took."""
    on_gpu = UnitDocument(unit=Unit("m", "cuda", sizes={"n": 1}), seconds=1.0)
    on_cpu = UnitDocument(unit=Unit("m", "cpu", sizes={"n": 1}), seconds=9.0)
    known = {name_of(each.unit): each for each in (on_gpu, on_cpu)}
    asked = [Unit("m", "cpu"), Unit("m", "cuda"), Unit("m", "H100")]
    assert [*expected(asked, known).values()] == [9.0, 1.0, 5.0]


def test_a_failure_while_units_are_claimed_is_released():
    """A unit that ended between the look and the claim is free, and not taken."""
    store, board = Claimed(), UnitClaims(Claimed(), HERE)
    board.store = board.claims = store
    claim = store.claim

    def late(name, document, lease_s):
        store.put(name_of(UNIT), written(UnitDocument(unit=UNIT, releases=HERE)))
        return claim(name, document, lease_s)

    store.claim = late
    assert board.take(UNIT) == "ended"
    assert [*store.documents] == [name_of(UNIT)]
    assert board.held == {}


ROWS = (RaceRow("default", seconds=1.0, won=True),)
RACED = Decision("a", "", "default", rows=ROWS)


def test_which_decisions_are_kept():
    """Those of races that are not provisional, the last one of each key."""
    later = replace(RACED, winner="freezing")
    unraced = replace(RACED, key="b", rows=())
    cannot_run = RaceRow("default", status="unavailable", reason="no compiler")
    unlasting = replace(RACED, key="c", winner="eager", rows=(cannot_run, RaceRow("eager", seconds=1.0, won=True)))
    found = Tuned("m", [RACED, unraced, later, unlasting])
    assert [(each.key, each.winner) for each in found.kept] == [("a", "freezing")]
    assert _not_kept(Tuned("m", [unlasting])) == "provisional, so not one to ship: default could not run here"


@pytest.mark.parametrize(
    ("compiled", "again", "slower"),
    [
        pytest.param([9.0] * 8, [9.0] * 8, True, id="0.11x"),
        pytest.param([0.5] * 8, [0.5] * 8, False, id="2x"),
        pytest.param([1.05] * 8, [1.2] * 8, False, id="within noise"),
        pytest.param([], [], False, id="not timed"),
    ],
)
def test_when_the_model_itself_is_called(compiled, again, slower):
    """Where the compiled call takes longer than eager's by more than it differs from itself."""
    assert Tuned("m", [RACED], [1.0] * len(compiled), compiled, again).calls_itself is slower


@pytest.mark.parametrize(
    ("decisions", "why"),
    [
        pytest.param([RACED], "", id="kept"),
        pytest.param([], "no graph was raced: torch.compile found no graph", id="no graph"),
        pytest.param(
            [replace(RACED, rows=(), facts="it is tiny", unraced=Unraced.GRAPH)],
            "no graph was raced: it is tiny",
            id="not raced",
        ),
    ],
)
def test_why_nothing_is_kept(decisions, why):
    """The unit's failure says it."""
    assert _not_kept(Tuned("m", decisions)) == why


# ---- where units run


def test_devices_are_given_once(tmp_path):
    """A device that runs a unit is not free, and a race on a CPU does not run beside one on a GPU."""
    cpus = [Device((0, 1)), Device((2, 3))]
    gpu = Device((4, 5), "0", "NVIDIA H100")
    on_gpu = Unit("m", "cuda")
    pool = LocalPool([*cpus, gpu], tmp_path)
    assert pool.fits(UNIT)
    assert pool.fits(on_gpu)
    pool.running[Future()] = UNIT, cpus[0]
    assert pool.fits(UNIT)
    assert not pool.fits(on_gpu)
    pool.running[Future()] = UNIT, cpus[1]
    assert not pool.fits(UNIT)
    pool.running.clear()
    pool.running[Future()] = on_gpu, gpu
    assert not pool.fits(UNIT)
    assert not pool.fits(on_gpu)


def test_a_unit_gets_as_many_cores_as_it_has_threads(tmp_path):
    """Of several free workers it gets one that has them."""
    pool = LocalPool([Device((0,)), Device((1, 2))], tmp_path)
    assert pool._free(Unit("m", "cpu", threads=2)).cores == (1, 2)
    assert pool._free(UNIT).cores == (0,)
    assert pool.devices_of(UNIT) == {"cpu"}
    assert pool.missing(Unit("m", "cuda")) == "this machine has no GPU"


# ---- what came of a plan

FAILED, OTHER = Unit("failed", "cpu"), Unit("other", "cuda")


def summed(*ended, known=(), missing=()):
    store = Documents()
    for each in known:
        store.put(name_of(each.unit), written(each))
    units = [UNIT, FAILED, OTHER]
    return Summary.of(units, UnitClaims(store, HERE), ended, dict.fromkeys((each.key for each in missing), "no GPU"))


def test_what_became_of_each_unit():
    """What ended here, was done before, failed here or elsewhere, or has no worker."""
    own = summed(Ended(UNIT, Result(seconds=3.0)), Ended(FAILED, Result(failed="no weights", seconds=4.0)))
    assert [each.status for each in own.units] == ["raced", "failed", "not done"]
    assert [each.failed for each in own.units] == ["", "no weights", ""]
    assert (own.cost_s, own.covered) == (7.0, (["cpu", "cuda"], []))
    done = [UnitDocument(unit=each, releases=HERE) for each in (UNIT, OTHER)]
    before = summed(known=[*done, UnitDocument(unit=FAILED, failed="elsewhere", releases=HERE)], missing=[OTHER])
    assert [each.status for each in before.units] == ["done before", "failed", "done before"]
    assert [each.failed for each in before.units] == ["", "elsewhere", ""]
    assert before.covered == (["cpu", "cuda"], ["cuda"])
    assert summed(missing=[OTHER]).units[-1].status == "no worker"


def test_what_failed_before_and_ended_here_is_done():
    """The later result counts, either way."""
    stored = UnitDocument(unit=UNIT, failed="no weights", releases=HERE)
    mended = summed(Ended(UNIT, Result()), known=[stored]).units[0]
    assert (mended.status, mended.failed) == ("raced", "")
    broken = summed(Ended(UNIT, Result(failed="now")), known=[UnitDocument(unit=UNIT, releases=HERE)]).units[0]
    assert (broken.status, broken.failed) == ("failed", "now")


@pytest.mark.parametrize(
    ("ratios", "widest", "disturbed"),
    [
        pytest.param([], None, False, id="none"),
        pytest.param([(0.99, 1.05), (0.97, 1.01)], (0.99, 1.05), False, id="quiet"),
        pytest.param([(0.8, 1.01), (0.99, 1.1)], (0.8, 1.01), True, id="faster than itself"),
        pytest.param([(0.99, 1.2), (0.9, 1.05)], (0.99, 1.2), True, id="slower than itself"),
    ],
)
def test_a_disturbed_machine(ratios, widest, disturbed):
    """The call that differs most from itself, in either direction, says how steady timings are."""
    units = [UNIT, FAILED]
    ended = [Ended(unit, Result(same=Interval(1.0, *each))) for unit, each in zip(units, ratios, strict=False)]
    summary = summed(*ended, Ended(OTHER, Result()))
    assert summary.same == (widest and Interval(1.0, *widest))
    assert summary.is_disturbed == disturbed


def test_a_unit_that_is_away_is_looked_at_later():
    """While a store does not answer, a queue asks it no more often than it looks at claims."""
    store, clock = Claimed(), SimpleNamespace(now=0.0)
    queue = Queue([UNIT], UnitClaims(store, HERE), lambda: clock.now)
    store.away = ConnectionError("refused")
    assert queue.take(lambda unit: True) is None
    store.away, clock.now = None, 1.0
    assert queue.take(lambda unit: True) is None
    clock.now = 60.0
    assert queue.take(lambda unit: True) == UNIT
