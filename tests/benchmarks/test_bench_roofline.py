"""T_limit = max(flops / peak, bytes / bandwidth, launch floor), and per cent of it."""

import math
from dataclasses import replace

import pytest

from backend_kwargs.trial import Interval
from benchmarks.execution.ceilings import Ceilings, Figure
from benchmarks.execution.roofline import PhysicalLimit, limit, over, per_cent
from benchmarks.workloads.case import Work

L2 = 60 * 10**6


def figure(value: float, unit: str, spread: float = 0.01) -> Figure:
    return Figure(value, value / (1 + spread), value * (1 + spread), unit, "test")


H200 = Ceilings(
    "H200",
    L2,
    {
        "copy": figure(4.0e12, "B/s"),
        "read": figure(4.4e12, "B/s"),
        "write": figure(4.2e12, "B/s"),
        "bf16": figure(790e12, "FLOP/s", 0.02),
        "fp32": figure(50e12, "FLOP/s"),
        "launch": figure(2e-6, "s", 0.1),
    },
)


@pytest.mark.parametrize(
    ("work", "seconds", "bound", "tolerance"),
    [
        pytest.param(Work(790e9, 1e9), 1e-3, "compute", 0.02, id="arithmetic"),
        pytest.param(Work(50e9, 1e9, "fp32"), 1e-3, "compute", 0.01, id="of its unit"),
        pytest.param(Work(50e9, 1e9, "tf32"), 1e-3, "compute", 0.01, id="tf32 is fp32 where there is none"),
        pytest.param(Work(1e9, 4.4e9), 1e-3, "memory", 0.01, id="memory, the best bandwidth"),
        pytest.param(Work(0, 4.4e9, written=0), 1e-3, "memory", 0.01, id="only read"),
        pytest.param(Work(0, 4.2e9, written=4.2e9), 1e-3, "memory", 0.01, id="only written"),
        pytest.param(Work(0, 4e9, written=2e9), 1e-3, "memory", 0.01, id="read and written"),
        pytest.param(Work(0, 6.2e9, written=1.55e9), 3.1e9 / 4e12 + 3.1e9 / 4.4e12, "memory", 0.01, id="between"),
        pytest.param(Work(1e3, 1e3), 2e-6, "launch", 0.1, id="launch"),
        pytest.param(Work(1e3, L2), L2 / 4.4e12, "L2", 0.01, id="all of it fits in the L2"),
        pytest.param(Work(790e9, 1e6), 1e-3, "compute", 0.02, id="the L2 is no matter to arithmetic"),
        pytest.param(Work(790e9, 0), 1e-3, "compute", 0.02, id="no bytes"),
    ],
)
def test_limit(work, seconds, bound, tolerance):
    """The limit is the largest of the three terms, and names it."""
    found = limit(work, H200)
    assert (found.seconds, found.tolerance) == pytest.approx((seconds, tolerance))
    assert found.bound == bound


@pytest.mark.parametrize("work", [None, Work(1e9, 1e9, "fp8")], ids=["no work", "no such unit"])
def test_no_limit(work):
    """An unknown rate or amount of work gives no limit."""
    assert limit(work, H200) is None


@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(Figure(4.0e12, 4.0e12 / 1.05, 4.0e12, "B/s", "test"), id="too fast"),
        pytest.param(Figure(4.0e12, 4.0e12, 4.0e12 * 1.05, "B/s", "test"), id="too slow"),
    ],
)
def test_between_two_bandwidths_the_less_certain_counts(copy):
    """A mix of reading and copying has the uncertainty of the less certain bandwidth, in either direction."""
    unsure = replace(H200, figures={**H200.figures, "copy": copy})
    assert limit(Work(0, 6.2e9, written=1.55e9), unsure).tolerance == pytest.approx(0.05)


def test_balance_is_one_on_the_ridge():
    """The balance is 1 where arithmetic and memory take equally long, and infinite without bytes."""
    assert limit(Work(790e9, 4.4e9), H200).balance == pytest.approx(1.0)
    assert limit(Work(790e9, 0), H200).balance == math.inf


def a_limit(bound: str) -> PhysicalLimit:
    return PhysicalLimit(1.0, bound, tolerance=0.02, balance=1.0)


def test_per_cent_of_the_limit():
    """Twice the limit's time is 50 %, and the longest time gives the lowest share."""
    assert per_cent(a_limit("memory"), Interval(2.0, 1.25, 4.0)) == Interval(50.0, 25.0, 80.0)


def test_what_fits_in_the_l2_is_not_scored():
    """A working set that fits in the L2 has no per cent, and cannot exceed the limit."""
    assert per_cent(a_limit("L2"), Interval(0.5, 0.5, 0.5)) is None
    assert not over(a_limit("L2"), None)


@pytest.mark.parametrize(("share", "flagged"), [(99.0, False), (101.9, False), (102.1, True)])
def test_over_the_limit_is_flagged(share, flagged):
    """A share above 100 %, beyond the ceiling's uncertainty, is flagged."""
    assert over(a_limit("compute"), Interval(share, share, share)) is flagged
