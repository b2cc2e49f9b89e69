"""The suite's results as a page: one verdict over all cases, each case, what auto chose, and what is absent."""

import math

import pytest
from typer.testing import CliRunner

from backend_kwargs.interval import Interval
from backend_kwargs.page import parse, read_document, to_json
from benchmarks.analysis.page import decision_of, document_of, mean_of, stays
from benchmarks.cli import app
from benchmarks.execution import records
from benchmarks.execution.records import AGAIN
from tests.benchmarks.bench_cells import CEILINGS, ENVIRONMENT, cell

AUTO = "tmpl-inductor:auto"
DECIDED = {
    "winner": "cudagraphs",
    "options": {"triton.cudagraphs": True},
    "seconds": 9.0,
    "rows": [
        ["eager", "pass", 4e-3, 0.0, "", "", None],
        ["default", "pass", 2e-3, 3.0, "", "eager", [1.9, 2.0, 2.1]],
        ["cudagraphs", "pass", 1e-3, 4.0, "", "default", [1.8, 2.0, 2.2]],
        ["padded", "skipped", None, 0.0, "it could save 1 % at most", "", None],
    ],
}


def case(name, auto_s=1e-3, **more):
    """Return the cells of one case: eager, eager again, two modes, and auto."""
    about = {"case": name, **more}
    return [
        cell("eager", 4e-3, **about),
        cell(AGAIN, 4e-3, **about),
        cell("default", 2e-3, **about),
        cell("max-autotune", 1.5e-3, options={"triton.cudagraphs": True}, **about),
        cell(AUTO, auto_s, kind="auto", options={"auto": True}, decided=DECIDED, **about),
    ]


@pytest.fixture
def results(tmp_path):
    """Two cases, in the second of which a mode fails."""
    cells = [*case("gemm_8192"), *case("softmax", work=None)]
    cells[-2] = cell("max-autotune", case="softmax", status="timeout", reason="longer than 260 s")
    path = tmp_path / "results.jsonl"
    groups = sorted({each.group_id for each in cells})
    lines = [ENVIRONMENT, CEILINGS, *map(records.line_of, cells), records.group_line("all", groups)]
    records.append(path, lines)
    return path


def test_the_verdict_is_on_what_passes_everywhere(results):
    """The peer with the highest mean whose results stay, over the best such mode of each case, default and eager."""
    verdict = document_of(records.read(results)).verdict
    assert (verdict.winner, verdict.clear) == (AUTO, True)
    assert [each.over for each in verdict.speedups] == ["the fastest mode of torch for each case", "default", "eager"]
    assert [each.ratio.median for each in verdict.speedups] == pytest.approx([2.0, 2.0, 4.0], rel=0.05)
    assert verdict.pays_back_over == "eager"
    assert verdict.pays_back_calls == pytest.approx(verdict.compile_s / 3e-3, rel=0.05)


def test_a_mode_wins_with_what_is_faster_in_most_cases(results):
    """A mode is not compared with the fastest of the modes; a peer that fails in one case of six is named."""
    found = records.read(results)
    found.cells = [each for name in "abcdef" for each in case(name)]
    found.cells[-1] = cell(AUTO, case="f", kind="auto", status="timeout", reason="longer than 260 s")
    verdict = document_of(found).verdict
    assert [each.over for each in verdict.speedups] == ["eager"]
    assert (verdict.winner, verdict.clear, verdict.paste) == ("default", True, "")
    assert verdict.text == (
        "tmpl-inductor:auto is faster in the 5 of 6 cases that it passes: 4.01x as fast as eager, there 2.00x. "
        "Costs are medians over the cases."
    ).replace("x", "\N{MULTIPLICATION SIGN}")


def test_each_case_has_its_peers(results):
    """Controls are left out, what failed has its reason, and what the next call overwrites is marked."""
    document = document_of(records.read(results))
    overview, gemm, softmax = document.speedups
    assert [row.note for row in overview.rows] == ["2 of 2 cases", "1 of 2 cases, results overwritten", "2 of 2 cases"]
    assert [(row.name, row.note) for row in gemm.rows] == [
        ("eager", "baseline"),
        ("default", ""),
        ("max-autotune", "results overwritten"),
        (AUTO, ""),
    ]
    assert [row.name for row in gemm.rows if row.won] == [AUTO]
    assert [(row.status, row.reason) for row in softmax.rows][2] == ("timeout", "longer than 260 s")
    assert [(warned.where, warned.text) for warned in document.warnings] == [
        ("max-autotune", "does not pass on softmax (timeout)")
    ]


def test_what_auto_chose_is_a_race_and_a_graph(results):
    """A record has no times, so that no timeline is shown. A case whose work is known has its limit in a note."""
    document = document_of(records.read(results))
    assert [(race.graph, race.estimated, race.winner) for race in document.races] == [
        ("gemm_8192", False, "cudagraphs"),
        ("softmax", False, "cudagraphs"),
    ]
    assert document.races[0].leads == ()
    gemm, softmax = document.graphs
    assert [(option.name, option.source) for option in gemm.options] == [("triton.cudagraphs", "auto")]
    assert [note for note in gemm.notes if "at least" in note] == [
        "the device needs at least 500 µs (compute), 50% of the time"
    ]
    assert not any("at least" in note for note in softmax.notes)
    assert parse(to_json(document)).accuracy == ()


def test_a_tie_goes_to_what_compiles_faster(results):
    """Of peers whose intervals overlap the fastest one's, the winner of a case is the cheapest to compile."""
    tied = records.read(results)
    tied.cells = [*case("gemm_8192", auto_s=2e-3)]
    tied.cells[2].device_s = tied.cells[4].device_s = [2e-3, 2.1e-3] * 15
    tied.cells[4].compile.cold_s = 1.0
    assert [row.name for row in document_of(tied).speedups[1].rows if row.won] == [AUTO]
    tied.cells[4].compile.cold_s = 9.0
    assert [row.name for row in document_of(tied).speedups[1].rows if row.won] == ["default"]


def test_without_a_peer_that_passes_everywhere_there_is_no_winner(results):
    """The page then points to the cases."""
    found = records.read(results)
    found.cells = [each for each in found.cells if each.peer in ("eager", AGAIN, "max-autotune")]
    document = document_of(found)
    assert document.verdict.text == (
        "No backend passes in every case with results that stay: use the winner of each case, below."
    )
    assert (document.races, document.graphs) == ((), ())


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        pytest.param({"peer": "default"}, True, id="mode"),
        pytest.param({"peer": "max-autotune", "options": {"triton.cudagraphs": True}}, False, id="CUDA graphs"),
        pytest.param({"peer": "auto", "options": {"auto": True}}, True, id="auto"),
    ],
)
def test_whose_results_stay(about, expected):
    """A CUDA graph overwrites results at the next call; auto clones them."""
    assert stays(cell(**about)) is expected


def test_a_mean_has_a_narrower_interval_than_its_parts():
    """Measurements are independent: the mean of four has half of their spread."""
    mean = mean_of([Interval(2.0, 1.0, 4.0)] * 4)
    assert (mean.median, mean.low, mean.high) == pytest.approx((2.0, math.sqrt(2.0), 2 * math.sqrt(2.0)))
    assert mean_of([]) is None


def test_a_record_without_rows_is_a_decision():
    """Older records have the winner alone."""
    decision = decision_of({"winner": "default", "options": {}, "seconds": None}, "gemm")
    assert (decision.winner, decision.facts, decision.rows) == ("default", "gemm", ())


def test_the_command_writes_a_page_beside_an_older_one(results, tmp_path):
    """`report --html` writes the page, with what differs from an older one."""
    html = str(tmp_path / "page.html")
    ran = CliRunner().invoke(app, ["report", str(results), "--html", html])
    assert ran.exit_code == 0, ran.output
    again = CliRunner().invoke(app, ["report", str(results), "--html", str(tmp_path / "new.html"), "--against", html])
    assert again.exit_code == 0, again.output
    found = read_document(tmp_path / "new.html").changes
    assert (found.changes, found.title) == ((), "Benchmarks on NVIDIA H200")
