"""The comparison of two candidates: speed beyond noise, and cost."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from backend_kwargs import trial
from backend_kwargs.auto import race, steps
from backend_kwargs.auto.candidates import RaceCandidate
from backend_kwargs.facts.decision import DEFAULT, EAGER
from backend_kwargs.trial import timing


def runner(*, complexity=1, speedup=None, peak_mib=None):
    row = steps.RaceRow("a step", speedup=speedup, peak_bytes=peak_mib and int(peak_mib * 2**20))
    return steps.Runner(RaceCandidate("a step", complexity=complexity), row, None, ())


def raced(left_s=5.0, *, warm=True):
    """Return a race with so many seconds left, whose calls are short enough to be warmed up, or not."""
    return SimpleNamespace(
        device=torch.device("cpu"), budget=SimpleNamespace(left_s=left_s, call_s=0.0 if warm else 1.0)
    )


@pytest.mark.parametrize(
    ("ratios", "clear"),
    [
        pytest.param([1.05, 1.06, 1.07], True, id="faster"),
        pytest.param([0.95, 0.94, 0.93], True, id="slower"),
        pytest.param([1.0, 1.005, 0.995], True, id="even"),
        pytest.param([1.0, 1.03, 1.06], False, id="about the margin"),
        pytest.param([0.9, 1.0, 1.1], False, id="noisy"),
        pytest.param([0.98], True, id="as slow as the margin"),
        pytest.param([1.02], True, id="as fast as the margin"),
        pytest.param([0.98, 0.95], False, id="slower than the margin, or as slow"),
        pytest.param([1.02, 1.05], False, id="faster than the margin, or as fast"),
        pytest.param([0.979, 0.95], True, id="slower than the margin"),
        pytest.param([1.021, 1.05], True, id="faster than the margin"),
    ],
)
def test_who_is_faster_is_clear(ratios, clear):
    """A comparison is clear if the interval is entirely on one side of the margin, or within it, which it may reach."""
    samples = {"champion": ratios * 12, "challenger": [1.0] * len(ratios * 12)}
    assert steps._certain(samples) is clear


@pytest.fixture
def napping(monkeypatch):
    """Return a function that makes calls which take given times in turn, by a clock that only they move."""
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    for module in (steps, timing):
        monkeypatch.setattr(module, "time", clock)

    def made(*naps):
        left = cycle(naps)
        return lambda: now.__setitem__(0, now[0] + next(left))

    return made


@pytest.mark.parametrize(
    ("naps", "least", "most"),
    [pytest.param([8e-3], 6, 6, id="clear"), pytest.param([2e-3, 4e-3, 8e-3], 30, 120, id="noisy")],
)
def test_what_is_not_clear_is_timed_longer(napping, naps, least, most):
    """A clear result needs one set of rounds; a difference within noise gets more."""
    runners = [steps.Runner(RaceCandidate(""), steps.RaceRow(""), call, ()) for call in (napping(*naps), napping(4e-3))]
    samples = steps.interleaved(raced(), *runners, pytest.fail)
    assert least <= len(samples["champion"]) == len(samples["challenger"]) <= most


def test_what_fails_late_ends_it(napping):
    """A call that raises after some rounds is reported, and no further round runs."""
    naps, left, found = napping(1e-3, 2e-3, 4e-3), iter(range(20)), {}
    calls = (lambda: (next(left), naps())), napping(2e-3)
    runners = [steps.Runner(RaceCandidate(""), steps.RaceRow(""), call, ()) for call in calls]
    samples = steps.interleaved(raced(), *runners, found.__setitem__)
    assert isinstance(found.pop("challenger"), StopIteration)
    assert (found, len(samples["champion"]) <= 18) == ({}, True)


@pytest.mark.parametrize(
    ("seconds", "against", "slower"),
    [
        pytest.param(0.9, DEFAULT, False, id="faster"),
        pytest.param(1.4, DEFAULT, True, id="slower"),
        pytest.param(1.4, EAGER, False, id="has met eager alone"),
    ],
)
def test_a_champion_that_is_slower_than_eager(seconds, against, slower):
    """By its figures, where it has met others alone: then both are timed."""
    champion, eager = runner(), runner()
    champion.row.seconds, eager.row.seconds, champion.row.against = seconds, 1.0, against
    assert race.is_slower(champion, eager) is slower


@pytest.mark.parametrize(
    ("ratio", "complexity", "wins"),
    [
        pytest.param((1.05, 1.03, 1.08), 2, True, id="faster"),
        pytest.param((1.016, 1.014, 1.019), 2, True, id="a little faster, and surely"),
        pytest.param((1.016, 1.009, 1.019), 2, False, id="a little faster, and perhaps"),
        pytest.param((1.0, 0.95, 1.05), 2, False, id="dearer"),
        pytest.param((1.0, 0.95, 1.05), 1, False, id="even"),
        pytest.param((1.3, 1.021, 1.5), 1, True, id="faster by an unsure margin"),
        pytest.param((0.9, 0.85, 0.95), 1, False, id="slower"),
    ],
)
def test_what_is_faster_beyond_noise_wins(ratio, complexity, wins):
    """The whole interval has to be beyond the slack, however little memory the challenger needs."""
    challenger = runner(complexity=complexity, speedup=trial.Interval(*ratio), peak_mib=50)
    assert steps.better(challenger, runner(peak_mib=100), "latency") is wins


def test_some_pages_are_no_memory():
    """Peaks that differ by less than a mebibyte do not decide, even with objective="memory"."""
    lighter = runner(speedup=trial.Interval(0.8, 0.7, 0.9), peak_mib=0.1)
    assert not steps.better(lighter, runner(peak_mib=0.2), "memory")


@pytest.mark.parametrize("objective", ["latency", "memory"])
@pytest.mark.parametrize(
    ("ratio", "wins"),
    [pytest.param((1.3, 0.9, 1.6), False, id="noise"), pytest.param((1.3, 1.1, 1.6), True, id="faster")],
)
def test_noise_picks_none_of_equal_peaks(objective, ratio, wins):
    """With equal peaks the challenger wins only if the whole interval says that it is faster."""
    challenger = runner(complexity=2, speedup=trial.Interval(*ratio), peak_mib=100)
    assert steps.better(challenger, runner(peak_mib=100), objective) is wins


@pytest.mark.parametrize(("rounds", "wins"), [pytest.param(4, False, id="few"), pytest.param(5, True, id="enough")])
def test_few_rounds_show_little(rounds, wins):
    """The spread of fewer than five rounds does not count as noise: 1.05x over a cheaper candidate is not a win."""
    samples = {"champion": [1.05] * rounds, "challenger": [1.0] * rounds}
    challenger = runner(complexity=2, speedup=steps.speedup(samples))
    assert steps._certain(samples) is wins
    assert steps.better(challenger, runner(), "latency") is wins


def test_cuda_graphs_cost_whichever_step_brought_them():
    """Within noise a candidate with CUDA graphs does not replace one without, even if it needs less memory."""
    graphed = runner(speedup=trial.Interval(1.0, 0.95, 1.05), peak_mib=0)
    graphed.row.options["triton.cudagraphs"] = True
    assert not steps.better(graphed, runner(peak_mib=100), "latency")


TIE = [1.05, 0.95] * 3
NOISE = [2.0, 0.5] * 3  # of a bout: in half of the rounds one is faster, in half the other


@pytest.fixture
def timed(monkeypatch):
    """Return a comparison whose bouts take `bout_s` each by a clock of its own, and what each bout was called with."""

    def compare(bout_s, left_s=100.0, ratios=NOISE, lost=(), warm=True):
        now, bouts = [50.0], []

        def interleave(calls, **given):
            now[0] += bout_s
            bouts.append((round(given["budget_s"], 6), given["warmup"], given["rounds"]))
            both = {"champion": ratios, "challenger": [1.0] * len(ratios)}
            return {name: both[name] for name in calls if name not in lost}

        monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: now[0]))
        monkeypatch.setattr(trial, "interleave", interleave)
        samples = steps.interleaved(raced(left_s, warm=warm), runner(), runner(), pytest.fail)
        assert len(samples["champion"]) == len(ratios) * len(bouts)
        return bouts

    return compare


@pytest.mark.parametrize(
    ("given", "bouts"),
    [
        pytest.param({"bout_s": 1e-3}, 20, id="until 120 rounds"),
        pytest.param({"bout_s": 0.07, "ratios": TIE}, 5, id="until 30 rounds after a third of a second"),
        pytest.param({"bout_s": 0.04, "ratios": TIE}, 8, id="until a third of a second after 30 rounds"),
        pytest.param({"bout_s": 0.07}, 20, id="until 120 rounds where it is noise"),
        pytest.param({"bout_s": 0.9}, 5, id="until 30 rounds within four seconds"),
        pytest.param({"bout_s": 1.5}, 3, id="until four seconds"),
        pytest.param({"bout_s": 1.0, "left_s": 2.0}, 3, id="until the budget ends"),
        pytest.param({"bout_s": 0.2, "left_s": 0.0}, 2, id="for a third of a second where the budget has ended"),
        pytest.param({"bout_s": 1e-3, "ratios": [1.5] * 6}, 1, id="until it is clear"),
        pytest.param({"bout_s": 1e-3, "lost": ("challenger",), "ratios": [1.0]}, 1, id="until one fails"),
    ],
)
def test_how_long_a_near_tie_is_timed(timed, given, bouts):
    """Bouts of six rounds are added until it is clear which is faster, and no longer than that is worth."""
    assert len(timed(**given)) == bouts


def test_what_a_bout_is_given(timed):
    """Six rounds, the time that is left, and fewer warm-up calls than the first; none for a slow call."""
    assert timed(bout_s=1.5) == [(4.0, 3, 6), (2.5, 1, 6), (1.0, 1, 6)]
    assert timed(bout_s=0.2, left_s=0.1, warm=False) == [(0.3, 0, 6), (0.1, 0, 6)]


def test_the_interval_of_few_rounds_is_wide():
    """Fewer than five rounds have the interval of a noisy machine around their own, the wider the fewer they are."""
    samples = {"champion": [1.0, 2.0] * 2, "challenger": [1.0] * 4}
    assert steps.speedup(samples) == trial.Interval(1.5, 1.0 * 0.875, 2.0 * 1.125)
    assert steps.speedup({"champion": [4.0], "challenger": [1.0]}) == trial.Interval(4.0, 2.0, 6.0)
    samples = {name: [*seconds, 1.0] for name, seconds in samples.items()}
    assert steps.speedup(samples) == trial.Interval(1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("ratio", "wins"),
    [
        pytest.param((0.985, 0.97, 0.99), True, id="within the margin"),
        pytest.param((0.8, 0.6, 1.1), False, id="unsure but far"),
        pytest.param((0.8, 0.74, 0.99), False, id="slower"),
        pytest.param((0.9, 0.8, 1.1), True, id="at the end of an unsure margin"),
        pytest.param((0.899, 0.8, 1.1), False, id="beyond it"),
        pytest.param((0.95, 0.9, 1.0), True, id="just unsure"),
        pytest.param((0.95, 0.9, 0.999), False, id="just sure"),
        pytest.param((0.98, 0.97, 0.99), True, id="at the end of the margin"),
        pytest.param((0.979, 0.97, 0.99), False, id="beyond the margin"),
    ],
)
def test_how_much_slower_default_may_be(ratio, wins):
    """Two per cent, or ten where the interval is not clear of 1."""
    default = steps.Runner(RaceCandidate(DEFAULT, over=False, complexity=0), steps.RaceRow(DEFAULT), None, ())
    default.row.speedup = trial.Interval(*ratio)
    eager = steps.Runner(RaceCandidate(EAGER), steps.RaceRow(EAGER), None, ())
    assert steps.better(default, eager, "latency") is wins
    default.candidate = RaceCandidate("a step", complexity=0)
    assert steps.better(default, eager, "latency") is False  # only what stands alone
    default.candidate = RaceCandidate("a template", over=False, complexity=2)
    assert steps.better(default, eager, "latency") is False  # only what has the lower complexity


@pytest.mark.parametrize(
    ("new", "old", "wins"),
    [
        pytest.param(99, 100, False, id="a mebibyte less"),
        pytest.param(9.0, 10.0, False, id="a tenth, and a mebibyte, less"),
        pytest.param(8.9, 10.0, True, id="more than a mebibyte less"),
        pytest.param(189.9, 200, True, id="more than a twentieth less"),
        pytest.param(190.1, 200, False, id="hardly less"),
        pytest.param(200, 189.9, False, id="more"),
        pytest.param(None, 100, False, id="unknown"),
        pytest.param(100, None, False, id="the other unknown"),
    ],
)
def test_how_much_less_memory_wins(new, old, wins):
    """More than a mebibyte and more than a twentieth; where that is not so, speed decides."""
    challenger = runner(complexity=2, speedup=trial.Interval(0.9, 0.8, 1.0), peak_mib=new)
    assert steps.better(challenger, runner(peak_mib=old), "memory") is wins
    challenger.row.speedup = trial.Interval(1.5, 1.03, 1.6)
    heavier = new is not None and old is not None and new > old
    assert steps.better(challenger, runner(peak_mib=old), "memory") is not heavier


@pytest.mark.parametrize(
    ("code", "replayed"),
    [
        pytest.param((), False, id="no code"),
        pytest.param((("a", False), ("b", False)), False, id="none"),
        pytest.param((("a", False), ("b", True)), True, id="one graph"),
    ],
)
def test_what_a_replay_is(code, replayed):
    """A candidate is replayed if a CUDA graph has any of its graphs."""
    one = runner()
    one.code = code
    assert one.replayed is replayed


def test_the_complexity_of_cuda_graphs():
    """It is that of the step which enables them, whatever the candidate's own."""
    graphed = runner(complexity=1)
    assert graphed.complexity == 1
    graphed.row.options["triton.cudagraphs"] = True
    assert graphed.complexity == 3
