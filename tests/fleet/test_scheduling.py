"""Which unit runs next, what is claimed, and what becomes of units whose workers die; on real queues and boards."""

import pytest

from backend_kwargs.auto.store import Catalogue
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import Decision
from backend_kwargs.fleet.board import LEASE_S, Result, Unit, UnitClaims, UnitDocument, name_of, read
from backend_kwargs.fleet.racing import documents_of
from backend_kwargs.fleet.scheduling import (
    LEARN_S,
    MOST_ATTEMPTS,
    MOST_AWAY_S,
    POLL_S,
    Ended,
    Queue,
    Summary,
    drive,
    expected,
)
from benchmarks.studies import fleet
from tests.fleet.stores import Claimed, Documents, written

HERE = {"torch": "2.13"}
SEED = 52


def unit(name, **fields):
    return Unit(model=f"models.py:{name}", device="cpu", **fields)


def done(unit, seconds=1.0, torch="2.13", failed=""):
    return written(UnitDocument(unit=unit, seconds=seconds, releases={"torch": torch}, failed=failed))


def any_worker(unit):
    return True


def taken(queue):
    """Return the models that a queue gives until it gives none."""
    return [each.model[-1] for each in iter(lambda: queue.take(any_worker), None)]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Pool:
    """One worker, which gives each unit the next of some outcomes."""

    def __init__(self, *outcomes):
        self.outcomes, self.running, self.cancelled = list(outcomes), [], False

    def missing(self, unit):
        return ""

    def fits(self, unit):
        return not self.running

    def start(self, unit):
        self.running.append(unit)

    def wait(self, seconds):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return [Ended(self.running.pop(), *outcome)]

    def cancel(self):
        self.cancelled = True


RACED = (Result(seconds=1.0, releases=HERE),)
LOST = (None, "signal 9")


def test_the_longest_comes_first():
    """Units are taken by what they took before, the longest first; one that is new counts as its model's others."""
    store, names = Documents(), "abc"
    for seconds, name in enumerate(names, 1):
        store.put(name_of(unit(name)), done(unit(name), float(seconds), torch="2.12"))
    new = unit("c", sizes={"batch": 8})
    queue = Queue([*map(unit, names), new], UnitClaims(store, HERE), Clock())
    assert taken(queue) == ["c", "c", "b", "a"]


def test_what_is_expected():
    """A unit takes as long as its model's others did, as all did if there are none, or else its budget."""
    known = {name_of(each): read(name_of(each), done(each, 4.0)) for each in [unit("a", sizes={"batch": 1})]}
    like, other = unit("a"), unit("b", budget_s=9.0)
    assert expected([like, other], known) == {like.key: 4.0, other.key: 4.0}
    assert expected([other], {}) == {other.key: 9.0}


def test_what_is_learned_meanwhile():
    """One of each model comes before a second, so that the others' durations are known while there is a choice."""
    store, clock = Documents(), Clock()
    units = [unit(name, sizes={"batch": size}) for name in "ab" for size in (1, 2)]
    queue = Queue(units, UnitClaims(store, HERE), clock)
    assert [queue.take(any_worker).model[-1] for _ in range(2)] == ["a", "b"]
    for each, seconds in ((units[0], 1.0), (units[2], 9.0)):
        store.put(name_of(each), done(each, seconds))
    clock.now = LEARN_S
    assert taken(queue) == ["b", "a"]


def test_what_was_lost_stays_first():
    """A unit whose worker was lost comes before longer ones, also when durations are learned meanwhile."""
    store, clock = Documents(), Clock()
    store.put(name_of(unit("a")), done(unit("a"), 9.0, torch="2.12"))
    store.put(name_of(unit("b")), done(unit("b"), 1.0, torch="2.12"))
    queue = Queue([unit(name) for name in "abc"], UnitClaims(store, HERE), clock)
    lost = queue.left[unit("b").key]
    assert taken(queue) == ["a", "c", "b"]
    queue.left = {unit("a").key: unit("a"), unit("c").key: unit("c")}
    assert queue.again(lost)
    clock.now = LEARN_S
    assert taken(queue) == ["b", "a", "c"]


def test_a_unit_that_is_done_is_skipped():
    """What is done under this torch is not taken; what was done under another, or failed, is."""
    store = Documents()
    store.put(name_of(unit("a")), done(unit("a")))
    store.put(name_of(unit("b")), done(unit("b"), torch="2.12"))
    store.put(name_of(unit("c")), done(unit("c"), failed="no weights"))
    queue = Queue([unit(name) for name in "abc"], UnitClaims(store, HERE), Clock())
    assert sorted(taken(queue)) == ["b", "c"]


class Raced:
    """A unit that was raced, with the store that has its decision."""

    def __init__(self):
        made = Decision("k" * 64, "g" * 64, "default", machine={"device": "cpu AVX512"})
        documents = documents_of([made])
        (self.decision,) = documents
        self.unit, self.store = unit("a"), Documents()
        result = Result(seconds=1.0, releases=HERE, device_name="cpu AVX512", documents=documents)
        assert UnitClaims(self.store, HERE).record(self.unit, result) == ""

    def queue(self, *devices):
        """Return a queue of the unit on such devices."""
        return Queue([self.unit], UnitClaims(self.store, HERE, devices=lambda unit: devices), Clock())


@pytest.mark.parametrize("gone", ["forgotten", "removed", "damaged"])
def test_a_unit_without_its_decision_runs_again(gone):
    """A unit is done while the store has its decision: not once it was forgotten, removed or damaged."""
    raced = Raced()
    assert list(raced.queue().done) == [raced.unit.key]
    waiting = Queue([raced.unit], UnitClaims(Documents(), HERE), Clock())
    waiting.board.store = raced.store
    if gone == "forgotten":
        assert Catalogue(raced.store).forget() == 1
    elif gone == "removed":
        raced.store.forget(raced.decision)
    else:
        raced.store.put(raced.decision, b"{")
    assert taken(raced.queue()) == ["a"]
    assert taken(waiting) == ["a"]
    assert Summary.of([raced.unit], UnitClaims(raced.store, HERE), [], {}).units[0].status == "not done"


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        pytest.param(["cpu AVX512"], [], id="such a CPU"),
        pytest.param(["cpu AVX2"], ["a"], id="another one"),
        pytest.param([], [], id="not known"),
    ],
)
def test_a_unit_of_another_device_runs_here(devices, given):
    """A unit is done for the type of device that it was raced on, whose decisions serve no other."""
    raced = Raced()
    waiting = Queue([raced.unit], UnitClaims(Documents(), HERE, devices=lambda unit: devices), Clock())
    waiting.board.store = raced.store
    assert taken(raced.queue(*devices)) == given
    assert taken(waiting) == given


def test_decisions_with_hostile_names_are_none():
    """A unit whose document names what can be no decision is not done, and nothing fails."""
    store = Documents()
    document = UnitDocument(unit=unit("a"), releases=HERE, decisions=("../../etc/passwd", "units/x", ""))
    store.put(name_of(unit("a")), written(document))
    assert taken(Queue([unit("a")], UnitClaims(store, HERE), Clock())) == ["a"]


def ended(board, unit):
    """End the work of a process."""
    with board.renewing():
        pass


@pytest.mark.parametrize("released", [UnitClaims.release, ended], ids=["one", "all"])
def test_a_claim_of_another_process_stays(released):
    """A process whose lease ended meanwhile does not remove the claim of the one that took the unit."""
    store = Claimed()
    first, second, third = (UnitClaims(store, HERE) for _ in range(3))
    assert first.take(unit("a")) == "ours"
    store.now = LEASE_S + 1
    assert second.take(unit("a")) == "ours"
    released(first, unit("a"))
    assert third.take(unit("a")) == "elsewhere"
    released(second, unit("a"))
    assert third.take(unit("a")) == "ours"


class FailsFor(Claimed):
    """A store that does not renew one claim."""

    def renew(self, name, document, lease_s):
        if name == self.failing:
            raise OSError("no answer")
        return super().renew(name, document, lease_s)


@pytest.mark.parametrize("failing", range(3))
def test_a_claim_that_cannot_be_released_keeps_no_other(failing, caplog):
    """Each is renewed and released by itself; of the one that fails the lease ends."""
    store, units = FailsFor(), [unit(name) for name in "abc"]
    first, second = UnitClaims(store, HERE), UnitClaims(store, HERE)
    assert [first.take(each) for each in units] == ["ours"] * 3
    store.failing = f"claims/{units[failing].key}"
    store.now = LEASE_S - 1
    first.renew()
    assert sorted(store.leases.values()) == [LEASE_S, *[2 * LEASE_S - 1] * 2]
    ended(first, None)
    wanted = ["ours"] * 3
    wanted[failing] = "elsewhere"
    assert [second.take(each) for each in units] == wanted
    assert [each.getMessage() for each in caplog.records] == [
        f"The lease of {store.failing} could not be renewed: OSError: no answer.",
        f"{store.failing} is claimed until its lease ends: OSError: no answer.",
    ]


def test_a_claimed_unit_is_elsewhere_until_its_lease_ends():
    """Of two processes one gets a unit; the other gets it when the lease ended without a renewal, and not before."""
    store, clock = Claimed(), Clock()
    first, second = (Queue([unit("a")], UnitClaims(store, HERE), clock) for _ in range(2))
    assert taken(first) == ["a"]
    assert taken(second) == []
    store.now = clock.now = LEASE_S - 1
    first.board.renew()
    store.now = clock.now = LEASE_S + 1
    assert taken(second) == []
    store.now = clock.now = 2 * LEASE_S
    assert taken(second) == ["a"]


def test_a_unit_that_another_process_ended_is_not_taken():
    """A unit that was claimed elsewhere leaves the queue when its document is there."""
    store, clock = Claimed(), Clock()
    first, second = (Queue([unit("a")], UnitClaims(store, HERE), clock) for _ in range(2))
    assert taken(first) == ["a"]
    assert taken(second) == []
    assert first.board.record(unit("a"), *RACED) == ""
    clock.now = POLL_S
    assert taken(second) == []
    assert second.left == {}


@pytest.mark.parametrize(
    ("store", "given"),
    [pytest.param(Claimed, ["b", "d", "a", "c"], id="claims"), pytest.param(Documents, ["b", "d"], id="no claims")],
)
def test_a_shard_begins_with_its_own(store, given):
    """The second of two shards begins with its units, and takes the others' if the store can give claims."""
    assert taken(Queue([unit(name) for name in "abcd"], UnitClaims(store(), HERE), Clock(), (2, 2))) == given


def test_what_failed_in_another_shard_is_not_tried_again():
    """A shard tries its own failed unit again, and leaves those of others to them."""
    store = Claimed()
    for name in "ab":
        store.put(name_of(unit(name)), done(unit(name), failed="no weights"))
    assert taken(Queue([unit("a"), unit("b")], UnitClaims(store, HERE), Clock(), (2, 2))) == ["b"]


def test_a_shard_fails_by_its_own_units():
    """What failed in another's share makes the plan's process without shards fail, and no other shard."""
    units, store = [unit("a"), unit("b")], Claimed()
    store.put(name_of(unit("a")), done(unit("a"), failed="no weights"))
    failed = []
    for number in ((1, 1), (1, 2), (2, 2)):
        queue = Queue(units, board := UnitClaims(store, HERE), Clock(), number)
        failed.append(Summary.of(units, board, [], {}).failed_among(queue.own))
    assert failed == [True, True, False]


def test_a_store_that_is_away_keeps_a_claim(caplog):
    """A worker's claim then ends with its lease, and the other units go on."""
    store = Claimed()
    board = UnitClaims(store, HERE)
    assert board.take(unit("a")) == "ours"
    store.renew = lambda *_: 1 / 0
    board.release(unit("a"))
    assert "is claimed until its lease ends: " in caplog.text


def test_shares_are_the_same_whatever_is_known():
    """Durations that are recorded meanwhile move no unit to another share."""
    units, store = [unit(name) for name in "abcd"], Documents()
    before = [set(taken(Queue(units, UnitClaims(store, HERE), Clock(), (number, 2)))) for number in (1, 2)]
    store.put(name_of(units[0]), done(units[0], 100.0, torch="2.12"))
    assert [set(taken(Queue(units, UnitClaims(store, HERE), Clock(), (number, 2)))) for number in (1, 2)] == before


def test_a_lost_worker_costs_its_unit_one_attempt():
    """A unit whose worker died runs again, and its claim is free meanwhile."""
    store = Claimed()
    ended = list(drive(Queue([unit("a"), unit("b")], UnitClaims(store, HERE), Clock()), Pool(LOST, RACED, RACED)))
    assert [each.unit.model[-1] for each in ended] == ["a", "b"]
    assert not any(each.result.failed for each in ended)
    assert sorted(store.documents) == sorted(name_of(unit(name)) for name in "ab")


def test_a_unit_that_kills_its_workers_fails():
    """After some attempts a unit fails with the reason, and the others run."""
    pool = Pool(*[LOST] * MOST_ATTEMPTS, RACED)
    first, second = drive(Queue([unit("a"), unit("b")], UnitClaims(Claimed(), HERE), Clock()), pool)
    assert first.result.failed == f"its worker was lost {MOST_ATTEMPTS} times: signal 9"
    assert (second.unit.model[-1], second.result.failed) == ("b", "")


def test_an_interrupt_cancels_and_releases():
    """Ctrl-C ends what runs, and what was claimed is free at once."""
    store = Claimed()
    board, pool = UnitClaims(store, HERE), Pool(RACED, KeyboardInterrupt())
    ended = []
    with pytest.raises(KeyboardInterrupt), board.renewing():
        ended.extend(drive(Queue([unit("a"), unit("b")], board, Clock()), pool))
    assert pool.cancelled
    assert list(store.documents) == [name_of(unit("a"))]
    assert taken(Queue([unit("a"), unit("b")], UnitClaims(store, HERE), Clock())) == ["b"]


def test_a_store_that_does_not_take_a_result_fails_the_unit(monkeypatch):
    """A result that the store does not take, tried several times, is a failure with the store's name and error."""
    monkeypatch.setattr("backend_kwargs.fleet.board.PAUSES_S", (0.0,))
    store = Documents()
    pool = Pool(RACED)
    queue = Queue([unit("a")], UnitClaims(store, HERE), Clock())
    store.put = lambda name, document: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    (ended,) = drive(queue, pool)
    assert ended.result.failed == (
        "the store memory did not take what came of it: OSError: [Errno 28] No space left on device"
    )


def test_a_store_that_goes_away_is_waited_for():
    """A store that does not answer for a while costs no unit."""
    store, clock = Claimed(), Clock()
    queue = Queue([unit("a")], UnitClaims(store, HERE), clock)
    store.away = ConnectionError("refused")
    assert taken(queue) == []
    store.away, clock.now = None, POLL_S
    assert taken(queue) == ["a"]


def test_a_store_that_stays_away_ends_the_run():
    """A run whose store does not answer for minutes ends with its error, when nothing runs any more."""
    store, clock = Claimed(), Clock()
    queue = Queue([unit("a")], UnitClaims(store, HERE), clock)
    store.away = ConnectionError("refused")
    pool = Pool()

    def wait(seconds):
        clock.now += seconds
        return []

    pool.wait = wait
    with pytest.raises(BackendKwargsError) as error:
        list(drive(queue, pool))
    assert str(error.value) == (
        "Store 'memory' does not answer any more: ConnectionError: refused. What ended is kept: start it again later."
    )
    assert clock.now > MOST_AWAY_S


@pytest.mark.parametrize("document", [b"", b"{}", b"\xff", done(unit("b")), b"[" * 10_000], ids=range(5))
def test_a_hostile_document_is_no_unit(document):
    """What is not the document of this unit, whatever it is, does not make it done."""
    store = Documents()
    store.put(name_of(unit("a")), document)
    assert taken(Queue([unit("a")], UnitClaims(store, HERE), Clock())) == ["a"]


@pytest.mark.parametrize(("dying", "most"), [(False, 1.1), (True, 1.2)], ids=["none dies", "one dies in ten minutes"])
@pytest.mark.parametrize(("sizes", "known"), [(1, True), (4, False)], ids=["durations known", "four sizes of a model"])
def test_a_thousand_units_on_64_gpus(sizes, known, dying, most):
    """By this scheduling the makespan is near the least possible, also when GPUs die and do not come back."""
    work = fleet.Work.drawn(SEED, sizes)
    makespan, lost = fleet.one_driver(work, dying=dying, known=known, seed=SEED)
    assert bool(lost) == dying
    assert makespan <= most * work.least_s


@pytest.mark.parametrize(
    ("sizes", "known", "dying", "most"),
    [
        pytest.param(1, True, True, 1.2, id="durations known, one dies in ten minutes"),
        pytest.param(4, False, False, 1.1, id="four sizes of a model, none dies"),
    ],
)
def test_a_thousand_units_on_64_shards(sizes, known, dying, most):
    """The same holds for 64 processes that know of each other by a store with claims."""
    work = fleet.Work.drawn(SEED, sizes)
    makespan, lost = fleet.shards(work, dying=dying, known=known, seed=SEED)
    assert bool(lost) == dying
    assert makespan <= most * work.least_s
