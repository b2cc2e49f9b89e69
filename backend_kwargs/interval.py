"""A measured value with its uncertainty; outside `trial/`, which imports torch, since files are read without it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval, in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def reach(self) -> float:
        """How far a ratio may be from 1, as a factor."""
        return max(self.high, 1 / self.low if self.low > 0 else math.inf, 1.0)

    def as_ratio(self, digits: int = 2) -> str:
        """Return a ratio as the command line prints it: "1.42x [1.38, 1.46]"."""
        median, low, high = (f"{each:.{digits}f}" for each in (self.median, self.low, self.high))
        return f"{median}x [{low}, {high}]"


def widest(ratios: Iterable[Interval | None]) -> Interval | None:
    """Return the ratio that may be furthest from 1, None if none is known."""
    return max(filter(None, ratios), key=lambda each: each.reach, default=None)
