"""The budget of a race: how much time is left, and what rows say when it has ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LONGEST_CHECKS_S = 120.0  # of all that default's check needs, which do not count; more of it does
LEAST_CALLS = 4  # of one comparison of two candidates
LATE_S = 1.0  # what takes no longer is timed although the budget is spent
GRACE = 1.1  # times the budget: a candidate compiled just before the end is still timed


@dataclass
class Budget:
    """`seconds` for a race that `started` at a time of `time.perf_counter`; a call in eager takes `call_s`.

    They are what is added to the compile that serves, which took `served_s`.
    """

    seconds: float
    started: float
    call_s: float
    checked_s: float = 0.0  # of what decides whether default is right, which no budget may
    checks_since: float | None = None
    served_s: float = 0.0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Do not count the time of a compile without which nothing would serve."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.served_s += time.perf_counter() - began

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the time of what is done within, up to two minutes of a race, and allow what fits into these."""
        self.checks_since = time.perf_counter()
        try:
            yield
        finally:
            self.checked_s += time.perf_counter() - self.checks_since
            self.checks_since = None

    @property
    def free_s(self) -> float:
        """The seconds up to now that do not count."""
        return self.served_s + self._checks_s

    @property
    def _checks_s(self) -> float:
        now_s = 0.0 if self.checks_since is None else time.perf_counter() - self.checks_since
        return min(self.checked_s + now_s, LONGEST_CHECKS_S)

    @property
    def counted_s(self) -> float:
        """The seconds up to now that count."""
        return max(self.spent_s - self.free_s, 0.0)

    @property
    def spent_s(self) -> float:
        """The seconds since the race started."""
        return time.perf_counter() - self.started

    @property
    def left_s(self) -> float:
        """The seconds until the end, 0 after it."""
        return max(self.seconds + self.free_s - self.spent_s, 0.0)

    @property
    def over(self) -> bool:
        """Whether the budget is spent, so that no more is compiled or measured."""
        return self.left_s <= 0

    @property
    def may_time(self) -> bool:
        """Whether there is time for the fewest calls that can tell two candidates apart."""
        return GRACE * self.seconds + self.free_s - self.spent_s > LEAST_CALLS * self.call_s

    @property
    def may_time_late(self) -> bool:
        """Whether the fewest calls fit into the time that is allowed beyond the budget: a second, or a tenth of it."""
        return LEAST_CALLS * self.call_s <= max((GRACE - 1) * self.seconds, LATE_S)

    @property
    def ends(self) -> float:
        """The end, as a time of `time.perf_counter`."""
        return self.started + self.seconds + self.free_s

    def allows(self, calls: float) -> bool:
        """Return whether so many calls in eager fit into what is left, or into what default's check may take."""
        free_s = 0.0 if self.checks_since is None else LONGEST_CHECKS_S - self._checks_s
        return calls * self.call_s <= free_s + self.left_s
