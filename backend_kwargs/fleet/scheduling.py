"""Which unit runs next: done ones skipped, the longest first, each claimed; what a lost worker had runs again.

How long a unit takes is learned from earlier runs and from other sizes of its model, also while others run. Of units
that may take as long, a process begins with its share, and then takes what others have not begun if the store can give
claims. A `Summary` says what came of it all.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.fleet.board import LEASE_S, Result, Unit, UnitClaims, UnitDocument, document_of, name_of
from backend_kwargs.interval import Interval, widest

MOST_ATTEMPTS = 3  # of a unit whose worker dies
MOST_AWAY_S = 600.0  # of a store that does not answer, if nothing runs
POLL_S = LEASE_S / 4  # between two looks at a unit that another process runs
LEARN_S = LEASE_S  # between two looks at how long units took, while that of some is not known


class Ended(NamedTuple):
    """A unit that ended: its result, or the reason why its worker was lost."""

    unit: Unit
    result: Result | None
    lost: str = ""


class Pool(Protocol):
    """Workers that run units."""

    def missing(self, unit: Unit) -> str:
        """Return why no worker here can ever run this unit, or ""."""

    def devices_of(self, unit: Unit) -> Collection[str]:
        """Return the names of the devices that may run this unit, as its result names one; none if not known."""

    def fits(self, unit: Unit) -> bool:
        """Return whether a worker is free that can run it now, by its device and threads."""

    def start(self, unit: Unit) -> None:
        """Run a unit that fits."""

    def wait(self, seconds: float) -> Sequence[Ended]:
        """Return the units that ended; wait at most `seconds` for the first."""

    def cancel(self) -> None:
        """End what runs."""


class Queue:
    """The units of a process, with what became of them: each is taken once, unless it is lost."""

    def __init__(
        self,
        units: Sequence[Unit],
        board: UnitClaims,
        clock: Callable[[], float],
        share: tuple[int, int] = (1, 1),
    ) -> None:
        number, of = share
        self.board, self.clock = board, clock
        self.own = {unit.key for unit in units[number - 1 :: of]}
        known = board.known()
        done = board.done(known)
        self.done = {unit.key: done[name_of(unit)] for unit in units if name_of(unit) in done}
        # Without claims another process may be racing what is not its own, and nobody would know.
        mine = units if board.claims else [unit for unit in units if unit.key in self.own]
        self.left = {unit.key: unit for unit in mine if unit.key not in self.done}
        self.looked: dict[str, float] = {}
        self.attempts: Counter[str] = Counter()
        self.away, self.looked_again = "", 0.0
        self.away_since: float | None = None
        before: Counter[tuple[str, str]] = Counter()
        self.places: dict[str, int] = {}  # among the units of its model
        for unit in units:
            self.places[unit.key] = before[unit.model, unit.device]
            before[unit.model, unit.device] += 1
        self.learned = clock()
        self._order(known)

    def _order(self, known: Mapping[str, UnitDocument]) -> None:
        """Sort what is left: what was lost, then the longest, its own, and one of each model before a second one."""
        seconds = expected(self.left.values(), known)
        self.is_guess = any(name_of(unit) not in known for unit in self.left.values())

        def place(key: str) -> tuple[bool, float, bool, int]:
            return key not in self.attempts, -seconds[key], key not in self.own, self.places[key]

        self.left = {key: self.left[key] for key in sorted(self.left, key=place)}

    def take(self, fits: Callable[[Unit], bool]) -> Unit | None:
        """Return the longest unit that fits and that no other process has, None if there is none now."""
        now = self.clock()
        kinds = {_kind(unit): unit for unit in self.left.values()}
        free = {kind for kind, unit in kinds.items() if fits(unit)}
        if not free or (self.away_since is not None and now < self.looked_again):
            return None
        try:
            if self.is_guess and now - self.learned >= LEARN_S:
                self.learned = now
                self._order(self.board.known())
            found = self._claimed(free, now)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            self.away_since = now if self.away_since is None else self.away_since
            self.away, self.looked_again = self.board.words(error), now + POLL_S
            return None
        self.away_since = None
        return found

    def _claimed(self, free: Collection[tuple[str, int | None]], now: float) -> Unit | None:
        """Return the first unit of the kinds that is this process's to run, and take off those that have ended."""
        for key, unit in list(self.left.items()):
            if now - self.looked.get(key, float("-inf")) < POLL_S or _kind(unit) not in free:
                continue
            # What failed in another's share is that process's to try again.
            state = self.board.take(unit, failed_too=key in self.own)
            if state == "elsewhere":
                self.looked[key] = now
                continue
            del self.left[key]
            if state == "ours":
                return unit
        return None

    def check_store(self) -> None:
        """Raise if the store has not answered for a long time."""
        if self.away_since is not None and self.clock() - self.away_since > MOST_AWAY_S:
            raise BackendKwargsError(
                f"Store {self.board.store.label!r} does not answer any more: {self.away}. What ended is kept: start it "
                "again later."
            )

    def again(self, unit: Unit) -> bool:
        """Put a unit back whose worker was lost, first in the queue; return whether it may be tried again."""
        self.attempts[unit.key] += 1
        if self.attempts[unit.key] >= MOST_ATTEMPTS:
            return False
        self.left = {unit.key: unit, **self.left}
        return True


def _kind(unit: Unit) -> tuple[str, int | None]:
    """Return what says whether a worker can run a unit."""
    return unit.device, unit.threads


def expected(units: Collection[Unit], known: Mapping[str, UnitDocument]) -> dict[str, float]:
    """Return how many seconds each unit may take: as it did, as its model's others did, as all did, or its budget."""
    of_model, all_seconds = defaultdict(list), []
    for document in known.values():
        if document.seconds and not document.failed:
            of_model[document.unit.model, document.unit.device].append(document.seconds)
            all_seconds.append(document.seconds)

    def seconds(unit: Unit) -> float:
        own = known.get(name_of(unit))
        if own and own.seconds and not own.failed:
            return own.seconds
        like = of_model[unit.model, unit.device] or all_seconds
        return statistics.fmean(like) if like else unit.budget_s

    return {unit.key: seconds(unit) for unit in units}


def drive(queue: Queue, pool: Pool) -> Iterator[Ended]:
    """Run the units of the queue on the pool, and yield each that ended here, once it is in the store.

    It returns when every unit has ended here or elsewhere; whoever stops before ends what runs.
    """
    running = 0
    try:
        while queue.left or running:
            while (unit := queue.take(pool.fits)) is not None:
                pool.start(unit)
                running += 1
            if not running:
                queue.check_store()
                if not queue.left:
                    return
            for ended in pool.wait(POLL_S):
                running -= 1
                if (final := _recorded(queue, ended)) is not None:
                    yield final
    finally:
        if running:
            pool.cancel()


def _recorded(queue: Queue, ended: Ended) -> Ended | None:
    """Keep what came of a unit; None if it runs again, since its worker was lost."""
    unit, result, lost = ended
    if result is None:
        queue.board.release(unit)
        if queue.again(unit):
            return None
        result = Result(failed=f"its worker was lost {MOST_ATTEMPTS} times: {lost}")
    if why := queue.board.record(unit, result):
        result = msgspec.structs.replace(result, failed=why)
    return Ended(unit, result)


SAME_WITHIN = 1.1  # a call is as fast as itself, up to this


@dataclass(frozen=True)
class Summary:
    """What came of a plan: `known` are the store's documents by name, `missing` the reasons why no worker can run one.

    `ended` are the units that ended in this process.
    """

    units: Sequence[Unit]
    known: Mapping[str, UnitDocument]
    ended: Mapping[str, Ended] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, units: Sequence[Unit], board: UnitClaims, ended: Sequence[Ended], missing: Mapping[str, str]
    ) -> "Summary":
        """Return the summary, with the store read again for what others did."""
        known = board.known()
        failed = {name: document for name, document in known.items() if document.failed}
        # What ended here is done, also if another process has raced it for its own device since.
        own = {name_of(unit): document_of(unit, result) for unit, result, _ in ended if result and not result.failed}
        done = failed | board.done(known) | own
        return cls(units, done, {each.unit.key: each for each in ended}, missing)

    def document(self, unit: Unit) -> UnitDocument | None:
        """Return the document of a unit that is done."""
        document = self.known.get(name_of(unit))
        return document if document and not document.failed else None

    def failure(self, unit: Unit) -> str:
        """Return why a unit is not done, "" if it is, or was not begun."""
        ended = self.ended.get(unit.key)
        if ended and ended.result and ended.result.failed:
            return ended.result.failed
        if self.document(unit):
            return ""
        stored = self.known.get(name_of(unit))
        return stored.failed if stored else ""

    def status(self, unit: Unit) -> str:
        """Return whether a unit was raced here, was done before or elsewhere, failed, or is not done."""
        if self.failure(unit):
            return "failed"
        if self.document(unit):
            return "raced" if unit.key in self.ended else "done before"
        return "no worker" if unit.key in self.missing else "not done"

    def failed_among(self, own: Collection[str]) -> bool:
        """Return whether a unit failed here, or in this process's `own` share: others' are theirs to try again."""
        return any(unit.key in own or unit.key in self.ended for unit, _ in self.failures)

    @property
    def failures(self) -> list[tuple[Unit, str]]:
        """The units that failed, with their reasons."""
        return [(unit, why) for unit in self.units if (why := self.failure(unit))]

    @property
    def cost_s(self) -> float:
        """The seconds of workers that this process spent."""
        return sum(each.result.seconds for each in self.ended.values() if each.result)

    @property
    def covered(self) -> tuple[list[str], list[str]]:
        """The devices that were asked for, and those of them for which each unit is done."""
        asked = list(dict.fromkeys(unit.device for unit in self.units))
        left = {unit.device for unit in self.units if not self.document(unit)}
        return asked, [device for device in asked if device not in left]

    @property
    def same(self) -> Interval | None:
        """The widest A/A ratio of the units that were raced here: how far a call may be from itself."""
        return widest(each.result.same for each in self.ended.values() if each.result)

    @property
    def noise(self) -> Interval | None:
        """The widest A/A ratio of all units that are done, whenever they were raced."""
        return widest(document.same for unit in self.units if (document := self.document(unit)))

    @property
    def is_disturbed(self) -> bool:
        """Whether a call may differ from itself by more than a quiet machine explains."""
        return self.same is not None and self.same.reach > SAME_WITHIN
