"""Compile one graph of dynamo with an engine: the engine compiles its parts, and the rest runs in eager."""

import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_fn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from backend_kwargs.compilers.engines.engine import Engine, is_too_small, why_not
from backend_kwargs.compilers.engines.outputs import finished
from backend_kwargs.compilers.engines.summary import EnginePart, EngineSummary
from backend_kwargs.compilers.freezing import compile_frozen
from backend_kwargs.compilers.layouts import with_eagers_layouts
from backend_kwargs.compilers.parameter_guards import dropping_guards
from backend_kwargs.compilers.parts import (
    Boxed,
    boxed,
    calls_of,
    is_part,
    op_name,
    operators_of,
    parts_of,
    replace_part,
    results_of,
    serving,
    split,
    tensors_of,
    writes_in_place,
)
from backend_kwargs.compilers.tvm.capture import constants_of
from backend_kwargs.errors import error_text, warn_once

TRAINS = "it records gradients: call the model under torch.no_grad()"


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], engine: Engine, in_eager: Collection[str]
) -> Callable[..., Any]:
    """Compile dynamo's `gm` with `engine`, its parameters as constants; the callable has an `EngineSummary`.

    Results equal eager's up to rounding. Operators that the engine lacks, and parts that it fails to compile, run in
    eager, as does any graph that records gradients. Parameters are guarded as under Inductor's freezing.
    """
    summary = EngineSummary(engine.name)
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in example_inputs):
        warn_once(f"{engine.name} compiles for inference only. A graph runs in eager, since {TRAINS}.")
        summary.fallbacks["the graph"] = TRAINS
        return _with_summary(partial(_called, gm), summary)
    steps = _Steps(engine, in_eager, summary)

    def captured(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        step, table = partial(steps.compile, gm), with_eagers_layouts(engine.decompositions())
        capture = aot_autograd(fw_compiler=step, bw_compiler=step, inference_compiler=step, decompositions=table)
        return capture(gm, list(inputs))

    drop_guards = dropping_guards()
    try:
        frozen = not torch.is_grad_enabled()
        compiled = compile_frozen(gm, example_inputs, captured) if frozen else captured(gm, example_inputs)
    except torch._dynamo.exc.TorchDynamoException:  # dynamo traces again, or reports its own error
        raise
    except Exception as error:  # noqa: BLE001 - such as a view of what a decomposition lays out otherwise
        reason = f"AOTAutograd cannot trace it with {engine.name}'s decompositions: {_line(error)}"
        warn_once(f"{engine.name} compiles nothing of a graph, which runs in eager: {reason}.")
        summary.fallbacks["the graph"] = reason
        summary.partitions.clear()
    if not summary.partitions:
        # Dynamo's own graph: AOTAutograd's has more operators, and each call goes through its wrappers. Nothing is a
        # constant there, so another module of the class needs no graph of its own.
        compiled = partial(_called, gm)
        drop_guards()
    return _with_summary(compiled, summary)


def _called(gm: GraphModule, *args: Any) -> Any:
    return gm.forward(*args)


def _with_summary(compiled: Callable[..., Any], summary: EngineSummary) -> Callable[..., Any]:
    both: Any = (compiled, innermost_fn(compiled))
    for each in both:
        each.engine_summary = summary
    return compiled


class _Steps:
    """Compiles each graph that AOTAutograd makes from one of dynamo's."""

    def __init__(self, engine: Engine, in_eager: Collection[str], summary: EngineSummary) -> None:
        self.engine, self.in_eager, self.summary = engine, in_eager, summary

    def compile(self, attributes: GraphModule, gm: GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Return a callable that runs `gm`; parameters and buffers in `attributes` become constants.

        A graph that writes in place runs in eager.
        """
        # AOTAutograd's fake tensor mode is active, but constants are real tensors.
        with _disable_current_modes():
            if written := writes_in_place(gm):
                self.summary.leave(written, "it writes in place")
            else:
                self._compile_parts(gm, constants_of(gm, attributes))
        return boxed(gm)

    def _compile_parts(self, gm: GraphModule, constants: Mapping[str, torch.Tensor]) -> None:
        nodes = [node for node in gm.graph.nodes if node.op == "call_function" and tensors_of(node)]
        found = {node: why_not(node, self.engine, self.in_eager) for node in nodes}
        for node, reason in found.items():
            if reason and node.target is not operator.getitem:
                self.summary.leave(op_name(node), reason)
        least = self.engine.min_block_size
        taken = [node for node, reason in found.items() if not reason]
        for node in split(gm, taken, partial(is_too_small, min_block_size=least)):
            self.summary.leave(
                op_name(node), f"a part of fewer than {least} operators and little work costs more than eager"
            )
        for call in parts_of(gm):
            self._compile_part(gm, call, constants)

    def _compile_part(self, gm: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> None:
        """Replace the call of a part by the engine's callable; if the engine fails, the part stays unchanged."""
        part = gm.get_submodule(str(call.target))
        assert isinstance(part, GraphModule)
        started = time.perf_counter()
        args = _attach(part, call, constants)
        try:
            run = self.engine.build(part)
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            warn_once(f"{self.engine.name} failed to compile a part of a graph, which runs in eager: {_line(error)}.")
            self.summary.leave(operators_of(part), _line(error))
            call.args = args
            return
        if (note := getattr(run, "note", "")) and note not in self.summary.notes:
            self.summary.notes.append(note)
        observed = [i for i, result in enumerate(results_of(call)) if not all(map(is_part, result.users))]
        self.summary.partitions.append(made := EnginePart(len(calls_of(part)), time.perf_counter() - started))
        names = operators_of(part)

        def failed(error: Exception) -> None:
            warn_once(
                f"{self.engine.name} failed to run a part of a graph, which runs in eager from now on: {_line(error)}."
            )
            self.summary.fail(made, names, _line(error))

        replace_part(call, serving(finished(run, part, observed), part, failed), args)


def _attach(part: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Make the constant arguments of a part its attributes; return the other arguments."""
    left = []
    for placeholder, argument in zip(part.graph.find_nodes(op="placeholder"), call.args, strict=True):
        value = constants.get(str(argument))
        if value is None:
            left.append(argument)
            continue
        name = f"constant_{placeholder.name}"
        part.register_buffer(name, value, persistent=False)
        with part.graph.inserting_before(next(node for node in part.graph.nodes if node.op != "placeholder")):
            attribute = part.graph.get_attr(name)
        attribute.meta = dict(placeholder.meta)
        placeholder.replace_all_uses_with(attribute)
        part.graph.erase_node(placeholder)
    part.recompile()
    return tuple(left)


def _line(error: Exception) -> str:
    return " ".join(error_text(error).split())[:200]
