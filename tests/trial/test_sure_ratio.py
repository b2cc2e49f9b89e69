"""A test of two calls timed in turn that is right where rounds are correlated, and Holm's correction."""

import math

import pytest
import torch

from backend_kwargs.interval import Interval
from backend_kwargs.trial import SureRatio, holm, ratio_interval, sure_ratio
from backend_kwargs.trial.timing import _tail

ROUNDS, TRIALS, LEVEL = 240, 500, 0.01


def noise(correlation, trials=TRIALS, share=0.02):
    """Return rounds of noise whose neighbours are so correlated, with some that took much longer."""
    drawn = torch.Generator().manual_seed(7)
    own = torch.randn(trials, ROUNDS, generator=drawn, dtype=torch.float64)
    values = [own[:, 0]]
    for at in range(1, ROUNDS):
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * own[:, at])
    late = (torch.rand(trials, ROUNDS, generator=drawn) < 0.02) * torch.rand(trials, ROUNDS, generator=drawn)
    return (share * torch.stack(values, dim=1) + late).exp()


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_the_level_holds_where_rounds_are_correlated(correlation):
    """A call that is slower by just the margin is found slower in about 1 % of the trials, not in more than 3 %."""
    found = [sure_ratio((1.02 * each).tolist(), [1.0] * ROUNDS, 0.02).p <= LEVEL for each in noise(correlation)]
    assert sum(found) <= 0.03 * TRIALS


def test_a_bootstrap_of_rounds_is_sure_too_often():
    """The interval of `ratio_interval`, whose level is 2.5 % on a side, excludes an equal call much more often."""
    found = [ratio_interval([1.0] * ROUNDS, each.tolist()).high < 1 for each in noise(0.8, 100)]
    assert sum(found) > 10


def test_five_per_cent_are_found():
    """Of calls that are 5 % slower all are found beyond a margin of 2 %, also among 20 decisions."""
    found = [sure_ratio((1.05 * each).tolist(), [1.0] * ROUNDS, 0.02).p <= LEVEL / 20 for each in noise(0.3, 50)]
    assert all(found)


def test_audits_of_many_decisions_raise_no_more_alarms():
    """Of audits of 20 equal decisions each, at most a few per cent find one that has lost."""
    p_values = [sure_ratio(each.tolist(), [1.0] * ROUNDS).p for each in noise(0.5, 25 * 20)]
    audits = [holm(p_values[at : at + 20]) for at in range(0, len(p_values), 20)]
    assert sum(min(each) <= LEVEL for each in audits) <= 1


def test_few_rounds_prove_nothing():
    """Without enough rounds the ratio has no bounds."""
    assert sure_ratio([2.0] * 23, [1.0] * 23) == SureRatio(Interval(2.0, 0.0, math.inf), 1.0)
    assert sure_ratio([], []).p == 1.0


def test_equal_samples_are_certain():
    """Where no round differs, there is no doubt."""
    assert sure_ratio([2.0] * 24, [1.0] * 24, 0.02).p == 0.0
    assert sure_ratio([1.0] * 24, [1.0] * 24).p == 1.0


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    [(2.306, 8, 0.025), (2.896, 8, 0.01), (2.447, 6, 0.025), (2.776, 4, 0.025), (4.303, 2, 0.025), (0.0, 8, 0.5)],
)
def test_tail_of_students_t(t, degrees, p):
    """The probabilities are those of the tables."""
    assert _tail(t, degrees) == pytest.approx(p, abs=2e-5)
    assert _tail(-t, degrees) == pytest.approx(1 - p, abs=2e-5)


def test_holm():
    """Each p-value is multiplied by the number of those that are not smaller, and none is below a smaller one's."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
