"""The budget of a race: how much time is left, and what rows say when it has ended."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LONGEST_CHECK_S = 120.0  # of one thing that default's check needs, by the time of a call in eager
LEAST_CALLS = 4  # of one comparison of two candidates
LATE_S = 1.0  # what takes no longer is timed although the budget is spent
GRACE = 1.1  # times the budget: a candidate compiled just before the end is still timed


@dataclass
class Budget:
    """`seconds` for a race that `started` at a time of `time.perf_counter`; a call in eager takes `call_s`."""

    seconds: float
    started: float
    call_s: float
    free_s: float = 0.0  # what does not count: it decides whether default is right, which no budget may
    free: bool = False

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the time of what is done within, and allow what default's check needs."""
        began, self.free = time.perf_counter(), True
        try:
            yield
        finally:
            self.free = False
            self.free_s += time.perf_counter() - began

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

    @property
    def is_spent(self) -> str:
        """What the row of a candidate says that is not compiled, since the budget is spent."""
        return f"the budget of {self.seconds:g} s is spent"

    @property
    def interrupted(self) -> str:
        """What the row of a candidate says whose tuning lasted until the end."""
        return f"its tuning was interrupted when the budget of {self.seconds:g} s ended"

    def allows(self, calls: float) -> bool:
        """Return whether so many calls in eager fit into what is left, or into what default's check may take."""
        return calls * self.call_s <= (LONGEST_CHECK_S if self.free else self.left_s)
