"""Figures of a page where their form changes: at each bound, and just below and above it."""

import math

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page import figures, plots

TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.mark.parametrize(
    ("made", "text"),
    [
        pytest.param(figures.ratio(9.994), f"9.99{TIMES}", id="below ten"),
        pytest.param(figures.ratio(10.0), f"10{TIMES}", id="ten"),
        pytest.param(figures.ratio(-9.5), f"-9.50{TIMES}", id="minus nine and a half"),
        pytest.param(figures.ratio(-12.34), f"-12.3{TIMES}", id="below minus ten"),
        pytest.param(figures.ratio(999.4), f"999{TIMES}", id="below a thousand"),
        pytest.param(figures.ratio(1000.0), f"1,000{TIMES}", id="a thousand"),
        pytest.param(figures.duration(1.0), "1 s", id="a second"),
        pytest.param(figures.duration(0.999), "999 ms", id="below a second"),
        pytest.param(figures.duration(1e-3), "1 ms", id="a millisecond"),
        pytest.param(figures.duration(0.999e-3), "999 µs", id="below a millisecond"),
        pytest.param(figures.duration(1e-6), "1 µs", id="a microsecond"),
        pytest.param(figures.duration(99.4), "99.4 s", id="three digits"),
        pytest.param(figures.duration(99.5), "100 s", id="where three digits end"),
        pytest.param(figures.duration(1234.0), "1,234 s", id="thousands"),
        pytest.param(figures.duration(None), "", id="no duration"),
        pytest.param(figures.size(0), "0 bytes", id="no bytes"),
        pytest.param(figures.size(999), "999 bytes", id="three digits of bytes"),
        pytest.param(figures.size(1000), "1000 bytes", id="four digits of bytes"),
        pytest.param(figures.size(1023), "1023 bytes", id="below a kibibyte"),
        pytest.param(figures.size(1024), "1 KiB", id="a kibibyte"),
        pytest.param(figures.size((1 << 20) - 1), "1024 KiB", id="below a mebibyte"),
        pytest.param(figures.size(1 << 50), "1024 TiB", id="beyond the last unit"),
        pytest.param(figures.error(9.96e-5), "1.0e-4", id="an error that is rounded up"),
        pytest.param(figures.error(1.0), "1.0e0", id="an error of one"),
        pytest.param(figures.error(math.inf), "inf", id="an infinite error"),
    ],
)
def test_figures(made, text):
    """The unit and the digits are those of the value."""
    assert made == text


TINY = 5e-324


@pytest.mark.parametrize(
    ("made", "value"),
    [
        pytest.param(figures.seconds_of(0.0), 0.0, id="no time"),
        pytest.param(figures.seconds_of(-TINY), None, id="less than no time"),
        pytest.param(figures.seconds_of(math.inf), None, id="for ever"),
        pytest.param(figures.seconds_of(math.nan), None, id="no number"),
        pytest.param(figures.count_of(0), 0, id="none"),
        pytest.param(figures.count_of(-1), None, id="fewer than none"),
        pytest.param(figures.count_of(figures.MOST), figures.MOST, id="the most"),
        pytest.param(figures.count_of(figures.MOST + 1), None, id="more"),
        pytest.param(figures.error_of(-math.inf), None, id="an infinite error"),
        pytest.param(figures.error_of(0.0), 0.0, id="no error"),
        pytest.param(figures.interval_of(Interval(1.0, 0.0, 2.0)), None, id="from zero"),
        pytest.param(figures.interval_of(Interval(1.0, 1.0, math.inf)), None, id="without end"),
        pytest.param(figures.interval_of(Interval(1.0, 0.5, 2.0)), Interval(1.0, 0.5, 2.0), id="an interval"),
    ],
)
def test_what_is_a_figure(made, value):
    """What is none is left out of a document."""
    assert made == value


@pytest.mark.parametrize(
    ("high", "ticks"), [(2.4, [1.0, 1.5, 2.0]), (2.5, [1, 1.5, 2]), (2.6, [1, 1.5, 2])], ids=["below", "at", "above"]
)
def test_where_an_axis_is_narrow(high, ticks):
    """From a factor of 2.5 on an axis has the round values of decades."""
    assert plots.log_ticks(1.0, high) == pytest.approx(ticks)
