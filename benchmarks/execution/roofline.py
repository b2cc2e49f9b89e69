"""The least time that the device needs for a case's work, what bounds it, and how close a peer comes.

T_limit = max(flops / peak[unit], bytes / bandwidth, launch floor)
"""

import math
from dataclasses import dataclass
from typing import Literal

from backend_kwargs.trial import Interval
from benchmarks.execution.ceilings import BANDWIDTHS, Ceilings, Figure
from benchmarks.workloads.case import Work

Bound = Literal["compute", "memory", "launch", "L2"]
OTHERWISE = {"tf32": "fp32"}  # a device without tf32 units, such as a CPU, computes in fp32


@dataclass(frozen=True, slots=True)
class PhysicalLimit:
    """The least seconds, what bounds them, and the relative uncertainty of the ceiling behind them (0.02: 2 %).

    `balance` is the time of the arithmetic over that of the memory: the case's position relative to the ridge of the
    roofline. "L2": memory would bound it, but everything fits in the L2, so the memory's bandwidth is no limit and it
    is not scored. Compute and launches bound a small working set like a large one.
    """

    seconds: float
    bound: Bound
    tolerance: float
    balance: float

    @property
    def scored(self) -> bool:
        """Return whether a per cent of this limit is meaningful."""
        return self.bound != "L2"


def limit(work: Work | None, ceilings: Ceilings) -> PhysicalLimit | None:
    """Return the limit of `work` on the device of `ceilings`; None if the work or its unit's peak is unknown."""
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
    """Return the share of the limit that a device time reaches, in per cent; None if it is not scored."""
    if not limit.scored:
        return None
    # The longest time is the lowest share.
    return Interval(*(100 * limit.seconds / seconds for seconds in (time.median, time.high, time.low)))


def over(limit: PhysicalLimit, share: Interval | None) -> bool:
    """Return whether a share of the limit exceeds 100 beyond interval and uncertainty, which is a bug of the suite."""
    return share is not None and share.low > 100 * (1 + limit.tolerance)


def _bandwidth(work: Work, ceilings: Ceilings) -> Figure:
    """Return the bandwidth for the case's mix of reading and writing; the best one if the mix is unknown."""
    copy, read, write = (ceilings.figures[name] for name in BANDWIDTHS)
    if work.written is None:
        return max((copy, read, write), key=lambda figure: figure.value)
    share = work.written / work.bytes if work.bytes else 0.0
    # Half of a copy's bytes are written. For other mixes, the seconds per byte are added up.
    one, other, at = (read, copy, 2 * share) if share <= 0.5 else (copy, write, 2 * share - 1)
    value = 1 / ((1 - at) / one.value + at / other.value)
    widest = max(one, other, key=_tolerance)
    return Figure(value, value * widest.low / widest.value, value * widest.high / widest.value, "B/s", "as the case")


def _tolerance(figure: Figure) -> float:
    return max(figure.high / figure.value, figure.value / figure.low) - 1
