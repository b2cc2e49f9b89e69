"""The plots: their points, positions and names."""

import pytest

from backend_kwargs.trial import Interval
from benchmarks.analysis import plots
from benchmarks.analysis.report import tables_of
from benchmarks.execution import records
from benchmarks.execution.records import AGAIN, Compile
from tests.benchmarks.bench_cells import cell, write


def test_names_do_not_cover_each_other():
    """The names of points at one place do not overlap."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 2), ylim=(0, 2))
    plots._label(figure, axes, [(1.0, 1.0, f"peer {at}", "0.2") for at in range(12)])
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(name).extents for name in axes.texts]  # without the line to the point
    assert not any(plots.overlap(tuple(a), tuple(b)) for at, a in enumerate(boxes) for b in boxes[:at])


def test_compile_times_are_of_most_cases(tmp_path):
    """A peer is drawn only if most of its cases have a speedup and a compile time."""
    cells = [cell(peer, case=case) for case in "abc" for peer in ("eager", "default", "t")]
    cells += [cell("half", case=case) for case in "ab"] + [cell("seldom", case="a")]
    cells += [cell("unknown", case=case, compile=Compile(cold_s=5.0 if case == "a" else None)) for case in "abc"]
    found = tables_of(records.read(write(tmp_path / "r.jsonl", cells)))["device"]
    assert [of.peer for of in plots._costs(found)] == ["default", "t", "half"]


def test_compile_times_are_of_most_cases_that_have_a_speedup(tmp_path):
    """A passing case without a speedup does not count, just like a failing one."""
    cells = [cell(peer, case=case) for case in "abc" for peer in ("eager", "default")]
    cells += [cell("late", case=case, exposed=case != "a") for case in "abc"]
    found = tables_of(records.read(write(tmp_path / "r.jsonl", cells)))["device"]
    assert [of.peer for of in plots._costs(found)] == ["default"]


def test_compiles_beside_others_are_hollow(tmp_path):
    """A compile in its own process is a filled mark, any other a hollow one with a note."""
    cells = [cell("eager"), cell("default"), cell("t", compile=Compile(cold_s=2.0))]
    figure = drawn(cells, tmp_path, plots.compile_time)
    faces = [of.get_facecolor()[0, :3].tolist() == [1.0, 1.0, 1.0] for of in figure.axes[0].collections]
    assert faces == [False, True]
    assert figure.get_suptitle().endswith(
        "\nHollow: compiled in one process with other peers, where earlier compiles make later ones cheaper."
    )
    assert "Hollow" not in drawn(cells[:2], tmp_path / "fresh", plots.compile_time).get_suptitle()


def drawn(cells, tmp_path, plot):
    """Return the figure of a plot."""
    from matplotlib.figure import Figure

    return plot(Figure, tables_of(records.read(write(tmp_path / "drawn.jsonl", cells))))


def texts(axes):
    return [each.get_text() for each in axes.texts]


@pytest.fixture
def on_two_days():
    """A template without gain from a process twice as fast as that of another template, which gains a tenth."""
    first = [cell(peer, 0.7e-3, group="first") for peer in ("eager", AGAIN, "default", "idle")]
    then = [cell(peer, group="then") for peer in ("eager", AGAIN, "default")] + [cell("quick", 0.9e-3, group="then")]
    return {"latest is faster": [*first, *then], "earlier is faster": [*then, *first]}


@pytest.mark.parametrize("order", ["latest is faster", "earlier is faster"])
def test_both_plots_name_the_fastest_over_its_own_eager(on_two_days, order, tmp_path):
    """The best peer is chosen by its speedup, not by a faster device or a later run.

    On the plot of limits, a faster process does not lift a peer above eager either.
    """
    found = tables_of(records.read(write(tmp_path / "r.jsonl", on_two_days[order])))["device"]
    (table,) = found.values()
    assert plots.roles(table)["best template"].cell.peer == "quick"
    shares = plots._shares(table)
    assert shares["best template"] / shares["eager"] == pytest.approx(1 / 0.9, rel=0.02)


def test_what_the_roofline_leaves_out(tmp_path):
    """A case without a score, for instance because it fits in the L2 or its work is unknown, is named."""
    small = {"flops": 0.0, "bytes": 5e7, "unit": "bf16"}
    cells = [cell("eager"), cell("eager", case="small", work=small), cell("eager", case="unknown", work=None)]
    title = drawn(cells, tmp_path, plots.roofline).get_suptitle()
    assert title.endswith("\nWithout a scored limit or a time: small, unknown.")
    assert "Without" not in drawn(cells[:1], tmp_path / "all", plots.roofline).get_suptitle()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [pytest.param(0.8e-3, ["t"], id="faster"), pytest.param(0.895e-3, [], id="within noise")],
)
def test_a_winner_out_of_noise_has_no_name(seconds, expected, tmp_path):
    """The best template is named only if it is faster than default beyond noise."""
    cells = [cell("eager"), cell(AGAIN), cell("default", 0.9e-3), cell("t", seconds)]
    for axes in drawn(cells, tmp_path, plots.speedups).axes:
        assert texts(axes) == expected


def test_a_mark_at_the_edge_has_its_value(tmp_path):
    """Points slower than the axis are labelled with their value."""
    cells = [cell("eager"), cell(AGAIN), cell("default", 5e-3), cell("t", 1.5e-3, kind="tvm")]
    assert texts(drawn(cells, tmp_path, plots.speedups).axes[0]) == ["0.2x"]


def test_a_clock_without_speedups_has_no_panel(tmp_path):
    """If all device times include host gaps, only wall times are drawn."""
    cells = [cell(peer, exposed=True) for peer in ("eager", "default")]
    (axes,) = drawn(cells, tmp_path, plots.speedups).axes
    assert axes.get_xlabel() == "Wall time: speedup over eager"
    assert drawn(cells, tmp_path / "none", plots.roofline) is None


def test_what_is_slow_stands_at_the_edge():
    """Slow peers, named or grey, are drawn at the edge, so that neither looks faster than the other."""
    assert plots._clipped(Interval(0.2, 0.1, 0.5)) == Interval(plots.SLOWEST, plots.SLOWEST, 0.5)


def test_cases_without_arithmetic_stand_side_by_side(tmp_path):
    """Cases with hardly any arithmetic are drawn side by side, each with its own line."""
    work = {"flops": 0.0, "bytes": 1e9, "unit": "bf16"}
    cells = [cell("eager", case=case, work=work) for case in "abc"] + [cell("eager")]
    found = tables_of(records.read(write(tmp_path / "r.jsonl", cells)))["device"]
    places = {key[0]: x for key, x in plots._intensities(found).items()}
    assert len(set(places.values())) == 4
    assert max(places[case] for case in "abc") < plots.EDGE < 1 < places["gemm"]


def test_the_axis_tells_the_state_of_the_l2(tmp_path):
    """Times with a warm L2 are labelled as warm."""
    cells = [cell(peer, l2="warm") for peer in ("eager", AGAIN, "default")]
    assert drawn(cells, tmp_path, plots.speedups).axes[0].get_xlabel() == "Device time, warm L2: speedup over eager"
