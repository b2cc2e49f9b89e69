"""The table of real models: auto compared with the modes whose results stay valid, and its first call."""

import pytest

from benchmarks.analysis.real_models import AUTO, KEPT, MODES, mean_over, raced_twice, real_models
from benchmarks.analysis.report import write_report
from benchmarks.execution.records import AGAIN, Compile
from benchmarks.workloads.peers import TEMPLATES, WITHOUT_REWRITES
from tests.benchmarks.bench_cells import cell, write


def timed(peer, seconds, kind, cold_s=None, **compile_s):
    """Return a cell of gpt2 with `seconds` in the loop that keeps results, and half of it with dropped results."""
    compiled = Compile(cold_s=cold_s, peak_bytes=2**21, fresh=True, **compile_s)
    decided = {"winner": "cudagraphs", "options": {}, "seconds": 9.0, "rows": []} if kind == "auto" else None
    made = cell(peer, seconds, case="gpt2", kind=kind, compile=compiled, decided=decided)
    made.wall_s = [seconds] * 30
    made.dropped_s = [seconds / 2] * 30
    return made


@pytest.fixture
def cells():
    """Auto is 5 % slower than a cloned mode, and 10 % slower than the raw mode."""
    return [
        timed("eager", 4e-3, "eager"),
        timed(AGAIN, 4e-3, "control"),
        timed("default", 2e-3, "mode", 5.0),
        timed("reduce-overhead", 0.9e-3, "mode", 6.0),
        timed("reduce-overhead+clone", 0.95e-3, "clone", 6.0),
        timed("max-autotune", 1.1e-3, "mode", 20.0),
        timed("max-autotune-no-cudagraphs", 2e-3, "mode", 19.0),
        timed(AUTO, 1e-3, "auto", 20.0, warm_s=4.2, alone_s=4.0),
    ]


def test_the_bar_is_the_best_mode_whose_results_stay(cells):
    """The goal is the best mode whose results stay valid; a mode that overwrites them is only listed."""
    (model,) = real_models(cells)
    assert model.best(KEPT) == "reduce-overhead+clone"
    assert model.over(model.best(KEPT)).median == pytest.approx(0.95, rel=0.005)
    assert model.best(MODES) == "reduce-overhead"
    assert mean_over([model], MODES) == pytest.approx(0.9, rel=0.005)
    assert model.too_slow


def test_first_calls(cells):
    """The table has first calls: auto's, those of all four modes, and auto's with a stored decision over its winner."""
    (model,) = real_models(cells)
    assert (model.first_s(AUTO), model.modes_s, model.stored_over_alone) == (20.0, 50.0, 1.05)


def test_a_sum_of_three_modes_is_none(cells):
    """Without one of the four modes there is no total of their first calls."""
    (model,) = real_models([each for each in cells if each.peer != "max-autotune"])
    assert model.modes_s is None


def test_other_cases_are_no_real_models(cells):
    """Other cases are not in the tables of real models."""
    assert real_models([cell("eager"), cell(f"{TEMPLATES}auto", kind="auto")]) == []


def test_report(cells, tmp_path):
    """The page has two tables, the goals of auto, and the peers that failed."""
    cells.append(cell("max-autotune+clone", case="gpt2", kind="clone", status="oom", reason="no memory"))
    cells.append(cell("eager", case="deit", status="unavailable", reason="no timm"))
    text = write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False).read_text()
    section = text.partition("## Real models")[2].partition("\n## ")[0]
    loop, first = (line.split(" | ") for line in section.splitlines() if line.startswith("| gpt2"))
    assert loop[:9] == ["| gpt2", "4", "2", "0.9", "1.1", "2", "reduce-overhead+clone", "0.95", "1"]
    assert [ratio[:4] for ratio in loop[9:11]] == ["0.95", "0.90"]
    assert loop[11:] == ["0.45", "0.5 |"]
    figures = ["5.0", "6.0", "20.0", "19.0", "50.0", "20.0", "0.40", "4.2", "4.0", "1.05", "2", "2", "2"]
    assert first == ["| gpt2", *figures, "cudagraphs |"]
    assert [line for line in section.splitlines() if line.startswith("- ")] == [
        "- Below 0.97x of the fastest mode whose results stay, of 1 models: gpt2.",
        "- First call of `auto`: 20.0 s in the middle, 20.0 s at most.",
        "- Of what the four modes take together: 0.40 in the middle, 0.40 at most.",
        "- With a stored decision over its winner alone: 1.05 in the middle, 1.05 at most.",
        "- Not passed on gpt2: max-autotune+clone oom(no memory).",
        "- Not passed on deit: all unavailable(no timm).",
    ]


def test_no_table_without_real_models(tmp_path):
    """A report without real models has no such section."""
    text = write_report([write(tmp_path / "r.jsonl", [cell("eager")])], tmp_path / "out.md", plots=False).read_text()
    assert "Real models" not in text


def test_what_rewrites_gain(cells, tmp_path):
    """A case that was raced with and without rewrites has a row with what they gain; other cases have none."""
    assert raced_twice(cells) == []
    cells.append(timed(WITHOUT_REWRITES, 1.2e-3, "auto", 8.0))
    (case,) = raced_twice(cells)
    assert case.over(WITHOUT_REWRITES).median == pytest.approx(1.2, rel=0.005)
    text = write_report([write(tmp_path / "r.jsonl", cells)], tmp_path / "out.md", plots=False).read_text()
    section = text.partition("## Rewrites")[2].partition("\n## ")[0]
    row, means = ([*map(str.strip, line.split("|"))][1:-1] for line in section.splitlines()[-2:])
    assert row[:6] == ["gpt2", "4", "reduce-overhead", "0.9", "1.2", "1"]
    assert [ratio[:4] for ratio in row[6:9]] == ["1.20", "0.90", "0.95"]
    assert row[9:] == ["8.0; 20.0", "cudagraphs"]
    assert means == ["all", "", "", "", "", "geomean", "1.20", "0.90", "0.95", "", ""]
