"""Where things are in the plots."""

import math
import re

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page import Document, figures, plots, to_html
from backend_kwargs.page.document import Graph, Kernel, Lead, Point, Race, Result, Row, Speedups, Tradeoffs


def test_equal_ratios_are_equal_distances():
    """On an axis of logarithms, 1 to 2 is as far as 2 to 4."""
    axis = plots.Axis(0.5, 8.0)
    assert axis.at(2) - axis.at(1) == pytest.approx(axis.at(4) - axis.at(2), abs=0.11)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e300, math.inf])
def test_what_is_beyond_an_axis_is_at_its_end(value):
    """No value leaves the plot."""
    axis = plots.Axis(0.5, 2.0)
    assert axis.at(value) in (plots.MARGIN, 100 - plots.MARGIN)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        pytest.param(0.9, 2.4, [1, 1.5, 2], id="a factor"),
        pytest.param(0.97, 1.06, [0.98, 1, 1.02, 1.04, 1.06], id="percents"),
        pytest.param(0.2, 40, [0.3, 1, 3, 10, 30], id="two decades"),
        pytest.param(1e-9, 10, [1e-9, 1e-7, 1e-5, 1e-3, 0.1, 10], id="ten decades"),
    ],
)
def test_ticks_are_round_and_few(low, high, ticks):
    """Ticks fit any range."""
    assert plots.log_ticks(low, high) == pytest.approx(ticks)


def test_the_axis_of_speedups_contains_one():
    """Slower candidates alone still show where 1 is."""
    axis = plots.speedup_axis([Speedups(rows=(Row("a", speedup=Interval(0.2, 0.1, 0.3)),))])
    assert axis.low < 0.1
    assert axis.high > 1


def test_the_front_has_what_nothing_beats():
    """A point that another beats in one value and equals in the other is not on it."""
    assert plots.on_front([(1, 5), (2, 3), (2, 4), (3, 3), (4, 1), (0.5, 9)]) == [(0.5, 9), (1, 5), (2, 3), (4, 1)]


def test_a_plot_for_each_known_cost():
    """Costs that fewer than two candidates have, or all alike, have no plot."""
    points = (Point("a", 1.0, compile_s=5.0, error=1e-3), Point("b", 2.0, compile_s=3.0, error=1e-3), Point("c", 3.0))
    assert [plot.title for plot in plots.scatters(Tradeoffs(points=points))] == ["time to compile"]


def test_nothing_costs_nothing():
    """A cost of zero, such as the memory of eager, stands at the start of its axis."""
    points = (Point("a", 1.0, peak_bytes=0), Point("b", 2.0, peak_bytes=1 << 20))
    (plot,) = plots.scatters(Tradeoffs(points=points))
    assert all(plots.LEFT <= mark.x <= plots.RIGHT and plots.TOP <= mark.y <= plots.BOTTOM for mark in plot.marks)
    (only_zero,) = [[*plots.scatters(Tradeoffs(points=points[:1] * 2))]]
    assert only_zero == []


def test_who_led_when():
    """Each leads until the next one does, the last until the race ends."""
    race = Race(seconds=10.0, leads=(Lead("b", 4.0), Lead("a", 0.0), Lead("a", 7.0)))
    assert plots.led(race, 10.0) == {"a": [(0.0, 4.0), (7.0, 10.0)], "b": [(4.0, 7.0)]}


def test_a_race_without_times_has_an_axis():
    """A record without any duration makes no empty axis."""
    axis = plots.race_axis(Race())
    assert (axis.low, axis.high) == (0.0, 1.0)


def test_kernels_by_time():
    """The longest come first; those without a time come last."""
    found = plots.kernels_by_time([Kernel("a"), Kernel("b", seconds=1.0), Kernel("c", seconds=4.0)])
    assert [kernel.name for kernel in found] == ["c", "b", "a"]


def test_a_kernel_has_a_bar_as_long_as_its_share():
    """Of the longest one's time; a kernel without a time has none."""
    kernels = (Kernel("a"), Kernel("b", seconds=1.0), Kernel("c", seconds=4.0))
    page = to_html(Document(title="", graphs=(Graph(name="graph", kernels=kernels),)))
    assert re.findall(r'class="share" width="([\d.]+)%"', page) == ["100.0", "25.0", "0.0"]


@pytest.mark.parametrize(("error", "bound"), [(None, 1.0), (1.0, None), (1.0, 0.0)])
def test_no_share_of_an_unknown_bound(error, bound):
    """An error without a bound has no place on the axis."""
    assert plots.of_bound(Result("a", error=error, bound=bound)) is None


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (figures.duration(0.0), "0 s"),
        (figures.duration(4.2e-9), "0.0042 µs"),
        (figures.duration(4.02e-3), "4.02 ms"),
        (figures.duration(171.5), "172 s"),
        (figures.duration(123_456), "123,456 s"),
        (figures.size(512), "512 bytes"),
        (figures.size(1023 << 20), "1023 MiB"),
        (figures.size(5 << 40), "5 TiB"),
        (figures.error(2.1e-4), "2.1e-4"),
        (figures.error(0.0), "0"),
        (figures.ratio(1234.5), "1,234\N{MULTIPLICATION SIGN}"),
        (figures.ratio(None), ""),
    ],
)
def test_figures(words, text):
    """Figures have few digits, and their unit."""
    assert words == text


def test_ticks_of_trade_offs_are_where_points_lie():
    """Those of the front first; a label that would lie on another one is left out."""
    points = (Point("a", 1.0, compile_s=8.0), Point("b", 2.0, compile_s=2.0), Point("c", 2.001, compile_s=8.001))
    (plot,) = plots.scatters(Tradeoffs(points=points))
    assert sorted(x for x, _ in plot.x_ticks) == sorted({mark.x for mark in plot.marks if mark.best})
    assert [label for _, label in plot.x_ticks] == ["8 s", "2 s"]
    assert [label for _, label in plot.y_ticks] == ["1 s", "2 s"]
