"""The steps of a race, and the loop that takes them: in torch's state, within the budget, what fails noted in its row.

A race is a generator of steps: it reads what a step has found from the runner that the step is about.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from backend_kwargs import trial
from backend_kwargs.auto.compiling import Candidate
from backend_kwargs.auto.deadline import OutOfTime, capped
from backend_kwargs.auto.head_to_head import Runner, interleaved, note_figures
from backend_kwargs.auto.sandbox import own_libdevice
from backend_kwargs.auto.selection import RaceState
from backend_kwargs.backends.generated_code import comparable, compiled_graphs, rewrites_made
from backend_kwargs.facts import DEFAULT, EAGER, Call, left_to_eager
from backend_kwargs.graphs.replay import ChangedInputError
from backend_kwargs.rewrites.table import chosen_places, find_rewrite
from backend_kwargs.torch_internals.caches import artifacts_noted
from backend_kwargs.torch_internals.dynamo import RESTARTS, get_metrics_context
from backend_kwargs.torch_internals.modes import modes_restored

T = TypeVar("T")

SLOW_S = 0.1  # a first call in eager that takes longer is timed again; if that does too, only CUDA graphs are warmed up


@dataclass(slots=True)
class Step:
    """What is done with a runner; if it is `free`, the end of the budget does not interrupt it."""

    runner: Runner
    free: bool = field(default=False, kw_only=True)


Steps: TypeAlias = Generator["Compile | Check | Time", None, T]


def execute(race: RaceState, steps: Steps[T]) -> T:
    """Take the steps of a race, and return its result."""
    while True:
        try:
            _take(race, next(steps))  # nothing is held here: what has lost goes
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def _take(race: RaceState, step: "Compile | Check | Time") -> None:
    row, began = step.runner.row, time.perf_counter()
    ends, noted = math.inf if step.free else race.budget.ends, list[Any]()
    try:
        with own_libdevice(), modes_restored(), capped(ends), artifacts_noted() as noted, get_metrics_context():
            step.take(race)
    except RESTARTS:
        raise
    except OutOfTime:
        why = f"its tuning was interrupted when the budget of {race.budget.seconds:g} s ended"
        row.status, row.reason = "timeout", why
    except Exception as error:
        if row.name == EAGER:  # a candidate may fail in any way, without harm to the others
            raise
        changed = isinstance(error, ChangedInputError)
        row.status, row.reason = ("fail_accuracy", str(error)) if changed else trial.status_of(error)
    finally:
        if isinstance(step, Time):
            row.timed_s = row.timed_s or time.perf_counter() - began
        elif row.name != EAGER:
            row.compile_s += time.perf_counter() - began
    if step.runner.made:
        step.runner.made.artifacts += noted


@dataclass(slots=True)
class Compile(Step):
    """Compile a candidate by `make`; if this is `free`, it counts for no budget."""

    make: Callable[[], Candidate]

    def take(self, race: RaceState) -> None:
        """Let the runner have what was made."""
        with race.budget.serving() if self.free else nullcontext():
            self.runner.made = self.make()


@dataclass(slots=True)
class Check(Step):
    """Check the results of a candidate, and the inputs that it changes; its row says what is wrong with them.

    If it is `near`, they are compared with the first run of eager alone.
    """

    near: bool = False

    def take(self, race: RaceState) -> None:
        """Let the runner have its call and its code too, by which it is timed and known."""
        runner, row = self.runner, self.runner.row
        assert runner.made is not None
        fn, facts = runner.made.compiled.call, runner.made.compiled.facts
        runner.call = race.caller(fn)
        accuracy = self._accuracy(race, fn)
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

    def _accuracy(self, race: RaceState, fn: Call) -> trial.Accuracy:
        checks, budget, row = race.checks, race.budget, self.runner.row
        began = time.perf_counter()
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
        if self.near:
            return checks.of_near(seen)
        if race.default_s and not checks.awaits_draws:
            return checks.of_results(seen)
        with budget.uncounted():
            if race.draws_its_own:
                drawing = race.compiles.compile({**row.options, "fallback_random": True})
                return checks.of_draws(seen, drawing.compiled.call, last=row.name == DEFAULT)
            return checks.of_results(seen)


@dataclass(slots=True)
class Time(Step):
    """Time a runner and the champion in turn, and note it in their rows; that of one which raises says so."""

    champion: Runner
    free: bool = field(default=True, kw_only=True)

    def take(self, race: RaceState) -> None:
        """Note the figures of both, unless one fails."""
        failed: dict[str, Exception] = {}
        # To record CUDA graphs takes many times as long as a call; those of other inputs are recorded anew.
        replayed = self.runner.replayed or self.champion.replayed
        warm, left_s = replayed or race.budget.call_s <= SLOW_S, race.budget.left_s
        samples = interleaved(self.runner, self.champion, race.device, left_s, failed.__setitem__, warm=warm)
        for runner, name in ((self.champion, "champion"), (self.runner, "challenger")):
            if name in failed:
                runner.row.status, runner.row.reason = trial.status_of(failed[name])
        if not failed:
            note_figures(self.runner, self.champion, samples, race.device)
