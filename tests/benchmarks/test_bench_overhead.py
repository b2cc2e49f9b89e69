"""Overhead of the package per call, at import and at look-up: times, and counts that must not differ."""

import json
import sys

import pytest
import torch

from backend_kwargs.auto.settings import OPTIONS as AUTO
from benchmarks.studies import overhead

COUNTS = tuple(overhead.EVENTS.values())
QUICK = ((("sleep", "time.sleep(0.02)"), ("", "x = 1"), ("read", "x")), (("sleep", "time.sleep(0.02)"),))


@pytest.fixture(scope="module")
def rows():
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overhead, "LISTS", QUICK)
        yield overhead.measure_overhead(rounds=3, processes=2)
    torch._dynamo.reset()


def test_a_call_executes_what_plain_torch_compile_does(rows):
    """A call runs the same number of Python calls, C calls and bytecodes as plain torch.compile."""
    calls = [row for row in rows if row["kind"] == "call"]
    assert [row["name"] for row in calls] == list(overhead.PEERS)
    assert len({tuple(row[count] for count in COUNTS) for row in calls}) == 1
    assert all(row[count] > 0 for row in calls for count in COUNTS)


def test_steps_that_have_a_name_are_timed(rows):
    """Named steps are timed in every process that runs them."""
    steps = {row["name"]: row for row in rows if row["kind"] == "step"}
    assert list(steps) == ["sleep", "read"]
    assert len(steps["sleep"]["seconds"]) == 2 * 2
    assert min(steps["sleep"]["seconds"]) >= 0.02
    assert steps["sleep"]["ms"] >= 20


@pytest.mark.parametrize("steps", overhead.LISTS, ids=lambda steps: steps[-1][0])
def test_steps_run(steps):
    names = {}
    for _, step in steps:
        exec(step, names)


def test_rows_are_json(rows):
    assert json.loads(json.dumps(rows)) == rows


def test_table_has_a_line_for_each_row(rows):
    lines = overhead.as_table(rows).splitlines()
    assert lines[0].startswith("| per call |")
    assert len(lines) == len(rows) + 5  # two heads, two rules, and an empty line


def test_one_more_layer_is_counted():
    """A wrapper in the hot path increases the counts."""

    def inner():
        return None

    def outer():
        return inner()

    plain, wrapped = overhead.call_counts(inner), overhead.call_counts(outer)
    assert wrapped["python_calls"] == plain["python_calls"] + 1
    assert wrapped["bytecodes"] > plain["bytecodes"]
    assert wrapped["c_calls"] == plain["c_calls"]


def test_counting_leaves_the_hooks_as_they_were():
    before = sys.getprofile(), sys.gettrace()
    with pytest.raises(ZeroDivisionError):
        overhead.call_counts(lambda: 1 / 0)
    assert (sys.getprofile(), sys.gettrace()) == before


@pytest.mark.parametrize("name", overhead.PEERS)
def test_peers_have_equal_options(name):
    given = overhead.PEERS[name]()
    options = dict(given.get("options") or given["backend"].options)
    auto = {name: options.pop(name) for name in list(options) if name in AUTO}
    assert (options, auto) == (overhead.OPTIONS, {"auto": True, "race": "never"} if name == "auto, decided" else {})
