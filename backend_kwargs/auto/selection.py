"""What is known of a race, and what follows from it: which candidate is next, and why the others are skipped."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch
from torch.fx import GraphModule

from backend_kwargs.auto import logger
from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.candidates import (
    CUDAGRAPHS,
    DEFAULT_AND_GRAPHS,
    GRAPHS_COMPLEXITY,
    PERSISTENT_REDUCTIONS,
    UNFROZEN,
    WITH_GRAPHS,
    RaceCandidate,
    candidates_for,
    merged,
    name_of_other,
    placed,
    precision_candidates,
    records,
    rewriting,
    toggled,
    why_not_raced,
)
from backend_kwargs.auto.compiling import Candidate, Compiles
from backend_kwargs.auto.graph_stats import GraphStats, observed_stats
from backend_kwargs.auto.places import with_neighbours, worth_it
from backend_kwargs.auto.question import Request
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.sandbox import Sandbox
from backend_kwargs.auto.verdicts import Verdict
from backend_kwargs.errors import error_text
from backend_kwargs.facts import DEFAULT, EAGER, Call, PlaceRow, RaceRow
from backend_kwargs.graphs.freezing import freezable_parameters
from backend_kwargs.graphs.replay import Task
from backend_kwargs.options.machine import machine, unmet
from backend_kwargs.options.option import Options, standing, with_users
from backend_kwargs.rewrites.table import find_rewrite
from backend_kwargs.rewrites.traced import Place
from backend_kwargs.trial import may_draw

Progress = Callable[[str, float], None]

MARGIN = 0.02  # the difference between two runs of one callable on a quiet machine
LEAST_GAIN = 0.03  # a candidate that cannot gain this much is skipped
LEAST_COMPILE_S = 0.5  # assumed for default, whose own compile is faster when it hits Inductor's cache


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


@dataclass
class RaceState:
    """A race: its subject, its parts, and what has been measured up to now.

    Each call is made after `dynamo_s`, the time of dynamo's guards. The first compile took `default_s`. `verdicts` has
    those of the `places` that were looked for, as far as they were raced by themselves. `best_row` is the fastest of
    Inductor's, whose options the next ones extend, and `leading` what was made of it. `codes` has the first candidate
    with each code.
    """

    request: Request
    task: Task
    device: torch.device
    budget: Budget
    checks: ResultChecks
    compiles: Compiles
    sandbox: Sandbox
    tell: Progress
    dynamo_s: float
    rows: list[RaceRow] = field(default_factory=list)
    default_s: float = 0.0
    places: list[Place] = field(default_factory=list)
    verdicts: dict[Place, Verdict] = field(default_factory=dict)
    codes: dict[tuple[object, ...], str] = field(default_factory=dict)
    best_row: RaceRow | None = None
    leading: Runner | None = None

    @cached_property
    def stats(self) -> GraphStats:
        """What a further run of the graph in eager shows."""
        task = self.task
        stats = observed_stats(
            partial(task.observe, task.copy()),
            bytes_read=task.inputs.bytes,
            device=self.device.type,
            training=task.training,
            writes=bool(task.inputs.written),
            dynamic=any(isinstance(value, torch.SymInt) for value in task.inputs.values),
            frozen=len(freezable_parameters(task.gm, self.request.example_inputs)) if self.request.frozen else 0,
        )
        # Operators inside a higher-order operator are not counted, and a tag says what may draw.
        return replace(stats, random=self.checks.random)

    @property
    def draws_its_own(self) -> bool:
        """Whether compiled code returns other random numbers than eager: what is drawn for nothing is not lowered."""
        if not self.checks.random or self.request.fixed.get("fallback_random"):
            return False
        nodes = [node for each in self.compiles.lowered for node in each.gm.graph.nodes if node.op == "call_function"]
        return not nodes or any(may_draw(node.target, node.args, node.kwargs) for node in nodes)

    def caller(self, fn: Call) -> Callable[[], object]:
        """Return the call of a candidate on the race's inputs."""
        return self.task.caller(partial(_after_guards, fn, self.dynamo_s))

    def note(self, *rows: RaceRow) -> None:
        """List rows, each once."""
        self.rows += [row for row in rows if not any(row is each for each in self.rows)]

    @property
    def named(self) -> bool:
        """Whether the user has named the candidates: all of them are raced, in this order."""
        return self.request.settings.candidates is not None

    # ---- CUDA graphs

    @property
    def may_have_graphs(self) -> bool:
        """Whether CUDA graphs that the user has not named may be raced."""
        if self.device.type != "cuda" or self.named or self.request.settings.objective == "memory":
            return False
        # Each symbolic size would record a graph of its own.
        return not self.stats.dynamic and not self._unfit(WITH_GRAPHS, CUDAGRAPHS)

    @property
    def default(self) -> RaceCandidate:
        """Default, compiled for CUDA graphs if these may be raced: the same code then serves with them and without."""
        shared = self.may_have_graphs and self.compiles.may_share(CUDAGRAPHS)
        return DEFAULT_AND_GRAPHS if shared else RaceCandidate(DEFAULT, over=False, complexity=0)

    def other(self, candidate: RaceCandidate, champion: Runner) -> RaceCandidate | None:
        """Return the step for a candidate's code with CUDA graphs where it has none, or without.

        None if it is not worth its time: once CUDA graphs won, code is raced with them.
        """
        options = toggled(candidate.options)
        raced = any(row.options == options for row in self.rows if row.status != "skipped")
        if champion.replayed or raced or not self.may_have_graphs:
            return None
        return replace(
            WITH_GRAPHS if candidate.name == DEFAULT else candidate,
            name=name_of_other(candidate.name, options),
            options=options,
            over=False,
        )

    # ---- all candidates

    def candidates(self, champion: Runner) -> list[RaceCandidate]:
        """Return what may be raced against the first champion: steps, rewrites, precisions and other compilers."""
        settings, of, frozen = self.request.settings, self.request.options_of, self.request.frozen
        steps = candidates_for(self.stats, settings.effort, settings.candidates, of, frozen=frozen)
        compilers = [step.name for step in steps if step.compiler]
        precise = precision_candidates(settings, compilers)
        if any(records(row.options) for row in self.rows):
            steps = [step for step in steps if step is not WITH_GRAPHS]
        if self.named:
            return [*self.request.offered, *steps, *precise]
        refused = champion.candidate.name == EAGER and any(row.status == "fail_accuracy" for row in self.rows)
        if refused and PERSISTENT_REDUCTIONS not in steps and PERSISTENT_REDUCTIONS.can_gain(self.stats):
            options = {**self.default.options, **PERSISTENT_REDUCTIONS.options}
            precise = [replace(PERSISTENT_REDUCTIONS, options=options, over=False), *precise]
        short = [step for step in steps if step.name in (UNFROZEN, WITH_GRAPHS.name)]
        return [
            *self.request.offered,
            *precise,
            *short,
            *self.rewriting,
            *(step for step in steps if step not in short),
        ]

    # ---- rewrites

    @property
    def places_first(self) -> bool:
        """Whether all places are raced by themselves before anything is compiled."""
        return self.device.type == "cuda" and self.races_places

    @property
    def races_places(self) -> bool:
        """Whether any place is: not at sizes that vary, nor where parameters are constants, which it does not know."""
        varies = self.named or self.stats.dynamic or self.request.frozen
        return not varies and self.request.settings.objective == "latency"

    @cached_property
    def traced(self) -> list[Place]:
        """The places of dynamo's graph where rewrites may be raced, in training with the backward pass."""
        return self._matching(traced=True)

    @cached_property
    def lowered(self) -> list[Place]:
        """The places in the graphs that Inductor lowers, as lowered for default if they were."""
        return self._matching(traced=False)

    def _matching(self, *, traced: bool) -> list[Place]:
        """Return the places where rewrites of dynamo's graph match, or those of lowered graphs; all stay unchanged."""
        from backend_kwargs.rewrites.traced import places_in, places_in_traced

        @cache
        def lowered() -> list[GraphModule]:
            if not self.compiles.lowered:
                with self.budget.serving(), suppress(Exception):  # default's compile says what is wrong
                    self.compiles.trace(self.first.options)
            return [each.gm for each in self.compiles.lowered]

        found, given = list[Place](), (self.task.copy(), self.request.example_inputs)
        for name in () if self.named else self.request.rewrites:
            rewrite = find_rewrite(name)
            try:
                fits = bool(rewrite.traced) == traced and rewrite.fitting(self.stats)
                fits = fits and rewrite.objective in ("latency", self.request.settings.objective)
                if not fits or unmet(rewrite.needs, machine()):
                    continue
                places = places_in_traced(*given, name) if traced else places_in(lowered(), name)
            except Exception as error:  # noqa: BLE001 - a user's rewrite may raise anything: it is not tried
                logger.info("Rewrite %s is not tried: %s", name, error_text(error))
                continue
            if places:
                logger.info("%s matches %d times", name, sum(each.count for each in places))
                found += map(with_neighbours, places)
        return found

    @property
    def chosen(self) -> list[Place]:
        """The places where a rewrite is faster by itself."""
        return worth_it(self.places, self.verdicts, MARGIN)

    @property
    def place_rows(self) -> tuple[PlaceRow, ...]:
        """The places that were raced by themselves, the dearest first."""
        rows = list[PlaceRow]()
        for place, it in self.verdicts.items():
            if not it.is_little:
                figures = it.default_s, it.rewritten_s, it.speedup, it.limit_s, it.why, it.confirmed
                rows.append(PlaceRow(str(place), place.what, place.count, *figures))
        return tuple(sorted(rows, key=lambda row: -row.count * row.default_s))

    @property
    def first(self) -> RaceCandidate:
        """Default, with the places rewritten that are chosen."""
        return placed([*map(str, self.chosen)], self.default.options) if self.chosen else self.default

    @property
    def rewriting(self) -> list[RaceCandidate]:
        """The rewrites to race in the whole graph: those of places without a verdict; in full, all."""
        matching, settled = [*self.traced, *self.lowered], set[Place]()
        if self.request.settings.effort != "full":  # these need no race in the whole graph
            settled = {*self.chosen, *(place for place, it in self.verdicts.items() if it.speedup or it.is_little)}
        return [
            rewriting(name, map(str, left))
            for name in self.request.rewrites
            if (left := [place for place in matching if place.rewrite == name and place not in settled])
        ]

    # ---- one candidate

    def following(self, left: list[RaceCandidate], champion: Runner) -> RaceCandidate | None:
        """Take the next candidate out of those that are left; None, and rows with the reasons, if none is worth it."""
        skipped = [self.skipped(each, champion) for each in left]
        if None in skipped:
            return left.pop(skipped.index(None))
        self.rows += [row for row in skipped if row and row.reason]
        return None

    def options(self, candidate: RaceCandidate, champion: Runner) -> Options:
        """Return the options with which the candidate is compiled: merged onto those of Inductor's best, if it is."""
        row = self.best_row if champion.row.compiler else champion.row
        return merged(row.options if candidate.over and row else {}, candidate)

    def skipped(self, candidate: RaceCandidate, champion: Runner) -> RaceRow | None:
        """Return the row that says why the candidate is skipped, or None; without a reason if it was raced already."""
        options, predicted = self.options(candidate, champion), self.predicted_s(candidate)
        of = {**candidate.options}
        because = partial(RaceRow, candidate.name, of, "skipped", compiler=candidate.compiler, predicted_s=predicted)
        if why := self._unfit(candidate, options):
            return because(why)
        compiled = [row for row in self.rows if row.status != "skipped" and row.name != EAGER]
        if equal := [row.name for row in compiled if row.options == options and row.compiler == candidate.compiler]:
            return because("" if equal[0] == candidate.name else f"it would be {equal[0]} again")
        if why := self._gains_little(candidate, champion):  # which more time would not change
            return because(why)
        if self.budget.over:
            return because(f"the budget of {self.budget.seconds:g} s is spent", untried=True)
        if predicted > self.budget.left_s:
            # Rounded apart, so that the first figure is the larger one.
            needed, left = math.ceil(predicted * 10) / 10, math.floor(self.budget.left_s * 10) / 10
            why = f"it is predicted to exceed the budget: about {needed:g} s of compiling, {left:g} s are left"
            return because(why, untried=True)
        if "precision" in options and isinstance(self.checks.precise, str):
            return because(f"its error cannot be measured in float64: {self.checks.precise}")
        return None

    def _gains_little(self, candidate: RaceCandidate, champion: Runner) -> str:
        """Return why the candidate is not worth its time, or ""; what is named, or has won elsewhere, always is."""
        known = self.named or candidate in self.request.offered
        if known or self.request.settings.objective == "memory" or not champion.row.seconds:
            return ""
        gain = candidate.saves_op_s * self.stats.ops / champion.row.seconds
        return f"it could save {gain:.1%} at most" if gain < LEAST_GAIN else ""

    def _unfit(self, candidate: RaceCandidate, options: Options) -> str:
        """Return why the candidate has no effect here, or ""."""
        if candidate.compiler:
            return why_not_raced(candidate, self.stats, frozen=self.request.frozen)
        if candidate.name == UNFROZEN and not self.stats.frozen:
            return "no parameter is frozen here"
        limits = self.request.limits(with_users(options, self.request.fixed))
        inert = {name: limit.reason for name, limit in limits.items()}
        inert |= dict.fromkeys(standing(self.request.fixed, options), "your options set it otherwise")
        if candidate.options and all(name in inert for name in candidate.options):
            return f"it can do nothing here: {next(iter(inert[name] for name in candidate.options))}"
        return ""

    def predicted_s(self, candidate: RaceCandidate) -> float:
        """Return the predicted seconds to compile and tune, from the time that default took."""
        return candidate.costs.seconds(max(self.default_s, LEAST_COMPILE_S), self.stats)


def _after_guards(fn: Call, dynamo_s: float, *inputs: object) -> object:
    """Call `fn` after the time of dynamo's guards."""
    called = time.perf_counter() + dynamo_s
    while time.perf_counter() < called:
        pass
    return fn(*inputs)
