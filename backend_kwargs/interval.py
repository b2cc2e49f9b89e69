"""A measured value with its uncertainty; outside `measure/`, which imports torch, since files are read without it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap 95 % interval, in the unit of the samples."""

    median: float
    low: float
    high: float
