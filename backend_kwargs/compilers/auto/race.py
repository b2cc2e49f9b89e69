"""The race for one graph: compile, check and time candidates against the fastest so far, until the budget is spent."""

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import get_metrics_context
from torch._guards import TracingContext

from backend_kwargs import measure
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, Candidate, candidates_for, why_not_raced
from backend_kwargs.compilers.auto.deadline import OutOfTime, capped
from backend_kwargs.compilers.auto.decision import RaceRow
from backend_kwargs.compilers.auto.eligibility import recomputes
from backend_kwargs.compilers.auto.graph_stats import GraphStats, Product, observed_stats
from backend_kwargs.compilers.auto.head_to_head import Runner, alike, better, interleaved, speedup
from backend_kwargs.compilers.auto.request import RESTARTS, Request, Tools
from backend_kwargs.compilers.auto.roofline import Slack, slack_of, time_library
from backend_kwargs.compilers.auto.sandbox import own_libdevice, sandboxed
from backend_kwargs.compilers.auto.settings import Settings
from backend_kwargs.compilers.auto.workload import Task, has_drawn
from backend_kwargs.compilers.fell_back import left_to_eager
from backend_kwargs.compilers.generated_code import comparable, compiled_graphs
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.measure import Accuracy

logger = logging.getLogger("backend_kwargs.auto")

Progress = Callable[[str, float], None]

LEAST_CALLS = 4  # of a meeting
SLOW_S = 0.1  # a call of eager above which fewer are made
LEAST_GAIN = 0.03  # a candidate that cannot gain as much is not tried
LEAST_GAIN_PER_S = 0.003  # nor is one that gains less for a second of compiling, unless effort is "full"
LEAST_COMPILE_S = 0.5  # what a compile of default takes at least where little of it was in Inductor's cache
OVER_BUDGET = "it is predicted to exceed the budget"
PROLOGUE_S, GUARD_S = 1e-5, 1.2e-8  # of dynamo, for each call: 8 to 22 µs with 18 to 937 guards (Xeon, torch 2.11)
LARGEST_REFERENCE = 2 << 30  # bytes of inputs on a CPU; the reference takes up to four times as many
REFERENCES = 6  # that fit into a GPU's free memory: with what its operators take meanwhile
GRACE = 1.1  # of a budget: what is compiled when it ends is still timed
SLOWER_IN_PRECISION = 10


class UnfitError(Exception):
    """A graph is not to be raced; the message says why."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """A race: the winner's row, all rows in the order tried, the graph's stats; `cut` where time ran out."""

    winner: RaceRow
    rows: tuple[RaceRow, ...]
    stats: GraphStats
    seconds: float
    cut: bool


def race(request: Request, tell: Progress) -> RaceResult:
    """Return the fastest candidate that is right; leaves no trace in torch, in the inputs or in the generators."""
    dynamo_s = dynamo_seconds()
    with sandboxed(request.gm) as begin:
        return _begun(request, tell, begin, dynamo_s).run()


def _begun(request: Request, tell: Progress, begin: Callable[[], None], dynamo_s: float) -> "_Race":
    """Run the graph once in eager; raise UnfitError where that shows that it is not to be raced."""
    started = time.perf_counter()
    # A copy: to have run shows in a graph, and so in AOTAutograd's key, by which the next process finds the winner.
    task = Task.of(copy_of_graph(request.gm), request.example_inputs, begin)
    tensors = [value for value in task.inputs.values if isinstance(value, torch.Tensor)]
    device = next((t.device for t in tensors if t.is_cuda), tensors[0].device if tensors else torch.device("cpu"))
    began = time.perf_counter()
    eager, stats = _seen(task, device)
    ended = time.perf_counter()
    if stats.random and recomputes(request.gm):
        raise UnfitError("activation checkpointing with random operators is not reproducible in eager")
    spent, budget_s = ended - started, request.settings.budget_s
    if spent >= budget_s:
        raise UnfitError(f"one call in eager took {spent:.2g} s, over budget_s={budget_s:g}; raise budget_s")
    return _Race(request, tell, dynamo_s, started, task, device, stats, eager_s=ended - began, expected=eager)


def _seen(task: Task, device: torch.device) -> tuple[dict[str, Any], GraphStats]:
    """Return what eager gives, and what the graph holds."""
    result, stats = observed_stats(
        partial(task.observe, task.copy()),
        _bytes,
        task.inputs.storages,
        bytes_read=task.inputs.bytes,
        device=device.type,
        training=task.training,
        writes=bool(task.inputs.written),
        dynamic=any(isinstance(value, torch.SymInt) for value in task.inputs.values),
    )
    # Of what an operator of a higher order holds only the generators tell.
    return result, replace(stats, random=stats.random or has_drawn())


@dataclass
class _Race:
    """One race: what it is of, and below that what it has learned so far.

    `expected` is what results are compared with, None where nothing may be; `reference` the same in higher precision.
    `base` is what candidates are merged onto: its seconds, and what they hold; `best_row` is Inductor's fastest so far.
    """

    request: Request
    tell: Progress
    dynamo_s: float
    started: float
    task: Task
    device: torch.device
    stats: GraphStats
    eager_s: float
    expected: dict[str, Any] | None
    reference: Any = None
    rows: list[RaceRow] = field(default_factory=list)
    codes: dict[tuple[Any, ...], str] = field(default_factory=dict)
    default_s: float = 0.0
    library: dict[Product, float] | None = None
    base: tuple[float, Slack] | None = None
    best_row: RaceRow | None = None

    @property
    def settings(self) -> Settings:
        return self.request.settings

    @property
    def tools(self) -> Tools:
        return self.request.tools

    def run(self) -> RaceResult:
        # Before there is a reference, which differs as well where two runs of eager do.
        eager = self._entered(Candidate(EAGER), self.task.copy(), RaceRow(EAGER))
        if eager.row.status != "pass":
            raise UnfitError(f"two runs in eager differ: {eager.row.reason}")
        self.reference = self._reference()
        champion = self._meet(eager, Candidate(DEFAULT, over=False, rank=0))
        champion = self._climb(champion)
        champion = self._not_slower(champion, eager)
        if champion.row.status != "pass":
            raise RuntimeError(f"no candidate runs: {champion.row.name}: {champion.row.reason}")
        champion.row.won = True
        self._list(champion.row)  # nothing else could be compiled
        for row in self.rows:
            if row.status == "pass" and row.seconds is None:
                row.reason = "it met no other for as long as a timing takes"
        ended = (self._capped, self._out_of_time, OVER_BUDGET)
        cut = any(row.reason.startswith(ended) for row in self.rows) or not self._may_time
        return RaceResult(champion.row, tuple(self.rows), self.stats, time.perf_counter() - self.started, cut)

    def _list(self, row: RaceRow) -> None:
        if not any(row is each for each in self.rows):
            self.rows.append(row)

    def _climb(self, champion: Runner) -> Runner:
        """Return the fastest after all candidates that are worth their time, those that gain most per second first."""
        left = candidates_for(
            self.stats,
            self.settings.effort,
            self.settings.candidates,
            self.tools.options_of,
            frozen=self.request.frozen,
        )
        count = len(left)
        while left:
            reasons = {id(each): self._not_worth(each, champion) for each in left}
            fitting = [each for each in left if not reasons[id(each)]]
            if not fitting:
                for each in left:
                    row = RaceRow(each.name, dict(each.options), "skipped", reasons[id(each)], compiler=each.compiler)
                    self.rows.append(replace(row, predicted_s=self._predicted_s(each)))
                break
            following = (
                fitting[0]
                if self._named
                else max(fitting, key=lambda each: self._gain(each, champion) / self._predicted_s(each))
            )
            left.remove(following)
            self.tell(following.name, 1 - (len(left) + 1) / (count + 1))
            champion = self._meet(champion, following)
        return champion

    # ---- before

    def _reference(self) -> Any | None:
        # A copy in higher precision, leaf by leaf, would take sandboxed what shares memory.
        if self.stats.random or self.task.inputs.aliased or self.task.inputs.bytes > self._largest_reference:
            return None
        if SLOWER_IN_PRECISION * self.eager_s > self._left_s:
            return None
        return measure.reference(self.task.copy(), self.task.inputs.fresh(), run=self._in_precision)

    @property
    def _largest_reference(self) -> float:
        if self.device.type != "cuda":
            return LARGEST_REFERENCE
        free, _ = torch.cuda.mem_get_info(self.device)
        return free / REFERENCES

    def _in_precision(self, gm: Any, args: Any) -> Any:
        # Not the module itself, which would print the traceback of a graph that cannot run in float64.
        return replace(self.task, inputs=replace(self.task.inputs, values=args)).observe(gm.forward)

    @property
    def _left_s(self) -> float:
        return max(self.settings.budget_s - (time.perf_counter() - self.started), 0.0)

    @property
    def _over(self) -> bool:
        """Whether so much time is spent that default stands without more ado."""
        return self._left_s <= 0

    @property
    def _may_time(self) -> bool:
        """Whether there is time for the least calls that tell two candidates sandboxed."""
        spent = time.perf_counter() - self.started
        return GRACE * self.settings.budget_s - spent > LEAST_CALLS * self.eager_s

    @property
    def _out_of_time(self) -> str:
        return f"the budget of {self.settings.budget_s:g} s is spent"

    @property
    def _capped(self) -> str:
        return f"its tuning was ended with the budget of {self.settings.budget_s:g} s"

    @property
    def _named(self) -> bool:
        return self.settings.candidates is not None

    def _not_worth(self, candidate: Candidate, champion: Runner) -> str:
        """Return why the candidate is not tried against this champion, "" where it is."""
        options = self._options(candidate, champion)
        if why := self._unfit(candidate, options):
            return why
        met = [row for row in self.rows if row.status != "skipped" and row.name != EAGER]
        if tried := [row.name for row in met if row.options == options and row.compiler == candidate.compiler]:
            return f"it would be {tried[0]} again"
        if self._over:
            return self._out_of_time
        if (predicted := self._predicted_s(candidate)) > self._left_s:
            return f"{OVER_BUDGET}: about {predicted:.0f} s of compiling, {self._left_s:.0f} s are left"
        if self._named or self.settings.objective == "memory":
            return ""
        gain = self._gain(candidate, champion)
        if gain < LEAST_GAIN:
            return f"it could save {max(gain, 0):.1%} at most"
        if self.settings.effort == "quick" and gain < LEAST_GAIN_PER_S * predicted:
            return f"it could save {gain:.1%}, for about {predicted:.0f} s of compiling"
        return ""

    def _unfit(self, candidate: Candidate, options: Mapping[str, Any]) -> str:
        """Return why the candidate can do nothing here, "" where it can."""
        if candidate.compiler:
            return why_not_raced(candidate, self.stats, frozen=self.request.frozen)
        fixed = dict.fromkeys(self.tools.fixed, "your options set it otherwise")
        limits = self.tools.limits({**options, **self.tools.fixed})
        inert = {name: limit.reason for name, limit in limits.items()} | fixed
        if candidate.options and all(name in inert for name in candidate.options):
            return f"it can do nothing here: {next(iter(inert[name] for name in candidate.options))}"
        return ""

    def _predicted_s(self, candidate: Candidate) -> float:
        """Return the seconds that compiling and tuning are predicted to take, by those of default."""
        return candidate.costs.seconds(max(self.default_s, LEAST_COMPILE_S), self.stats)

    def _gain(self, candidate: Candidate, champion: Runner) -> float:
        """Return the share of the champion's time that the candidate may save, by what its kind has saved before."""
        if self.base is None:  # default is wrong or fails: nothing is known
            return 1.0
        seconds, slack = self.base
        return 1 - (seconds - slack.saves(candidate.shares)) / (champion.row.seconds or seconds)

    def _options(self, candidate: Candidate, champion: Runner) -> dict[str, Any]:
        # Inductor's best, where another compiler is faster still.
        row = self.best_row if champion.row.compiler else champion.row
        under = row.options if candidate.over and row else {}
        return {**{k: v for k, v in under.items() if k not in candidate.without}, **candidate.options}

    def _not_slower(self, champion: Runner, eager: Runner) -> Runner:
        """Return eager where the champion, over whomever it won, turned out slower than eager."""
        if champion.row.against in ("", EAGER) or eager.row.status != "pass" or self._over:
            return champion
        slower = (champion.row.seconds or 0.0) > (eager.row.seconds or 0.0)
        return eager if slower and not self._beats(champion, eager) else champion

    # ---- one candidate

    def _meet(self, champion: Runner, candidate: Candidate) -> Runner:
        """Return the better of the two."""
        challenger = self._prepared(candidate, champion)
        best = challenger if challenger is not None and self._beats(challenger, champion) else champion
        # Candidates are merged onto Inductor's options, and what another compiler leaves to save they cannot.
        ours = challenger is not None and not candidate.compiler
        if ours and (candidate.name == DEFAULT or best is challenger):
            self.best_row = challenger.row
            self._learn_slack(challenger)
        del challenger, champion
        gc.collect()  # compiled graphs hold one another in cycles: a loser's memory is free only now
        return best

    def _learn_slack(self, runner: Runner) -> None:
        """Measure what a compiled candidate leaves to save: the next ones are options merged onto its own."""
        row = runner.row
        if row.status != "pass" or row.seconds is None or self._named or self._over:
            return
        try:
            if self.library is None:
                self.library = time_library(self.stats.products, self.device)
            slack = slack_of(runner.call, row.seconds, self.stats, self.library, self.device)
            self.base = row.seconds, slack
            logger.info("%s could save at most %s of %.1f µs", row.name, slack, row.seconds * 1e6)
        except Exception as error:  # noqa: BLE001 - the race goes on without an order
            logger.info("What %s leaves to save is unknown: %s", row.name, measure.status_of(error)[1])

    def _prepared(self, candidate: Candidate, champion: Runner) -> Runner | None:
        options = self._options(candidate, champion)
        first, row = candidate.name == DEFAULT, RaceRow(candidate.name, options, compiler=candidate.compiler)
        row.predicted_s = None if first else self._predicted_s(candidate)
        runner, began = None, time.perf_counter()
        try:
            with own_libdevice(), capped(math.inf if first else self.started + self.settings.budget_s):
                runner = self._entered(candidate, self._compiled(row.options, row.compiler), row)
        except RESTARTS:
            raise
        except OutOfTime:
            row.status, row.reason = "timeout", self._capped
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, and hurts no other
            row.status, row.reason = measure.status_of(error)
        row.compile_s = time.perf_counter() - began
        if first:
            self.default_s = row.compile_s
        if runner and row.status == "pass" and runner.code:
            same = self.codes.setdefault(runner.code, candidate.name)
            if same != candidate.name:
                row.status, row.reason = "same code", f"as {same}"
        if row.status == "pass":
            return runner
        self.rows.append(row)
        logger.info("%s is dropped: %s: %s", row.name, row.status, row.reason)
        return None

    def _compiled(self, options: Mapping[str, Any], compiler: str = "") -> Callable[..., Any]:
        with get_metrics_context():
            return self.request.compiled(self.task.copy(), self.request.example_inputs, options, compiler)

    def _entered(self, candidate: Candidate, fn: Callable[..., Any], row: RaceRow) -> Runner:
        """Return the candidate as a runner; its row says whether it passed the accuracy check."""
        call = _Call(fn, self.task, self.dynamo_s)
        accuracy = self._check(candidate, fn)
        if not accuracy.passed:
            row.status, row.reason = accuracy.status, accuracy.reason
        elif candidate.compiler and (why := left_to_eager(fn)):
            row.status, row.reason = "fell_back", why
        elif self.settings.objective == "memory":
            call()  # which makes its inputs
            row.peak_bytes = measure.peak_memory(call, self.device)
        return Runner(candidate, row, call, () if candidate.name == EAGER else _code(fn))

    def _check(self, candidate: Candidate, fn: Callable[..., Any]) -> Accuracy:
        """Check what `fn` gives and changes.

        Inductor draws other random numbers than eager. There default is checked by its twin that draws as eager does,
        and the other candidates against default, whose draws they share.
        """
        seen = self.task.observe(fn)
        own_draws = self.stats.random and not self.tools.fixed.get("fallback_random")
        if candidate.name != DEFAULT or not own_draws:
            return self._compare(seen)
        accuracy = self._compare(self.task.observe(self._compiled({"fallback_random": True})))
        self.expected = seen if accuracy.passed else None
        return accuracy

    def _compare(self, seen: dict[str, Any]) -> Accuracy:
        if self.expected is None:
            return Accuracy("fail_accuracy", "default is wrong, so that nothing draws the numbers to compare with")
        precise, training, tol = self.reference or {}, self.task.training, self.settings.tolerance
        judged = [
            measure.check(seen[what], self.expected[what], precise.get(what), training=training, what=what, tol=tol)
            for what in seen
        ]
        return measure.worst(judged)

    # ---- the race of two

    def _beats(self, challenger: Runner, champion: Runner) -> bool:
        self._list(champion.row)
        self._list(challenger.row)
        if not self._may_time:
            return challenger.candidate.name == DEFAULT
        failed: dict[str, Exception] = {}
        warm = self.eager_s <= SLOW_S
        samples = interleaved(challenger, champion, self.device, self._left_s, failed.__setitem__, warm=warm)
        for runner, name in ((champion, "champion"), (challenger, "challenger")):
            if name in failed:
                runner.row.status, runner.row.reason = measure.status_of(failed[name])
        if failed:
            return "challenger" not in failed
        self._note_figures(challenger, champion, samples)
        return better(challenger, champion, self.settings.objective)

    def _note_figures(self, challenger: Runner, champion: Runner, samples: Mapping[str, list[float]]) -> None:
        challenger.row.speedup, challenger.row.against = speedup(samples), champion.row.name
        # By the ratio, not as it was timed: clocks drift from one meeting to the next, and ranks would contradict it.
        champion.row.seconds = champion.row.seconds or measure.percentile(samples["champion"], 0.5)
        challenger.row.seconds = champion.row.seconds / challenger.row.speedup.median
        if self.device.type == "cuda" and alike(challenger, champion):
            for runner in (champion, challenger):
                runner.row.peak_bytes = runner.row.peak_bytes or self._peak(runner)

    def _peak(self, runner: Runner) -> int | None:
        try:
            return measure.peak_memory(runner.call, self.device)
        except Exception:  # noqa: BLE001 - a tie may stay one
            return None


@dataclass
class _Call:
    """A candidate's call as the user makes it, behind dynamo's guards; its inputs are made when it is first called."""

    fn: Callable[..., Any]
    task: Task
    dynamo_s: float
    made: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self.made is None:
            self.made = self.task.caller(self.fn)
        called = time.perf_counter() + self.dynamo_s
        while time.perf_counter() < called:
            pass
        return self.made()


def dynamo_seconds() -> float:
    """Return what dynamo adds to each call of the function that is being compiled: its guards and its prologue."""
    context = TracingContext.try_get()
    return PROLOGUE_S + GUARD_S * len(context.guards_context.dynamo_guards) if context else 0.0


def _code(fn: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return what tells the candidate from another: its generated code, and whether CUDA graphs replay it."""
    return tuple(
        sorted(
            (comparable(graph.source_code), bool(graph.cudagraph_info) and not graph.disabled_cudagraphs_reason)
            for graph in compiled_graphs(fn)
        )
    )


def _bytes(seen: Mapping[str, Any]) -> float:
    from torch.utils import _pytree as pytree

    return float(sum(leaf.nbytes for leaf in pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)))
