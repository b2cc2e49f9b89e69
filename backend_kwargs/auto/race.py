"""The race for one graph, from top to bottom: what is compiled, checked, and timed against what, by `steps`."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from backend_kwargs import trial
from backend_kwargs.auto import logger
from backend_kwargs.auto.alternating import AS_RACED, WITH, WITHOUT, Ways
from backend_kwargs.auto.budget import Budget
from backend_kwargs.auto.candidates import SLACK, WITH_GRAPHS, RaceCandidate, records, toggled
from backend_kwargs.auto.compiling import Candidate, Compiles
from backend_kwargs.auto.graph_stats import GraphStats, calls_a_library
from backend_kwargs.auto.places import LEAST_SHARE, Standing, rewritten_alone, standing, why_not_made, why_unlike_alone
from backend_kwargs.auto.question import Request
from backend_kwargs.auto.result_checks import ResultChecks
from backend_kwargs.auto.sandbox import Sandbox, sandboxed
from backend_kwargs.auto.selection import MARGIN, Progress, RaceState, Runner
from backend_kwargs.auto.steps import better, check_results, compile_candidate, time_in_turn
from backend_kwargs.auto.verdicts import UNKNOWN, Verdict, confirmed_by
from backend_kwargs.backends import CapturedGraph
from backend_kwargs.errors import error_text
from backend_kwargs.facts import DEFAULT, EAGER, Compiled, Decision, PlaceRow, RaceRow
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import copy_of_graph, recomputes
from backend_kwargs.rewrites.traced import Place
from backend_kwargs.torch_internals.device_peaks import peaks_of
from backend_kwargs.torch_internals.dynamo import RESTARTS, guard_count, is_tracing, tracing
from backend_kwargs.torch_internals.tensors import modes_restored

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
        running = begun(request, sandbox, tell, dynamo_s)
        best = whole_graph(running)
        result = _result(running, best)
    # The trees of the race are gone with the losers: the winner records its CUDA graphs in those of the process.
    if request.keeps and request.of_several is not None and (ways := ways_of(running, result.winner)):
        return replace(result, ways=ways)
    return replace(result, compiled=running.compiles.kept(best.made) if request.keeps and best.made else None)


def checked(request: Request, decision: Decision) -> tuple[str, Compiled | None]:
    """Compile the graph with a winner from elsewhere; return what is wrong with its results here, "" if nothing is.

    What was compiled is returned too, if it can outlast this.
    """
    candidate = RaceCandidate(decision.winner, decision.options, compiler=decision.compiler)
    with sandboxed(request.gm, collects=False) as sandbox:
        running = begun(request, sandbox)
        eager = in_eager(running)
        if running.checks.random:  # what it draws is compared with what default draws
            against(running, eager, running.default)
        running.codes.clear()
        winner = prepared(running, eager, candidate)
    if winner is None:
        return f"{running.rows[-1].status}: {running.rows[-1].reason}", None
    return "", running.compiles.kept(winner.made) if request.keeps and winner.made else None


def verdict_of(request: Request, sandbox: Sandbox, standing: Standing) -> Verdict:
    """Race a place by itself: default against its rewrite, on the inputs that it has in a call."""
    settings = replace(request.settings, candidates=[], budget_s=PLACE_S)

    def alone(graph: CapturedGraph) -> RaceState:
        return begun(replace(request, graph=graph, settings=settings, offered=()), sandbox)

    try:
        with tracing(None):  # its inputs have fake tensors of their own
            bare = of_libraries(alone(standing.bare), standing.place)
            return bare or place_alone(alone(standing.fused), standing.place)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a race of it meets, others are raced
        return Verdict(why=error_text(error))


def begun(
    request: Request, sandbox: Sandbox, tell: Progress = lambda name, done: None, dynamo_s: float = 0.0
) -> RaceState:
    """Run the graph in eager; raise NotRaceableError if that takes the whole budget, or if it draws as others may."""
    started = time.perf_counter()
    # A copy: running a graph changes AOTAutograd's key for it, by which the next process finds the winner.
    try:
        task = Task.of(copy_of_graph(request.gm), request.example_inputs, sandbox.begin)
    except trial.DrawsError as error:
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
    sandbox.stack.callback(checks.close)
    return RaceState(request, task, device, budget, checks, Compiles(request, task), sandbox, tell, dynamo_s)


# ---- the steps


def whole_graph(race: RaceState) -> Runner:
    """Race all candidates that are worth their time, in their order; return the fastest.

    On a GPU places are raced by themselves, and what is compiled first has them rewritten where that is faster; default
    follows if this leaves it in doubt. On a CPU whole graphs compile about as fast as places do: there only places that
    may gain several times their time are raced by themselves, since the budget may end before a second graph is there.
    """
    eager = in_eager(race)
    if race.places_first:
        judge(race, race.traced)
        judge(race, [] if race.stats.training else race.lowered)  # of a backward pass none stands alone
    elif race.races_places:
        judge(race, [each for each in race.traced if each.rewrite == "contraction"])
    best = against(race, eager, race.first)
    if doubt := doubt_of(race, best):
        again = replace(WITH_GRAPHS, over=False) if best.replayed else race.default
        best = against(race, best, again, free=True)
        for row in race.rows:
            row.reason = doubt if row.name == again.name and row.status == "pass" else row.reason
    left = race.candidates(best)
    count = len(left)
    while candidate := race.following(left, best):
        race.tell(candidate.name, 1 - (len(left) + 1) / (count + 1))
        best = against(race, best, candidate)
        gc.collect()  # compiled graphs are reference cycles; this frees a loser's memory now
    if is_slower(best, eager) and race.budget.may_time and not beats(race, best, eager):
        best = eager
    if not best.runs:
        raise RuntimeError(f"no candidate runs: {best.row.name}: {best.row.reason}")
    return best


def against(race: RaceState, best: Runner, candidate: RaceCandidate, *, free: bool = False) -> Runner:
    """Compile and check the candidate; return the better of it and the best.

    Where it was compiled for CUDA graphs, it is raced with them and without, unless they are known to help.
    """
    candidate = replace(candidate, options=race.options(candidate, best))
    challenger = prepared(race, best, candidate, free=free)
    best = met(race, best, challenger, free=free)
    made = challenger and challenger.made
    if made and made.has_other and (step := race.other(candidate, best)):
        best = met(race, best, prepared(race, best, step, made))
    return best


def prepared(
    race: RaceState, best: Runner, candidate: RaceCandidate, code: Candidate | None = None, *, free: bool = False
) -> Runner | None:
    """Compile a candidate, and check it; return None if it fails, or if it has another one's code.

    Given compiled `code`, it is that with CUDA graphs where that has none, or the reverse. The first compile has to
    serve, and is always `free` of the budget.
    """
    compiles, first = race.compiles, not race.default_s
    make = partial(compiles.other, code) if code else partial(compiles.compile, candidate.options, candidate.compiler)
    row = RaceRow(candidate.name, candidate.options, compiler=candidate.compiler)
    row.predicted_s, row.began_s = None if first else race.predicted_s(candidate), race.budget.spent_s
    runner = Runner(candidate, row)
    compile_candidate(race, runner, make, free=first or free)
    if runner.made:
        check_results(race, runner)
    race.default_s = race.default_s or row.compile_s
    if runner.runs and runner.code and (same := race.codes.setdefault(runner.code, row.name)) != row.name:
        row.status, row.reason = "same code", f"as {same}"
    if runner.runs:
        return runner
    if row.error is not None and row.status == "fail_accuracy" and race.budget.may_time:
        time_in_turn(race, runner, best)  # never chosen, and worth knowing when the bound is reconsidered
    race.rows.append(row)
    logger.info("%s is dropped: %s: %s", row.name, row.status, row.reason)
    return None


def met(race: RaceState, best: Runner, challenger: Runner | None, *, free: bool = False) -> Runner:
    """Return the better of two candidates, by time or memory; the next ones extend the challenger if it wins.

    Without time for a few calls nothing is timed, and the first compiled candidate wins; a `free` one is always timed.
    """
    if challenger is None:
        return best
    # Nothing compiled has been compared yet: Inductor's best is then what is compared now.
    first = best.candidate.name == EAGER and race.best_row is None
    race.note(best.row, challenger.row)
    wins = beats(race, challenger, best) if free or race.budget.may_time else first
    if wins:
        challenger.row.led_s = race.budget.spent_s
    # The next candidates extend Inductor's options; they cannot save what another compiler leaves.
    if (first or wins) and not challenger.candidate.compiler:
        race.best_row = challenger.row
        # What eager has beaten takes memory, and serves only beside other graphs.
        race.leading = challenger if wins or race.request.of_several else None
    return challenger if wins else best


def beats(race: RaceState, challenger: Runner, best: Runner) -> bool:
    """Time two candidates, and return whether the challenger wins."""
    time_in_turn(race, challenger, best)
    both = challenger.runs and best.runs
    return better(challenger, best, race.request.settings.objective) if both else challenger.runs


def in_eager(race: RaceState) -> Runner:
    """Run the graph in eager again, and in higher precision; raise NotRaceableError if it cannot be raced."""
    if race.checks.random and recomputes(race.request.gm):
        raise NotRaceableError("activation checkpointing with random operators is not reproducible in eager")
    eager = Runner(RaceCandidate(EAGER), RaceRow(EAGER), made=Candidate(Compiled(race.task.copy()), {}))
    with race.budget.uncounted():
        # Before the reference exists: where two eager runs differ, both differ from it as well.
        check_results(race, eager)
        if eager.row.status == "fail_accuracy":
            raise NotRaceableError(f"two runs in eager differ: {eager.row.reason}")
        if not eager.runs:
            raise RuntimeError(f"a second run in eager fails: {eager.row.reason}")
        race.checks.compute_reference()
    return eager


def place_alone(race: RaceState, place: Place) -> Verdict:
    """Return the verdict on a place whose graph this is: default is timed against the rewrite."""
    if race.checks.random:
        return Verdict(why="it draws random numbers")
    eager = in_eager(race)
    runners = []
    for name, options in ((DEFAULT, {}), (place.rewrite, {"rewrites": [place.rewrite]})):
        if (runner := prepared(race, eager, RaceCandidate(name, options))) is None:
            return Verdict(why=f"{name}: {race.rows[-1].status}: {race.rows[-1].reason}")
        runners.append(runner)
    return timed_alone(race, [each.call for each in runners])


# ---- places


def judge(race: RaceState, places: Sequence[Place]) -> None:
    """Race places by themselves in half of the budget, but for those that take little."""
    found, stored, longest_s = race.verdicts, race.request.verdicts, 0.0
    race.places += places
    if stored:
        found.update(stored.find_all(places))
    ends = time.perf_counter() + race.budget.seconds / 2
    try:
        alone = standing((each for each in places if each not in found), race.task.inputs.fresh, race.device)
    except Exception as error:  # noqa: BLE001 - such as too little memory for what they read: races go on without
        logger.info("No place is raced by itself: %s", error_text(error))
        return
    for each in alone:
        if each.share < LEAST_SHARE:
            found[each.place] = Verdict(why=f"{each.share:.1%} of a call", is_little=True)
            continue
        began = time.perf_counter()
        if began + longest_s > ends:
            continue
        race.tell(str(each.place), 0.0)
        verdict = found[each.place] = verdict_of(race.request, race.sandbox, each)
        longest_s = max(longest_s, time.perf_counter() - began)
        logger.info("%s: %s", each.place, verdict)
        if stored:
            stored.put({each.place: verdict})


def of_libraries(race: RaceState, place: Place) -> Verdict | None:
    """Return that the rewrite is faster in a place that only calls libraries, where it is so without a compile.

    There compiled code would fuse nothing, and what the rewrite adds takes no longer compiled.
    """
    if race.stats.fused or (rewritten := rewritten_alone(race.request.graph, place.rewrite)) is None:
        return None
    verdict = timed_alone(race, [race.task.caller(gm.forward) for gm in (race.task.copy(), rewritten)])
    return verdict if verdict.speedup and verdict.speedup.low > 1 + MARGIN else None


def timed_alone(race: RaceState, calls: Sequence[Callable[[], object]]) -> Verdict:
    """Return the verdict on two calls, timed in turn: by their kernels on a GPU, where CUDA graphs launch them."""
    with modes_restored():
        rounds = [[trial.device_seconds(each, race.device) for each in calls] for _ in range(PLACE_ROUNDS)]
        default, rewritten = map(list, zip(*rounds, strict=True))
    # The least seconds of a call: all that it multiplies at the GPU's peak, or each byte once; 0 if not known.
    stats, limit_s = race.stats, 0.0
    dtype = next((each.dtype for each in trial.tensors_of(race.task.inputs.values) if each.is_floating_point()), None)
    if dtype and not stats.training and (peaks := peaks_of(race.device, dtype)):
        moved = stats.bytes_read + stats.bytes_written
        limit_s = max(moved / peaks.bytes_per_s, stats.flops / peaks.flops_per_s)
    medians = trial.percentile(default, 0.5), trial.percentile(rewritten, 0.5)
    calls_of = operators_of(race, calls[1]) or {}
    return Verdict(*medians, trial.ratio_interval(default, rewritten), limit_s=limit_s, calls=calls_of)


def doubt_of(race: RaceState, best: Runner) -> str:
    """Return why the compiled graph may not have what was learnt of places by themselves, "" if it has."""
    chosen, row, known = race.chosen, race.best_row, race.verdicts
    if not chosen:
        return ""
    if row is None or not best.runs or best.made is None or best.candidate.name == EAGER:
        return "the graph with its places rewritten does not serve"
    # A replay of CUDA graphs calls nothing.
    made = race.compiles.other(best.made) if records(best.row.options) else best.made
    # On a CPU other programs slow an operator down by more than what is doubted here.
    whole = operators_of(race, race.caller(made.compiled.call)) if race.places_first else {}
    unlike = UNTIMED if whole is None else why_unlike_alone(chosen, known, whole)
    # Under `tune`, where nobody waits, whole graphs are timed to confirm what their places are alone.
    confirms = race.request.settings.effort == "full" or race.request.settings.race == "always"
    is_open = confirms and not all(known.get(each, UNKNOWN).confirmed for each in chosen)
    return why_not_made(chosen, row.rewritten) or unlike or (UNCONFIRMED if is_open else "")


def operators_of(race: RaceState, call: Callable[[], object]) -> trial.Times | None:
    """Return the times of what a call calls of libraries and of ours; None where it fails, as for memory."""
    try:
        with modes_restored():
            return trial.operator_times(call, race.device, calls_a_library)
    except RuntimeError as error:
        logger.info("The operators of a call are not timed: %s", error_text(error))
        return None


# ---- the result


def _result(race: RaceState, best: Runner) -> RaceResult:
    """Return the result of a race that `best` has won, and keep which verdicts it has confirmed."""
    best.row.won = True
    race.note(best.row)  # not listed yet if no other candidate compiled
    found = race.verdicts
    places = [place for place in confirmed_by(race.rows, found, SLACK) if not found[place].confirmed]
    found.update({place: replace(found[place], confirmed=True) for place in places})
    if race.request.verdicts:
        race.request.verdicts.put({place: found[place] for place in places})
    untimed = [row for row in race.rows if row.status == "pass" and row.seconds is None]
    for row in untimed:
        row.reason = "the budget ended before it was timed" if len(untimed) > 1 else "nothing to time it against"
    cut = len(untimed) > 1 or any(row.left for row in race.rows)
    figures = race.stats, race.budget.spent_s, cut, None, race.dynamo_s, race.budget.counted_s
    return RaceResult(best.row, tuple(race.rows), *figures, race.place_rows)


def ways_of(race: RaceState, winner: RaceRow) -> Ways | None:
    """Return Inductor's fastest code, with CUDA graphs and without, if this race cannot tell which of them serves.

    That is where its call has other graphs, whether eager won this one or not, and where both are about as fast. In
    training only where eager did not win.
    """
    best = race.leading
    if best is None or best.made is None or not best.made.has_other:
        return None
    options = best.row.options, toggled(best.row.options)
    pair = [row for row in race.rows if row.status == "pass" and row.options in options]
    ratios = [row.speedup.median for row in pair if row.speedup and row.against in {each.name for each in pair}]
    is_clear = bool(ratios) and not 1 / CLEAR < ratios[0] < CLEAR
    alone = not race.request.of_several and (is_clear or winner is not best.row)
    served = (best.row.name,) if race.stats.training else (best.row.name, EAGER)
    if len(pair) < len(options) or alone or winner.name not in served:
        return None
    rows = {WITH if records(row.options) else WITHOUT: row for row in pair}
    return race.compiles.ways(best.made, {**rows, AS_RACED: winner}, is_clear=is_clear)


def is_slower(best: Runner, eager: Runner) -> bool:
    """Return whether the best, which was timed against other candidates alone, is slower than eager by its figures."""
    known = best.row.against not in ("", EAGER) and eager.runs
    return known and (best.row.seconds or 0.0) > (eager.row.seconds or 0.0)


def dynamo_seconds() -> float:
    """Return what dynamo adds to each call of the function being compiled: its prologue and its guards."""
    return PROLOGUE_S + GUARD_S * guard_count() if is_tracing() else 0.0
