"""The verdict in one line: what to use or to keep, with figures, whatever the intervals say."""

import pytest

from backend_kwargs.interval import Interval
from backend_kwargs.page.document import Row, Speedup, Verdict
from backend_kwargs.page.sentence import SLOWER, gained, remark, sentence

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
    ("given", "noise", "ends"),
    [
        pytest.param(verdict(eager=ABOVE), NOISE, "as eager.", id="sure"),
        pytest.param(
            verdict(eager=ABOVE, clear=False), NOISE, "; within this machine's noise, 0.99 to 1.01.", id="noise"
        ),
        pytest.param(
            verdict(eager=ABOVE, clear=False), None, "; within the noise of the one before it in its race.", id="race"
        ),
        pytest.param(verdict(eager=AROUND, clear=False), NOISE, "1.01x (0.98 to 1.04).", id="its figures say it"),
        pytest.param(
            Verdict("w", provisional="1 of 5 not tried", speedups=(Speedup("default", BELOW),)),
            None,
            "(0.40 to 0.60); provisional: 1 of 5 not tried.",
            id="provisional",
        ),
    ],
)
def test_the_sentence_says_why_it_is_not_sure(given, noise, ends):
    """The reason stands in it, unless an interval that contains 1 is the reason."""
    said = "".join(piece.text for piece in sentence(given, noise))
    assert said.endswith(ends.replace("x ", f"{TIMES} "))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "0 of 0 units surely gain."),
        (
            [Row("a", speedup=ABOVE), Row("b", speedup=Interval(3.0, 2.9, 3.1)), Row("c", speedup=AROUND), Row("d")],
            "2 of 4 units surely gain: 2.00x to 3.00x as fast as eager; 2 not clear.",
        ),
        (
            [Row("a", SLOWER, speedup=BELOW), Row("b", "failed"), Row("c", "not done"), Row("d", "failed")],
            "0 of 4 units surely gain; 1 slower than eager; 2 failed; 1 not done.",
        ),
    ],
)
def test_what_several_have_gained(rows, said):
    """Those that surely gained, with their least and their highest gain; each of the others is counted."""
    assert gained("units", rows) == said.replace("x ", f"{TIMES} ")


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
