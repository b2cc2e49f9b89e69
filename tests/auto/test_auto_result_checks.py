"""The checks of a graph that draws random numbers: against float64 with eager's draws, then against default's."""

import math

import pytest
import torch
from torch.nn import functional

from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.graphs.replay import Task
from backend_kwargs.trial import Roundings

CPU = torch.device("cpu")
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def cancels(x):
    """Lose most of what eager computes, in its precision; compiled code keeps what is between in float32."""
    return functional.dropout((x + 200) - 200, 0.5)


def noisy(x):
    return x * torch.rand_like(x)


class Checks:
    """The checks of a graph of one input, after eager has run twice."""

    def __init__(self, fn, x):
        self.task = Task.of(torch.fx.symbolic_trace(fn), [x])
        with self.task.generators_kept():
            self.eager = self.task.observe(self.task.copy())
            random, budget = self.task.has_drawn(), Budget(math.inf, 0.0, 0.0)
            self.checks = ResultChecks(self.task, random, CPU, budget, None, self.eager)
            assert self.checks.of_eager(self.task.observe(self.task.copy())).passed
            self.checks.compute_reference()

    def changed(self, seen, change):
        return seen | {"output": change(seen["output"])}

    @property
    def precise(self):
        """The result of code that is exact up to its last step."""
        return self.changed(self.eager, lambda _: self.checks.reference["output"].to(self.eager["output"].dtype))


@torch.no_grad()
@pytest.mark.parametrize("fn", [cancels, noisy], ids=["dropout", "noise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_is_more_precise_than_eager_passes(fn, dtype):
    """By its error to float64, which has eager's random numbers, and with no run at other roundings."""
    made = Checks(fn, X.to(dtype))
    made.checks.roundings = ()
    assert made.checks.reference is not None
    assert made.checks.of_results(made.precise).passed


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda y: y * 1.01, id="a hundredth off"),
        pytest.param(lambda y: y + 0.01, id="moved"),
        pytest.param(lambda y: y.where(torch.arange(64) > 0, 0), id="a column lost"),
    ],
)
@pytest.mark.parametrize("fn", [lambda x: functional.dropout(x.sin(), 0.5), noisy], ids=["dropout", "noise"])
def test_what_is_a_little_wrong_fails(fn, change):
    """As it does where nothing is drawn."""
    made = Checks(fn, X)
    found = made.checks.of_results(made.changed(made.eager, change))
    assert found.status == "fail_accuracy"
    assert found.reason.startswith("output: ")


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "passes"),
    [
        pytest.param(lambda y, error: y, True, id="the same"),
        pytest.param(lambda y, error: y + error, True, id="as far off as eager"),
        pytest.param(lambda y, error: y + 3 * error, False, id="three times as far"),
        pytest.param(lambda y, error: y * 2, False, id="wrong"),
    ],
)
def test_the_other_candidates_are_held_to_defaults_own_draws(change, passes):
    """They draw as default does, and may be as far from it as eager is from float64; the reference has other draws."""
    made = Checks(cancels, X.bfloat16())
    checks, error = made.checks, made.eager["output"].double() - made.checks.reference["output"]
    checks.roundings = Roundings(None, made.eager, lambda: False)  # no time for any
    generator = torch.Generator().manual_seed(1)
    kept = (torch.rand(X.shape, generator=generator) < 0.5).double() * 2
    default = made.changed(made.eager, lambda _: (X.bfloat16() * kept).bfloat16())
    with made.task.generators_kept():
        assert checks.of_draws(default, made.task.copy(), last=True).passed
        seen = made.changed(default, lambda y: change(y.double(), error[torch.randperm(64)]).bfloat16())
        assert checks.of_results(seen).passed == passes


@torch.no_grad()
def test_without_a_reference_it_is_said_why():
    """Where eager computes with what it draws in its own precision, there is none."""
    made = Checks(lambda x: functional.rrelu(x, training=True), X)
    assert made.checks.reference is None
    assert made.checks.without == "it cannot be computed in float64 with the random numbers that eager draws"


@torch.no_grad()
@pytest.mark.parametrize("last", [pytest.param(False, id="another follows"), pytest.param(True, id="the last one")])
def test_a_wrong_first_candidate_of_a_random_graph(last):
    """What is expected stays eager's, so that the next candidate can be the first; after the last there is nothing."""
    made = Checks(lambda x: functional.dropout(x.sin(), 0.5), X)
    checks = made.checks
    with made.task.generators_kept():
        assert not checks.of_draws(made.eager, lambda *args: made.task.copy()(*args)[0] * 2, last=last).passed
    assert checks.awaits_draws is not last
    assert checks.is_lost is last
