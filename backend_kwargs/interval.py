"""A measured figure with its uncertainty: what files hold of it, so apart from what measures, which imports torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval, in the unit of the samples."""

    median: float
    low: float
    high: float
