"""How long a fleet takes, simulated by the scheduling code itself: `python -m benchmarks.studies.fleet`.

1,000 models on 64 GPUs, on a virtual clock, or 250 at four sizes. A model has between 1 and 60 graphs, whose races last
as long as one that was recorded on an H200 (fleet_seconds.json). Workers that die do not come back.

Where nothing is known of any model, all orders are alike: no choice among units that cannot be told apart has another
distribution of makespans than a random one, so that what is printed for that case is no fault of the order. The least
with deaths is that of workers that lose nothing and end together.
"""

# ruff: noqa: S311 - what is drawn is no secret

import heapq
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backend_kwargs.fleet.board import LEASE_S, Result, Unit, UnitClaims
from backend_kwargs.fleet.scheduling import POLL_S, Ended, Pool, Queue, drive

RECORDED = Path(__file__).with_name("fleet_seconds.json")
UNITS, GPUS, MOST_GRAPHS = 1000, 64, 60
DEATH_S = 600.0
HERE = {"torch": "simulated"}


@dataclass
class Clock:
    """Virtual time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Documents:
    """A store with claims in memory, whose server has the virtual clock."""

    clock: Clock
    label: str = "simulated"
    documents: dict[str, bytes] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)

    def get(self, name: str) -> bytes | None:
        return self.documents.get(name)

    def put(self, name: str, document: bytes) -> None:
        self.documents[name] = document

    def list(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        yield from [(name, each) for name, each in self.documents.items() if name.startswith(prefix)]

    def forget(self, name: str) -> None:
        self.documents.pop(name, None)
        self.leases.pop(name, None)

    def claim(self, name: str, document: bytes, lease_s: float) -> bool:
        if self.leases.get(name, -1.0) > self.clock():
            return False
        self.documents[name], self.leases[name] = document, self.clock() + lease_s
        return True

    def renew(self, name: str, document: bytes, lease_s: float) -> bool:
        if self.documents.get(name) != document:
            return False
        self.leases[name] = self.clock() + lease_s
        return True


@dataclass(frozen=True)
class Work:
    """Units with the seconds that each takes, by key."""

    units: list[Unit]
    seconds: dict[str, float]

    @classmethod
    def drawn(cls, seed: int, sizes: int = 1) -> "Work":
        """Draw the models from the recorded races: as many graphs at each size, whose races are drawn anew."""
        recorded, draw = json.loads(RECORDED.read_text()), random.Random(seed)
        graphs = [draw.randint(1, MOST_GRAPHS) for _ in range(UNITS // sizes)]
        units, seconds = [], {}
        for (at, count), size in itertools.product(enumerate(graphs), range(sizes)):
            units.append(Unit(model=f"models.py:m{at}", device="cuda", sizes={"batch": 2**size}))
            seconds[units[-1].key] = sum(draw.choices(recorded, k=count))
        return cls(units, seconds)

    @property
    def least_s(self) -> float:
        """No schedule on all GPUs is shorter."""
        return max(sum(self.seconds.values()) / GPUS, *self.seconds.values())

    @property
    def least_dying_s(self) -> float:
        """No schedule on GPUs of which one dies at each DEATH_S is shorter, were nothing lost with them."""
        left, gpus = sum(self.seconds.values()), GPUS
        while left > gpus * DEATH_S:
            left, gpus = left - gpus * DEATH_S, gpus - 1
        return max((GPUS - gpus) * DEATH_S + left / gpus, *self.seconds.values())

    def known_to(self, store: Documents) -> None:
        """Put what an earlier run under another torch recorded into the store: the plan's units are to run again."""
        board = UnitClaims(store, {})
        for unit in self.units:
            board.record(unit, self.result(unit, "before"))

    def result(self, unit: Unit, torch: str = HERE["torch"]) -> Result:
        return Result(seconds=self.seconds[unit.key], releases={"torch": torch})


@dataclass
class Workers(Pool):
    """A pool of GPUs on the virtual clock, of which one dies at each of `deaths`."""

    work: Work
    clock: Clock
    deaths: list[float]
    draw: random.Random
    free: int = GPUS
    events: list[tuple[float, int, Unit]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    lost: int = 0

    def missing(self, unit: Unit) -> str:
        return ""

    def fits(self, unit: Unit) -> bool:
        return self.free > 0

    def start(self, unit: Unit) -> None:
        self.free -= 1
        heapq.heappush(self.events, (self.clock() + self.work.seconds[unit.key], next(self.numbers), unit))

    def wait(self, seconds: float) -> Sequence[Ended]:
        if self.deaths and self.deaths[0] <= self.events[0][0]:
            self.clock.now = self.deaths.pop(0)
            self.lost += 1
            if (victim := self.draw.randrange(self.free + len(self.events))) >= len(self.events):
                self.free -= 1  # an idle one
                return []
            unit = self.events.pop(victim)[-1]
            heapq.heapify(self.events)
            return [Ended(unit, None, "signal 9")]
        self.clock.now, _, unit = heapq.heappop(self.events)
        self.free += 1
        return [Ended(unit, self.work.result(unit))]

    def cancel(self) -> None:
        self.events.clear()


def one_driver(work: Work, *, dying: bool, known: bool = True, seed: int = 0) -> tuple[float, int]:
    """Return how long one process takes that has all GPUs, and how many of them died."""
    clock = Clock()
    store = Documents(clock)
    if known:
        work.known_to(store)
    pool = Workers(work, clock, _deaths(dying), random.Random(seed))
    ended = list(drive(Queue(work.units, UnitClaims(store, HERE), clock), pool))
    assert len(ended) == UNITS
    assert not any(each.result is None or each.result.failed for each in ended)
    return clock(), pool.lost


def shards(work: Work, *, dying: bool, known: bool = True, seed: int = 0) -> tuple[float, int]:
    """Return how long 64 processes of one GPU take, which know of each other by the store alone, and how many died."""
    clock, draw, deaths = Clock(), random.Random(seed), _deaths(dying)
    store = Documents(clock)
    if known:
        work.known_to(store)
    queues = [Queue(work.units, UnitClaims(store, HERE), clock, (number, GPUS)) for number in range(1, GPUS + 1)]
    alive, lost, last = dict(enumerate(queues)), 0, 0.0
    events: list[tuple[float, int, Unit | None]] = [(0.0, number, None) for number in alive]
    renewals = LEASE_S / 3
    while events:
        at, number, unit = heapq.heappop(events)
        if deaths and deaths[0] <= at:
            clock.now = deaths.pop(0)
            del alive[draw.choice(sorted(alive))]
            lost += 1
            heapq.heappush(events, (at, number, unit))
            continue
        while renewals <= at:
            clock.now = renewals
            for queue in alive.values():
                queue.board.renew()
            renewals += LEASE_S / 3
        if number not in alive:
            continue
        clock.now, queue = at, alive[number]
        if unit:
            queue.board.record(unit, work.result(unit))
            last = at
        if (following := queue.take(lambda unit: True)) is not None:
            heapq.heappush(events, (at + work.seconds[following.key], number, following))
        elif queue.left:
            heapq.heappush(events, (at + POLL_S, number, None))
    board = queues[0].board
    assert len(board.done(board.known())) == UNITS
    return last, lost


def _deaths(dying: bool) -> list[float]:
    return [DEATH_S * count for count in range(1, GPUS)] if dying else []


WAYS: dict[str, Callable[..., tuple[float, int]]] = {"one driver": one_driver, "64 shards": shards}


CASES = {"durations known": (1, True), "four sizes of each model": (4, False), "nothing known": (1, False)}


def main(seeds: Sequence[int] = range(5)) -> None:
    """Print the makespan of each way over the least possible without deaths, the worst of some seeds."""
    for (case, (sizes, known)), dying, (name, run) in itertools.product(CASES.items(), (False, True), WAYS.items()):
        works = [Work.drawn(seed, sizes) for seed in seeds]
        ran = [run(work, dying=dying, known=known, seed=seed) for seed, work in zip(seeds, works, strict=True)]
        ratios = [makespan / work.least_s for (makespan, _), work in zip(ran, works, strict=True)]
        least = max((work.least_dying_s if dying else work.least_s) / work.least_s for work in works)
        died = max(lost for _, lost in ran)
        print(f"{name}, {case}, {died} deaths: {max(ratios):.3f}x, least {least:.3f}x")


if __name__ == "__main__":
    main(range(int(sys.argv[1]) if len(sys.argv) > 1 else 5))
