"""Compare two candidates: time them interleaved until it is clear, then judge by time and complexity, or by memory."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from backend_kwargs import trial
from backend_kwargs.auto.candidates import GRAPHS_COMPLEXITY, SLACK, RaceCandidate, records
from backend_kwargs.auto.compiling import Candidate
from backend_kwargs.facts.decision import RaceRow, is_unclear
from backend_kwargs.trial import Interval

MARGIN = 0.02  # the difference between two runs of one callable on a quiet machine
UNSURE = 0.1  # the same on a noisy machine, where intervals are this wide
BOUT = 6  # rounds between two checks of the time
LEAST_BOUTS, MOST_BOUTS = 5, 20  # for two candidates that differ by little
SETTLED_S = 0.3  # seconds after which LEAST_BOUTS suffice
BOUT_S = 4.0  # seconds after which no further round starts
FEW = 5  # with fewer rounds, their spread is no estimate of the noise
LITTLE = 1 << 20  # bytes by which peaks of one callable differ between runs


@dataclass(slots=True)
class Runner:
    """A candidate and its row; what was made of it; and once it is checked its call, and its code to compare."""

    candidate: RaceCandidate
    row: RaceRow
    call: Callable[[], object] = lambda: None
    code: tuple[tuple[str, bool], ...] = ()
    made: Candidate | None = None

    @property
    def runs(self) -> bool:
        """Whether nothing is wrong with it up to now."""
        return self.row.status == "pass"

    @property
    def complexity(self) -> int:
        """The candidate's complexity; with CUDA graphs the highest, whichever step set them."""
        return GRAPHS_COMPLEXITY if records(self.row.options) else self.candidate.complexity

    @property
    def replayed(self) -> bool:
        """Whether a CUDA graph replays any of it."""
        return any(replayed for _, replayed in self.code)


def interleaved(
    challenger: Runner,
    champion: Runner,
    device: torch.device,
    left_s: float,
    failed: Callable[[str, Exception], None],
    *,
    warm: bool,
) -> dict[str, list[float]]:
    """Return seconds per call of "champion" and "challenger", round by round, until it is clear which is faster.

    Near ties are timed longer, within `left_s`; `warm` adds warm-up calls. If a call raises, `failed` is called with
    the error, and the timing ends.
    """
    calls = {"champion": champion.call, "challenger": challenger.call}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    limit_s, began = min(BOUT_S, max(left_s, SETTLED_S)), time.perf_counter()
    spent = 0.0
    for before in range(MOST_BOUTS):
        warmup = 0 if not warm else 1 if before else 3
        bout = trial.interleave(
            calls, rounds=BOUT, device=device, budget_s=limit_s - spent, failed=failed, warmup=warmup
        )
        for name, seconds in bout.items():
            samples[name] += seconds
        if len(bout) < len(calls):
            break
        spent = time.perf_counter() - began
        unclear = is_unclear(speedup(samples))
        if unclear and len(samples["champion"]) < FEW:  # slow calls: a few rounds of them say nothing
            limit_s = max(limit_s, left_s)
        settled = spent > SETTLED_S and before + 1 >= LEAST_BOUTS and not unclear
        if spent > limit_s or settled or _certain(samples):
            break
    return samples


def speedup(samples: Mapping[str, list[float]]) -> Interval:
    """Return the challenger's speedup over the champion; with few rounds the interval is that of a noisy machine."""
    ratio, rounds = trial.ratio_interval(samples["champion"], samples["challenger"]), len(samples["champion"])
    if rounds >= FEW:
        return ratio
    unsure = UNSURE * FEW / rounds
    return Interval(ratio.median, ratio.low * (1 - unsure), ratio.high * (1 + unsure))


def note_figures(challenger: Runner, champion: Runner, samples: Mapping[str, list[float]]) -> None:
    """Note in both rows what a comparison has shown: seconds and speedup."""
    challenger.row.speedup, challenger.row.against = speedup(samples), champion.row.name
    # From the ratio, not as timed: clocks drift between comparisons, and the ranking would contradict the speedups.
    champion.row.seconds = champion.row.seconds or trial.percentile(samples["champion"], 0.5)
    challenger.row.seconds = champion.row.seconds / challenger.row.speedup.median


def _certain(samples: Mapping[str, list[float]]) -> bool:
    """Return whether the interval is entirely on one side of the margin, or within it."""
    ratio = speedup(samples)
    tied = ratio.low >= 1 - MARGIN and ratio.high <= 1 + MARGIN
    return tied or ratio.low > 1 + MARGIN or ratio.high < 1 - MARGIN


def better(challenger: Runner, champion: Runner, objective: str) -> bool:
    """Return whether the challenger wins: by its memory, or beyond noise if it is more complex, within it if less so.

    Where memory is as much, or unknown, the faster one wins.
    """
    ratio, new, old = challenger.row.speedup, challenger.row.peak_bytes, champion.row.peak_bytes
    assert ratio is not None
    if objective == "memory":
        if new is None or old is None or abs(new - old) <= max(0.05 * max(new, old), LITTLE):
            return ratio.low > 1 + MARGIN
        return new < old
    if not challenger.candidate.over and challenger.complexity < champion.complexity:  # less wins within the noise
        return ratio.median >= 1 - (UNSURE if ratio.high >= 1 else MARGIN)
    return ratio.low > 1 + SLACK
