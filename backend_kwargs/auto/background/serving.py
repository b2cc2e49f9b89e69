"""The calls that are served while a race goes on in the background.

The first call traces the model and serves eager or default. Worker processes lower the candidates; what they have made
is loaded, checked and timed on the inputs of a later call, just before that call is served: one slice of the race. All
slices of a process together take at most `background_share` of its time, and a slice does not begin before a pause of
`PAUSE_S` fits into that. Nothing is lowered in this process after the first call.

What dynamo calls is a `functools.partial`, whose function is replaced: by a step of the race as long as that goes on,
then by the winner itself. A slice is exclusive: calls of other threads wait for its end, and it does not begin while
one of them is in a call.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from backend_kwargs.auto.background.course import Course, Ready
from backend_kwargs.auto.background.following import Following
from backend_kwargs.auto.background.inputs import LaterChecks, bind, ordinary, part
from backend_kwargs.auto.background.lowering import Lowerings, pool
from backend_kwargs.auto.background.pacing import PAUSE_S, Gate, SliceBudget, pacer
from backend_kwargs.auto.background.versions import Versions
from backend_kwargs.auto.candidates import with_recording
from backend_kwargs.auto.compiling import Traced
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.race import Race, RaceResult, begun, dynamo_seconds
from backend_kwargs.auto.request import Request
from backend_kwargs.auto.sandbox import between_calls, sandboxed
from backend_kwargs.backends.inductor.lowered import Version
from backend_kwargs.errors import error_text
from backend_kwargs.facts import Call, Compiled
from backend_kwargs.facts.background import Timeline
from backend_kwargs.facts.decision import EAGER, Decision
from backend_kwargs.graphs.replay import cuda_devices
from backend_kwargs.measure.served import copied
from backend_kwargs.torch_internals.cudagraphs import TreesApart
from backend_kwargs.torch_internals.dynamo import compile_lock
from backend_kwargs.torch_internals.relowering import only_from_cache

logger = logging.getLogger("backend_kwargs.auto")

COMPARE_S = 0.25  # of one comparison of two candidates
SHORT_S = 0.02  # shorter pauses are not on the timeline
LOOK_S = 0.1  # a race that waits for workers looks so often
WATCHED = 3  # calls after a switch that fall back to what served before: they record CUDA graphs
LONGER = 1.2  # times eager: such a call is on the timeline

# Of what is known, whether that is all, and whether it is to be stored.
Record: TypeAlias = Callable[[RaceResult, bool, bool], Decision]


class RefusedError(Exception):
    """The graph cannot be raced in the background. Contains the reason."""


def begin(
    request: Request, record: Record, tell: Callable[[str, float], None], leader: Timeline | None = None
) -> tuple[Compiled, Timeline]:
    """Begin a race: return what serves from the first call on; `record` gets what is known whenever that changes.

    `leader` is the race of a graph of equal code that goes on. Raise RefusedError where the graph cannot be raced
    between calls.
    """
    if any(isinstance(value, torch.SymInt | torch.SymFloat) for value in request.example_inputs):
        raise RefusedError("its sizes are symbols, for which a later compile could add guards")
    if why := pool().refusal():
        raise RefusedError(f"there is no worker to compile: {why}")
    pacer()
    dynamo_s = dynamo_seconds()
    with sandboxed(request.gm) as step:
        race = begun(request, tell, step, dynamo_s)
        if race.stats.random:
            raise RefusedError("it draws random numbers, of which a later call would see others")
        background = Background.of(race, record, Following(leader))
        compiled = background.started()
    return compiled, background.timeline


@dataclass
class Background:
    """One race in the background, and what serves meanwhile."""

    race: Race
    record: Record
    following: Following
    timeline: Timeline
    budget: SliceBudget
    eager: Runner
    served: Runner  # what serves, by this call
    serving: Call
    gate: Gate
    versions: Versions
    previous: tuple[Runner, Call, Version | None] | None = None
    watched: int = 0
    written: tuple[int, ...] = ()
    ready: Ready = lambda: True
    due: float = 0.0
    longest_s: float = 0.0
    over: bool = False
    thread: threading.Thread | None = None  # of all slices, once there was one: CUDA graphs are recorded for a thread
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        lowerings = Lowerings(self.race)
        known = self.race, lowerings, self.timeline, self.eager, self.eager
        self.course = Course(*known, self._switch_to, self.following)
        self.steps = self.course.steps()

    @classmethod
    def of(cls, race: Race, record: Record, following: Following) -> "Background":
        """Return a race whose graph has run in eager once."""
        eager = race.entered_eager()
        settings = race.request.settings
        budget = SliceBudget(settings.budget_s, race.budget.started, race.budget.call_s)
        checks = LaterChecks(race.task, race.stats.random, race.device, budget, settings.tolerance, None)
        race.budget = race.selection.budget = budget
        race.checks = race.selection.checks = checks
        race.comparison_s = COMPARE_S
        race.compiles.ahead.pool = pool()
        forward, gate, written = race.request.gm.forward, Gate(), tuple(sorted(race.task.inputs.written))
        known = race, record, following, Timeline(), budget
        return cls(*known, eager, eager, forward, gate, Versions(gate), written=written)

    # ---- the first call

    def started(self) -> Compiled:
        """Trace the model, have workers lower candidates, and return what serves: eager, or default compiled here.

        Of a model that is trained, the forward graph's code must be there before its backward graph can be lowered.
        """
        race, ahead = self.race, self.race.compiles.ahead
        options, began = with_recording(race.selection.default.options), time.perf_counter()
        traced = None
        if not race.task.training:
            ahead.choose = lambda: [(options, race.compiles.patches(options)), *race.selection.ahead()]
            traced = race.compiles.deferred(options)
        if ahead.refused:
            raise RefusedError(ahead.refused)
        if traced is None:
            traced = self._default_here()
        else:
            race.selection.default_s = time.perf_counter() - began
            self.timeline.note(f"the model was traced in {race.selection.default_s:.2f} s; eager serves")
        if ahead.refused:
            raise RefusedError(ahead.refused)
        self.versions.lowered = traced.lowered
        traced.context.adopt()
        return self._switched()

    def _default_here(self) -> Traced:
        race, default = self.race, self.race.selection.default
        race.compiles.ahead.end()
        race.compiles.ahead.choose = race.selection.ahead
        runner = race.prepared(default, default.options, self.eager, partial(race.compiles.compile, default.options))
        made = runner.made if runner else None
        if runner is None or made is None or made.traced is None:
            raise RefusedError(race.rows[-1].reason if race.rows else "default's code cannot be exchanged")
        if made.traced.context.changed:
            raise RefusedError("default has guarded sizes")
        self.versions.lowered = made.traced.lowered
        self.versions.mark_forward_passes()
        runner.made = race.compiles.again(made)  # the trees of the first call end with it
        self._serve(runner)
        self.course.challenger, self.watched, self.previous = runner, 0, None
        self.timeline.note(f"default was compiled in {runner.row.compile_s:.2f} s, and serves")
        return made.traced

    def _switched(self) -> Compiled:
        self.trees = TreesApart(cuda_devices())
        weakref.finalize(self, self.trees.free).atexit = False
        self._part()
        self.versions.place()
        self.due = pacer().begins(self.share)
        self.switch: partial[Any] = partial(self.first_call)
        self._note_known(ended=False)
        return Compiled(self.switch)

    @property
    def share(self) -> float:
        """The share of the process's time that slices may take."""
        return self.race.request.settings.background_share

    def first_call(self, *inputs: Any) -> Any:
        """Serve the call for which dynamo has compiled, which waits for nothing."""
        self._call(self.call)
        return self.serving(*inputs)

    def _call(self, fn: Call) -> None:
        """Let dynamo call `fn` from the next call on."""
        self.switch.__setstate__((fn, (), {}, None))  # type: ignore[attr-defined]

    # ---- a later call

    def call(self, *inputs: Any) -> Any:
        """Serve a call; before it, go on with the race if that may take a slice now."""
        if os.getpid() != self.pid:
            self._forked()
        elif self.over:
            self._leave()
        elif time.perf_counter() >= self.due:
            self._boundary(inputs)
        with self.gate.call():
            return self._watched(inputs) if self.watched else self.serving(*inputs)

    def _watched(self, inputs: Sequence[Any]) -> Any:
        """Serve one of the first calls after a switch; where it fails, by what served before, on the inputs it had."""
        self.watched, previous = max(0, self.watched - 1), self.previous
        if previous is None:  # another thread's call was the last one
            return self.serving(*inputs)
        kept = [(inputs[at], copied(inputs[at])) for at in self.written]
        began = time.perf_counter()
        try:
            return self.serving(*inputs)
        except Exception as error:  # noqa: BLE001 - a candidate may fail in any way, without harm to the user
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)
            self.timeline.note(f"{self._name} failed in a call, which was served as before: {error_text(error)}")
            self._fall_back(error, *previous)
            return self.serving(*inputs)
        finally:
            if (pause_s := time.perf_counter() - began) > LONGER * (self.eager.row.seconds or self.budget.call_s):
                self.timeline.note(f"an early call of {self._name}", pause_s)
            if not self.watched:
                self.previous = None

    @property
    def _name(self) -> str:
        return self.served.row.name

    def _fall_back(self, error: Exception, served: Runner, serving: Call, version: Version | None) -> None:
        self.served.row.status, self.served.row.reason = "fail_to_run", error_text(error)
        self.course.champion, self.served, self.serving, self.watched = served, served, serving, 0
        self.versions.version = version
        self.versions.place()
        if self.over:
            self._note_known(ended=False)
        self._end()

    def _boundary(self, inputs: Sequence[Any]) -> None:
        """Go on with the race, unless it waits, or something forbids it now."""
        now = time.perf_counter()
        self.due = max(now + LOOK_S, pacer().begins(self.share))
        if not self._has_turn() or self.due > now + LOOK_S or not self.ready() or not ordinary(inputs):
            return
        with self.gate.alone() as alone:
            if not alone or self.versions.awaited_elsewhere() or not compile_lock.acquire(blocking=False):
                return
            try:
                self._slice(inputs)
            finally:
                compile_lock.release()

    def _has_turn(self) -> bool:
        """Return whether slices are this thread's; end the race if the thread that they are of has ended."""
        if self.thread is None or self.thread is threading.current_thread():
            return True
        if not self.thread.is_alive():
            with self.gate.alone() as alone:
                if alone:
                    self._end("the thread in which its candidates recorded CUDA graphs has ended")
        return False

    def _forked(self) -> None:
        """End the race in a process that was forked: a thread of the parent may have held the gate."""
        self.gate.reset()
        self.pid, self.over, self.timeline.ended = os.getpid(), True, True
        self.timeline.note("this process was forked, and has no workers")
        self.trees = TreesApart(())  # the device is the parent's
        self._leave()

    def _slice(self, inputs: Sequence[Any]) -> None:
        began, said = time.perf_counter(), len(self.timeline.events)
        finished, why, self.versions.slicing = False, "", True
        self.thread = threading.current_thread() if self.race.device.type == "cuda" else None
        try:
            with self.budget.sliced(), between_calls(self.trees.entered()), only_from_cache():
                bind(self.race, self.course.runners, inputs, self.trees.begin)
                finished = self._steps(began)
        except Exception as error:
            finished, why = True, f"the race failed: {error_text(error)}"
            logger.info("A race in the background failed", exc_info=True)
        except BaseException:
            self._end("it was interrupted")
            raise
        finally:
            self._part()
            self.versions.place()
            self.versions.slicing = False
            pause_s = time.perf_counter() - began
            pacer().spent_s += pause_s
            self.timeline.note(
                "a slice of the race" if len(self.timeline.events) == said else "end of a slice", pause_s
            )
        if finished:
            self._end(why)
        else:
            self._note_known(ended=False)
        self.due = pacer().begins(self.share)

    def _steps(self, began: float) -> bool:
        """Do steps of the race as long as the pause stays short; return whether there are no more."""
        while True:
            start = time.perf_counter()
            try:
                self.ready = next(self.steps) or (lambda: True)
            except StopIteration:
                return True
            now = time.perf_counter()
            self.longest_s = max(self.longest_s, now - start)
            if not self.ready() or now - began + self.longest_s > PAUSE_S:
                return False

    def _part(self) -> None:
        before = [self.previous[0]] if self.previous else []  # no longer one of the race's
        part(self.race, [*self.course.runners, self.served, *before], self.written)

    # ---- what serves

    def _switch_to(self, best: Runner) -> None:
        """Let the best of the race serve from this call on, if it does not."""
        if best is not self.served:
            self._serve(best)

    def _serve(self, runner: Runner) -> None:
        """Let a candidate serve from this call on."""
        self.previous, self.watched = (self.served, self.serving, self.versions.version), WATCHED
        self.versions.switch()
        self.served = runner
        if runner.candidate.name == EAGER or runner.made is None:
            self.serving = self.race.request.gm.forward
        else:
            compiled, self.versions.version = self.race.compiles.served(runner.made)
            self.serving = compiled.call
        self.timeline.note(f"{runner.row.name} takes over")

    def _end(self, why: str = "") -> None:
        """End the race: what serves now is what dynamo calls from then on."""
        if self.over:
            return
        self.over = True
        self.steps.close()
        self.race.compiles.ahead.end()
        self._part()
        self.course.challenger = None
        if why:
            self.timeline.note(why)
        self.timeline.note(f"the race has ended: {self._name}")
        self._note_known(ended=not why)
        self.timeline.ended = True
        self._leave()

    def _leave(self) -> None:
        """Let dynamo call what serves, without anything of the race, once no backward pass of another is to come."""
        if self.watched or not self.versions.settle():
            return
        self._call(self.serving)
        began = time.perf_counter()
        self.trees.free()
        if (pause_s := time.perf_counter() - began) > self.budget.call_s:
            self.timeline.note("the memory of the race was freed", pause_s)

    def _note_known(self, *, ended: bool) -> None:
        leader = self.course.champion
        rows = [replace(row, won=row is leader.row) for row in self.race.rows]
        if not any(row is leader.row for row in self.race.rows):
            rows.append(replace(leader.row, won=True))
        won = next(row for row in rows if row.won)
        stores, follows = self.following.stores(rows), self.following.leader is not None
        ended = ended and not (stores and follows)  # the leader's winner failed here: that is no whole race
        result = RaceResult(won, tuple(rows), self.race.stats, self.budget.spent_s, cut=self.budget.over or not ended)
        began = time.perf_counter()
        self.timeline.decision = self.record(result, ended, stores)
        if (pause_s := time.perf_counter() - began) > SHORT_S:  # a store that is slow, or away
            self.timeline.note("what is known was stored", pause_s)
            pacer().spent_s += pause_s
