"""Which candidates a race tries, in which order, and which it skips, by what they can save and compile time."""

import contextlib
import re

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import decide, selection
from backend_kwargs.auto.candidates import Costs, RaceCandidate
from backend_kwargs.auto.store import Catalogue
from tests.auto.graphs import chain, rows_of

OPS = 4  # of chain
OPTIONS = ({"epilogue_fusion": False}, {"max_fusion_size": 2}, {"realize_reads_threshold": 1})


@pytest.fixture
def raced(monkeypatch, store, default_wins):
    """Race steps given by name as (seconds saved of an operator, seconds to compile), and return the decision."""

    def run(steps, **options):
        made = [
            RaceCandidate(name, OPTIONS[at], saves_op_s=saved_s, costs=Costs(0.0, op_s=seconds / OPS))
            for at, (name, (saved_s, seconds)) in enumerate(steps.items())
        ]
        monkeypatch.setattr(selection, "candidates_for", lambda *_, **__: made)
        backend = backend_kwargs.make_backend("tmpl-inductor:auto", {"budget_s": 300.0} | options)
        torch.compile(chain, backend=backend)(torch.randn(8, 64))
        (decision,) = Catalogue(store).all()
        return decision

    return run


@pytest.mark.parametrize("options", [{}, {"candidates": ["aten"]}, {"effort": "full"}], ids=["quick", "named", "full"])
def test_what_cannot_end_in_time_is_not_begun(raced, store, options):
    """A candidate predicted to exceed the remaining budget is skipped; a larger budget may try it."""
    decision = raced({"long": (0.5, 120.0)}, budget_s=100.0, **options)
    row = rows_of(store)["long"]
    assert (row.status, row.predicted_s, row.compile_s) == ("skipped", 120.0, 0.0)
    reason = r"it is predicted to exceed the budget: about 120 s of compiling, ([\d.]+) s are left"
    assert 0 < float(re.fullmatch(reason, row.reason)[1]) <= 100
    assert decision.cut_s == 100.0


def test_progress_rises_to_the_last_candidate(raced, monkeypatch):
    """Progress is the fraction of candidates done before the current one, including default."""
    ticks = []

    @contextlib.contextmanager
    def progress(_on_progress):
        yield lambda name, fraction: ticks.append((name, fraction))

    monkeypatch.setattr(decide, "progress", progress)
    raced({"one": (0.5, 1.0), "two": (0.5, 2.0), "three": (0.5, 3.0)})
    assert ticks == [("one", 0.25), ("two", 0.5), ("three", 0.75)]


def test_a_prediction_stands_beside_its_outcome(raced, store):
    """A tried candidate's row has prediction and outcome; default, the basis of predictions, has none."""
    raced({"step": (0.5, 5.0)})
    rows = rows_of(store)
    assert (rows["step"].predicted_s, rows["default"].predicted_s) == (5.0, None)
    assert rows["step"].compile_s > 0


@pytest.mark.parametrize("options", [{}, {"candidates": ["aten"]}], ids=["quick", "named"])
def test_candidates_keep_their_order(raced, options):
    """They are tried in the order of the table, or as they are named, whatever they take to compile."""
    decision = raced({"first": (1.0, 100.0), "second": (1.0, 1.0)}, **options)
    assert [row.name for row in decision.rows] == ["eager", "default", "first", "second"]
