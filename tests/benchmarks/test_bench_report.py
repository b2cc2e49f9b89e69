"""The report: its contents, and what it keeps of an earlier one."""

import dataclasses
import re

import pytest

from backend_kwargs.errors import BackendKwargsError
from benchmarks.analysis.report import cases_of, write_report
from benchmarks.execution.controls import SLOWED
from benchmarks.execution.records import AGAIN, Compile
from tests.benchmarks.bench_cells import cell, write
from tests.full_disk import full_disk


@pytest.fixture
def results(tmp_path):
    """One case that a template wins, one that it loses, a wrong peer, an unavailable one, and one over the limit."""
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
    """Return the cells of a peer's row below a heading or a line that starts with this text."""
    lines = report.partition(f"\n{section}")[2].splitlines()
    found = next(line for line in lines if line.startswith(f"| {peer} "))
    return [part.strip() for part in found.replace("\\|", "/").split("|")[1:-1]]


def test_summary(report):
    """The summary has cases, pass rate, unclipped mean, rates, marks, worst case, compile time and memory."""
    found = row(report, "### Device time, cold L2, bf16", "t")
    assert found[:3] == ["t", "2", "100%"]
    assert float(found[3]) == pytest.approx((1 / 0.6 / 2) ** 0.5, rel=0.02)
    assert found[6:10] == ["50%", "50%", "0%", "1/0/1"]
    assert found[10].startswith("0.5")
    assert found[10].endswith("norm")
    assert found[11] == "5.0 s, 1.0 s"


def test_classes_have_summaries_of_their_own(report):
    """Peers that fold weights have a separate summary, and no ratio to others."""
    assert row(report, "### Device time, cold L2, frozen", "freezing")[3:6] == ["", "", ""]


def test_a_case_has_a_table_for_each_clock(each):
    """A case has a table per clock, with intervals, percentiles and ratios, and shares of the limit for device time."""
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
    """The number of kernels per call is shown if it is known for any peer."""
    text = cases_text([cell("eager"), cell("t", compile=Compile(kernels=3))], tmp_path)
    assert (row(text, "## gemm", "t")[-1], row(text, "## gemm", "eager")[-1]) == ("3", "")
    assert "| peak | kernels |" in text
    assert "| kernels |" not in each


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        pytest.param((True, True), "Peers shared one cache: no compile times.", id="all"),
        pytest.param((False, True), "Some peers shared one cache: no compile times.", id="some"),
        pytest.param((False, False), "", id="none"),
    ],
)
def test_one_cache_is_told(tmp_path, shared, expected):
    """The table says why it has no compile times."""
    cells = [cell(peer, one_cache=one, group=peer) for peer, one in zip(("eager", "t"), shared, strict=True)]
    line = next(line for line in cases_text(cells, tmp_path).splitlines() if line.startswith("Wall time."))
    assert line == f"Wall time. No noise floor. 30 rounds. {expected}".rstrip()


def test_noise_floors_of_several_groups(tmp_path):
    """A table with rows from two processes shows the range of their noise floors."""
    later = [cell("eager", group="later"), cell(AGAIN, 1.1e-3, group="later")]
    text = cases_text([cell("eager"), cell(AGAIN), cell("t"), *later], tmp_path)
    assert re.search(r"\nDevice time, cold L2\. Noise floors ±1\.\d% to ±1\d\.\d%\. ", text)


def test_means_over_fewer_cases_are_marked(report):
    """A mean over fewer cases than others has an asterisk."""
    section = "### Device time, cold L2, bf16"
    assert row(report, section, "magic")[3].endswith(r"\*")
    assert "*" not in "".join(row(report, section, "t"))


def test_cases_stand_in_the_order_of_the_table(tmp_path):
    """Cases are in the order of `list`, and unknown ones come last, whatever ran first."""
    cells = [cell("eager", case=case) for case in ("mine", "rope", "softmax", "gemm_8192")]
    text = cases_text(cells, tmp_path)
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == ["gemm_8192", "softmax", "rope", "mine"]


def test_what_has_no_time_has_its_word(each):
    """A wrong or unavailable peer shows its status instead of a time; a pipe does not break the table."""
    assert row(each, "## gemm", "bad")[1] == "fail_accuracy(output: RMSE 1 / at most 0.1)"
    assert row(each, "## gemm", "tma")[1] == "unavailable(needs a GPU)"


def test_what_was_compiled_beside_others_is_marked(tmp_path):
    """A compile in the timing process is not shown as a cold one."""
    cells = [cell("eager"), cell("t", compile=Compile(cold_s=5.0))]
    out = write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)
    assert row(out.read_text(), "### Device time, cold L2, bf16", "t")[11] == "~5.0 s, -"
    assert row(cases_of(out).read_text(), "## gemm", "t")[-2] == "~5.0 s, -"


def test_how_many_compiles_are_known_is_told(tmp_path):
    """A median over fewer cases than all shows their number."""
    cells = [cell(peer, case=case) for case in "ab" for peer in ("eager", "default")]
    cells += [cell("t", case="a"), cell("t", case="b", compile=Compile())]
    out = write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)
    table = "### Device time, cold L2, bf16"
    assert [row(out.read_text(), table, peer)[11] for peer in ("default", "t")] == ["5.0 s, 1.0 s", "5.0 s, 1.0 s in 1"]


def test_a_device_time_that_holds_the_hosts_is_marked(tmp_path):
    """A device time with host gaps has a dagger on that clock only; the calls per sample are shown."""
    cells = [cell("eager"), cell("t", exposed=True, repeats={"wall": 40, "events": 1})]
    text = cases_of(write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False)).read_text()
    assert row(text, "## gemm", "t")[1].endswith("] †")
    wall = text.partition("\n## gemm")[2]
    assert row(wall, "Wall time. No noise floor. 30 rounds. A sample is the mean of up to 40 calls.", "t")[1][-1] == "]"


@pytest.fixture
def autos(tmp_path):
    """Auto wins one case, decided quickly, and loses the other, decided late; the modes compile in 5 s each."""

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
    """The table shows the winner, its race, its wall time over each mode, and the compile time of all modes."""
    gemm, norm = (row(autos, "### auto", case) for case in ("gemm", "norm"))
    assert gemm[:7] == ["gemm", "tuned", "max_autotune=True", "9.0 s", "5.0 s", "10.0 s", "max-autotune"]
    assert gemm[7] == gemm[9]
    assert [float(ratio.split()[0]) for ratio in gemm[8:]] == pytest.approx([2.19, 1.95], rel=0.03)
    assert (norm[1], norm[6]) == ("default", "default")
    assert norm[7].startswith("0.5")


def test_auto_is_held_against_its_goals(autos):
    """The report shows the means over all cases, and the cases that miss each goal."""
    means = row(autos, "### auto", "all")
    assert means[3:7] == ["20.0 s", "10.0 s", "20.0 s", "geomean"]
    assert float(means[7]) == pytest.approx((0.82 / 0.42 * 0.92 / 1.82) ** 0.5, rel=0.03)
    assert "- Against the best mode, wins/ties/losses: 1/0/1." in autos
    assert "- Below 0.97x of the best mode beyond noise: norm." in autos
    assert "- Longer to decide than to compile all modes, of 2 where both are known: norm." in autos


def test_nothing_is_said_of_auto_where_it_was_not_run(report):
    """Files without a decision have no table of auto's choices."""
    assert "What auto chose" not in report


def test_controls(report, each):
    """The report shows the noise of A/A, where the injected work did not show, and results over the limit."""
    assert (
        "- Device time, cold L2: 5.0% to 9.0% more work, in 2 groups. Not seen: none. Not at its size: norm." in report
    )
    over = "- Above 100 % of the limit by the best ceilings of all runs, beyond noise:"
    assert f"{over} magic in norm." in report
    assert "**over 100 %: a bug of the suite until explained**" in row(each, "## norm", "magic")[3]


def report_text(cells, tmp_path):
    return write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False).read_text()


def test_groups_in_which_the_injected_work_is_not_seen(tmp_path):
    """Each group in which the injected work does not show is named, with a dagger if device time has host gaps."""
    cells = [cell(peer, case=case) for case in "abc" for peer in ("eager", AGAIN)]
    cells += [cell(SLOWED, 1.05e-3, case="a"), cell(SLOWED, case="b"), cell(SLOWED, 1.05e-3, case="c", exposed=True)]
    line = "5.0% to 5.0% more work, in 3 groups. Not seen: b, c †. Not at its size: b, c †."
    assert f"- Device time, cold L2: {line}\n" in report_text(cells, tmp_path)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param(
            (0.9e-3, 1.1e-3),
            "1 of 2 cells by their medians, at most t in gemm at 110.0 %, as clocks differ between runs",
            id="one",
        ),
        pytest.param((0.9e-3, 0.8e-3), "none of 2 cells", id="none"),
    ],
)
def test_limits_of_the_own_run(tmp_path, limits, expected):
    """Per cent of the limit uses the best ceilings over all runs; the figure by the cell's own run is also given."""
    peers = zip(("eager", "t"), limits, strict=True)
    cells = [dataclasses.replace(cell(peer, limit_s=limit), device_s=[1e-3] * 30) for peer, limit in peers]
    assert f"- Above 100 % of the limit by the ceilings of its own run: {expected}.\n" in report_text(cells, tmp_path)


def test_ties_are_marked(each):
    """A ratio within the noise floor is in italics."""
    assert row(each, "## gemm", AGAIN)[4].startswith("*1.00")
    assert not row(each, "## gemm", "t")[4].startswith("*")


def test_how_it_was_measured(report):
    """The report shows the commands, the environment and the ceilings."""
    assert "python -m benchmarks run --suite full" in report
    assert "| torch | 2.11.0 |" in report
    assert "| ceiling | best of 1 runs | attempt |\n|---|---:|---:|\n| copy | 4 TB/s | test |" in report


def test_many_commands_are_folded(tmp_path):
    """More than six commands are collapsed into one block."""
    files = [write(tmp_path / f"{at}.jsonl", [cell("eager")], command=f"run {at}") for at in range(7)]
    six, seven = (write_report(files[:count], tmp_path / "out.md", plots=False).read_text() for count in (6, 7))
    assert "<details>" not in six
    assert "<details><summary>7 commands</summary>\n\n```\nrun 0\nrun 1\n" in seven
    assert "run 6\n```\n\n</details>\n" in seven


def test_the_reading_is_kept(results, tmp_path):
    """The text below "## Reading" is kept in the next report."""
    out = tmp_path / "h200.md"
    out.write_text("# Old\n\n## Reading\n\nTemplates lose on norms.\n")
    text = write_report([results], out, plots=False).read_text()
    assert text.endswith("\n## Reading\n\nTemplates lose on norms.\n")
    assert "# Old" not in text
    assert write_report([results], out, plots=False).read_text() == text


def test_files_of_two_machines(results, tmp_path):
    """Files of two machines cannot be in one report."""
    other = write(tmp_path / "other.jsonl", [cell("eager")], device_name="AMD EPYC")
    with pytest.raises(BackendKwargsError) as error:
        write_report([results, other], tmp_path / "out.md")
    assert (
        str(error.value) == "A report is of one device_name, got ['AMD EPYC', 'NVIDIA H200']: report these files apart."
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"l2": "warm"}, "l2, got ['cold', 'warm']", id="L2"),
        pytest.param({"scale": "smoke"}, "scale, got ['full', 'smoke']", id="scale"),
        pytest.param({"dtype": "float16"}, "dtype of gemm, got ['bfloat16', 'float16']", id="dtype of one case"),
    ],
)
def test_what_no_table_may_pool(results, tmp_path, changed, expected):
    """Different states of the L2, scales, or dtypes of a case cannot be in one report."""
    other = write(tmp_path / "other.jsonl", [cell("eager", **changed)])
    with pytest.raises(BackendKwargsError) as error:
        write_report([results, other], tmp_path / "out.md")
    assert str(error.value) == f"A report is of one {expected}: report these files apart."


def test_the_state_of_the_l2_is_told(tmp_path):
    """Headings name the state of the L2."""
    cells = [cell(peer, l2="warm") for peer in ("eager", AGAIN, "default")]
    text = report_text(cells, tmp_path)
    assert "### Device time, warm L2, bf16" in text
    assert "- Device time, warm L2: noise floor" in text


def test_shards_are_one_report(tmp_path):
    """The cells of several files are in one report."""
    shards = [write(tmp_path / f"{case}.jsonl", [cell("eager", case=case)]) for case in ("gemm", "norm")]
    text = cases_of(write_report(shards, tmp_path / "out.md", plots=False)).read_text()
    assert "## gemm (" in text
    assert "## norm (" in text


def test_a_cpu_has_wall_time_alone(tmp_path):
    """Without device times there is no table of them."""
    cells = [cell(peer, device=False) for peer in ("eager", AGAIN, "default")]
    text = write_report([write(tmp_path / "cpu.jsonl", cells)], tmp_path / "out.md").read_text()
    assert "Device time" not in text
    assert "Above 100 %" not in text
    assert "roofline" not in text
    assert "out_speedup.png" in text


def test_dropped_results_are_a_second_column(tmp_path):
    """Times with dropped results are a second column without ratios, empty where unknown."""
    cells = [cell("eager"), dataclasses.replace(cell("t"), dropped_s=[1e-3, 2e-3, 3e-3])]
    wall = cases_text(cells, tmp_path).partition("\nWall time.")[2]
    head, _, eager, t = (line.split(" | ") for line in wall.strip().splitlines()[2:6])
    at = head.index("results dropped")
    assert (eager[at], t[at]) == ("", "2 ms [1, 3]")
    assert "results dropped at once." not in wall


def test_an_older_file_has_a_table_of_dropped_results(tmp_path):
    """If no results were kept, the tables show times with dropped results, and say so."""
    cells = [
        dataclasses.replace(one, wall_s=[], dropped_s=one.wall_s, device_s=[])
        for one in (cell("eager"), cell("t", 5e-4))
    ]
    text = cases_text(cells, tmp_path)
    assert "Wall time, results dropped at once. No noise floor." in text
    assert "\nWall time. " not in text


def test_three_plots(results, tmp_path):
    """The report contains three images, written next to it."""
    out = write_report([results], tmp_path / "h200.md")
    for name in ("speedup", "roofline", "compile"):
        assert (tmp_path / f"h200_{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"(h200_{name}.png)" in out.read_text()


def test_nothing_timed_draws_nothing(tmp_path):
    """A file in which no peer passed has a table of statuses, and no plot."""
    cells = [cell("eager", status="oom")]
    out = write_report([write(tmp_path / "bad.jsonl", cells)], tmp_path / "out.md")
    assert "| eager | oom |" in cases_of(out).read_text()
    assert "png" not in out.read_text()


def test_the_page_opens_with_one_line_for_each_family(report):
    """The first table has at most twelve lines: cases, default, best mode, auto and its share of the limit."""
    table = report.split("\n\n")[1].splitlines()
    assert table[0].startswith("| speedup over eager | cases | default | best of torch's four modes | `auto` |")
    assert 2 < len(table) <= 12


def test_the_page_leads_to_each_case(report, each):
    """Tables of cases are on a separate page, linked from the summary."""
    assert "[Each case](h200_cases.md)" in report
    assert "## gemm" not in report
    assert each.startswith("# Each case on NVIDIA H200, torch 2.11.0\n")


def test_files_that_hold_no_results(tmp_path):
    """A file without results raises, instead of giving an empty report."""
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(BackendKwargsError) as error:
        write_report([tmp_path / "other.jsonl"], tmp_path / "out.md")
    assert str(error.value) == "report requires JSON lines of `run --out`, got files without any."


def test_a_report_on_a_full_disk_leaves_the_old_one(results, tmp_path):
    """A page that cannot be written whole is reported in one line, and replaces nothing."""
    page = tmp_path / "full.md"
    page.write_text("old")
    with full_disk(), pytest.raises(BackendKwargsError) as raised:
        write_report([results], page, plots=False)
    assert str(raised.value) == f"Cannot write {str(page)!r}: File too large."
    assert page.read_text() == "old"
