"""Compile one graph of dynamo with TVM: its parts are lowered and built, and the rest runs in eager."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo.eval_frame import innermost_fn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from backend_kwargs.compilers.freezing import compile_frozen
from backend_kwargs.compilers.parts import (
    Boxed,
    boxed,
    calls_of,
    device_of,
    is_part,
    operators_of,
    parts_of,
    random_nodes,
    replace_part,
    results_of,
    serving,
    split,
    writes_in_place,
)
from backend_kwargs.compilers.tvm.against_eager import why_eager
from backend_kwargs.compilers.tvm.build import build
from backend_kwargs.compilers.tvm.capture import capture, constants_of
from backend_kwargs.compilers.tvm.lowering import Unsupported, lower
from backend_kwargs.compilers.tvm.partition import reasons, unwanted
from backend_kwargs.compilers.tvm.runtime import runner
from backend_kwargs.compilers.tvm.settings import Settings
from backend_kwargs.compilers.tvm.summary import Partition, TVMSummary
from backend_kwargs.compilers.tvm.supported import ATEN_OPS
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.measure import Roundings, accuracy


class _InEagerError(Exception):
    """TVM cannot compile the whole graph, and `fallback` allows no partition."""


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings) -> Callable[..., Any]:
    """Compile dynamo's `gm` with `settings`; the callable returned has its `TVMSummary` as `tvm_summary`.

    Results are eager's within rounding: what TVM does not support, or fails at, runs in eager as `fallback` allows. So
    does a tuned graph that is faster in eager, unless it is trained.
    """
    steps = Steps(settings)
    freezes = settings.freeze and not torch.is_grad_enabled()
    if settings.freeze and not freezes:
        warn_once("Option 'freeze' is inert while gradients are recorded: call the model under torch.no_grad().")
    whole = settings.aten_ops if settings.aten_ops is not None else ATEN_OPS["cpu"]
    captured = partial(capture, steps.compile, whole, freezes)
    compiled = compile_frozen(gm, example_inputs, captured) if freezes else captured(gm, example_inputs)
    raced = steps.summary.partitions and _is_raced(settings, example_inputs)
    if raced and (reason := why_eager(gm, example_inputs, compiled)):
        compiled = partial(gm.forward)
        steps.summary = TVMSummary(fallbacks={"the graph": reason})
    compiled.tvm_summary = innermost_fn(compiled).tvm_summary = steps.summary  # type: ignore[attr-defined]
    return compiled


def _is_raced(settings: Settings, example_inputs: Sequence[Any]) -> bool:
    trains = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in example_inputs)
    return settings.scheduler == "meta_schedule" and settings.fallback != "error" and not trains


class Steps:
    """The steps for each graph that AOTAutograd makes of one graph of dynamo's."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.summary = TVMSummary()

    def compile(
        self, graph: str, gm: GraphModule, example_inputs: Sequence[Any], attributes: GraphModule | None = None
    ) -> Boxed:
        """Return a callable for `gm`, the forward, backward or inference `graph`.

        The parameters and buffers of `attributes` become constants, except those that the graph mutates.
        """
        eager = GraphModule(gm, copy.deepcopy(gm.graph))
        try:
            # AOTAutograd's fake tensor mode is on, but constants are real.
            with _disable_current_modes():
                compiles = self._compile_parts(graph, gm, constants_of(gm, attributes))
        except _InEagerError:
            return boxed(eager)
        run = boxed(gm)
        return _verified(run, eager, graph) if compiles and self.settings.verify else run

    def _compile_parts(self, graph: str, gm: GraphModule, constants: Mapping[str, torch.Tensor]) -> int:
        if written := writes_in_place(gm):
            self._leave(written, "it writes in place")
            return 0
        found = reasons(gm, self.settings)
        for op, reason in unwanted(found):
            self._leave(op, reason)
        split(gm, [node for node, reason in found.items() if not reason])
        parts = parts_of(gm)
        for call in parts:
            self._compile_part(graph, gm, call, constants)
        return len(parts)

    def _leave(self, op: str, reason: str) -> None:
        """Record that `op` runs in eager, if that is allowed."""
        self.summary.leave(op, reason)
        if self.settings.fallback == "error":
            raise BackendKwargsError(
                f"TVM cannot have {op!r}: {reason}. Write fallback='partition' to leave it to eager."
            )
        if self.settings.fallback == "graph":
            raise _InEagerError

    def _compile_part(self, graph: str, gm: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> None:
        """Replace the call of a part by TVM's code; a part that TVM fails at stays in eager."""
        part = gm.get_submodule(str(call.target))
        assert isinstance(part, GraphModule)
        started = time.perf_counter()
        try:
            run, built = self._built(part, call, constants)
        except BackendKwargsError:  # a wrong option
            raise
        except Unsupported as unsupported:
            return self._leave(operators_of(part), unsupported.reason)
        except Exception as error:  # noqa: BLE001 - TVM may raise any exception
            if self.settings.fallback != "error":
                warn_once(f"TVM failed to compile a part of a graph, which runs in eager: {error_text(error)}.")
            return self._leave(operators_of(part), error_text(error))
        seconds = time.perf_counter() - started
        made = Partition(graph, len(calls_of(part)), seconds, built.target, built.tuned, tuple(built.notes))
        self.summary.partitions.append(made)
        if self.settings.fallback != "error":
            run = serving(run, part, partial(self._failed, made, operators_of(part)))
        replace_part(call, run, call.args)
        return None

    def _failed(self, partition: Partition, operators: str, error: Exception) -> None:
        reason = error_text(error)
        warn_once(f"TVM failed to run a part of a graph, which runs in eager from now on: {reason}.")
        self.summary.fail(partition, operators, reason)

    def _built(self, part: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
        names = [node.name for node in part.graph.find_nodes(op="placeholder")]
        given = zip(names, map(str, call.args), strict=True)
        lowered = lower(part, {own: constants[name] for own, name in given if name in constants})
        device = device_of(results_of(call)[0])
        built = build(lowered.mod, self.settings, device)
        observed = [i for i, result in enumerate(results_of(call)) if not all(map(is_part, result.users))]
        return runner(part, lowered, built.executable, device, observed), built


def _verified(run: Boxed, eager: GraphModule, graph: str) -> Boxed:
    """Return `run` with its first results compared with eager's; if they differ, the graph runs in eager from then."""
    chosen: list[Boxed] = []

    def call(args: list[Any]) -> Any:
        if chosen:
            return chosen[0](args)
        given, what = list(args), f"{graph} output"  # a boxed call empties its list
        wanted, precise = _in_eager(eager, given), _in_precision(eager, given)
        result = run(args)
        otherwise = Roundings(lambda: {what: _in_eager(eager, given)}, {what: wanted})
        training = graph != "inference"
        verdict = accuracy.check(result, wanted, precise, training=training, what=what, roundings=otherwise)
        if verdict.passed:
            chosen.append(run)
            return result
        warn_once(f"TVM's results differ from eager's, so the {graph} graph runs in eager: {verdict.reason}.")
        chosen.append(boxed(eager))
        return wanted

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _in_eager(eager: GraphModule, args: Sequence[Any]) -> Any:
    """Return the graph's results in eager, without changes to random states and inputs."""
    devices = {arg.device for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
    with torch.random.fork_rng(devices):
        return accuracy.call(eager, tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


def _in_precision(eager: GraphModule, args: Sequence[Any]) -> Any:
    # Another dtype draws other random numbers.
    return None if random_nodes(eager) else accuracy.reference(eager, tuple(args))
