"""The race for one graph: compile, check and time candidates against the current best, until the budget is spent."""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch

from backend_kwargs import trial
from backend_kwargs.auto.alternating import AS_RACED, WITH, WITHOUT, Ways
from backend_kwargs.auto.budget import LEAST_CALLS, Budget
from backend_kwargs.auto.candidates import SLACK, WITH_GRAPHS, RaceCandidate, records, toggled
from backend_kwargs.auto.compiling import Candidate, Compiles
from backend_kwargs.auto.deadline import OutOfTime, capped, capped_backward
from backend_kwargs.auto.graph_stats import GraphStats, calls_a_library, observed_stats
from backend_kwargs.auto.head_to_head import MARGIN, Runner, better, interleaved, note_figures
from backend_kwargs.auto.places import LEAST_SHARE, Standing, rewritten_alone, standing, why_not_made, why_unlike_alone
from backend_kwargs.auto.request import Request
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.sandbox import Sandbox, own_libdevice, sandboxed
from backend_kwargs.auto.selection import Reason, Selection, Skipped
from backend_kwargs.auto.verdicts import UNKNOWN, Verdict, confirmed_by
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.generated_code import comparable, compiled_graphs, rewrites_made
from backend_kwargs.errors import error_text
from backend_kwargs.facts import Call, Compiled
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, PlaceRow, RaceRow
from backend_kwargs.facts.parts import left_to_eager
from backend_kwargs.graphs.eligibility import recomputes
from backend_kwargs.graphs.freezing import freezable_parameters
from backend_kwargs.graphs.replay import ChangedInputError, Task
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.options.layers import Options
from backend_kwargs.rewrites.places import Place
from backend_kwargs.rewrites.table import chosen_places, find_rewrite
from backend_kwargs.torch_internals.caches import artifacts_noted
from backend_kwargs.torch_internals.device_peaks import peaks_of
from backend_kwargs.torch_internals.dynamo import RESTARTS, get_metrics_context
from backend_kwargs.torch_internals.guards import guard_count, is_tracing, without_context
from backend_kwargs.torch_internals.modes import modes_restored
from backend_kwargs.trial.draws import DrawsError, may_draw
from backend_kwargs.trial.trees import Results, tensors_of

logger = logging.getLogger("backend_kwargs.auto")

Progress = Callable[[str, float], None]

SLOW_S = 0.1  # a first call in eager that takes longer is timed again; if that does too, nothing is warmed up
PLACE_S = 20.0  # for the race of a place at most, so that its check has what it needs
PLACE_ROUNDS = 8
CLEAR = 1.2  # CUDA graphs that won by 1.1 in a race lost by 0.96 in the calls of a user, so that less is tried there
UNTIMED = "its operators could not be timed"
UNCONFIRMED = "no whole graph has confirmed what its places are by themselves"
PROLOGUE_S, GUARD_S = 1e-5, 1.2e-8  # dynamo's, per call: 8 to 22 µs with 18 to 937 guards (Xeon, torch 2.11)


class NotRaceableError(Exception):
    """The graph cannot be raced; the message says why."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The result of a race: the winner's row, all rows in the order tried, the graph's stats; `cut` if time ran out.

    `compiled` is what was raced as the winner, None if that cannot outlast the race. `guards_s` is what dynamo adds to
    each call. `ways` are there in its place if the calls that are made decide between CUDA graphs and none.
    """

    winner: RaceRow
    rows: tuple[RaceRow, ...]
    stats: GraphStats
    seconds: float
    cut: bool
    compiled: Compiled | None = None
    guards_s: float = 0.0
    counted_s: float = 0.0  # of `seconds`, what was added to the compile that serves
    places: tuple[PlaceRow, ...] = ()
    ways: Ways | None = None


def race(request: Request, tell: Progress) -> RaceResult:
    """Return the fastest candidate that passes the accuracy check; restore torch's state, inputs and generators."""
    dynamo_s = dynamo_seconds()
    with sandboxed(request.gm) as sandbox:
        running = begun(request, tell, sandbox, dynamo_s)
        result, winner = running.run()
    # The trees of the race are gone with the losers: the winner records its CUDA graphs in those of the process.
    if request.keeps and request.of_several is not None and (ways := running.ways(result.winner)):
        return replace(result, ways=ways)
    compiled = running.compiles.kept(winner) if request.keeps and winner else None
    return replace(result, compiled=compiled)


def checked(request: Request, decision: Decision) -> tuple[str, Compiled | None]:
    """Compile the graph with a winner from elsewhere; return what is wrong with its results here, "" if nothing is.

    What was compiled is returned too, if it can outlast this. Only where the winner's results are not near those of one
    run of eager is more found out: whether eager's own differ, and which errors are rounding errors.
    """
    dynamo_s = dynamo_seconds()
    with sandboxed(request.gm, collects=False) as sandbox:
        first = FirstRun.of(request, sandbox)
        make = cache(partial(first.compiles.compile_to_keep, decision.options, decision.compiler))
        why, made = "", first.near(decision, make)
        if made is None:
            why, made = first.race(lambda name, fraction: None, dynamo_s).check(decision, make)
    return why, first.compiles.kept(made) if request.keeps and made else None


def verdict_of(request: Request, sandbox: Sandbox, standing: Standing) -> Verdict:
    """Race a place by itself: default against its rewrite, on the inputs that it has in a call."""
    settings = replace(request.settings, candidates=[], budget_s=PLACE_S)

    def alone(graph: CapturedGraph) -> "Race":
        first = FirstRun.of(replace(request, graph=graph, settings=settings, offered=()), sandbox)
        return first.race(lambda name, fraction: None, 0.0)

    try:
        with without_context():
            return alone(standing.bare).of_libraries(standing.place) or alone(standing.fused).of_two(standing.place)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a race of it meets, others are raced
        return Verdict(why=error_text(error))


def begun(request: Request, tell: Progress, sandbox: Sandbox, dynamo_s: float) -> "Race":
    """Run the graph in eager; raise NotRaceableError if that shows that it cannot be raced."""
    return FirstRun.of(request, sandbox).race(tell, dynamo_s)


@dataclass(frozen=True, slots=True)
class FirstRun:
    """The first run of a graph in eager, and the checks against its results."""

    request: Request
    task: Task
    device: torch.device
    budget: Budget
    checks: ResultChecks
    compiles: Compiles
    sandbox: Sandbox

    @classmethod
    def of(cls, request: Request, sandbox: Sandbox) -> "FirstRun":
        """Run the graph; raise NotRaceableError if that takes the whole budget, or if it draws as other threads may."""
        started = time.perf_counter()
        # A copy: running a graph changes AOTAutograd's key for it, by which the next process finds the winner.
        try:
            task = Task.of(copy_of_graph(request.gm), request.example_inputs, sandbox.begin, capped_backward)
        except DrawsError as error:
            raise NotRaceableError(str(error)) from None
        sandbox.keep_generators(task)
        tensors = [value for value in task.inputs.values if isinstance(value, torch.Tensor)]
        device = next((t.device for t in tensors if t.is_cuda), tensors[0].device if tensors else torch.device("cpu"))
        # A plain call: under a mode that counts its operators, torch may choose other ones.
        began = time.perf_counter()
        try:
            eager = task.observe(task.copy())
        except RuntimeError as error:
            if trial.status_of(error)[0] == "oom":
                raise
            raise NotRaceableError(f"a call in eager fails: {error_text(error)}") from error
        ended = time.perf_counter()
        spent, budget_s = ended - started, request.settings.budget_s
        if spent >= budget_s:
            raise NotRaceableError(f"one call in eager took {spent:.2g} s, over budget_s={budget_s:g}; raise budget_s")
        budget = Budget(budget_s, started, ended - began)
        checks = ResultChecks(task, task.has_drawn(), device, budget, request.settings.tolerance, eager)
        return cls(request, task, device, budget, checks, Compiles(request, task), sandbox)

    def race(self, tell: Progress, dynamo_s: float) -> "Race":
        """Run the graph once more, to count its operators; raise NotRaceableError if it cannot be raced."""
        frozen = len(freezable_parameters(self.task.gm, self.request.example_inputs)) if self.request.frozen else 0
        stats = _stats(self.task, self.device, frozen, drawn=self.checks.random)
        self.checks.random = stats.random
        if stats.random and recomputes(self.request.gm):
            raise NotRaceableError("activation checkpointing with random operators is not reproducible in eager")
        parts = self.budget, self.checks, self.compiles, self.sandbox
        return Race.of(self.request, tell, dynamo_s, self.task, self.device, stats, *parts)

    def near(self, decision: Decision, make: Callable[[], Candidate]) -> Candidate | None:
        """Return the winner if its results are right without a doubt, else None."""
        if self.checks.random:  # the reference is what default draws
            return None
        row = RaceRow(decision.winner, decision.options)
        try:
            with own_libdevice(), modes_restored(), artifacts_noted() as artifacts, get_metrics_context():
                made = make()
                trial.fill_free_memory(self.device)
                seen = self.task.observe(made.compiled.call)
            made.artifacts += artifacts
            fell_back = decision.compiler and left_to_eager(made.compiled.facts.parts)
            return made if self.checks.are_near(seen, row) and not fell_back else None
        except RESTARTS:
            raise
        except Exception:  # noqa: BLE001 - the longer way says what is wrong
            return None


def _stats(task: Task, device: torch.device, frozen: int, *, drawn: bool) -> GraphStats:
    _, stats = observed_stats(
        partial(task.observe, task.copy()),
        _bytes,
        bytes_read=task.inputs.bytes,
        device=device.type,
        training=task.training,
        writes=bool(task.inputs.written),
        dynamic=any(isinstance(value, torch.SymInt) for value in task.inputs.values),
        frozen=frozen,
    )
    # Operators inside a higher-order operator are not counted, and a tag says what may draw.
    return replace(stats, random=drawn)


@dataclass
class Race:
    """One race: its subject, its parts, the rows up to now, and the first candidate with each code."""

    request: Request
    tell: Progress
    dynamo_s: float
    task: Task
    device: torch.device
    stats: GraphStats
    budget: Budget
    checks: ResultChecks
    selection: Selection
    compiles: Compiles
    rows: list[RaceRow]
    sandbox: Sandbox
    codes: dict[tuple[object, ...], str] = field(default_factory=dict)
    leading: Runner | None = None  # the fastest of Inductor's

    @classmethod
    def of(
        cls,
        request: Request,
        tell: Progress,
        dynamo_s: float,
        task: Task,
        device: torch.device,
        stats: GraphStats,
        budget: Budget,
        checks: ResultChecks,
        compiles: Compiles,
        sandbox: Sandbox,
    ) -> "Race":
        """Return a race whose results are checked by `checks`."""
        rows: list[RaceRow] = []
        selection = Selection(request, task, stats, device, budget, checks, rows, compiles)
        return cls(request, tell, dynamo_s, task, device, stats, budget, checks, selection, compiles, rows, sandbox)

    def run(self) -> tuple[RaceResult, Candidate | None]:
        """Race all candidates worth their time; return the result, and what was raced as the winner."""
        with self.budget.uncounted():
            eager = self.entered_eager()
            self.checks.compute_reference()
        champion = self._climb(self._begun(eager))
        champion = self.not_slower(champion, eager)
        if champion.row.status != "pass":
            raise RuntimeError(f"no candidate runs: {champion.row.name}: {champion.row.reason}")
        champion.row.won = True
        self._list(champion.row)  # not listed yet if no other candidate compiled
        self._confirm()
        untimed = [row for row in self.rows if row.status == "pass" and row.seconds is None]
        for row in untimed:
            row.reason = "the budget ended before it was timed" if len(untimed) > 1 else "nothing to time it against"
        rows, cut = tuple(self.rows), len(untimed) > 1 or any(row.left for row in self.rows)
        seconds = self.budget.spent_s, self.budget.counted_s
        figures = seconds[0], cut, None, self.dynamo_s, seconds[1]
        result = RaceResult(champion.row, rows, self.stats, *figures, self.selection.place_rows)
        return result, champion.made

    def ways(self, winner: RaceRow) -> Ways | None:
        """Return Inductor's fastest code, with CUDA graphs and without, if this race cannot tell which of them serves.

        That is where its call has other graphs, whether eager won this one or not, and where both are about as fast.
        Not in training on a GPU: CUDA graphs of two ways share a tree, and what the backward pass of one has kept was
        alive where the other recorded.
        """
        best = self.leading
        if self.stats.training and self.device.type == "cuda":
            return None
        if best is None or best.made is None or not best.made.has_other or winner.name not in (best.row.name, EAGER):
            return None
        options = best.row.options, toggled(best.row.options)
        pair = [row for row in self.rows if row.status == "pass" and row.options in options]
        ratios = [row.speedup.median for row in pair if row.speedup and row.against in {each.name for each in pair}]
        is_clear = bool(ratios) and not 1 / CLEAR < ratios[0] < CLEAR
        alone = not self.request.of_several and (is_clear or winner is not best.row)
        if len(pair) < len(options) or alone:
            return None
        rows = {WITH if records(row.options) else WITHOUT: row for row in pair}
        return self.compiles.ways(best.made, {**rows, AS_RACED: winner}, is_clear=is_clear)

    def entered_eager(self) -> Runner:
        """Return eager as a runner, or raise NotRaceableError if two runs of it differ."""
        # Before the reference exists: where two eager runs differ, both differ from it as well.
        eager = self._check_candidate(RaceCandidate(EAGER), Candidate(Compiled(self.task.copy()), {}), RaceRow(EAGER))
        if eager.row.status != "pass":
            raise NotRaceableError(f"two runs in eager differ: {eager.row.reason}")
        if self.budget.call_s > SLOW_S and self.budget.allows(LEAST_CALLS):
            began = time.perf_counter()
            eager.call()
            trial.synchronize(self.device)
            self.budget.call_s = min(self.budget.call_s, time.perf_counter() - began)
        return eager

    def caller(self, made: Candidate) -> Callable[[], object]:
        """Return the call of a candidate on the race's inputs."""
        return self.task.caller(partial(_after_guards, made.compiled.call, self.dynamo_s))

    def check(self, decision: Decision, make: Callable[[], Candidate]) -> tuple[str, Candidate | None]:
        """Check the results of another race's winner, which `make` compiles, without timing it."""
        eager = self._check_candidate(RaceCandidate(EAGER), Candidate(Compiled(self.task.copy()), {}), RaceRow(EAGER))
        if eager.row.status != "pass":
            raise NotRaceableError(f"two runs in eager differ: {eager.row.reason}")
        self.checks.compute_reference()
        if self.stats.random:  # what default draws is the reference
            self.race_against(eager, self.selection.default)
        winner = RaceCandidate(decision.winner, decision.options, compiler=decision.compiler)
        self.codes.clear()
        runner = self.prepared(winner, decision.options, eager, make)
        if runner is None:
            return f"{self.rows[-1].status}: {self.rows[-1].reason}", None
        return "", runner.made

    def _list(self, row: RaceRow) -> None:
        if not any(row is each for each in self.rows):
            self.rows.append(row)

    # ---- the first candidates

    def _begun(self, eager: Runner) -> Runner:
        """Return the better of eager and what is compiled first.

        On a GPU that is the graph with its places rewritten where that is faster by itself; then default too, if the
        compiled graph leaves it in doubt. On a CPU whole graphs compile about as fast as places do.
        """
        if not self.selection.places_first:
            return self.race_against(eager, self.selection.default)
        self._judge(self.selection.traced)
        self._judge(self.selection.lowered)
        champion = self.race_against(eager, self.selection.first)
        if not (doubt := self.doubt(self.selection.chosen, champion)):
            return champion
        again = replace(WITH_GRAPHS, over=False) if champion.replayed else self.selection.default
        champion = self.race_against(champion, again, counts=False)
        for row in self.rows:
            if row.name == again.name and row.status == "pass":
                row.reason = doubt
        return champion

    def doubt(self, chosen: Sequence[Place], champion: Runner) -> str:
        """Return why the compiled graph may not have what was learnt of places by themselves, "" if it has."""
        if not chosen:
            return ""
        row = self.selection.best_row
        if row is None or row.status != "pass" or champion.made is None or champion.candidate.name == EAGER:
            return "the graph with its places rewritten does not serve"
        # A replay of CUDA graphs calls nothing.
        made = self.compiles.other(champion.made) if records(champion.row.options) else champion.made
        whole = self._operators_of(self.caller(made))
        unlike = UNTIMED if whole is None else why_unlike_alone(chosen, self.selection.verdicts, whole)
        why = why_not_made(chosen, row.rewritten) or unlike
        open_ = [each for each in chosen if not self.selection.verdicts.get(each, UNKNOWN).confirmed]
        return why or (UNCONFIRMED if open_ and self.request.settings.confirms else "")

    def _confirm(self) -> None:
        """Keep that verdicts were confirmed, where the whole graph was faster with the places than without."""
        found = self.selection.verdicts
        places = [place for place in confirmed_by(self.rows, found, SLACK) if not found[place].confirmed]
        found.update({place: replace(found[place], confirmed=True) for place in places})
        if self.request.verdicts:
            self.request.verdicts.put({place: found[place] for place in places})

    def _operators_of(self, call: Callable[[], object]) -> trial.Times | None:
        """Return the times of what a call calls of libraries and of ours; None where it fails, as for memory."""
        try:
            with modes_restored():
                return trial.operator_times(call, self.device, calls_a_library)
        except RuntimeError as error:
            logger.info("The operators of a call are not timed: %s", error_text(error))
            return None

    def standing(self, places: Iterable[Place]) -> list[Standing]:
        """Return places as graphs of their own, in the order in which they are raced."""
        return standing(places, self.task.inputs.fresh, self.device)

    def _alone(self, places: Iterable[Place]) -> list[Standing]:
        try:
            return self.standing(places)
        except Exception as error:  # noqa: BLE001 - such as too little memory for what they read: races go on without
            logger.info("No place is raced by itself: %s", error_text(error))
            return []

    def _judge(self, places: Iterable[Place]) -> None:
        """Race places by themselves in the budget that is left, at least half of it, but for those that take little."""
        found, stored, longest_s = self.selection.verdicts, self.request.verdicts, 0.0
        places = [each for each in places if each not in self.selection.places]
        self.selection.places += places
        if stored:
            found.update(stored.find_all(places))
        ends = time.perf_counter() + max(self.budget.left_s, self.budget.seconds / 2)
        for each in self._alone([place for place in places if place not in found]):
            if each.share < LEAST_SHARE:
                found[each.place] = Verdict(why=f"{each.share:.1%} of a call", is_little=True)
                continue
            began = time.perf_counter()
            if each.is_dynamic or began + longest_s > ends:
                continue
            self.tell(str(each.place), 0.0)
            verdict = found[each.place] = verdict_of(self.request, self.sandbox, each)
            longest_s = max(longest_s, time.perf_counter() - began)
            logger.info("%s: %s", each.place, verdict)
            if stored:
                stored.put({each.place: verdict})

    def of_libraries(self, place: Place) -> Verdict | None:
        """Return that the rewrite is faster in a place that only calls libraries, where it is so without a compile.

        There compiled code would fuse nothing, and what the rewrite adds takes no longer compiled.
        """
        if self.stats.fused or (rewritten := rewritten_alone(self.request.graph, place.rewrite)) is None:
            return None
        verdict = self._timed_alone([self.task.caller(gm.forward) for gm in (self.task.copy(), rewritten)])
        return verdict if verdict.speedup and verdict.speedup.low > 1 + MARGIN else None

    def of_two(self, place: Place) -> Verdict:
        """Return the verdict on a place whose graph this is: default is timed against the rewrite."""
        if self.stats.random:
            return Verdict(why="it draws random numbers")
        eager = self.entered_eager()
        self.checks.compute_reference()
        runners = []
        for name, options in ((DEFAULT, {}), (place.rewrite, {"rewrites": [place.rewrite]})):
            make = partial(self.compiles.compile, options)
            if (runner := self.prepared(RaceCandidate(name, options), options, eager, make)) is None:
                row = self.rows[-1]
                return Verdict(why=f"{row.name}: {row.status}: {row.reason}")
            runners.append(runner)
        return self._timed_alone([each.call for each in runners])

    def _timed_alone(self, calls: Sequence[Callable[[], object]]) -> Verdict:
        """Return the verdict on two calls, timed in turn: by their kernels on a GPU, where CUDA graphs launch them."""
        with modes_restored():
            if self.device.type == "cuda":
                rounds = [[trial.device_seconds(each, self.device) for each in calls] for _ in range(PLACE_ROUNDS)]
                default, rewritten = map(list, zip(*rounds, strict=True))
            else:
                named = dict(zip(("default", "rewritten"), calls, strict=True))
                default, rewritten = trial.interleave(named, rounds=2 * PLACE_ROUNDS, device=self.device).values()
        speedup = trial.ratio_interval(default, rewritten)
        medians = trial.percentile(default, 0.5), trial.percentile(rewritten, 0.5)
        return Verdict(*medians, speedup, limit_s=self.limit_s, calls=self._operators_of(calls[1]) or {})

    @cached_property
    def limit_s(self) -> float:
        """The least seconds of a call: all that it multiplies at the GPU's peak, or each byte once; 0 if not known."""
        dtype = next((each.dtype for each in tensors_of(self.task.inputs.values) if each.is_floating_point()), None)
        peaks = peaks_of(self.device, dtype) if dtype and not self.stats.training else None
        if peaks is None:
            return 0.0
        moved = self.stats.bytes_read + self.stats.bytes_written
        return max(moved / peaks.bytes_per_s, self.stats.flops / peaks.flops_per_s)

    # ---- the others

    def _climb(self, champion: Runner) -> Runner:
        """Return the fastest after trying all candidates worth their time, in their order."""
        left = self.selection.candidates(champion)
        count = len(left)
        while left:
            reasons = [(each, self.selection.why_not(each, champion)) for each in left]
            fitting = [each for each, why in reasons if why is None]
            if not fitting:
                self._skip(reasons)
                break
            following = self.selection.first_of(fitting)
            left.remove(following)
            self.tell(following.name, 1 - (len(left) + 1) / (count + 1))
            champion = self.race_against(champion, following)
        return champion

    def _skip(self, reasons: Iterable[tuple[RaceCandidate, Reason | None]]) -> None:
        """List what is left out, with the reasons."""
        for each, why in reasons:
            if why is not None and why.kind is not Skipped.ITSELF:
                row = RaceRow(each.name, dict(each.options), "skipped", why.text, compiler=each.compiler)
                row.predicted_s, row.untried = self.selection.predicted_s(each), why.kind is Skipped.BUDGET
                self.rows.append(row)

    def not_slower(self, champion: Runner, eager: Runner) -> Runner:
        """Return eager if the champion, which was timed only against other candidates, is slower than eager."""
        if champion.row.against in ("", EAGER) or eager.row.status != "pass" or self.budget.over:
            return champion
        slower = (champion.row.seconds or 0.0) > (eager.row.seconds or 0.0)
        return eager if slower and not self._beats(champion, eager) else champion

    # ---- one candidate

    def race_against(self, champion: Runner, candidate: RaceCandidate, *, counts: bool = True) -> Runner:
        """Compile and check the candidate; return the better of it and the champion.

        Where it was compiled for CUDA graphs, it is raced with them and without, unless they are known to help.
        """
        options = self.selection.options(candidate, champion)
        compiling = partial(self.compiles.compile, options, candidate.compiler)
        challenger = self.prepared(candidate, options, champion, compiling, counts=counts)
        best = self.better(challenger, champion, always=not counts)
        made = challenger.made if challenger is not None else None
        options = toggled(options)
        if made is not None and made.has_other and (step := self.selection.other(candidate, options, best)):
            again = partial(self.compiles.other, made)
            best = self.better(self.prepared(step, options, best, again), best, late=True)
            del again
        del challenger, champion, made
        gc.collect()  # compiled graphs are reference cycles; this frees a loser's memory now
        return best

    def better(
        self, challenger: Runner | None, champion: Runner, *, late: bool = False, always: bool = False
    ) -> Runner:
        """Return the better of two candidates, by time or memory; the next ones extend the challenger if it wins.

        If `late`, the end of the budget does not keep a few calls of both from being timed, if these are short.
        """
        if challenger is None:
            return champion
        best = challenger if self._beats(challenger, champion, late=late, always=always) else champion
        if best is challenger:
            best.row.led_s = self.budget.spent_s
        # The next candidates extend Inductor's options; they cannot save what another compiler leaves.
        if (self._is_first(champion) or best is challenger) and not challenger.candidate.compiler:
            self.selection.best_row = challenger.row
            # What eager has beaten takes memory, and serves only beside other graphs.
            self.leading = challenger if best is challenger or self.request.of_several else None
        return best

    def prepared(
        self,
        candidate: RaceCandidate,
        options: Options,
        champion: Runner,
        make: Callable[[], Candidate],
        *,
        counts: bool = True,
    ) -> Runner | None:
        """Return the candidate that `make` compiles, as a runner; None if it fails, or if it has another one's code.

        The first compile has to serve, and never `counts`.
        """
        first = not self.selection.default_s
        row = RaceRow(candidate.name, options, compiler=candidate.compiler)
        row.predicted_s = None if first else self.selection.predicted_s(candidate)
        row.began_s = self.budget.spent_s
        made, runner = None, None
        free = first or not counts
        with self._noting(row, free), artifacts_noted() as artifacts, get_metrics_context():
            with self.budget.serving() if free else nullcontext():
                made = make()
            runner = self._check_candidate(candidate, made, row)
        if made is not None:
            made.artifacts += artifacts
        if first:
            self.selection.default_s = row.compile_s
        if runner and row.status == "pass" and runner.code:
            same = self.codes.setdefault(runner.code, candidate.name)
            if same != candidate.name:
                row.status, row.reason = "same code", f"as {same}"
        if row.status == "pass":
            return runner
        if runner and row.error is not None and row.status == "fail_accuracy" and self.budget.may_time:
            self._timed(runner, champion)  # never chosen, and worth knowing when the bound is reconsidered
        self.rows.append(row)
        logger.info("%s is dropped: %s: %s", row.name, row.status, row.reason)
        return None

    @contextmanager
    def _noting(self, row: RaceRow, free: bool) -> Iterator[None]:
        """Let the row say why what is done within fails, and how long it took."""
        began = time.perf_counter()
        try:
            with own_libdevice(), modes_restored(), capped(math.inf if free else self.budget.ends):
                yield
        except RESTARTS:
            raise
        except OutOfTime:
            row.status, row.reason = "timeout", self.budget.interrupted
        except ChangedInputError as error:
            row.status, row.reason = "fail_accuracy", str(error)
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, without harm to the others
            row.status, row.reason = trial.status_of(error)
        finally:
            row.compile_s += time.perf_counter() - began

    def _check_candidate(self, candidate: RaceCandidate, made: Candidate, row: RaceRow) -> Runner:
        """Return the candidate as a runner; its row says whether it passed the accuracy check."""
        compiled = made.compiled
        fn, names = compiled.call, chosen_places(row.options.get("rewrites", ()))
        call, accuracy = self.caller(made), self._accuracy(candidate, fn, row)
        if not accuracy.passed:
            row.status, row.reason = accuracy.status, accuracy.reason
        elif candidate.compiler and (why := left_to_eager(compiled.facts.parts)):
            row.status, row.reason = "fell_back", why
        row.rewritten = rewrites_made(fn, compiled.facts, {name: find_rewrite(name).operators for name in names})
        if row.status == "pass" and self.request.settings.objective == "memory":
            row.peak_bytes = trial.peak_memory(call, self.device)
        return Runner(candidate, row, call, () if candidate.name == EAGER else _code(fn), made)

    def _accuracy(self, candidate: RaceCandidate, fn: Call, row: RaceRow) -> trial.Accuracy:
        """Check the results of `fn` and the inputs it changes; note the error of a lower precision in its row."""
        began = time.perf_counter()
        seen = self.task.observe(fn)
        if candidate.name == EAGER:
            # The first call also loads kernels, or times those of cuDNN.
            self.budget.call_s = min(self.budget.call_s, time.perf_counter() - began)
            return self.checks.of_eager(seen)
        if self.device.type == "cuda":
            trial.fill_free_memory(self.device)
            seen = self.task.observe(fn)
        if "precision" in row.options:
            return self.checks.of_error(seen, row)
        if self.selection.default_s and not self.checks.awaits_draws:
            return self.checks.of_results(seen)
        with self.budget.uncounted():
            if self._draws_its_own:
                drawing = self.compiles.compile({**row.options, "fallback_random": True})
                return self.checks.of_draws(seen, drawing.compiled.call, last=candidate.name == DEFAULT)
            return self.checks.of_results(seen)

    @property
    def _draws_its_own(self) -> bool:
        """Whether compiled code returns other random numbers than eager: what is drawn for nothing is not lowered."""
        if not self.stats.random or self.request.context.fixed.get("fallback_random"):
            return False
        nodes = [node for each in self.compiles.lowered for node in each.gm.graph.nodes if node.op == "call_function"]
        return not nodes or any(may_draw(node.target, node.args, node.kwargs) for node in nodes)

    # ---- the race of two

    def _is_first(self, champion: Runner) -> bool:
        """Return whether nothing compiled has been compared yet: Inductor's best is then what is compared now."""
        return champion.candidate.name == EAGER and self.selection.best_row is None

    def _beats(self, challenger: Runner, champion: Runner, *, late: bool = False, always: bool = False) -> bool:
        self._list(champion.row)
        self._list(challenger.row)
        if not (always or self.budget.may_time):
            # To compile default can take all of the budget; a few calls then show what is faster of what is there.
            first = self._is_first(champion)
            if not ((first or late) and self.budget.may_time_late):
                return first
        failed = self._timed(challenger, champion)
        return "challenger" not in failed if failed else better(challenger, champion, self.request.settings.objective)

    def _timed(self, challenger: Runner, champion: Runner) -> dict[str, Exception]:
        """Time both in turn and note it in their rows; return what either raised."""
        failed: dict[str, Exception] = {}
        warm, began = self.budget.call_s <= SLOW_S, time.perf_counter()
        with modes_restored():
            samples = interleaved(challenger, champion, self.device, self.budget.left_s, failed.__setitem__, warm=warm)
        challenger.row.timed_s = challenger.row.timed_s or time.perf_counter() - began
        for runner, name in ((champion, "champion"), (challenger, "challenger")):
            if name in failed:
                runner.row.status, runner.row.reason = trial.status_of(failed[name])
        if not failed:
            note_figures(challenger, champion, samples, self.device)
        return failed


def _after_guards(fn: Call, dynamo_s: float, *inputs: object) -> object:
    """Call `fn` after the time of dynamo's guards."""
    called = time.perf_counter() + dynamo_s
    while time.perf_counter() < called:
        pass
    return fn(*inputs)


def dynamo_seconds() -> float:
    """Return what dynamo adds to each call of the function being compiled: its prologue and its guards."""
    return PROLOGUE_S + GUARD_S * guard_count() if is_tracing() else 0.0


def _code(fn: Call) -> tuple[tuple[str, bool], ...]:
    """Return what identifies a compiled candidate: its generated code, and whether CUDA graphs replay it."""
    return tuple(
        sorted(
            (comparable(graph.source_code), bool(graph.cudagraph_info) and not graph.disabled_cudagraphs_reason)
            for graph in compiled_graphs(fn)
        )
    )


def _bytes(seen: Results) -> float:
    return float(sum(tensor.nbytes for tensor in tensors_of(seen)))
