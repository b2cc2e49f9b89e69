"""The steps of a race: compile, check, time; each in torch's state, within the budget, what fails noted in its row.

Two candidates are timed in turn until it is clear which is faster, and judged by time and complexity, or by memory.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from backend_kwargs import trial
from backend_kwargs.auto.candidates import SLACK
from backend_kwargs.auto.compiling import Candidate
from backend_kwargs.auto.sandbox import own_libdevice
from backend_kwargs.auto.selection import MARGIN, RaceState, Runner
from backend_kwargs.backends.generated_code import comparable, compiled_graphs, rewrites_made
from backend_kwargs.facts import DEFAULT, EAGER, Call, left_to_eager
from backend_kwargs.facts.decision import RaceRow, is_unclear
from backend_kwargs.graphs.replay import ChangedInputError
from backend_kwargs.rewrites.table import chosen_places, find_rewrite
from backend_kwargs.torch_internals.caches import artifacts_noted
from backend_kwargs.torch_internals.dynamo import RESTARTS, get_metrics_context
from backend_kwargs.torch_internals.tensors import modes_restored

SLOW_S = 0.1  # a first call in eager that takes longer is timed again; if that does too, only CUDA graphs are warmed up
UNSURE = 0.1  # the same on a noisy machine, where intervals are this wide
BOUT = 6  # rounds between two checks of the time
LEAST_BOUTS, MOST_BOUTS = 5, 20  # for two candidates that differ by little
SETTLED_S = 0.3  # seconds after which LEAST_BOUTS suffice
BOUT_S = 4.0  # seconds after which no further round starts
FEW = 5  # with fewer rounds, their spread is no estimate of the noise
LITTLE = 1 << 20  # bytes by which peaks of one callable differ between runs


@contextmanager
def _noting(runner: Runner) -> Iterator[None]:
    """Do a step with a runner, whose row says what failed."""
    row, noted = runner.row, list[Any]()
    try:
        with own_libdevice(), modes_restored(), artifacts_noted() as noted, get_metrics_context():
            yield
    except RESTARTS:
        raise
    except Exception as error:
        if row.name == EAGER:  # a candidate may fail in any way, without harm to the others
            raise
        changed = isinstance(error, ChangedInputError)
        row.status, row.reason = ("fail_accuracy", str(error)) if changed else trial.status_of(error)
    if runner.made:
        runner.made.artifacts += noted


def compile_candidate(race: RaceState, runner: Runner, make: Callable[[], Candidate], *, free: bool) -> None:
    """Compile the runner's candidate by `make`; if this is `free`, it does not count against the budget."""
    began = time.perf_counter()
    with _noting(runner), race.budget.serving() if free else nullcontext():
        runner.made = make()
    runner.row.compile_s += time.perf_counter() - began


def check_results(race: RaceState, runner: Runner) -> None:
    """Check the results of a candidate, and the inputs that it changes; its row says what is wrong with them.

    The runner also gets its call, which is timed, and its code, which identifies it.
    """
    began, row = time.perf_counter(), runner.row
    assert runner.made is not None
    fn, facts = runner.made.compiled.call, runner.made.compiled.facts
    with _noting(runner):
        runner.call = race.caller(fn)
        accuracy = _accuracy(race, row, fn)
        if not accuracy.passed:
            row.status, row.reason = accuracy.status, accuracy.reason
        elif row.compiler and (why := left_to_eager(facts.parts)):
            row.status, row.reason = "fell_back", why
        names = chosen_places(row.options.get("rewrites", ()))
        row.rewritten = rewrites_made(fn, facts, {name: find_rewrite(name).operators for name in names})
        if runner.runs and race.request.settings.objective == "memory":
            row.peak_bytes = trial.peak_memory(runner.call, race.device)
        # What identifies a compiled candidate: its generated code, and whether CUDA graphs replay it.
        graphs = [] if row.name == EAGER else compiled_graphs(fn)
        replayed = (bool(each.cudagraph_info) and not each.disabled_cudagraphs_reason for each in graphs)
        runner.code = tuple(sorted(zip((comparable(each.source_code) for each in graphs), replayed, strict=True)))
    if row.name != EAGER:
        row.compile_s += time.perf_counter() - began


def _accuracy(race: RaceState, row: RaceRow, fn: Call) -> trial.Accuracy:
    checks, budget, began = race.checks, race.budget, time.perf_counter()
    seen = race.task.observe(fn)
    if row.name == EAGER:
        # The first call also loads kernels, or times those of cuDNN.
        budget.call_s = min(budget.call_s, time.perf_counter() - began)
        return checks.of_eager(seen)
    if race.device.type == "cuda":
        trial.fill_free_memory(race.device)
        seen = race.task.observe(fn)
    if "precision" in row.options:  # the error is noted in the row
        return checks.of_error(seen, row)
    if race.default_s and not checks.awaits_draws:
        return checks.of_results(seen)
    with budget.uncounted():
        if race.draws_its_own:
            drawing = race.compiles.compile({**row.options, "fallback_random": True})
            return checks.of_draws(seen, drawing.compiled.call, last=row.name == DEFAULT)
        return checks.of_results(seen)


def time_in_turn(race: RaceState, runner: Runner, champion: Runner) -> None:
    """Time a runner and the champion in turn, and note it in their rows; that of one which raises says so."""
    began, failed = time.perf_counter(), dict[str, Exception]()
    with _noting(runner):
        samples = interleaved(race, runner, champion, failed.__setitem__)
        for each, name in ((champion, "champion"), (runner, "challenger")):
            if name in failed:
                each.row.status, each.row.reason = trial.status_of(failed[name])
        if not failed:
            note_figures(runner, champion, samples)
    runner.row.timed_s = runner.row.timed_s or time.perf_counter() - began


# ---- who is faster


def interleaved(
    race: RaceState, challenger: Runner, champion: Runner, failed: Callable[[str, Exception], None]
) -> dict[str, list[float]]:
    """Return seconds per call of "champion" and "challenger", round by round, until it is clear which is faster.

    Near ties are timed longer, within the budget. If a call raises, `failed` is called with the error, and the timing
    ends.
    """
    # To record CUDA graphs takes many times as long as a call; those of other inputs are recorded anew.
    warm, left_s = challenger.replayed or champion.replayed or race.budget.call_s <= SLOW_S, race.budget.left_s
    calls = {"champion": champion.call, "challenger": challenger.call}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    limit_s, began = min(BOUT_S, max(left_s, SETTLED_S)), time.perf_counter()
    spent = 0.0
    for before in range(MOST_BOUTS):
        warmup = 0 if not warm else 1 if before else 3
        bout = trial.interleave(
            calls, rounds=BOUT, device=race.device, budget_s=limit_s - spent, failed=failed, warmup=warmup
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


def speedup(samples: Mapping[str, list[float]]) -> trial.Interval:
    """Return the challenger's speedup over the champion; with few rounds the interval is that of a noisy machine."""
    ratio, rounds = trial.ratio_interval(samples["champion"], samples["challenger"]), len(samples["champion"])
    if rounds >= FEW:
        return ratio
    unsure = UNSURE * FEW / rounds
    return trial.Interval(ratio.median, ratio.low * (1 - unsure), ratio.high * (1 + unsure))


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
    """Return whether the challenger wins: faster beyond noise, or not slower beyond noise if it is less complex.

    Under `objective="memory"` less memory wins; where peaks are equal or unknown, the faster one does.
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
