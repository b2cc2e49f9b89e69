"""The verdict in one line: what to use or to keep, with figures, whatever the intervals say."""

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page.document import Speedup, Verdict
from backend_kwargs.page.sentence import how_sure, remark, sentence

NOISE = Interval(1.0, 0.99, 1.01)
TIMES = "\N{MULTIPLICATION SIGN}"
ABOVE, BELOW, AROUND = Interval(2.0, 1.9, 2.1), Interval(0.5, 0.4, 0.6), Interval(1.01, 0.98, 1.04)


def verdict(winner="w", *, clear=True, **over):
    return Verdict(winner=winner, clear=clear, speedups=tuple(Speedup(name, ratio) for name, ratio in over.items()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            verdict(mode=ABOVE, default=ABOVE, eager=ABOVE),
            "Use w: 2.00x as fast as mode, 2.00x as fast as default and 2.00x as fast as eager.",
            id="wins",
        ),
        pytest.param(
            verdict(mode=AROUND, eager=ABOVE),
            "Use w: 2.00x as fast as eager; not clearly faster or slower than mode, 1.01x (0.98 to 1.04).",
            id="as fast as a mode",
        ),
        pytest.param(
            verdict(mode=ABOVE, eager=AROUND),
            "Call the model itself: it is not clear whether w is faster, 1.01x (0.98 to 1.04).",
            id="not clear",
        ),
        pytest.param(
            verdict(mode=ABOVE, eager=BELOW), "Call the model itself: w is 0.50x as fast (0.40 to 0.60).", id="loses"
        ),
        pytest.param(verdict(mode=BELOW, eager=ABOVE), "Keep mode: w is 0.50x as fast (0.40 to 0.60).", id="mode wins"),
        pytest.param(
            verdict("eager", default=AROUND),
            "Call the model itself: not clearly faster or slower than default, 1.01x (0.98 to 1.04).",
            id="eager wins",
        ),
        pytest.param(verdict(), "Use w.", id="no figures"),
        pytest.param(Verdict(text="Keep eager: alone."), "Keep eager: alone.", id="its own text"),
        pytest.param(Verdict(), "No verdict.", id="nothing"),
    ],
)
def test_the_sentence(given, said):
    """A winner is used where it is surely faster than what costs nothing; else that is kept."""
    assert "".join(piece.text for piece in sentence(given)) == said.replace("x ", f"{TIMES} ")


def test_a_text_of_several_lines_is_a_sentence_and_a_remark():
    """Without a winner the first line is the sentence; beside one, all of it is a remark."""
    alone, beside = Verdict(text="Keep eager.\nNot clear."), Verdict("w", text="Timed once.")
    assert ([piece.text for piece in sentence(alone)], remark(alone)) == (["Keep eager."], "Not clear.")
    assert remark(beside) == "Timed once."


@pytest.mark.parametrize(
    ("given", "noise", "sure"),
    [
        pytest.param(verdict(eager=ABOVE), NOISE, ("Clear", "beyond this machine's noise, 0.99 to 1.01"), id="noise"),
        pytest.param(verdict(mode=ABOVE, eager=ABOVE), None, ("Clear", "each interval lies above 1"), id="all"),
        pytest.param(verdict(eager=ABOVE), None, ("Clear", "the interval lies above 1"), id="one"),
        pytest.param(
            verdict(mode=AROUND, default=ABOVE, eager=ABOVE),
            NOISE,
            ("Clear over default and eager", "not over mode: the interval contains 1"),
            id="partly",
        ),
        pytest.param(verdict(eager=AROUND), NOISE, ("Not clear", "the interval contains 1"), id="not clear"),
        pytest.param(
            verdict(eager=BELOW), NOISE, ("Clear", "eager is faster than w: the interval lies below 1"), id="loses"
        ),
        pytest.param(
            verdict(eager=ABOVE, clear=False),
            None,
            ("Not clear", "the winner and the one before it in the race are within noise"),
            id="race",
        ),
    ],
)
def test_how_sure_that_is(given, noise, sure):
    """The word is on what the sentence says, and the reason on the intervals behind it."""
    assert how_sure(given, noise) == sure


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        pytest.param(0.9, 1.0, "Call the model itself: it is not clear whether w is faster", id="ends at 1"),
        pytest.param(0.9, 0.999, "Call the model itself: w is", id="ends below 1"),
        pytest.param(1.0, 1.2, "Call the model itself: it is not clear whether w is faster", id="begins at 1"),
        pytest.param(1.001, 1.2, "Use w:", id="begins above 1"),
    ],
)
def test_where_an_interval_contains_one(low, high, said):
    """An interval that ends at 1 contains it."""
    made = "".join(piece.text for piece in sentence(verdict(eager=Interval((low + high) / 2, low, high))))
    assert made.startswith(said)
