"""What recorded races predict of a candidate."""

from types import SimpleNamespace

import pytest

from backend_kwargs.auto import predictions
from backend_kwargs.auto.candidates import STEPS
from backend_kwargs.auto.predictions import Outcome, Prediction, RecordedRace, encoded, parsed, predicted, predicted_for
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.facts.decision import DEFAULT
from backend_kwargs.rewrites.table import list_rewrites


def race(case, kind, gain, cost, *, device="cuda", training=False, name="cudagraphs"):
    return RecordedRace(case, device, "H200", "2.11.0", training, kind, None, {name: Outcome(1, gain, cost)})


SMALL, LARGE = (10, 2, 0, 0), (1000, 200, 0, 20)
RACES = (race("small", SMALL, 0.5, 1.0), race("large", LARGE, 0.1, 0.5))


def test_one_kind_predicts_what_it_saw():
    """With a single recorded kind, any graph gets its gain and cost."""
    assert predicted_for("cudagraphs", LARGE, "cuda", RACES[:1], training=False) == Prediction(0.5, 1.0, 1)


def test_the_nearer_kind_weighs_more():
    """A graph like the large one is predicted to gain about as little, and one like the small one about as much."""
    near_large = predicted_for("cudagraphs", (900, 180, 0, 18), "cuda", RACES, training=False)
    near_small = predicted_for("cudagraphs", (11, 2, 0, 0), "cuda", RACES, training=False)
    assert (near_large.gain, near_small.gain) == (pytest.approx(0.1, abs=0.05), pytest.approx(0.5, abs=0.05))
    assert (near_large.cost, near_small.cost) == (pytest.approx(0.5, abs=0.05), pytest.approx(1.0, abs=0.1))


def test_training_is_another_kind():
    """Of two kinds with equal counts, the one that trains weighs more for a graph that trains."""
    races = (race("a", SMALL, 0.1, None), race("b", SMALL, 0.5, None, training=True))
    gains = [predicted_for("cudagraphs", SMALL, "cuda", races, training=each).gain for each in (False, True)]
    assert gains == [pytest.approx(0.15, abs=0.05), pytest.approx(0.45, abs=0.05)]


def test_a_loss_that_is_large_does_not_outweigh_all_gains():
    """Gains are averaged as factors of a call's time: ten times as long and a tenth of the time cancel out."""
    races = (race("a", SMALL, -9.0, None), race("b", SMALL, 0.9, None))
    assert predicted_for("cudagraphs", SMALL, "cuda", races, training=False).gain == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("name", "device"), [pytest.param("padded", "cuda", id="candidate"), pytest.param("cudagraphs", "cpu", id="device")]
)
def test_nothing_is_known_of_others(name, device):
    """A candidate or a type of device without races has no prediction."""
    assert predicted_for(name, SMALL, device, RACES, training=False) == Prediction(None, None, 0)


def test_a_graph_is_described_by_its_stats():
    """`predicted` reads the counts of a graph's stats in the order of the columns."""
    stats = SimpleNamespace(ops=10, gemms=2, convolutions=0, attentions=0, device="cuda", training=False)
    assert predicted("cudagraphs", stats, RACES) == predicted_for("cudagraphs", SMALL, "cuda", RACES, training=False)


def test_the_file_is_read_as_it_was_written():
    """Encoding and parsing give the same races."""
    assert parsed(encoded(RACES)).races == RACES


def test_the_package_has_races_of_both_devices():
    """The file that ships is well formed, and each of its candidates is one that `auto` has or had."""
    races = predictions.recorded()
    names = {name for each in races for name in each.candidates}
    known = {DEFAULT, *(step.name for step in STEPS), *list_rewrites(), "tuned_products", "cudagraphs_of_rewritten"}
    assert {each.device for each in races} == {"cpu", "cuda"}
    assert names <= known


AGAIN = "Regenerate them: python -m benchmarks recorded-races FOLDER --write"
COLUMNS = "Recorded races must have the columns operators, gemms, convolutions, attentions: "


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b'{"columns":["operators"],"races":[]}', "got operators", id="columns"),
        pytest.param(b'{"races":[]}', "Object missing required field `columns`", id="field"),
        pytest.param(encoded([race("x", (1, 2), 0.1, 1.0)]), "'x' has another number of counts", id="counts"),
    ],
)
def test_another_form_is_one_error(content, why):
    """A file of another form is refused with what is wrong and how to make one."""
    with pytest.raises(BackendKwargsError) as caught:
        parsed(content)
    assert str(caught.value).replace("ValidationError: ", "") == f"{COLUMNS}{why}. {AGAIN}"
