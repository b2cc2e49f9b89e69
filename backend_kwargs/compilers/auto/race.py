"""The race for one graph: compile, check and time candidates against the fastest so far, until the budget is spent."""

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import get_metrics_context

from backend_kwargs import measure
from backend_kwargs.compilers.auto.apart import Task, apart, has_drawn, own_libdevice
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, Candidate, candidates_for
from backend_kwargs.compilers.auto.capped import OutOfTime, capped
from backend_kwargs.compilers.auto.decisions import Row
from backend_kwargs.compilers.auto.facts import Facts, recomputes, seen_facts
from backend_kwargs.compilers.auto.judging import Runner, alike, better, in_turns, speedup
from backend_kwargs.compilers.auto.limit import limit_of
from backend_kwargs.compilers.auto.request import RESTARTS, Request
from backend_kwargs.compilers.freezing import copy_of_graph
from backend_kwargs.compilers.generated import comparable, compiled_graphs
from backend_kwargs.measure import Accuracy

logger = logging.getLogger("backend_kwargs.auto")

Progress = Callable[[str, float], None]

LEAST_CALLS = 4  # of a meeting
SLOW_S = 0.1  # a call of eager above which fewer are made
LAUNCH_S = 5e-6  # of a kernel, from Python; where a call is waited for, the first ones hide behind nothing
LEAST_GAIN = 0.03  # a candidate that cannot gain as much is not tried
LARGEST_REFERENCE = 2 << 30  # bytes of inputs: the reference takes up to four times as many
SLOWER_IN_PRECISION = 10


class UnfitError(Exception):
    """A graph is not to be raced; the message says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The race's end: the winner's row, all rows as they were tried, what the graph held; `cut` where time ran out."""

    winner: Row
    rows: tuple[Row, ...]
    facts: Facts
    seconds: float
    cut: bool


def race(request: Request, tell: Progress) -> Outcome:
    """Return the fastest candidate that is right; leaves no trace in torch, in the inputs or in the generators."""
    with apart(request.gm) as begin:
        return _Race(request, tell, begin).run()


@dataclass
class _Race:
    request: Request
    tell: Progress
    begin: Callable[[], None]

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.settings, self.tools = self.request.settings, self.request.tools
        # A copy: to have run shows in a graph, and so in AOTAutograd's key, by which the next process finds the winner.
        self.task = Task.of(copy_of_graph(self.request.gm), self.request.example_inputs, self.begin)
        self.rows: list[Row] = []
        self.codes: dict[tuple[Any, ...], str] = {}
        self.device = _device(self.task.inputs.values)

    def run(self) -> Outcome:
        began = time.perf_counter()
        self.eager, self.facts = self._seen()
        self.eager_s = time.perf_counter() - began
        if self.facts.random and recomputes(self.request.gm):
            raise UnfitError("it recomputes what it draws, in eager from other random numbers")
        if self._over:
            spent = time.perf_counter() - self.started
            raise UnfitError(
                f"to run it in eager took {spent:.2g} s, over twice its budget of {self.settings.budget_s:g} s; "
                "raise budget_s"
            )
        self.expected: dict[str, Any] | None = self.eager
        self.reference = self._reference()
        eager = self._entered(Candidate(EAGER), self.task.copy())
        champion = self._meet(eager, Candidate(DEFAULT, over=False, rank=0))
        field = candidates_for(self.facts, self.settings.effort, self.settings.candidates, self.tools.options_of)
        for at, candidate in enumerate(field):
            self.tell(candidate.name, (at + 1) / (len(field) + 1))
            if why := self._not_worth(candidate, champion):
                self.rows.append(Row(candidate.name, dict(candidate.options), "skipped", why))
            else:
                champion = self._meet(champion, candidate)
        champion = self._not_slower(champion, eager)
        if champion.row.status != "pass":
            raise RuntimeError(f"no candidate runs: {champion.row.name}: {champion.row.reason}")
        champion.row.won = True
        if not any(row is champion.row for row in self.rows):  # nothing else could be compiled
            self.rows.append(champion.row)
        for row in self.rows:
            if row.status == "pass" and row.seconds is None:
                row.reason = "it met no other for as long as a timing takes"
        cut = self._over or any(row.reason in (self._out_of_time, self._capped) for row in self.rows)
        return Outcome(champion.row, tuple(self.rows), self.facts, time.perf_counter() - self.started, cut)

    # ---- before

    def _seen(self) -> tuple[dict[str, Any], Facts]:
        """Return what eager gives, and what the graph holds."""
        result, facts = seen_facts(
            partial(self.task.observe, self.task.copy()),
            _bytes,
            bytes_read=self.task.inputs.bytes,
            device=self.device.type,
            training=self.task.training,
            writes=bool(self.task.inputs.written),
            dynamic=any(isinstance(value, torch.SymInt) for value in self.task.inputs.values),
        )
        # Of what an operator of a higher order holds only the generators tell.
        return result, replace(facts, random=facts.random or has_drawn())

    @property
    def slow(self) -> bool:
        """Whether a call takes so long that few are made."""
        return self.eager_s > SLOW_S

    def _reference(self) -> Any | None:
        # A copy in higher precision, leaf by leaf, would take apart what shares memory.
        if self.facts.random or self.task.inputs.aliased or self.task.inputs.bytes > LARGEST_REFERENCE:
            return None
        if SLOWER_IN_PRECISION * self.eager_s > self._left_s:
            return None
        return measure.reference(self.task.copy(), self.task.inputs.fresh(), run=self._in_precision)

    def _in_precision(self, gm: Any, args: Any) -> Any:
        # Not the module itself, which would print the traceback of a graph that cannot run in float64.
        return replace(self.task, inputs=replace(self.task.inputs, values=args)).observe(gm.forward)

    @property
    def _left_s(self) -> float:
        return max(self.settings.budget_s - (time.perf_counter() - self.started), 0.0)

    @property
    def _until_cap_s(self) -> float:
        return self.settings.cap_s - (time.perf_counter() - self.started)

    @property
    def _over(self) -> bool:
        """Whether so much time is spent that default stands without more ado."""
        return self._until_cap_s < 0

    @property
    def _out_of_time(self) -> str:
        return f"the budget of {self.settings.budget_s:g} s is spent"

    @property
    def _capped(self) -> str:
        return f"its tuning was ended after {self.settings.cap_s:g} s of the race"

    def _not_worth(self, candidate: Candidate, champion: Runner) -> str:
        if not self._left_s and not (candidate.late and not self._over):
            return self._out_of_time
        fixed = dict.fromkeys(self.tools.fixed, "your options set it otherwise")
        options = self._options(candidate, champion)
        inert = {**self.tools.inert({**options, **self.tools.fixed}), **fixed}
        if candidate.options and all(name in inert for name in candidate.options):
            return f"it can do nothing here: {next(iter(inert[name] for name in candidate.options))}"
        if tried := [r.name for r in self.rows if r.options == options and r.status != "skipped" and r.name != EAGER]:
            return f"it would be {tried[0]} again"
        seconds = champion.row.seconds or 0.0
        if not _saves_enough(candidate, self.facts, seconds):
            return "it saves time of the host, of which little is spent here"
        if candidate.expensive and self._at_its_limit(seconds):
            return f"the fastest is within {LEAST_GAIN:.0%} of the limit already"
        return ""

    def _at_its_limit(self, seconds: float) -> bool:
        limit = limit_of(self.facts, self.device)
        # What is faster than its limit proves that to be none: an embedding reads few of its rows, a cache is warm.
        return bool(limit) and abs(seconds / limit - 1) < LEAST_GAIN

    def _options(self, candidate: Candidate, champion: Runner) -> dict[str, Any]:
        under = champion.row.options if candidate.over else {}
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
        del challenger, champion
        gc.collect()  # compiled graphs hold one another in cycles: a loser's memory is free only now
        return best

    def _prepared(self, candidate: Candidate, champion: Runner) -> Runner | None:
        options = self._options(candidate, champion)
        began = time.perf_counter()
        try:
            with own_libdevice(), capped(math.inf if candidate.name == DEFAULT else self.started + self.settings.cap_s):
                runner = self._entered(candidate, self._compiled(options), options)
        except RESTARTS:
            raise
        except OutOfTime:
            spent = time.perf_counter() - began
            self._dropped(Row(candidate.name, options, "timeout", self._capped, compile_s=spent))
            return None
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, and hurts no other
            status, reason = measure.status_of(error)
            self._dropped(Row(candidate.name, options, status, reason, compile_s=time.perf_counter() - began))
            return None
        runner.row.compile_s = time.perf_counter() - began
        first = self.codes.setdefault(runner.code, candidate.name) if runner.code else candidate.name
        if runner.row.status == "pass" and first != candidate.name:
            runner.row.status, runner.row.reason = "same code", f"as {first}"
        if runner.row.status != "pass":
            self._dropped(runner.row)
            return None
        return runner

    def _compiled(self, options: Mapping[str, Any]) -> Callable[..., Any]:
        with get_metrics_context():
            return self.request.compile_one(self.task.copy(), self.request.example_inputs, options)

    def _entered(self, candidate: Candidate, fn: Callable[..., Any], options: Mapping[str, Any] = {}) -> Runner:
        row, call = Row(candidate.name, dict(options)), _Call(fn, self.task)
        accuracy = self._check(candidate, fn)
        if not accuracy.passed:
            row.status, row.reason = accuracy.status, accuracy.reason
        elif self.settings.objective == "memory":
            call()  # which makes its inputs
            row.peak_bytes = measure.peak_memory(call, self.device)
        return Runner(candidate, row, call, () if candidate.name == EAGER else _code(fn))

    def _check(self, candidate: Candidate, fn: Callable[..., Any]) -> Accuracy:
        """Check what `fn` gives and changes.

        Inductor draws other random numbers than eager. There default is checked by its twin that draws as eager does,
        and the other candidates against default, whose draws they share.
        """
        seen = self.eager if candidate.name == EAGER and self.slow else self.task.observe(fn)
        own_draws = self.facts.random and not self.tools.fixed.get("fallback_random")
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

    def _dropped(self, row: Row) -> None:
        self.rows.append(row)
        logger.info("%s is dropped: %s: %s", row.name, row.status, row.reason)

    # ---- the race of two

    def _beats(self, challenger: Runner, champion: Runner) -> bool:
        for runner in (champion, challenger):
            if not any(row is runner.row for row in self.rows):
                self.rows.append(runner.row)
        if self._over or LEAST_CALLS * self.eager_s > self._until_cap_s:
            return challenger.candidate.name == DEFAULT
        failed: dict[str, Exception] = {}
        samples = in_turns(challenger, champion, self.device, self._left_s, failed.__setitem__, warm=not self.slow)
        for runner, name in ((champion, "champion"), (challenger, "challenger")):
            if name in failed:
                runner.row.status, runner.row.reason = measure.status_of(failed[name])
        if failed:
            return "challenger" not in failed
        challenger.row.speedup, challenger.row.against = speedup(samples), champion.row.name
        # By the ratio, not as it was timed: clocks drift from one meeting to the next, and ranks would contradict it.
        champion.row.seconds = champion.row.seconds or measure.percentile(samples["champion"], 0.5)
        challenger.row.seconds = champion.row.seconds / challenger.row.speedup.median
        if self.device.type == "cuda" and alike(challenger, champion):
            for runner in (champion, challenger):
                runner.row.peak_bytes = runner.row.peak_bytes or self._peak(runner)
        return better(challenger, champion, self.settings.objective)

    def _peak(self, runner: Runner) -> int | None:
        try:
            return measure.peak_memory(runner.call, self.device)
        except Exception:  # noqa: BLE001 - a tie may stay one
            return None


@dataclass
class _Call:
    """A candidate's call, whose inputs are made when it is first called."""

    fn: Callable[..., Any]
    task: Task
    made: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        if self.made is None:
            self.made = self.task.caller(self.fn)
        return self.made()


def _saves_enough(candidate: Candidate, facts: Facts, seconds: float) -> bool:
    """Tell whether the host's time that a candidate saves can count; of an opaque graph nobody knows."""
    return not candidate.saves_launches or facts.opaque or LAUNCH_S * facts.ops >= LEAST_GAIN * seconds


def _code(fn: Callable[..., Any]) -> tuple[tuple[str, bool], ...]:
    """Return what tells the candidate from another: its generated code, and whether CUDA graphs replay it."""
    return tuple(sorted((comparable(graph.source_code), _replayed(graph)) for graph in compiled_graphs(fn)))


def _replayed(graph: Any) -> bool:
    return bool(graph.cudagraph_info) and not graph.disabled_cudagraphs_reason


def _device(values: Sequence[Any]) -> torch.device:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return next((t.device for t in tensors if t.is_cuda), tensors[0].device if tensors else torch.device("cpu"))


def _bytes(seen: Mapping[str, Any]) -> float:
    from torch.utils import _pytree as pytree

    return float(sum(leaf.nbytes for leaf in pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)))
