"""The report: what it says, what it keeps, what it draws."""

import re

import pytest
from bench_cells import cell, write

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.measure import Interval
from benchmarks import plots, records
from benchmarks.controls import SLOWED
from benchmarks.records import AGAIN, Compile
from benchmarks.report import cases_of, tables_of, write_report


@pytest.fixture
def results(tmp_path):
    """One case that a template wins, one that it loses, a wrong peer, one that cannot be had, one over the limit."""
    cells = [
        *(cell(peer, case=case) for case in ("gemm", "norm") for peer in ("eager", AGAIN)),
        cell(SLOWED, 1.05e-3, case="gemm"),
        cell(SLOWED, 1.05e-3, case="norm", options={"injected": 0.09}),
        *(cell("default", 0.9e-3, case=case) for case in ("gemm", "norm")),
        cell("t", 0.6e-3, case="gemm"),
        cell("t", 2e-3, case="norm"),
        cell("bad", case="gemm", status="fail_accuracy", reason="output: RMSE 1 | at most 0.1"),
        cell("tma", case="gemm", status="unavailable", reason="needs a GPU"),
        cell("magic", 0.4e-3, case="norm"),
        cell("freezing", 0.9e-3, case="gemm", numerics="frozen"),
    ]
    return write(tmp_path / "full.jsonl", cells)


@pytest.fixture
def report(results, tmp_path):
    return write_report([results], tmp_path / "out" / "h200.md", plots=False).read_text()


@pytest.fixture
def each(results, tmp_path):
    return cases_of(write_report([results], tmp_path / "out" / "h200.md", plots=False)).read_text()


def row(report, section, peer):
    """Return the cells of a peer's row below a heading or a line that starts so."""
    lines = report.partition(f"\n{section}")[2].splitlines()
    found = next(line for line in lines if line.startswith(f"| {peer} "))
    return [part.strip() for part in found.replace("\\|", "/").split("|")[1:-1]]


def test_summary(report):
    """A win and a loss: cases, pass rate, an unclipped mean, rates, marks, the worst case, compile, memory."""
    found = row(report, "### Device time, cold L2, bf16", "t")
    assert found[:3] == ["t", "2", "100%"]
    assert float(found[3]) == pytest.approx((1 / 0.6 / 2) ** 0.5, rel=0.02)
    assert found[6:10] == ["50%", "50%", "0%", "1/0/1"]
    assert found[10].startswith("0.5")
    assert found[10].endswith("norm")
    assert found[11] == "5.0 s, 1.0 s"


def test_classes_have_summaries_of_their_own(report):
    """What folds its weights stands apart, and has no ratio."""
    assert row(report, "### Device time, cold L2, frozen", "freezing")[3:6] == ["", "", ""]


def test_a_case_has_a_table_for_each_clock(each):
    """Times with intervals and percentiles, per cent of the limit, ratios; the wall's has no per cent."""
    device = row(each, "## gemm", "t")
    assert device[1].endswith("]")
    assert " µs [" in device[1]
    low, high = map(float, device[2].split(", "))
    assert 600 < low < high < 620
    assert float(device[3].split()[0]) == pytest.approx(100 * 0.5 / 0.6, rel=0.02)
    wall = row(each.partition("\n## gemm")[2], "Wall time.", "t")
    assert len(wall) == len(device) - 1


def cases_text(cells, tmp_path):
    return cases_of(write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)).read_text()


def test_kernels_of_a_call(tmp_path, each):
    """How many a call launches, where that is known of anyone."""
    text = cases_text([cell("eager"), cell("t", compile=Compile(kernels=3))], tmp_path)
    assert (row(text, "## gemm", "t")[-1], row(text, "## gemm", "eager")[-1]) == ("3", "")
    assert "| peak | kernels |" in text
    assert "| kernels |" not in each


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        pytest.param((True, True), "Peers shared one cache: no compile times.", id="all"),
        pytest.param((False, True), "Some peers shared one cache: no compile times.", id="some"),
        pytest.param((False, False), "", id="none"),
    ],
)
def test_one_cache_is_told(tmp_path, shared, said):
    """Why there is no compile time stands above the table."""
    cells = [cell(peer, one_cache=one, group=peer) for peer, one in zip(("eager", "t"), shared, strict=True)]
    line = next(line for line in cases_text(cells, tmp_path).splitlines() if line.startswith("Wall time."))
    assert line == f"Wall time. No noise floor. 30 rounds. {said}".rstrip()


def test_noise_floors_of_several_groups(tmp_path):
    """A table of rows from two processes says how far their floors reach."""
    later = [cell("eager", group="later"), cell(AGAIN, 1.1e-3, group="later")]
    text = cases_text([cell("eager"), cell(AGAIN), cell("t"), *later], tmp_path)
    assert re.search(r"\nDevice time, cold L2\. Noise floors ±1\.\d% to ±1\d\.\d%\. ", text)


def test_means_over_fewer_cases_are_marked(report):
    """A mean that leaves out cases, which others have, has an asterisk; it is no lesser figure, but another."""
    section = "### Device time, cold L2, bf16"
    assert row(report, section, "magic")[3].endswith(r"\*")
    assert "*" not in "".join(row(report, section, "t"))


def test_cases_stand_in_the_order_of_the_table(tmp_path):
    """Whatever was run first: as `list` shows them, and those that it does not show last."""
    cells = [cell("eager", case=case) for case in ("mine", "rope", "softmax", "gemm_8192")]
    text = cases_text(cells, tmp_path)
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == ["gemm_8192", "softmax", "rope", "mine"]


def test_what_has_no_time_has_its_word(each):
    """A wrong peer and one that cannot be had say so in the place of a time; a pipe does not break the table."""
    assert row(each, "## gemm", "bad")[1] == "fail_accuracy(output: RMSE 1 / at most 0.1)"
    assert row(each, "## gemm", "tma")[1] == "unavailable(needs a GPU)"


def test_what_was_compiled_beside_others_is_marked(tmp_path):
    """A compile in the timing process is no cold one."""
    cells = [cell("eager"), cell("t", compile=Compile(cold_s=5.0))]
    out = write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)
    assert row(out.read_text(), "### Device time, cold L2, bf16", "t")[11] == "~5.0 s, -"
    assert row(cases_of(out).read_text(), "## gemm", "t")[-2] == "~5.0 s, -"


def test_a_device_time_that_holds_the_hosts_is_marked(tmp_path):
    """A dagger, on that clock alone; and how many calls a sample is."""
    cells = [cell("eager"), cell("t", exposed=True, repeats={"wall": 40, "events": 1})]
    text = cases_of(write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)).read_text()
    assert row(text, "## gemm", "t")[1].endswith("] †")
    wall = text.partition("\n## gemm")[2]
    assert row(wall, "Wall time. No noise floor. 30 rounds. A sample is the mean of up to 40 calls.", "t")[1][-1] == "]"


@pytest.fixture
def autos(tmp_path):
    """Auto wins one case, decided in time, and loses the other, decided late; the modes compile in 5 s each."""

    def decided(winner, seconds, **options):
        return {"winner": winner, "options": options, "seconds": seconds, "rows": [[winner, "pass", 1e-3, 5.0, ""]]}

    cells = [
        *(cell(peer, case=case) for case in ("gemm", "norm") for peer in ("eager", AGAIN)),
        *(cell("default", 0.9e-3, case=case) for case in ("gemm", "norm")),
        cell("max-autotune", 0.8e-3, case="gemm"),
        cell("max-autotune", 1.2e-3, case="norm"),
        cell("auto", 0.4e-3, case="gemm", decided=decided("tuned", 9.0, max_autotune=True)),
        cell("auto", 1.8e-3, case="norm", decided=decided("default", 11.0)),
    ]
    return write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False).read_text()


def test_what_auto_chose(autos):
    """The winner, its race, its wall time over the best mode and over each, and what compiling all modes takes."""
    gemm, norm = (row(autos, "### auto", case) for case in ("gemm", "norm"))
    assert gemm[:7] == ["gemm", "tuned", "max_autotune=True", "9.0 s", "5.0 s", "10.0 s", "max-autotune"]
    assert gemm[7] == gemm[9]
    assert [float(ratio.split()[0]) for ratio in gemm[8:]] == pytest.approx([2.19, 1.95], rel=0.03)
    assert (norm[1], norm[6]) == ("default", "default")
    assert norm[7].startswith("0.5")


def test_auto_is_held_against_its_goals(autos):
    """Means over all cases, and which cases miss what is wanted of each."""
    means = row(autos, "### auto", "all")
    assert means[3:7] == ["20.0 s", "10.0 s", "20.0 s", "geomean"]
    assert float(means[7]) == pytest.approx((0.82 / 0.42 * 0.92 / 1.82) ** 0.5, rel=0.03)
    assert "- Against the best mode, wins/ties/losses: 1/0/1." in autos
    assert "- Below 0.97x of the best mode beyond noise: norm." in autos
    assert "- Longer to decide than to compile all modes, of 2 where both are known: norm." in autos


def test_nothing_is_said_of_auto_where_it_was_not_run(report):
    """Files without a decision have no such table."""
    assert "What auto chose" not in report


def test_controls(report, each):
    """The noise of A/A, whether the injected work was seen, and what is over the limit."""
    assert "- Device time, cold L2: 5.0% to 9.0% more work is seen in 2 of 2 groups, and at its size in 1." in report
    assert "- Above 100 % of the limit: magic in norm." in report
    assert "**over 100 %: a bug of the suite until explained**" in row(each, "## norm", "magic")[3]


def test_ties_are_marked(each):
    """A ratio within the noise floor is in italics."""
    assert row(each, "## gemm", AGAIN)[4].startswith("*1.00")
    assert not row(each, "## gemm", "t")[4].startswith("*")


def test_how_it_was_measured(report):
    """The command, the environment, the ceilings."""
    assert "python -m benchmarks run --suite full" in report
    assert "| torch | 2.11.0 |" in report
    assert "| copy | 4 TB/s | test |" in report


def test_the_reading_is_kept(results, tmp_path):
    """What a person wrote below "## Reading" outlives the next report."""
    out = tmp_path / "h200.md"
    out.write_text("# Old\n\n## Reading\n\nTemplates lose on norms.\n")
    text = write_report([results], out, plots=False).read_text()
    assert text.endswith("\n## Reading\n\nTemplates lose on norms.\n")
    assert "# Old" not in text
    assert write_report([results], out, plots=False).read_text() == text


def test_files_of_two_machines(results, tmp_path):
    """A report is of one machine."""
    other = write(tmp_path / "other.jsonl", [cell("eager")], device_name="AMD EPYC")
    with pytest.raises(BackendKwargsError) as error:
        write_report([results, other], tmp_path / "out.md")
    assert (
        str(error.value) == "A report is of one device_name, got ['AMD EPYC', 'NVIDIA H200']: report these files apart."
    )


def test_shards_are_one_report(tmp_path):
    """Cells of several files stand in one table of contents."""
    shards = [write(tmp_path / f"{case}.jsonl", [cell("eager", case=case)]) for case in ("gemm", "norm")]
    text = cases_of(write_report(shards, tmp_path / "out.md", plots=False)).read_text()
    assert "## gemm (" in text
    assert "## norm (" in text


def test_a_cpu_has_wall_time_alone(tmp_path):
    """Where no cell has device time there is no table of it."""
    cells = [cell(peer, device=False) for peer in ("eager", AGAIN, "default")]
    text = write_report([write(tmp_path / "cpu.jsonl", cells)], tmp_path / "out.md").read_text()
    assert "Device time" not in text
    assert "roofline" not in text
    assert "out_speedup.png" in text


def test_three_plots(results, tmp_path):
    """Three images stand beside the report, which shows them."""
    out = write_report([results], tmp_path / "h200.md")
    for name in ("speedup", "roofline", "compile"):
        assert (tmp_path / f"h200_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(h200_{name}.png)" in out.read_text()


def test_nothing_timed_draws_nothing(tmp_path):
    """A file in which nobody passed has its status words, and no plot."""
    cells = [cell("eager", status="oom")]
    out = write_report([write(tmp_path / "bad.jsonl", cells)], tmp_path / "out.md")
    assert "| eager | oom |" in cases_of(out).read_text()
    assert "png" not in out.read_text()


def test_names_do_not_cover_each_other():
    """Of names round one point each finds a place of its own."""
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
    """A peer of few cases has a mean of other things: it is not among those that are drawn."""
    cells = [cell(peer, case=case) for case in "abc" for peer in ("eager", "default", "t")]
    cells += [cell("half", case=case) for case in "ab"] + [cell("seldom", case="a")]
    found = tables_of(records.read(write(tmp_path / "r.jsonl", cells)))["device"]
    assert [of.peer for of in plots._costs(found)] == ["default", "t", "half"]


@pytest.fixture
def on_two_days(tmp_path):
    """A template that gains nothing, on a day when all is twice as fast as on the next, when another gains a tenth."""
    first = [cell(peer, 0.5e-3, group="first") for peer in ("eager", "default", "idle")]
    then = [cell(peer, group="then") for peer in ("eager", "default")] + [cell("quick", 0.9e-3, group="then")]
    (table,) = tables_of(records.read(write(tmp_path / "r.jsonl", [*first, *then])))["device"].values()
    return table


def test_the_best_is_the_fastest_over_its_own_eager(on_two_days):
    """A process whose device ran faster makes no peer the best one."""
    assert plots.roles(on_two_days)["best template"].cell.peer == "quick"


def test_the_roofline_is_of_one_process(on_two_days):
    """Shares of a limit are times: those of another day are not drawn beside them."""
    assert [e.cell.peer for e in plots._of_one_process(on_two_days)] == ["eager", "default", "quick"]


def test_what_is_slow_stands_at_the_edge():
    """A named peer as well as one in grey, so that neither looks faster than the other."""
    assert plots._clipped(Interval(0.2, 0.1, 0.5)) == Interval(plots.SLOWEST, plots.SLOWEST, 0.5)


def test_cases_without_arithmetic_stand_side_by_side(tmp_path):
    """Where hardly anything is computed, the intensity tells nothing: each case has a line of its own in the plot."""
    work = {"flops": 0.0, "bytes": 1e9, "unit": "bf16"}
    cells = [cell("eager", case=case, work=work) for case in "abc"] + [cell("eager")]
    found = tables_of(records.read(write(tmp_path / "r.jsonl", cells)))["device"]
    places = {key[0]: x for key, x in plots._intensities(found).items()}
    assert len(set(places.values())) == 4
    assert max(places[case] for case in "abc") < plots.EDGE < 1 < places["gemm"]


def test_the_page_leads_to_each_case(report, each):
    """Tables of cases stand in a file of their own, which the summary names."""
    assert "[h200_cases.md](h200_cases.md)" in report
    assert "## gemm" not in report
    assert each.startswith("# Each case on NVIDIA H200, torch 2.11.0\n")


def test_files_that_hold_no_results(tmp_path):
    """Another file is not an empty report."""
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(BackendKwargsError) as error:
        write_report([tmp_path / "other.jsonl"], tmp_path / "out.md")
    assert str(error.value) == "report wants JSON lines of `run --out`, got files without any."
