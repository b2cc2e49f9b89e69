"""Races in results as a table by kind of graph."""

import json

import pytest

from backend_kwargs.auto.graph_stats import GraphStats
from backend_kwargs.auto.predictions import Outcome, RecordedRace
from benchmarks.studies.recorded_races import Race, leave_one_out, outcomes, read, stats_of, table

ABOUT = {
    "record": "environment",
    "device": "cuda",
    "device_name": "H200",
    "torch": "2.11.0",
    "cpu": "",
    "scale": "full",
}
KEY = "layer_norm@1 fwd torch.bfloat16 full cold run0 apart wall 30 eager,default,auto {}"
EAGER = ["eager", "pass", 4e-3, 0.0, "", "", None]
DEFAULT = ["default", "pass", 2e-3, 10.0, "", "eager", [1.9, 2.0, 2.1]]
GRAPHS = ["cudagraphs", "pass", 1e-3, 8.0, "", "default", [1.9, 2.0, 2.1]]
TUNED = ["max_autotune", "pass", 0.8e-3, 30.0, "", "cudagraphs", [1.2, 1.25, 1.3]]
SAME = ["padded", "same code", None, 5.0, "as default", "", None]
LATE = ["tma", "skipped", None, 0.0, "it is predicted to exceed the budget", "", None]


def race(*rows):
    names = ("name", "status", "seconds", "compile_s", "reason", "against", "speedup")
    found = [dict(zip(names, row, strict=True)) for row in rows]
    for row in found:
        row["speedup"] = row["speedup"] and row["speedup"][1]
    return Race("H200", "2.11.0", "cuda", "layer_norm", "fwd", "full", tuple(found))


def test_gains_are_over_the_candidate_before_and_costs_over_the_first_compile():
    """Eager and default, which come first, have no outcome; nor has what was skipped."""
    found = outcomes(race(EAGER, DEFAULT, GRAPHS, TUNED, SAME, LATE))
    expected = {"cudagraphs": (0.5, 0.8), "max_autotune": (0.2, 3.0), "padded": (0.0, 0.5)}
    assert {name: pytest.approx(pair) for name, pair in expected.items()} == found


def test_cuda_graphs_that_came_first_gain_over_default():
    """Their cost is unknown, since it is what others are compared with; default's is a share of it."""
    first = ["cudagraphs", "pass", 1e-3, 8.0, "", "eager", [3.9, 4.0, 4.1]]
    later = ["default", "pass", 2e-3, 6.0, "", "cudagraphs", [0.4, 0.5, 0.6]]
    assert outcomes(race(EAGER, first, later)) == {"cudagraphs": (0.5, None), "default": (-1.0, 0.75)}


def test_a_gain_over_eager_is_not_one_over_compiled_code():
    """Where eager was faster than default, a candidate's speedup over eager says nothing of its options."""
    against_eager = [*TUNED[:5], "eager", [1.2, 1.25, 1.3]]
    assert outcomes(race(EAGER, DEFAULT, against_eager)) == {"max_autotune": (None, 3.0)}


def test_a_warm_first_compile_gives_no_costs():
    """A race that found its kernels in a cache says nothing of compile times."""
    assert outcomes(race(EAGER, [*DEFAULT[:3], 0.04, *DEFAULT[4:]], GRAPHS)) == {"cudagraphs": (0.5, None)}


def test_races_of_one_case_become_one_row(tmp_path):
    """The row has the kind of graph, the launches of default, and medians over the races."""
    made = {"kernels": 3, "cold_s": 9.0}
    compiles = [
        {"record": "compile", "key": KEY.format("default"), "compile": made},
        *(
            {"record": "compile", "key": KEY.format("auto"), "compile": {}, "decided": {"rows": [EAGER, DEFAULT, row]}}
            for row in (GRAPHS, [*GRAPHS[:3], 10.0, *GRAPHS[4:]])
        ),
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (ABOUT, *compiles)))
    (row,) = table(read(tmp_path))
    expected = {"cudagraphs": Outcome(2, 0.5, 0.9)}
    assert row == RecordedRace("layer_norm fwd", "cuda", "H200", "2.11.0", False, (1, 0, 0, 0), 3, expected)


def test_a_held_out_race_has_the_kind_that_its_process_counted(tmp_path):
    """Races of a cold compile with one graph are used; that of a warm one is not."""
    rows = [dict(race(EAGER, DEFAULT, GRAPHS).rows[at]) for at in range(3)]
    for row in rows:
        row["speedup"] = row["speedup"] and {"median": row["speedup"], "low": 0.0, "high": 9.0}
    compiled = {"record": "compile", "model": "olmoe", "way": "auto", "status": "pass", "races": [{"rows": rows}]}
    check = {"record": "check", "model": "olmoe", "way": "eager", "status": "pass", "kind": [100, 20, 0, 4]}
    lines = [ABOUT, {**compiled, "cold": True}, {**compiled, "cold": False}, check]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (row,) = table(read(tmp_path))
    assert (row.case, row.kind, row.candidates) == ("olmoe", (100, 20, 0, 4), {"cudagraphs": Outcome(1, 0.5, 0.8)})


def test_a_case_that_needs_numbers_has_no_stats():
    """A model that reads its mask cannot be counted on the meta device."""
    assert isinstance(stats_of("layer_norm", "fwd", "full", "cuda"), GraphStats)
    assert stats_of("adamw", "fwd", "full", "cuda") is None


def test_a_case_is_predicted_from_the_others():
    """Three cases that did the same are predicted without an error; today's constants are 0.65 of default's compile."""
    same = {"cudagraphs": Outcome(1, 0.5, 1.3)}
    races = [RecordedRace(name, "cuda", "H200", "2.11.0", False, (9, 1, 0, 0), None, same) for name in "abc"]
    (errors,) = leave_one_out(races, lambda _: stats_of("layer_norm", "fwd", "full", "cuda"))
    assert (errors.cases, errors.cost_nearest, errors.cost_constants) == (3, pytest.approx(1.0), pytest.approx(2.0))
    assert (errors.gain_nearest, errors.gain_mean) == (pytest.approx(1.0), pytest.approx(1.0))
