"""The report: what it says, what it keeps, what it draws."""

import pytest
from bench_cells import cell, write

from backend_kwargs.errors import BackendKwargsError
from benchmarks import plots
from benchmarks.controls import SLOWED
from benchmarks.records import AGAIN
from benchmarks.report import write_report


@pytest.fixture
def results(tmp_path):
    """One case that a template wins, one that it loses, a wrong peer, one that cannot be had, one over the limit."""
    cells = [
        *(cell(peer, case=case) for case in ("gemm", "norm") for peer in ("eager", AGAIN)),
        *(cell(SLOWED, 1.05e-3, case=case) for case in ("gemm", "norm")),
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


def test_a_case_has_a_table_for_each_clock(report):
    """Times with intervals, per cent of the limit, ratios; the wall's has no per cent."""
    device = row(report, "### gemm", "t")
    assert device[1].endswith("]")
    assert " µs [" in device[1]
    assert float(device[2].split()[0]) == pytest.approx(100 * 0.5 / 0.6, rel=0.02)
    wall = row(report.partition("\n### gemm")[2], "Wall time.", "t")
    assert len(wall) == len(device) - 1


def test_what_has_no_time_has_its_word(report):
    """A wrong peer and one that cannot be had say so in the place of a time; a pipe does not break the table."""
    assert row(report, "### gemm", "bad")[1] == "fail_accuracy(output: RMSE 1 / at most 0.1)"
    assert row(report, "### gemm", "tma")[1] == "unavailable(needs a GPU)"


def test_controls(report):
    """The noise of A/A, whether the injected work was seen, and what is over the limit."""
    assert "5 % more work is seen in 2 of 2 groups." in report
    assert "- Above 100 % of the limit: magic in norm." in report
    assert "**over 100 %: a bug of the suite until explained**" in row(report, "### norm", "magic")[2]


def test_ties_are_marked(report):
    """A ratio within the noise floor is in italics."""
    assert row(report, "### gemm", AGAIN)[3].startswith("*1.00")
    assert not row(report, "### gemm", "t")[3].startswith("*")


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
    text = write_report(shards, tmp_path / "out.md", plots=False).read_text()
    assert "### gemm (" in text
    assert "### norm (" in text


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
    text = write_report([write(tmp_path / "bad.jsonl", cells)], tmp_path / "out.md").read_text()
    assert "| eager | oom |" in text
    assert "png" not in text


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


def test_files_that_hold_no_results(tmp_path):
    """Another file is not an empty report."""
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(BackendKwargsError) as error:
        write_report([tmp_path / "other.jsonl"], tmp_path / "out.md")
    assert str(error.value) == "report wants JSON lines of `run --out`, got files without any."
