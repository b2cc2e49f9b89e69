"""Which candidates a race tries, in which order, and which it skips, by expected gain and compile time."""

import contextlib
import re

import pytest
import torch

import backend_kwargs
from backend_kwargs.auto import decide, race, selection
from backend_kwargs.auto.candidates import Costs, RaceCandidate
from backend_kwargs.auto.roofline import Slack
from backend_kwargs.auto.store import Catalogue
from tests.auto.graphs import chain, rows_of

OPS = 4  # of chain
OPTIONS = ({"epilogue_fusion": False}, {"max_fusion_size": 2}, {"realize_reads_threshold": 1})


@pytest.fixture(autouse=True)
def _all_of_default_is_slack(monkeypatch, default_wins):
    """Make a share the part of default's time that a candidate may save, and keep the last candidate."""
    monkeypatch.setattr(selection, "slack_of", lambda call, seconds, *_: Slack(0.0, 0.0, seconds))


@pytest.fixture
def raced(monkeypatch, store):
    """Race steps given by name as (share, seconds to compile), and return the decision."""

    def run(steps, **options):
        made = [
            RaceCandidate(name, OPTIONS[at], shares={"generated": share}, costs=Costs(0.0, op_s=seconds / OPS))
            for at, (name, (share, seconds)) in enumerate(steps.items())
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
    reason = r"it is predicted to exceed the budget: about 120 s of compiling, ([\d.]+) s are left(?:; it could .*)?"
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


@pytest.mark.parametrize("effort", ["quick", "full"])
def test_what_gains_little_is_skipped(raced, store, effort):
    """A candidate that could save less than 3 % is not compiled, whatever the budget."""
    decision = raced({"little": (0.029, 1.0)}, effort=effort)
    row = rows_of(store)["little"]
    assert (row.status, row.reason) == ("skipped", "it could save 2.9% at most")
    assert decision.cut_s == 0


def test_what_gains_little_per_second_is_skipped(raced, store):
    """By default a candidate must gain 0.3 % per second of compile time."""
    raced({"slowly": (0.05, 20.0), "as well": (0.05, 10.0)})
    row = rows_of(store)["slowly"]
    assert (row.status, row.reason) == ("skipped", "it could save 5.0%, for about 20 s of compiling")
    assert rows_of(store)["as well"].status != "skipped"


@pytest.mark.parametrize(
    ("share", "options"),
    [
        pytest.param(0.05, {"effort": "full"}, id="full effort"),
        pytest.param(0.05, {"candidates": ["aten"]}, id="named"),
        pytest.param(0.0, {"candidates": ["aten"]}, id="named, without any gain"),
        pytest.param(0.0, {"objective": "memory"}, id="for memory"),
    ],
)
def test_what_is_asked_for_is_tried(raced, store, share, options):
    """Full effort ignores the gain per second; named candidates and objective="memory" ignore the size of the gain."""
    raced({"slowly": (share, 20.0)}, **options)
    assert rows_of(store)["slowly"].status != "skipped"


def test_what_gains_most_per_second_comes_first(raced):
    """Candidates are tried by gain per predicted second, not in the order of the table."""
    decision = raced({"large": (0.4, 100.0), "none": (0.0, 1.0), "quick": (0.2, 10.0)})
    assert [row.name for row in decision.rows] == ["eager", "default", "quick", "large", "none"]


def test_named_candidates_keep_their_order(raced):
    """Named candidates are tried in the order given."""
    decision = raced({"first": (0.1, 100.0), "second": (0.2, 1.0)}, candidates=["aten"])
    assert [row.name for row in decision.rows] == ["eager", "default", "first", "second"]


def test_what_is_saved_once_is_not_saved_again(raced, store, monkeypatch):
    """After a win the slack is that of the winner, which decides on the candidates that follow."""
    left = iter([1.0, 0.01])
    monkeypatch.setattr(selection, "slack_of", lambda call, seconds, *_: Slack(0.0, 0.0, next(left) * seconds))
    monkeypatch.setattr(race, "_code", lambda fn: ())
    raced({"winner": (0.5, 1.0), "late": (0.3, 1.0)})
    row = rows_of(store)["late"]
    assert (row.status, row.reason) == ("skipped", "it could save 0.3% at most")


def test_what_nothing_is_known_of_is_tried(raced, store, monkeypatch, log):
    """If the slack cannot be measured, the race continues, and the log says so."""

    def fails(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(selection, "slack_of", fails)
    raced({"step": (0.0, 1.0)})
    assert rows_of(store)["step"].status != "skipped"
    assert "The slack of default is unknown: RuntimeError: planted" in log.messages


@pytest.mark.parametrize(
    ("default_s", "costs", "seconds"),
    [
        pytest.param(10.0, Costs(), 10.0, id="as long as default"),
        pytest.param(10.0, Costs(0.5, op_s=0.25), 5.5, id="tuned operators"),
        pytest.param(10.0, Costs(1.0, product_s=4.0), 14.0, id="tuned products"),
    ],
)
def test_predicted_seconds(default_s, costs, seconds):
    """Compile time is predicted in default's compiles, plus seconds for each fused operator and product layout."""
    x = torch.randn(4, 4)
    _, facts = race.observed_stats(
        lambda: torch.sin(x @ x @ x + 1),
        lambda seen: 0.0,
        device="cpu",
        training=False,
        writes=False,
        dynamic=False,
        bytes_read=0.0,
    )
    assert costs.seconds(default_s, facts) == seconds
