"""One budget for all graphs of a call."""

from dataclasses import replace

import pytest
import torch

from backend_kwargs.auto import race


def broken(x):
    x = x.relu() * 2
    torch._dynamo.graph_break()
    x = x.sigmoid() + 1
    torch._dynamo.graph_break()
    return x.tanh() - 3


@pytest.fixture
def budgets(monkeypatch, races):
    """Return the budgets that races are given; each adds eight seconds to the compile that serves."""
    given = []

    def raced(request, tick):
        given.append(request.settings.budget_s)
        return replace(races(request, tick), counted_s=8.0)

    monkeypatch.setattr(race, "race", raced)
    return given


def test_a_break_leaves_half_of_the_budget(auto, budgets):
    """The graphs of one call share its budget; the last one gets what is left."""
    fn = auto(broken, budget_s=40.0, race="always")
    fn(torch.randn(64, 64))
    assert budgets == [20.0, 16.0, 24.0]


def test_a_later_call_has_a_budget_of_its_own(auto, budgets):
    """Graphs that are compiled for other sizes do not lack what the first call has spent."""
    fn = auto(broken, budget_s=40.0, race="always")
    fn(torch.randn(64, 64))
    fn(torch.randn(32, 64, 2))
    assert budgets == [20.0, 16.0, 24.0] * 2


def test_a_spent_budget_leaves_default(auto, budgets, monkeypatch):
    """A graph whose call has nothing left is not raced."""
    x = torch.randn(64, 64)
    torch.testing.assert_close(auto(broken, budget_s=10.0, race="always")(x), broken(x))
    assert budgets == [5.0, 1.0]


def test_after_a_reset_calls_begin_anew(auto, budgets):
    """What was spent before `torch.compiler.reset()` is not counted for the calls after it."""
    fn = auto(broken, budget_s=40.0, race="always")
    fn(torch.randn(64, 64))
    torch.compiler.reset()
    fn(torch.randn(32, 64))
    assert budgets == [20.0, 16.0, 24.0] * 2
