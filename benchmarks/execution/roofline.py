"""The least time that the device needs for a case's work, what bounds it, and how near a peer comes.

T_limit = max(flops / peak[unit], bytes / bandwidth, launch floor)
"""

import math
from dataclasses import dataclass
from typing import Literal

from backend_kwargs.measure import Interval
from benchmarks.execution.ceilings import BANDWIDTHS, Ceilings, Figure
from benchmarks.workloads.case import Work

Bound = Literal["compute", "memory", "launch", "L2"]
OTHERWISE = {"tf32": "fp32"}  # a device without such a unit, a CPU say, computes in the other


@dataclass(frozen=True, slots=True)
class PhysicalLimit:
    """The least seconds, what bounds them, and how uncertain the ceiling behind them is (0.02: two per cent).

    `balance` is the time of the arithmetic over that of the memory: where a case stands to the ridge of the roofline.
    "L2": memory would bound it, but all of it fits in there, so that the memory's bandwidth is no limit and it is not
    scored. Compute and launches bound a small working set as they do a large one.
    """

    seconds: float
    bound: Bound
    tolerance: float
    balance: float

    @property
    def scored(self) -> bool:
        """Say whether a per cent of this limit means anything."""
        return self.bound != "L2"


def limit(work: Work | None, ceilings: Ceilings) -> PhysicalLimit | None:
    """Return the limit of `work` on the device of `ceilings`; None where the work or its unit's peak is not known."""
    peak = work and (ceilings.figures.get(work.unit) or ceilings.figures.get(OTHERWISE.get(work.unit, "")))
    if not work or not peak:
        return None
    floor = ceilings.figures["launch"]
    bandwidth = _bandwidth(work, ceilings)
    terms: dict[Bound, tuple[float, Figure]] = {
        "compute": (work.flops / peak.value, peak),
        "memory": (work.bytes / bandwidth.value, bandwidth),
        "launch": (floor.value, floor),
    }
    bound = max(terms, key=lambda term: terms[term][0])
    seconds, ceiling = terms[bound]
    in_l2 = bound == "memory" and work.bytes <= ceilings.l2_bytes
    balance = terms["compute"][0] / terms["memory"][0] if work.bytes else math.inf
    return PhysicalLimit(seconds, "L2" if in_l2 else bound, _tolerance(ceiling), balance)


def per_cent(limit: PhysicalLimit, time: Interval) -> Interval | None:
    """Return how much of the limit a device time reaches, in per cent; None where it is not scored."""
    if not limit.scored:
        return None
    # The longest time is the lowest share.
    return Interval(*(100 * limit.seconds / seconds for seconds in (time.median, time.high, time.low)))


def over(limit: PhysicalLimit, share: Interval | None) -> bool:
    """Say whether a per cent of the limit is beyond 100, interval and uncertainty of the ceiling taken off: our bug."""
    return share is not None and share.low > 100 * (1 + limit.tolerance)


def _bandwidth(work: Work, ceilings: Ceilings) -> Figure:
    """Return the bandwidth that fits: reading, writing, or both, as the case does; the best where that is not known."""
    copy, read, write = (ceilings.figures[name] for name in BANDWIDTHS)
    if work.written is None:
        return max((copy, read, write), key=lambda figure: figure.value)
    share = work.written / work.bytes if work.bytes else 0.0
    # A copy writes half of its bytes. Between what was measured, seconds per byte add up.
    one, other, at = (read, copy, 2 * share) if share <= 0.5 else (copy, write, 2 * share - 1)
    value = 1 / ((1 - at) / one.value + at / other.value)
    widest = max(one, other, key=_tolerance)
    return Figure(value, value * widest.low / widest.value, value * widest.high / widest.value, "B/s", "as the case")


def _tolerance(figure: Figure) -> float:
    return max(figure.high / figure.value, figure.value / figure.low) - 1
