"""One way to run a study's model: compile, call, warm up, check, time, check again.

Each `torch.compile` compiles separately, and the graphs that reach its backend are counted.
"""

import contextlib
import functools
import gc
import inspect
import itertools
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, cast

import torch

from backend_kwargs import trial
from backend_kwargs.auto.process_memory import call_until_chosen
from backend_kwargs.backend import Backend, CompilerFn, backend_of_function
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.compile_records import Record, kept_of, record_of
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.harness.study import Model, Study, Subject
from backend_kwargs.options.option import Options
from backend_kwargs.report import Ran, Report, report_of
from backend_kwargs.report.graphs import RETURNED, UNKNOWN
from backend_kwargs.torch_internals.compile_fx import InductorWrapper
from backend_kwargs.torch_internals.dynamo import limits_lifted, lookup_backend
from backend_kwargs.trial import Accuracy, Status

_LINES = itertools.count(1_000_000)


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def room_to_compile() -> contextlib.AbstractContextManager[object]:
    """Lift the limit on recompiles of one code object, since torch before 2.13 counts all variants together."""
    return contextlib.nullcontext() if _can_isolate() else limits_lifted()


def isolated(model: Model, **kwargs: object) -> Model:
    """Return `torch.compile(model, ...)` that shares no compiled code and no limit with another one."""
    compiler: Any = torch.compile
    if _can_isolate():
        return cast("Model", compiler(model, isolate_recompiles=True, **kwargs))

    def forward(*args: object, **kwargs: object) -> object:
        return model(*args, **kwargs)

    # By file, line and name dynamo knows sizes of before, and takes other ones for dynamic.
    code = forward.__code__.replace(co_name="forward", co_firstlineno=next(_LINES))
    own = types.FunctionType(code, globals(), "forward", None, forward.__closure__)
    return cast("Model", compiler(own, **kwargs))


class Counted:
    """A backend that counts the graphs it compiles and returns them unchanged: the hot path has no wrapper.

    `returned` counts the graphs that the backend returned uncompiled, `own` has the records of those that a backend of
    this package compiled: a report on a function has the graphs of all that compiled it. If `error_is_measured`, the
    caller measures the error of a lower precision, and a graph that exceeds its bound is compiled too.
    """

    def __init__(self, backend: CompilerFn, *, error_is_measured: bool = False) -> None:
        # A partial of one of our backends is that backend with more options.
        own = isinstance(backend, functools.partial) and isinstance(backend.func, Backend)
        self._backend = backend_of_function(backend) if own else backend
        self._error_is_measured = error_is_measured
        self.graphs = self.returned = 0
        self.own: list[Record] = []

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: Inputs, **kwargs: Any) -> Any:
        """Compile with the backend, and count."""
        code = gm.code
        compiled = self._compiled(gm, example_inputs, **kwargs)
        self.graphs += 1
        self.returned += kept_of(compiled) is gm and gm.code == code
        if record := record_of(compiled):
            self.own.append(record)
        return compiled

    def _compiled(
        self, gm: torch.fx.GraphModule, example_inputs: Inputs, *, name: str | None = None, **kwargs: Any
    ) -> Any:
        if not isinstance(self._backend, Backend):
            return self._backend(gm, example_inputs, **kwargs, **({"name": name} if name else {}))
        graph = CapturedGraph(gm, example_inputs, name, error_is_measured=self._error_is_measured)
        return self._backend.called_with(**kwargs).compile(graph).call

    def report(self) -> Report:
        """Return the report on the graphs that it compiled: without any for a backend of another package."""
        return report_of(self.own)

    def ran(self) -> Ran | None:
        """Return what ran the graphs in place of the backend; None if the backend ran them."""
        if (reported := self.report()).graphs:
            return reported.ran
        if isinstance(self._backend, InductorWrapper):
            return None
        return RETURNED if self.returned else UNKNOWN

    def __getattr__(self, name: str) -> Any:
        # torch reads compiler_name, config and reset() from a backend.
        if name == "_backend":
            raise AttributeError(name)
        return getattr(self._backend, name)


def counted(
    backend: CompilerFn | str,
    mode: str | None = None,
    options: Options | None = None,
    dynamic: bool | None = None,
    *,
    error_is_measured: bool = False,
) -> tuple[Counted, dict[str, Any]]:
    """Return the counted backend and the arguments for `torch.compile`, which itself binds those of "inductor"."""
    options = dict(options) if options else None
    if backend == "inductor":
        mode = mode or (None if options else "default")
        wrapper: Any = InductorWrapper
        return Counted(wrapper(mode, options, dynamic)), {"dynamic": dynamic}
    either: Any = backend  # torch declares a name, and takes a callable too
    own = Counted(lookup_backend(either), error_is_measured=error_is_measured)
    return own, {"mode": mode, "options": options, "dynamic": dynamic}


def start_inductor(device: torch.device) -> None:
    """Start Inductor's compile processes and build its headers, so that no candidate's compile time includes them."""
    # If Inductor cannot work, each candidate reports it.
    with contextlib.suppress(Exception):
        isolated(lambda x: x + 1, backend="inductor")(torch.ones(8, device=device))


WARM_CALLS = 3
SETTLING_CALLS = 4  # in which a model may compile again, since its attributes change


class TrialError(BackendKwargsError):
    """Ends a trial with this status; the message is the reason."""

    status: Status = "fail_to_run"


class UnavailableError(TrialError):
    """Something that was requested does not exist here."""

    status = "unavailable"


@dataclass(eq=False)
class Trial:
    """The run of one way to compile, through the study's checks, with its status and figures.

    `compile_s` is the time of the first call, None if nothing is compiled. `peak_bytes` is the peak memory of a call
    beyond what was allocated before (on CUDA before the compile), None if it is unknown, or hidden by memory that the
    process freed meanwhile. `subject` and `step` are dropped on failure.
    """

    study: Study
    status: Status = field(default="pass", kw_only=True)
    reason: str = field(default="", kw_only=True)
    accuracy: Accuracy | None = field(default=None, kw_only=True)
    compile_s: float | None = field(default=None, kw_only=True)
    peak_bytes: int | None = field(default=None, kw_only=True)
    counted: Counted | None = field(default=None, init=False)
    settled: int = field(default=0, init=False)  # graphs before timing
    subject: Subject = field(init=False)
    step: trial.RestoringCall = field(init=False)

    def compile(self, model: Model) -> tuple[Model, Counted | None]:
        """Return the callable for `model`, and the counter of its graphs: None if nothing is compiled."""
        return model, None

    def first_call(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of the first call, which sets up Inductor's cache."""
        return contextlib.nullcontext()

    timed: ClassVar[frozenset[Status]] = frozenset({"pass"})  # the statuses under which it is timed

    @property
    def passed(self) -> bool:
        """Return whether it may be timed."""
        return self.status in self.timed

    @property
    def graphs(self) -> int:
        """Return the number of graphs that its backend has compiled."""
        return self.counted.graphs if self.counted else 0

    def attempt(self, what: Callable[[], object]) -> None:
        """Call `what`; a failure sets the status."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - reported by the status
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Set the status from an error."""
        self.end(*((error.status, str(error)) if isinstance(error, TrialError) else trial.status_of(error)))

    def end(self, status: Status, reason: str) -> None:
        """Set a status other than "pass", and free the model and step unless it is still timed."""
        self.status, self.reason = status, reason
        if self.passed:
            return
        self.subject = self.step = None  # type: ignore[assignment]
        gc.collect()
        if self.study.device.type == "cuda":
            with contextlib.suppress(Exception):  # after a sticky CUDA error, which the next call reports
                torch.cuda.empty_cache()

    def start(self) -> None:
        """Compile, and check on fresh inputs."""
        self.build()
        self.verify(0)
        self.check_what_ran()
        if self.passed and self.counted and (call := self.study.in_a_loop(self.subject)):
            self.check_loop(call)
        self.settled = self.graphs

    def build(self) -> None:
        """Compile, warm up and count memory."""
        study = self.study
        gc.collect()  # leftovers of an earlier trial would count as memory in use, and be freed meanwhile
        in_use = torch.cuda.memory_allocated(study.device) if study.device.type == "cuda" else None
        subject = study.subject()
        call, self.counted = self.compile(subject.model)
        self.subject = subject._replace(call=call)
        self.step = study.step(self.subject)
        with self.first_call():
            started = perf_counter()
            self.step()
            trial.synchronize(study.device)
            self.compile_s = perf_counter() - started if self.counted else None
            call_until_chosen(self.step)
        if self.counted and not self.graphs:
            raise TrialError("no graph reached the backend: this would run in eager")
        self.peak_bytes = trial.peak_memory(self._warm, study.device, in_use) or None

    def _warm(self) -> None:
        for _ in range(WARM_CALLS):
            self.step()  # the result is dropped at once, since it would count

    def verify(self, at: int) -> None:
        """Check the callable that is timed, on the study's inputs `at`."""
        accuracy = self.study.verify(self.subject, at)
        if self.accuracy is None or self.accuracy.passed:
            self.accuracy = accuracy
        if not accuracy.passed and self.status != "fail_accuracy":
            self.end(accuracy.status, accuracy.reason)

    def check_what_ran(self) -> None:
        """Fail if something other than its backend ran, or may have run."""
        if self.status == "pass" and self.counted and (ran := self.counted.ran()):
            self.end(ran.status, ran.what)

    def check_loop(self, call: trial.RestoringCall) -> None:
        """Fail if each call compiles again, as where code depends on a counter; a short history settles."""
        settled: float = math.inf
        with contextlib.suppress(Exception):  # these calls are not timed, and may go past the end of a cache
            for _ in range(SETTLING_CALLS):
                call()
            settled = self.graphs
            call()
        if self.graphs > settled:
            raise TrialError("recompiled at each call, since an attribute of the model changes")

    def finish(self) -> None:
        """Check after timing, on other inputs, that results are right and that nothing was recompiled."""
        if self.status != "fail_accuracy":
            self.verify(1)
        if self.passed and self.graphs > self.settled:
            raise TrialError(f"recompiled {self.graphs - self.settled} times while it was timed")
        self.check_what_ran()


def learn(study: Study, trials: Sequence[Trial]) -> None:
    """Compute the expected results; if eager fails or is not reproducible, end every trial."""
    try:
        accuracy = study.learn()
        ending: tuple[Status, str] = ("eager_two_runs_differ", accuracy.reason)
    except Exception as error:  # noqa: BLE001 - reported by the trials
        status, reason = trial.status_of(error)
        accuracy, ending = None, (status, f"eager failed: {reason}")
    if accuracy is None or not accuracy.passed:
        for each in trials:
            each.end(*ending)
