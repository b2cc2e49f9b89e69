"""The budget of a race: how much time is left."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LONGEST_CHECKS_S = 120.0  # of all that default's check needs, which do not count; more of it does
LEAST_CALLS = 4  # of one comparison of two candidates
LATE_S = 1.0  # what takes no longer is timed although the budget is spent


@dataclass
class Budget:
    """`seconds` for a race that `started` at a time of `time.perf_counter`; a call in eager takes `call_s`.

    The compile that serves does not count: its seconds are in `free_s`. Nor do up to `checks_s` seconds of the check of
    default, so that a small budget does not decide whether default is right.
    """

    seconds: float
    started: float
    call_s: float
    free_s: float = 0.0
    checks_s: float = LONGEST_CHECKS_S
    checking: bool = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Do not count the time of a compile without which nothing would serve."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.free_s += time.perf_counter() - began

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count the time of what is done within, up to two minutes of a race, and allow what fits into these."""
        before_s, self.checking = self.free_s, True
        try:
            with self.serving():
                yield
        finally:
            took_s = min(self.free_s - before_s, self.checks_s)
            self.free_s, self.checks_s, self.checking = before_s + took_s, self.checks_s - took_s, False

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
        """Whether the budget is spent, so that nothing more is compiled."""
        return self.left_s <= 0

    @property
    def may_time(self) -> bool:
        """Whether the fewest calls that tell two candidates apart fit into what is left, or take a second at most."""
        return LEAST_CALLS * self.call_s <= max(self.left_s, LATE_S)

    def allows(self, calls: float) -> bool:
        """Return whether so many calls in eager fit into what is left, or into what default's check may take."""
        left_s = self.seconds + self.free_s - self.spent_s + (self.checks_s if self.checking else 0.0)
        return calls * self.call_s <= max(left_s, 0.0)
