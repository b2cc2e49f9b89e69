"""Orders of the candidates of recorded races."""

import pytest

from backend_kwargs.auto.predictions import Outcome, RecordedRace
from benchmarks.studies.race_orders import Order, orders_of, report_of_orders
from tests.benchmarks.test_recorded_races import DEFAULT, EAGER, TUNED, race

PADDED = ["padded", "pass", 1.6e-3, 10.0, "", "default", [1.2, 1.25, 1.3]]
TUNED_LATER = [*TUNED[:2], 0.8e-3, 30.0, "", "padded", [1.9, 2.0, 2.1]]
RACE = race(EAGER, DEFAULT, PADDED, TUNED_LATER)  # which save 20 % for 1 compile, and 50 % for 3


def recorded(case, **gains):
    outcomes = {name: Outcome(1, gain, 1.0) for name, gain in gains.items()}
    return RecordedRace(case, "cuda", "H200", "2.11.0", False, (1, 0, 0, 0), None, outcomes)


MINE = recorded("layer_norm fwd", padded=0.9, max_autotune=0.0)


def test_a_case_is_ordered_by_what_others_say():
    """Its own record is left out, and the regret is the mean of what a call takes beyond the end."""
    found = orders_of(RACE, [MINE, recorded("softmax fwd", padded=0.0, max_autotune=0.5)])
    raced, predicted = (1 * 1.0 + 3 * 0.8) / 4 / 0.4 - 1, (3 * 1.0 + 1 * 0.5) / 4 / 0.4 - 1
    assert found == {
        "as raced": Order(pytest.approx(raced), 4.0, False),
        "predicted": Order(pytest.approx(predicted), 3.0, True),
        "best": Order(pytest.approx(raced), 4.0, False),
    }


def test_one_candidate_has_no_order():
    """A race of one candidate is left out, and so is one whose kind of graph is unknown."""
    assert orders_of(race(EAGER, DEFAULT, PADDED), [MINE]) == {}
    assert orders_of(RACE, []) == {}
    assert list(report_of_orders([RACE], [])) == []
