"""What follows from the figures: when compiling pays, and what changed since an older report."""

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page import Document, changes, pays_back, tradeoffs_of
from backend_kwargs.page.document import Row, Speedups


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        pytest.param((30.0, 1.0, 10.0, 2.0), 20, id="after some calls"),
        pytest.param((30.0, 1.0, 10.0, 1.7), 29, id="rounded up"),
        pytest.param((5.0, 1.0, 10.0, 2.0), 0, id="at once, if it compiles faster"),
        pytest.param((30.0, 2.0, 10.0, 2.0), None, id="never, if it is no faster"),
    ],
)
def test_pays_back(arguments, calls):
    """The time to compile is saved after some calls, or never."""
    assert pays_back(*arguments) == calls


def test_points_are_right_results():
    """Candidates that failed, or gave wrong results, are nothing to choose."""
    times = Interval(1.0, 1.0, 1.0)
    rows = (Row("a", latency=times), Row("b", latency=times), Row("c", "fail_accuracy", latency=times), Row("d"))
    assert [point.name for point in tradeoffs_of(Speedups(rows=rows)).points] == ["a", "b"]
    assert tradeoffs_of(Speedups(rows=rows[1:])) is None


def report(*rows, noise=1.0, over="eager", title="", **environment):
    found = Speedups(title, over, Interval(1.0, 1 / noise, noise), tuple(rows))
    return Document("x", environment=environment, speedups=(found,))


def row(name, speedup, spread=0.01, **more):
    return Row(name, speedup=Interval(speedup, speedup - spread, speedup + spread), **more)


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        pytest.param(report(row("a", 1.5)), report(row("a", 1.505)), [], id="within the intervals"),
        pytest.param(report(row("a", 1.5)), report(row("a", 1.6)), [("faster", "a")], id="faster"),
        pytest.param(report(row("a", 1.6)), report(row("a", 1.5)), [("slower", "a")], id="slower"),
        pytest.param(report(row("a", 1.5)), report(row("a", 1.6), noise=1.1), [], id="within today's noise"),
        pytest.param(report(row("a", 1.5), noise=1.1), report(row("a", 1.6)), [], id="within the noise of then"),
        pytest.param(report(row("a", 1.5)), report(row("a", 1.6), over="b"), [], id="over something else"),
        pytest.param(report(row("a", 1.5)), report(row("b", 1.5)), [("new", "b"), ("lost", "a")], id="new and lost"),
        pytest.param(report(row("a", 1.5)), report(Row("a", "fail_accuracy")), [("status", "a")], id="fails now"),
        pytest.param(
            report(row("a", 1.5, won=True), row("b", 1.4)),
            report(row("a", 1.5), row("b", 1.5, won=True)),
            [("winner", "the winner"), ("faster", "b")],
            id="another winner",
        ),
        pytest.param(
            report(row("a", 1.5), title="one"),
            report(row("a", 1.5), title="two"),
            [],
            id="another title",
        ),
    ],
)
def test_changes(old, new, found):
    """Changes are those that neither the intervals nor the noise explains."""
    assert [(each.kind, each.name) for each in changes(old, new).changes] == found


@pytest.mark.parametrize(
    ("median", "noise", "kinds"),
    [
        pytest.param(2.0, 1.0, [], id="where the old interval ends"),
        pytest.param(2.25, 1.0, ["faster"], id="beyond it"),
        pytest.param(2.25, 1.5, [], id="by the noise"),
        pytest.param(2.5, 1.5, ["faster"], id="by more than the noise"),
        pytest.param(1.0, 1.0, [], id="where the old interval begins"),
        pytest.param(0.75, 1.0, ["slower"], id="below it"),
        pytest.param(0.75, 2.0, [], id="slower by the noise"),
        pytest.param(0.7, 2.0, ["slower"], id="slower by more than the noise"),
    ],
)
def test_where_a_change_begins(median, noise, kinds):
    """An interval that touches the old one, or a change as large as the noise, is none."""
    old, new = row("a", 1.5, spread=0.25), row("a", median, spread=0.25)
    assert [each.kind for each in changes(report(old, noise=noise), report(new)).changes] == kinds


def test_what_makes_reports_hard_to_compare():
    """Another torch, or another baseline, is named."""
    old, new = report(row("a", 1.5), torch="2.12.0", dtype="a"), report(row("a", 1.5), over="b", torch="2.13.0")
    assert changes(old, new).differs == (
        "torch was 2.12.0, and is 2.13.0",
        "speedups were over eager, and are over b: they are not compared",
    )


def test_rows_that_stay_are_counted():
    """Rows without a change are counted, not listed."""
    old = report(row("a", 1.5), row("b", 1.5), row("c", 1.0))
    assert changes(old, report(row("a", 1.5), row("b", 1.9))).same == 1
