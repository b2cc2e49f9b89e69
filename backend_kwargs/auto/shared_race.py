"""The first round of a race, divided among the ranks of a process group that have the same graph.

The racing rank offers the candidates that it would race against its first champion. A rank that waits for its decision
takes one after the other, times each beside that champion on its own device, and reports. What another rank found
better is raced again by the racing rank, since cards differ by some per cent; what it found no better is not.

All of this goes through the store of the process group, never through a collective: ranks may have other graphs, come
late, or die. The racing rank races what nobody has taken, and what was taken by a rank that no longer answers.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.auto.ranks import counting, place_of, ranks
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.errors import error_text
from backend_kwargs.facts.decision import RaceRow
from backend_kwargs.options.layers import Options

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("backend_kwargs.auto")

OPENED = "shared"  # what the racing rank writes before it races
GONE_S = 15.0  # a rank that took a candidate and has not counted up for so long is dead
LATE = 4  # times the predicted seconds, after which another rank's candidate is raced here too
Answer = TypeVar("Answer")


class Offered(msgspec.Struct, frozen=True):
    """A candidate as another rank races it: its options are whole, not merged onto others."""

    name: str
    options: Options
    compiler: str
    complexity: int
    predicted_s: float


class Offer(msgspec.Struct, frozen=True):
    """What other ranks may race against the row named `base`, until `ends`, in seconds since the epoch.

    An infinite end is None, since JSON has no infinity.
    """

    base: str
    base_options: Options
    ends: float | None
    candidates: list[Offered]

    @property
    def left_s(self) -> float:
        """The seconds until the end, by this host's clock."""
        return math.inf if self.ends is None else max(self.ends - time.time(), 0.0)


class Report(msgspec.Struct, frozen=True):
    """What a rank found: the rows of one candidate, and whether it is better than the base on that rank's device."""

    rank: int
    better: bool
    rows: list[RaceRow]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of one race write into their group's store, below `place`."""

    store: "Store"
    place: str
    rank: int

    def open(self) -> None:
        """Tell the ranks that wait that candidates will be offered."""
        self.store.set(f"{self.place}/{OPENED}", "yes")

    def first_on(self, device: str) -> bool:
        """Return whether no other rank has said that it times candidates on this device."""
        return self._first(f"device/{device}") == self.rank

    def offer(self, offer: Offer) -> None:
        """Offer candidates to the other ranks."""
        self.store.set(f"{self.place}/offer", msgspec.json.encode(offer).decode())

    def offered(self) -> Offer | None:
        """Return the offer, None as long as there is none."""
        return self._read("offer", Offer)

    def take(self, at: int) -> int:
        """Take an offered candidate unless a rank has it; return the rank that has it now."""
        return self._first(f"taken/{at}")

    def is_taken(self, at: int) -> bool:
        """Return whether a rank has taken an offered candidate."""
        return bool(self.store.check([f"{self.place}/taken/{at}"]))

    def tell(self, at: int, report: Report) -> None:
        """Report what was found of an offered candidate."""
        self.store.set(f"{self.place}/report/{at}", msgspec.json.encode(report, enc_hook=repr).decode())

    def told(self, at: int) -> Report | None:
        """Return what another rank has reported of an offered candidate, None if nothing."""
        return self._read(f"report/{at}", Report)

    @contextmanager
    def helping(self) -> Iterator[None]:
        """Show the racing rank that this one is alive, and at the end that it reports no more."""
        own = f"{self.place}/helper/{self.rank}"
        try:
            with counting(self.store, own):
                yield
        finally:
            with suppress(Exception):  # the store went with its process group
                self.store.set(f"{own}/left", "yes")

    def beats(self, rank: int) -> int | None:
        """Return how far a rank that helps has counted, None if it reports no more."""
        other = f"{self.place}/helper/{rank}"
        return None if self.store.check([f"{other}/left"]) else self.store.add(f"{other}/count", 0)

    def _first(self, name: str) -> int:
        return int(self.store.compare_set(f"{self.place}/{name}", "", str(self.rank)))

    def _read(self, name: str, kind: type[Answer]) -> Answer | None:
        if not self.store.check([f"{self.place}/{name}"]):
            return None
        return msgspec.json.decode(self.store.get(f"{self.place}/{name}"), type=kind)


def opened(key: str) -> bool:
    """Return whether the racing rank will offer candidates."""
    store, place = place_of(key)
    return bool(store.check([f"{place}/{OPENED}"]))


def exchange_for(key: str, settings: RaceSettings, card: int | None, *, opens: bool) -> Exchange | None:
    """Return what this rank shares the race for `key` through, None if it shares none; the racing rank `opens` it.

    Unless `share_race` says it, ranks share where each has a GPU of its own: on shared cores their timings would
    disturb each other.
    """
    shares = settings.share_race is not False and settings.race in ("missing", "always")
    if ranks() == 1 or not shares or settings.objective == "memory":
        return None
    import torch.distributed as dist

    try:
        exchange = Exchange(*place_of(key), dist.get_rank())
        own = settings.share_race or (card is not None and exchange.first_on(uuid_of(card)))
        if not own:
            return None
        if opens:
            exchange.open()
    except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
        logger.info("No race is shared: %s", error_text(error))
        return None
    return exchange


def uuid_of(card: int) -> str:
    """Return what tells a GPU from all others, also from those of other hosts."""
    import torch

    return str(torch.cuda.get_device_properties(card).uuid)


@dataclass
class Round:
    """The first round as the racing rank sees it: what it offered, who has taken it, and what was found better.

    Without an `exchange`, or once that fails, this rank races all.
    """

    exchange: Exchange | None = None
    offered: Sequence[RaceCandidate] = ()
    base_s: float = 0.0
    better: dict[str, Report] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)  # until when a candidate is left to the rank that took it
    taken: dict[str, int] = field(default_factory=dict)
    counts: dict[int, tuple[int, float]] = field(default_factory=dict)  # how far each rank has counted, and since when
    predicted: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, exchange: Exchange, base: RaceRow, fitting: Sequence[tuple[RaceCandidate, Options, float]], left_s: float
    ) -> "Round":
        """Offer candidates, each with its options and its predicted seconds; one that JSON cannot represent is not."""
        fitting = [each for each in fitting if _is_plain(each[1])]
        if len(fitting) < 2 or not base.seconds or not _is_plain(base.options):
            fitting = []
        given = [Offered(each.name, options, each.compiler, each.complexity, s) for each, options, s in fitting]
        made = cls(exchange, [each for each, _, _ in fitting], base.seconds or 0.0)
        made.predicted = {each.name: each.predicted_s for each in given}
        offer = Offer(base.name, base.options if fitting else {}, time.time() + left_s, given)
        made._asked(lambda exchange: exchange.offer(offer), None)
        return made

    def settle(self, left: list[RaceCandidate]) -> list[RaceRow]:
        """Take out of `left` what other ranks found no better, and return its rows; note what they found better."""
        rows: list[RaceRow] = []
        for each in [each for each in left if each in self.offered and each.name not in self.better]:
            report = self._asked(partial(Exchange.told, at=self.offered.index(each)), None)
            if report and report.better:
                self.better[each.name] = report
            elif report:
                left.remove(each)
                rows += [self._as_here(row, report.rank) for row in report.rows]
        return rows

    def next_of(
        self, fitting: Sequence[RaceCandidate], first_of: Callable[[Sequence[RaceCandidate]], RaceCandidate]
    ) -> RaceCandidate | None:
        """Return what this rank races next, None while other ranks race all that is left.

        First comes what another rank found better, so that it is confirmed and other steps extend it.
        """
        if found := [each for each in fitting if each.name in self.better]:
            return max(found, key=lambda each: _speedup(self.better[each.name]))
        left = list(fitting)
        while left:
            following = first_of(left)
            if self._mine(following):
                return following
            left.remove(following)
        return None

    def why(self, candidate: RaceCandidate, reason: str) -> str:
        """Return why a candidate is skipped, with what another rank found of it or that it found nothing."""
        if report := self.better.get(candidate.name):
            ratio, base = _speedup(report), report.rows[0].against
            return f"{reason}; rank {report.rank} measured {ratio:.2f}x over {base}, which is not confirmed here"
        rank = self.taken.get(candidate.name)
        return reason if rank is None else f"{reason}; rank {rank} took it and has not reported"

    def _as_here(self, row: RaceRow, rank: int) -> RaceRow:
        """Return another rank's row with the time of a call that its speedup means on this rank's device."""
        seconds = self.base_s / row.speedup.median if row.speedup else row.seconds
        return replace(row, seconds=seconds, rank=rank, began_s=None, timed_s=None, led_s=None)

    def _mine(self, candidate: RaceCandidate) -> bool:
        """Take a candidate; return whether this rank has it, or the one that has it no longer answers."""
        if self.exchange is None or candidate not in self.offered:
            return True
        own = self.exchange.rank
        holder = self._asked(lambda exchange: exchange.take(self.offered.index(candidate)), own)
        if holder == own:
            return True
        self.taken[candidate.name], now = holder, time.monotonic()
        ends = self.ends.setdefault(candidate.name, now + GONE_S + LATE * self.predicted[candidate.name])
        return now > ends or self._is_gone(holder)

    def _is_gone(self, rank: int) -> bool:
        count = self._asked(lambda exchange: exchange.beats(rank), None)
        if count is None:
            return True
        last, since = self.counts.get(rank, (None, 0.0))
        if count != last:
            self.counts[rank] = count, time.monotonic()
            return False
        return time.monotonic() - since > GONE_S

    def _asked(self, ask: Callable[[Exchange], Answer], otherwise: Answer) -> Answer:
        """Return the answer of the other ranks; if the store fails, `otherwise`, and share no more."""
        if self.exchange is None:
            return otherwise
        try:
            return ask(self.exchange)
        except Exception as error:  # noqa: BLE001 - each kind of store raises its own error
            logger.info("The race is shared no more: %s", error_text(error))
            self.exchange = None
            return otherwise


def _speedup(report: Report) -> float:
    return max((row.speedup.median for row in report.rows if row.speedup), default=1.0)


def _is_plain(options: Options) -> bool:
    """Return whether another rank can be told of these options."""
    try:
        json.dumps(options, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True
