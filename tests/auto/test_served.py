"""What a service is told of graphs under `race="never"`: a line of the log, the report, and the current span."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.auto.process_memory import SPAN, Served, note_served
from backend_kwargs.page import to_html
from tests.auto.graphs import chain

X = torch.ones(8, 64)
WITH, NONE = Served("Net", "0/0", ""), Served("Net", "1/0", "no decision is stored")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, logger="backend_kwargs.auto")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "backend_kwargs.auto"]


@pytest.mark.parametrize(
    ("served", "count"),
    [
        pytest.param([WITH], 0, id="a decision"),
        pytest.param([NONE], 1, id="none"),
        pytest.param([WITH, NONE], 0, id="only the first has one"),
        pytest.param([NONE, NONE, NONE], 1, id="never one per graph"),
        pytest.param([NONE, Served("Other", "2/0", "no decision is stored")], 2, id="two models"),
    ],
)
def test_one_line_for_a_model(lines, served, count):
    """It is logged once, at the model's first graph, if that has no decision."""
    for at in range(1, len(served) + 1):
        note_served(served[:at], "store 'd'")
    assert len(lines()) == count


def test_the_line(lines):
    """It names the store, the model and the reason, and what to do."""
    note_served([NONE], "store 'd'")
    (line,) = lines()
    assert line == (
        "race='never': store 'd' has no decision for the first graph of Net (no decision is stored), which is compiled "
        "under default. bk.report says which graphs have one; `backend-kwargs tune` makes them."
    )


def test_the_span(monkeypatch):
    """Where the process has loaded OpenTelemetry, its current span has the numbers, and which graphs have none."""
    note_served([NONE], "no store")
    span = {}
    loaded = ModuleType(SPAN)
    loaded.get_current_span = lambda: SimpleNamespace(set_attributes=span.update)
    monkeypatch.setitem(sys.modules, SPAN, loaded)
    note_served([WITH, NONE], "no store")
    assert span == {
        "backend_kwargs.graphs": 2,
        "backend_kwargs.graphs_decided": 1,
        "backend_kwargs.graphs_without_decision": ["graph 1/0 of Net: no decision is stored"],
    }


def test_tracing_that_fails_fails_no_compile(monkeypatch):
    """It is a service's own."""
    monkeypatch.setitem(sys.modules, SPAN, ModuleType(SPAN))
    note_served([WITH, NONE], "no store")


def test_the_report_counts_graphs_with_a_decision(auto, races, lines):
    """Text, data and page say how many of the graphs had one, which had none, and why."""
    auto(chain)(X)
    torch.compiler.reset()

    def two(x):
        y = chain(x)
        torch._dynamo.graph_break()
        return y.cos()

    compiled = auto(two, race="never")
    compiled(X)
    found = bk.report(compiled)
    first, second = (f"graph {each.compile_id}" for each in found.graphs)
    assert found.undecided == {second: "no decision is stored"}
    said = ["race='never': 1 of 2 graphs had a decision", f"no decision for {second}: no decision is stored"]
    assert list(found.notes[:2]) == said
    assert set(said) < {*str(found).splitlines()}
    assert found.to_dict()["race_never"] == {"graphs": 2, "without_decision": found.undecided}
    assert all(line in to_html(found._document()).replace("&#39;", "'") for line in said)
    assert (lines(), first in found.undecided) == ([], False)


def test_other_races_are_not_counted(auto, races):
    """A graph that may be raced has no line."""
    compiled = auto(chain)
    compiled(X)
    found = bk.report(compiled)
    assert (found.undecided, found.to_dict()["race_never"]["graphs"]) == ({}, 0)
    assert not any("race='never'" in note for note in found.notes)
