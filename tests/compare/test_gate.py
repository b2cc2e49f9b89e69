"""The gate of a pipeline: which candidate is judged, over what, and by which end of the interval."""

import pytest

from backend_kwargs.compare import Comparison, Row
from backend_kwargs.compare.comparison import Judged, judge, label_of
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.interval import Interval


def row(label, seconds, status="pass", backend="other"):
    """Return a row whose samples do not vary, so that its interval is one number."""
    timed = [seconds] * 5 if seconds else []
    latency = Interval(seconds, seconds, seconds) if seconds else None
    return Row(label, backend, status, latency=latency, samples=timed)


def comparison(*rows):
    return Comparison([*rows], {}, None, "eager", "inference", [])


DEFAULT, EAGER = row("inductor", 1.0), row("eager", 0.1, backend="eager")


@pytest.mark.parametrize(
    ("rows", "least", "expected"),
    [
        pytest.param(
            [row("a", 0.5), row("b", 0.8)],
            2.0,
            Judged(True, "a is 2.000x [2.000, 2.000] over inductor: at least 2x is asked for."),
            id="the fastest",
        ),
        pytest.param(
            [row("a", 0.5)],
            2.01,
            Judged(False, "a is 2.000x [2.000, 2.000] over inductor: its lower end is below 2.01x."),
            id="below",
        ),
        pytest.param(
            [row("wrong", 0.1, "fail_accuracy"), row("fell", 0.1, "fell_back"), row("b", 0.8)],
            1.1,
            Judged(True, "b is 1.250x [1.250, 1.250] over inductor: at least 1.1x is asked for."),
            id="only right results",
        ),
        pytest.param(
            [row("a", None, "fail_to_run")],
            1.0,
            Judged(False, "No candidate besides inductor and eager passed, so that no speedup can be judged."),
            id="none",
        ),
    ],
)
def test_the_fastest_candidate_is_judged(rows, least, expected):
    """Eager and what speedups are over are not judged, though they may be faster."""
    assert judge(comparison(EAGER, DEFAULT, *rows), "inductor", least) == expected


def test_the_lower_end_counts():
    """A speedup whose median reaches the limit does not pass if its interval begins below."""
    noisy = Row("a", "a", latency=Interval(1.0, 0.5, 2.0), samples=[0.5, 2.0, 0.5, 2.0, 0.5])
    judged = judge(comparison(row("inductor", 1.0), noisy), "inductor", 1.5)
    assert judged == Judged(False, "a is 2.000x [0.500, 2.000] over inductor: its lower end is below 1.5x.")


def test_nothing_passes_over_what_did_not_run():
    """If default fails, a pipeline does not pass unseen."""
    failed = comparison(row("inductor", None, "fail_to_run"), row("a", 0.5))
    text = "inductor was not timed (fail_to_run), so that no speedup over it can be judged."
    assert judge(failed, "inductor", 1.0) == Judged(False, text)


@pytest.mark.parametrize(
    ("over", "labels", "expected"),
    [
        pytest.param("a", ["a", "inductor"], "a", id="a candidate"),
        pytest.param("default", ["a", "inductor"], "inductor", id="default"),
        pytest.param("default", ["a", "tmpl-inductor:default"], "tmpl-inductor:default", id="a template"),
        pytest.param("default", ["a"], "default", id="default is added"),
        pytest.param("default", ["tmpl-inductor[freezing=true]"], "default", id="with options it is not default"),
    ],
)
def test_what_over_names(over, labels, expected):
    """It is a label, or default, which any of its names is."""
    assert label_of(over, labels) == expected


LABELS = "It is one of --backends, or 'default'."


@pytest.mark.parametrize(
    ("over", "message"),
    [
        pytest.param("eagr", "Unknown name of --fail-below 'eagr'. Did you mean 'eager'?", id="one letter less"),
        pytest.param("Default", "Unknown name of --fail-below 'Default'. Did you mean 'default'?", id="other case"),
        pytest.param("aaaa", f"Unknown name of --fail-below 'aaaa'. {LABELS}", id="before default in the alphabet"),
        pytest.param("zzzz", f"Unknown name of --fail-below 'zzzz'. {LABELS}", id="after it"),
        pytest.param("", f"Unknown name of --fail-below ''. {LABELS}", id="nothing"),
    ],
)
def test_over_an_unknown_candidate(over, message):
    """A name that no candidate has is an error with the closest."""
    with pytest.raises(BackendKwargsError) as raised:
        label_of(over, ["eager", "a"])
    assert str(raised.value) == message
