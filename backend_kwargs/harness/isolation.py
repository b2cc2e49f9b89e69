"""Isolation: each `torch.compile` compiles separately, and the graphs that reach its backend are counted."""

import contextlib
import functools
import inspect
import itertools
import types
from typing import Any, cast

import torch

from backend_kwargs.backend import Backend, CompilerFn, backend_of_function
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.compile_records import Record, kept_of, record_of
from backend_kwargs.harness.study import Model
from backend_kwargs.options.option import Options
from backend_kwargs.report import Ran, Report, report_of
from backend_kwargs.report.graphs import RETURNED, UNKNOWN
from backend_kwargs.torch_internals.compile_fx import InductorWrapper
from backend_kwargs.torch_internals.dynamo import limits_lifted, lookup_backend

_LINES = itertools.count(1_000_000)


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def room_to_compile() -> contextlib.AbstractContextManager[object]:
    """Lift the limit on recompiles of one code object, since torch before 2.13 counts all variants together."""
    if _can_isolate():
        return contextlib.nullcontext()
    return limits_lifted()


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
