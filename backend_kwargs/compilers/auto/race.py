"""The race for one graph: compile, check and time candidates against the current best, until the budget is spent."""

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch._dynamo.utils import get_metrics_context
from torch._guards import TracingContext
from torch.fx import GraphModule

from backend_kwargs import measure
from backend_kwargs.compilers.auto.candidates import (
    AGAIN,
    CUDAGRAPHS,
    DEFAULT,
    EAGER,
    GRAPHS_FIRST,
    PADDED,
    PRODUCT_S,
    TUNED_PRODUCTS,
    UNFROZEN,
    RaceCandidate,
    candidates_for,
    graphs_of_rewritten,
    merged,
    precision_candidates,
    standing,
    why_not_raced,
)
from backend_kwargs.compilers.auto.deadline import OutOfTime, capped
from backend_kwargs.compilers.auto.decision import RaceRow
from backend_kwargs.compilers.auto.eligibility import recomputes
from backend_kwargs.compilers.auto.graph_stats import GraphStats, Product, observed_stats, padded_in
from backend_kwargs.compilers.auto.head_to_head import Runner, alike, better, interleaved, speedup
from backend_kwargs.compilers.auto.products import after_tuning, candidate_of_products
from backend_kwargs.compilers.auto.request import RESTARTS, Request, Tools
from backend_kwargs.compilers.auto.rewritten import candidates_of_rewrites, lowered_anew
from backend_kwargs.compilers.auto.roofline import (
    Slack,
    excess_of,
    gain_without_graphs,
    idle_share,
    replay_seconds,
    seconds_of_traffic,
    slack_of,
    time_library,
)
from backend_kwargs.compilers.auto.sandbox import own_libdevice, sandboxed
from backend_kwargs.compilers.auto.settings import Settings
from backend_kwargs.compilers.auto.workload import Task, has_drawn
from backend_kwargs.compilers.fell_back import left_to_eager
from backend_kwargs.compilers.freezing import freezable_parameters
from backend_kwargs.compilers.generated_code import comparable, compiled_graphs, rewritten_in
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.inductor.compile_step import noting_lowered
from backend_kwargs.compilers.precision.error import against, in_float64
from backend_kwargs.errors import error_text
from backend_kwargs.measure import Accuracy
from backend_kwargs.rewrites import find_rewrite

logger = logging.getLogger("backend_kwargs.auto")

Progress = Callable[[str, float], None]

LEAST_CALLS = 4  # of one comparison of two candidates
SLOW_S = 0.1  # a first call in eager that takes longer is timed again; if that does too, nothing is warmed up
LEAST_GAIN = 0.03  # a candidate that cannot gain this much is skipped
LEAST_GAIN_PER_S = 0.003  # so is one that gains less per second of compiling, unless effort is "full"
WORTH_A_LARGER_BUDGET = 0.1
LEAST_COMPILE_S = 0.5  # assumed for default, whose own compile is faster when it hits Inductor's cache
OVER_BUDGET = "it is predicted to exceed the budget"
PROLOGUE_S, GUARD_S = 1e-5, 1.2e-8  # dynamo's, per call: 8 to 22 µs with 18 to 937 guards (Xeon, torch 2.11)
LARGEST_REFERENCE = 2 << 30  # bytes of inputs on a CPU; the reference takes up to four times as much memory
REFERENCES = 6  # references that must fit into a GPU's free memory, to leave room for intermediate results
GRACE = 1.1  # times the budget: a candidate compiled just before the end is still timed
SLOWER_IN_PRECISION = 10
IDLE_CALLS = 100  # eager calls that must fit into what is left to measure how long they leave the device idle
# Of an eager call: where the device is idle for longer, CUDA graphs are compiled first. Where default is predicted to
# take more than half of the budget to compile, nothing is compiled after it: then they are if their copies cost little,
# and otherwise if the device is idle for less. (Such graphs also have more launches than the driver queues ahead, about
# 1000, so that the device is idle for longer than it seems.)
IDLE, LITTLE_IDLE = 0.2, 0.1
OP_S = 0.03  # predicted for the first compile, per operator: the median of ten models, 0.018 to 0.075 (16 cores)


class UnfitError(Exception):
    """The graph cannot be raced; the message says why."""


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The result of a race: the winner's row, all rows in the order tried, the graph's stats; `cut` if time ran out."""

    winner: RaceRow
    rows: tuple[RaceRow, ...]
    stats: GraphStats
    seconds: float
    cut: bool


def race(request: Request, tell: Progress) -> RaceResult:
    """Return the fastest candidate that passes the accuracy check; restore torch's state, inputs and generators."""
    dynamo_s = dynamo_seconds()
    with sandboxed(request.gm) as begin:
        return _begun(request, tell, begin, dynamo_s).run()


def _begun(request: Request, tell: Progress, begin: Callable[[], None], dynamo_s: float) -> "_Race":
    """Run the graph once in eager; raise UnfitError if that shows that it cannot be raced."""
    started = time.perf_counter()
    # A copy: running a graph changes AOTAutograd's key for it, by which the next process finds the compiled winner.
    task = Task.of(copy_of_graph(request.gm), request.example_inputs, begin)
    tensors = [value for value in task.inputs.values if isinstance(value, torch.Tensor)]
    device = next((t.device for t in tensors if t.is_cuda), tensors[0].device if tensors else torch.device("cpu"))
    began = time.perf_counter()
    frozen = len(freezable_parameters(task.gm, request.example_inputs)) if request.frozen else 0
    eager, stats = _seen(task, device, frozen)
    ended = time.perf_counter()
    if stats.random and recomputes(request.gm):
        raise UnfitError("activation checkpointing with random operators is not reproducible in eager")
    spent, budget_s = ended - started, request.settings.budget_s
    if spent >= budget_s:
        raise UnfitError(f"one call in eager took {spent:.2g} s, over budget_s={budget_s:g}; raise budget_s")
    return _Race(request, tell, dynamo_s, started, task, device, stats, eager_s=ended - began, expected=eager)


def _seen(task: Task, device: torch.device, frozen: int) -> tuple[dict[str, Any], GraphStats]:
    """Return the eager result and the graph's stats."""
    result, stats = observed_stats(
        partial(task.observe, task.copy()),
        _bytes,
        task.inputs.storages,
        bytes_read=task.inputs.bytes,
        device=device.type,
        training=task.training,
        writes=bool(task.inputs.written),
        dynamic=any(isinstance(value, torch.SymInt) for value in task.inputs.values),
        frozen=frozen,
    )
    # Operators inside a higher-order operator are not counted; only the generators' states show that one was random.
    return result, replace(stats, random=stats.random or has_drawn())


@dataclass
class _Race:
    """One race: first its subject, then what it has measured up to now.

    `expected` is the result that others are compared with, None if there is none; `reference` is the same in higher
    precision. `base` belongs to the candidate whose options the next ones extend: its seconds and its slack. `best_row`
    is the fastest of Inductor's up to now. `led_to` are candidates that follow from the last one.
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
    lowered: list[GraphModule] = field(default_factory=list)
    base: tuple[float, Slack] | None = None
    best_row: RaceRow | None = None
    led_to: list[RaceCandidate] = field(default_factory=list)

    @property
    def settings(self) -> Settings:
        return self.request.settings

    @property
    def tools(self) -> Tools:
        return self.request.tools

    def run(self) -> RaceResult:
        # Before the reference exists: where two eager runs differ, both differ from it as well.
        eager = self._entered(RaceCandidate(EAGER), self.task.copy(), RaceRow(EAGER))
        if eager.row.status != "pass":
            raise UnfitError(f"two runs in eager differ: {eager.row.reason}")
        if SLOW_S < self.eager_s < self._left_s / LEAST_CALLS:
            began = time.perf_counter()
            eager.call()
            measure.synchronize(self.device)
            self.eager_s = min(self.eager_s, time.perf_counter() - began)  # the first call also loads kernels
        self.reference = self._reference()
        champion = self._first(eager)
        champion = self._climb(champion)
        champion = self._not_slower(champion, eager)
        if champion.row.status != "pass":
            raise RuntimeError(f"no candidate runs: {champion.row.name}: {champion.row.reason}")
        champion.row.won = True
        self._list(champion.row)  # not listed yet if no other candidate compiled
        for row in self.rows:
            if row.status == "pass" and row.seconds is None:
                row.reason = "the budget ended before it was timed"
        ended = (self._capped, self._out_of_time, OVER_BUDGET)
        cut = any(row.reason.startswith(ended) for row in self.rows) or not self._may_time
        return RaceResult(champion.row, tuple(self.rows), self.stats, time.perf_counter() - self.started, cut)

    def _list(self, row: RaceRow) -> None:
        if not any(row is each for each in self.rows):
            self.rows.append(row)

    def _first(self, eager: Runner) -> Runner:
        """Return the better of eager and default, or CUDA graphs where eager waits for launches.

        CUDA graphs run default's kernels, and compiling both takes nearly twice as long as one of them.
        """
        if self._graphs_first(eager):
            champion = self._meet(eager, self._graphs)
            if champion is not eager and champion.replayed:
                return champion
            self.codes.clear()  # its code is that of default if torch recorded nothing
        return self._meet(eager, RaceCandidate(DEFAULT, over=False, rank=0))

    @property
    def _may_have_graphs(self) -> bool:
        """Whether CUDA graphs may be raced without being named, for the latency that is to be least."""
        if self.device.type != "cuda" or self._named or self.settings.objective == "memory":
            return False
        # Each symbolic size would record a graph of its own.
        return not self.stats.dynamic and not self._unfit(GRAPHS_FIRST, CUDAGRAPHS)

    def _graphs_first(self, eager: Runner) -> bool:
        # Random graphs are checked against default.
        if self.stats.random or not self._may_have_graphs:
            return False
        alone = OP_S * self.stats.ops > self.settings.budget_s / 2
        copies_s = seconds_of_traffic(2 * self.stats.bytes_written, self.device)
        if alone and not self.stats.writes and copies_s < LEAST_GAIN * self.eager_s:
            return True
        if IDLE_CALLS * self.eager_s >= self._left_s:
            return False
        idle = idle_share(eager.call, self.device)
        logger.info("Eager leaves the device idle for %.0f%% of a call.", 100 * idle)
        return idle >= (LITTLE_IDLE if alone else IDLE)

    @cached_property
    def _graphs(self) -> RaceCandidate:
        """CUDA graphs as the first candidate, with the rewrites that seldom lose: it may be the only one."""
        early = tuple(name for name in self.tools.rewrites if self.stats.gpu and find_rewrite(name).early)
        names = [name for each in self._matching(early) for name in each.options["rewrites"]]
        return replace(GRAPHS_FIRST, options={**CUDAGRAPHS, "rewrites": names}) if names else GRAPHS_FIRST

    def _default_later(self, champion: Runner) -> list[RaceCandidate]:
        """Return default as a candidate if CUDA graphs came first."""
        if champion.candidate is not self._graphs:
            return []
        eager_s = next(row.seconds for row in self.rows if row.name == EAGER)
        gain = 1.0
        if self.base is not None and eager_s is not None:
            gain = gain_without_graphs(*self.base, eager_s, self.stats, self.device)
        return [RaceCandidate(DEFAULT, over=False, rank=0, costs=AGAIN, gain=gain)]

    def _climb(self, champion: Runner) -> Runner:
        """Return the fastest after trying all candidates worth their time, by highest expected gain per second."""
        named, options_of = self.settings.candidates, self.tools.options_of
        frozen, settings = self.request.frozen, self.settings
        candidates = candidates_for(self.stats, settings.effort, named, options_of, frozen=frozen)
        compilers = [each.name for each in candidates if each.compiler]
        precise = precision_candidates(settings.precision, settings.max_error, compilers)
        if any(row.name == GRAPHS_FIRST.name for row in self.rows):
            candidates = [each for each in candidates if each.name != GRAPHS_FIRST.name]
        left = [*self._default_later(champion), *self._tunings(), *candidates, *self._rewrites(), *precise]
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
            left += self.led_to
            count += len(self.led_to)
        return champion

    def _tunings(self) -> list[RaceCandidate]:
        """Return the tuning of the products that are far from what they need, on a GPU."""
        if self.device.type != "cuda" or self._named or self.base is None or self.library is None:
            return []
        excess, least_s = excess_of(self.library, self.device), LEAST_GAIN_PER_S * PRODUCT_S * self.base[0]
        made = candidate_of_products(excess, least_s, lambda each: self._predicted_s(each) <= self._left_s)
        return [made] if made else []

    def _rewrites(self) -> list[RaceCandidate]:
        """Return the rewrites that match, unless candidates are named."""
        return [] if self._named or self._over else self._matching(self.tools.rewrites)

    def _matching(self, names: Sequence[str]) -> list[RaceCandidate]:
        """Return those of the rewrites `names` that match."""
        if not names:
            return []

        @cache
        def lowered() -> list[GraphModule]:
            again = partial(self.request.compile_one, self.task.copy(), self.request.example_inputs, {})
            return self.lowered or lowered_anew(again)

        traced = self.task.copy(), self.request.example_inputs
        return candidates_of_rewrites(names, self.stats, self.settings.objective, lowered, traced, self.device)

    # ---- before

    @cached_property
    def _precise(self) -> dict[str, Any] | str:
        """The float64 results of the graph, the reference of lower precisions, or the reason why there are none."""
        if self.stats.random:
            return "it draws random numbers"
        if SLOWER_IN_PRECISION * self.eager_s > self._left_s:
            return f"there is no time for it within budget_s={self.settings.budget_s:g}; raise budget_s"
        try:
            return in_float64(self.task)
        except Exception as error:  # noqa: BLE001 - a kernel without float64, or no memory left
            return error_text(error)

    def _reference(self) -> Any | None:
        # The reference converts each tensor by itself, which separates inputs that share memory.
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
        # gm.forward, since GraphModule.__call__ prints the traceback when the graph cannot run in float64.
        return replace(self.task, inputs=replace(self.task.inputs, values=args)).observe(gm.forward)

    @property
    def _left_s(self) -> float:
        return max(self.settings.budget_s - (time.perf_counter() - self.started), 0.0)

    @property
    def _over(self) -> bool:
        """Whether the budget is spent, so that no more is timed or measured."""
        return self._left_s <= 0

    @property
    def _may_time(self) -> bool:
        """Whether there is time for the fewest calls that can tell two candidates apart."""
        spent = time.perf_counter() - self.started
        return GRACE * self.settings.budget_s - spent > LEAST_CALLS * self.eager_s

    @property
    def _out_of_time(self) -> str:
        return f"the budget of {self.settings.budget_s:g} s is spent"

    @property
    def _capped(self) -> str:
        return f"its tuning was interrupted when the budget of {self.settings.budget_s:g} s ended"

    @property
    def _named(self) -> bool:
        return self.settings.candidates is not None

    def _not_worth(self, candidate: RaceCandidate, champion: Runner) -> str:
        """Return why the candidate is skipped against this champion, "" if it is not."""
        options = self._options(candidate, champion)
        if why := self._unfit(candidate, options):
            return why
        met = [row for row in self.rows if row.status != "skipped" and row.name != EAGER]
        if tried := [row.name for row in met if row.options == options and row.compiler == candidate.compiler]:
            return f"it would be {tried[0]} again"
        if self._over:
            return self._out_of_time
        if (predicted := self._predicted_s(candidate)) > self._left_s:
            gain = self._gain(candidate, champion) if self.base else 0.0
            worth = f"; it could save {gain:.0%}, so raise budget_s" if gain >= WORTH_A_LARGER_BUDGET else ""
            # Rounded apart, so that the first figure is the larger one.
            needed, left = math.ceil(predicted * 10) / 10, math.floor(self._left_s * 10) / 10
            return f"{OVER_BUDGET}: about {needed:g} s of compiling, {left:g} s are left{worth}"
        if "precision" in options and isinstance(self._precise, str):
            return f"its error cannot be measured in float64: {self._precise}"
        if self._named or self.settings.objective == "memory":
            return ""
        gain = self._gain(candidate, champion)
        if gain < LEAST_GAIN:
            return f"it could save {max(gain, 0):.1%} at most"
        if self.settings.effort == "quick" and gain < LEAST_GAIN_PER_S * predicted:
            return f"it could save {gain:.1%}, for about {predicted:.0f} s of compiling"
        return ""

    def _unfit(self, candidate: RaceCandidate, options: Mapping[str, Any]) -> str:
        """Return why the candidate has no effect here, or ""."""
        if candidate.compiler:
            return why_not_raced(candidate, self.stats, frozen=self.request.frozen)
        if candidate.name == UNFROZEN and not self.stats.frozen:
            return "no parameter is frozen here"
        if candidate.name == PADDED and padded_in(self.lowered):
            return "Inductor has padded all products by itself"
        fixed = standing(self.tools.fixed, options)
        limits = self.tools.limits({**options, **fixed})
        inert = {name: limit.reason for name, limit in limits.items()}
        inert |= dict.fromkeys(fixed, "your options set it otherwise")
        if candidate.options and all(name in inert for name in candidate.options):
            return f"it can do nothing here: {next(iter(inert[name] for name in candidate.options))}"
        return ""

    def _predicted_s(self, candidate: RaceCandidate) -> float:
        """Return the predicted seconds to compile and tune, from the time that default took."""
        return candidate.costs.seconds(max(self.default_s, LEAST_COMPILE_S), self.stats)

    def _gain(self, candidate: RaceCandidate, champion: Runner) -> float:
        """Return the share of the champion's time that the candidate may save, from what such options saved before."""
        if candidate.gain is not None:
            return candidate.gain
        if candidate.call_s is not None and champion.row.seconds:
            return 1 - candidate.call_s / champion.row.seconds
        if self.base is None:  # default fails or is wrong, so there is no slack to compute from
            return 1.0
        seconds, slack = self.base
        saved_s = slack.saves(candidate.shares) + candidate.saved_s
        return 1 - (seconds - saved_s) / (champion.row.seconds or seconds)

    def _options(self, candidate: RaceCandidate, champion: Runner) -> dict[str, Any]:
        # Inductor's best, if another compiler is faster still.
        row = self.best_row if champion.row.compiler else champion.row
        return merged(row.options if candidate.over and row else {}, candidate)

    def _not_slower(self, champion: Runner, eager: Runner) -> Runner:
        """Return eager if the champion, which was timed only against other candidates, is slower than eager."""
        if champion.row.against in ("", EAGER) or eager.row.status != "pass" or self._over:
            return champion
        slower = (champion.row.seconds or 0.0) > (eager.row.seconds or 0.0)
        return eager if slower and not self._beats(champion, eager) else champion

    # ---- one candidate

    def _meet(self, champion: Runner, candidate: RaceCandidate) -> Runner:
        """Compile and check the candidate; return the better of it and the champion."""
        challenger = self._prepared(candidate, champion)
        best = challenger if challenger is not None and self._beats(challenger, champion) else champion
        # The next candidates extend Inductor's options; they cannot save what another compiler leaves.
        first = candidate.name == DEFAULT and champion.candidate.name == EAGER
        improves = challenger is not None and (first or best is challenger)
        if improves and challenger is not None and not candidate.compiler:
            self.best_row = challenger.row
            self._learn_slack(challenger)
        lost = best is champion and not improves
        self.led_to = self._with_graphs(challenger, champion) if challenger is not None and lost else []
        del challenger, champion
        gc.collect()  # compiled graphs are reference cycles; this frees a loser's memory now
        return best

    def _with_graphs(self, loser: Runner, champion: Runner) -> list[RaceCandidate]:
        """Return CUDA graphs of a rewrite that has lost, where its kernels take less time than the champion's call."""
        row, fastest_s = loser.row, champion.row.seconds
        if "rewrites" not in loser.candidate.options or row.status != "pass" or not row.seconds or not fastest_s:
            return []
        if not self._may_have_graphs or row.options.get("triton.cudagraphs"):
            return []
        if IDLE_CALLS * row.seconds >= self._left_s:
            return []
        try:
            call_s = replay_seconds(loser.call, self.stats, self.device)
        except Exception as error:  # noqa: BLE001 - the race goes on without this candidate
            logger.info("The kernels of %s cannot be timed: %s", row.name, measure.status_of(error)[1])
            return []
        logger.info("A replay of %s could take %.3g of %.3g s", row.name, call_s, fastest_s)
        return [graphs_of_rewritten(row.options["rewrites"], call_s)] if call_s < (1 - LEAST_GAIN) * fastest_s else []

    def _learn_slack(self, runner: Runner) -> None:
        """Measure the slack of a compiled candidate, since the next candidates extend its options."""
        row = runner.row
        if row.status != "pass" or row.seconds is None or self._named or self._over:
            return
        if "precision" in row.options and self.base is not None:
            self.base = row.seconds, self.base[1].scaled(row.seconds / self.base[0])
            return
        try:
            if self.library is None:
                self.library = time_library(self.stats.products, self.device)
            elif (names := row.options.get(TUNED_PRODUCTS)) and self.base is not None:
                self.library = after_tuning(self.library, names, self.base[0] - row.seconds)
            slack = slack_of(runner.call, row.seconds, self.stats, self.library, self.device)
            self.base = row.seconds, slack
            logger.info("%s could save at most %s of %.3g s", row.name, slack, row.seconds)
        except Exception as error:  # noqa: BLE001 - without the slack, the race goes on in the table's order
            logger.info("The slack of %s is unknown: %s", row.name, measure.status_of(error)[1])

    def _prepared(self, candidate: RaceCandidate, champion: Runner) -> Runner | None:
        options = self._options(candidate, champion)
        first = not self.default_s or (candidate.name == DEFAULT and candidate.gain is None)
        row = RaceRow(candidate.name, options, compiler=candidate.compiler)
        row.predicted_s = None if first else self._predicted_s(candidate)
        runner, began = None, time.perf_counter()
        try:
            with own_libdevice(), capped(math.inf if first else self.started + self.settings.budget_s):
                runner = self._entered(candidate, self._compiled(row.options, row.compiler), row)
        except RESTARTS:
            raise
        except OutOfTime:
            row.status, row.reason = "timeout", self._capped
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, without harm to the others
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
        if runner and row.error is not None and row.status == "fail_accuracy" and self._may_time:
            self._timed(runner, champion)  # never chosen, and worth knowing when the bound is reconsidered
        self.rows.append(row)
        logger.info("%s is dropped: %s: %s", row.name, row.status, row.reason)
        return None

    def _compiled(self, options: Mapping[str, Any], compiler: str = "") -> Callable[..., Any]:
        first = options in ({}, self._graphs.options) and not self.lowered
        noting = noting_lowered() if first else nullcontext(self.lowered)
        # The error under a lower precision is measured here, on what the compiled graph returns.
        options = {**options, **({"max_error": None} if "precision" in options else {})}
        with get_metrics_context(), noting as self.lowered:
            return self.request.compiled(self.task.copy(), self.request.example_inputs, options, compiler)

    def _entered(self, candidate: RaceCandidate, fn: Callable[..., Any], row: RaceRow) -> Runner:
        """Return the candidate as a runner; its row says whether it passed the accuracy check."""
        call = _Call(fn, self.task, self.dynamo_s)
        accuracy = self._within_bound(fn, row) if "precision" in row.options else self._check(candidate, fn)
        if not accuracy.passed:
            row.status, row.reason = accuracy.status, accuracy.reason
        elif candidate.compiler and (why := left_to_eager(fn)):
            row.status, row.reason = "fell_back", why
        row.rewritten = rewritten_in(fn, row.options.get("rewrites", ()))
        if row.status == "pass" and self.settings.objective == "memory":
            call()  # the first call allocates the inputs, which do not count
            row.peak_bytes = measure.peak_memory(call, self.device)
        return Runner(candidate, row, call, () if candidate.name == EAGER else _code(fn))

    def _check(self, candidate: RaceCandidate, fn: Callable[..., Any]) -> Accuracy:
        """Check the results of `fn` and the inputs it changes.

        Inductor draws other random numbers than eager does. So for a random graph, default is checked with
        `fallback_random`, which draws as eager does, and the other candidates are checked against default's own
        results.
        """
        seen = self.task.observe(fn)
        own_draws = self.stats.random and not self.tools.fixed.get("fallback_random")
        if candidate.name != DEFAULT or not own_draws:
            return self._compare(seen)
        accuracy = self._compare(self.task.observe(self._compiled({"fallback_random": True})))
        self.expected = seen if accuracy.passed else None
        return accuracy

    def _within_bound(self, fn: Callable[..., Any], row: RaceRow) -> Accuracy:
        """Measure the error of a candidate in a lower precision, and hold it to the bound that the user gave."""
        assert self.expected is not None
        assert not isinstance(self._precise, str)
        accuracy = against(self.task.observe(fn), self.expected, self._precise, row.options["max_error"])
        row.error, row.max_error = accuracy.error, row.options["max_error"]
        return accuracy

    def _compare(self, seen: dict[str, Any]) -> Accuracy:
        if self.expected is None:
            return Accuracy("fail_accuracy", "default failed the accuracy check, so there is no result to compare with")
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
        if not self._may_time and challenger.candidate is not self._graphs:
            # To compile default can take all of the budget; a few calls then show whether eager is faster.
            first = challenger.candidate.name == DEFAULT and champion.candidate.name == EAGER
            if not first or LEAST_CALLS * self.eager_s > (GRACE - 1) * self.settings.budget_s:
                return first
        failed = self._timed(challenger, champion)
        return "challenger" not in failed if failed else better(challenger, champion, self.settings.objective)

    def _timed(self, challenger: Runner, champion: Runner) -> dict[str, Exception]:
        """Time both in turn and note it in their rows; return what either raised."""
        failed: dict[str, Exception] = {}
        warm = self.eager_s <= SLOW_S
        samples = interleaved(challenger, champion, self.device, self._left_s, failed.__setitem__, warm=warm)
        for runner, name in ((champion, "champion"), (challenger, "challenger")):
            if name in failed:
                runner.row.status, runner.row.reason = measure.status_of(failed[name])
        if not failed:
            self._note_figures(challenger, champion, samples)
        return failed

    def _note_figures(self, challenger: Runner, champion: Runner, samples: Mapping[str, list[float]]) -> None:
        challenger.row.speedup, challenger.row.against = speedup(samples), champion.row.name
        # From the ratio, not as timed: clocks drift between comparisons, and the ranking would contradict the speedups.
        champion.row.seconds = champion.row.seconds or measure.percentile(samples["champion"], 0.5)
        challenger.row.seconds = champion.row.seconds / challenger.row.speedup.median
        if self.device.type == "cuda" and alike(challenger, champion):
            for runner in (champion, challenger):
                runner.row.peak_bytes = runner.row.peak_bytes or self._peak(runner)

    def _peak(self, runner: Runner) -> int | None:
        try:
            return measure.peak_memory(runner.call, self.device)
        except Exception:  # noqa: BLE001 - the candidates then stay tied
            return None


@dataclass
class _Call:
    """A candidate's call with the time of dynamo's guards added; it allocates its inputs at the first call."""

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
    """Return what dynamo adds to each call of the function being compiled: its prologue and its guards."""
    context = TracingContext.try_get()
    return PROLOGUE_S + GUARD_S * len(context.guards_context.dynamo_guards) if context else 0.0


def _code(fn: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return what identifies a compiled candidate: its generated code, and whether CUDA graphs replay it."""
    return tuple(
        sorted(
            (comparable(graph.source_code), bool(graph.cudagraph_info) and not graph.disabled_cudagraphs_reason)
            for graph in compiled_graphs(fn)
        )
    )


def _bytes(seen: Mapping[str, Any]) -> float:
    from torch.utils import _pytree as pytree

    return float(sum(leaf.nbytes for leaf in pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)))
