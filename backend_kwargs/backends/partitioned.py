"""Compile one graph of dynamo with a compiler of parts: it compiles what it takes, and the rest runs in eager."""

import copy
import operator
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import GraphModule, Node

from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.backends.part_compiler import PartCompiler, Unsupported, is_too_small, why_not
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.facts import Call, Compiled, CompileFacts, Partition, PartsSummary
from backend_kwargs.graphs.eligibility import in_eager
from backend_kwargs.graphs.freezing import compile_frozen
from backend_kwargs.graphs.layouts import with_eagers_layouts
from backend_kwargs.graphs.memory import SHARED, SharedMemory, unless_shared
from backend_kwargs.graphs.parts import (
    Boxed,
    attach,
    boxed,
    calls_of,
    finished,
    op_name,
    operators_of,
    parts_of,
    random_nodes,
    replace_part,
    serving,
    split,
    tensors_of,
    visible_results,
    writes_in_place,
)
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.options.layers import Options
from backend_kwargs.torch_internals.dynamo import TorchDynamoException
from backend_kwargs.torch_internals.functorch import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput, aot_autograd
from backend_kwargs.torch_internals.fx import mark_boxed
from backend_kwargs.torch_internals.guards import dropping_guards
from backend_kwargs.torch_internals.modes import without_modes
from backend_kwargs.trial import Expected, accuracy, generators

WHOLE = "the graph"
TRAINS = "it records gradients: call the model under torch.no_grad()"


class _InEagerError(Exception):
    """A node runs in eager, and `fallback` allows no partition."""


def compile_by_parts(graph: CapturedGraph, options: Options, compiler: PartCompiler) -> Compiled:
    """Compile dynamo's graph by parts, with their summary as a fact.

    Results are eager's within rounding: operators that the compiler does not take, and parts that it fails at, run in
    eager as its `fallback` allows. Parameters that become constants are guarded as under Inductor's freezing.
    """
    gm, example_inputs = graph.gm, graph.example_inputs
    summary, drop_guards = PartsSummary(compiler.name), dropping_guards()
    shares = SharedMemory(gm, example_inputs)
    eager = copy_of_graph(gm) if shares.can_occur else gm
    trains = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in example_inputs)
    if trains and not compiler.trains:
        warn_once(f"{compiler.name} compiles for inference only. A graph runs in eager, since {TRAINS}.")
        compiled, reason = None, TRAINS
    elif shares(example_inputs):
        compiled, reason = None, SHARED
    else:
        compiled, reason = _captured(gm, example_inputs, _Steps(compiler, summary), trains)
    if reason:
        summary.partitions.clear()
        summary.fallbacks = {WHOLE: reason}
    if compiled is None or not (trains or summary.partitions):
        # Dynamo's own graph: AOTAutograd's has more operators, and each call goes through its wrappers. Nothing is a
        # constant there, so another module of the class needs no graph of its own. A bound method would make the graph,
        # which is in a reference cycle, what the record of this compile lives with.
        compiled = partial(in_eager(gm))
        drop_guards()
    else:
        compiled = unless_shared(shares, eager, compiled)
    return Compiled(compiled, CompileFacts(options, parts=summary))


def _captured(gm: GraphModule, example_inputs: Inputs, steps: "_Steps", trains: bool) -> tuple[Call | None, str]:
    """Return the compiled graph, or None and the reason why the whole of it runs in eager."""
    compiler = steps.compiler
    freezes = compiler.freezes and not torch.is_grad_enabled()

    def capture(gm: GraphModule, inputs: Inputs) -> Call:
        capturing = aot_autograd(
            fw_compiler=partial(steps.compile, "forward"),
            bw_compiler=partial(steps.compile, "backward"),
            inference_compiler=partial(steps.compile, "inference", attributes=gm if freezes else None),
            decompositions=with_eagers_layouts(compiler.decompositions(trains)),
            partition_fn=min_cut_rematerialization_partition,
        )
        return capturing(gm, list(inputs))

    try:
        compiled = compile_frozen(gm, example_inputs, capture) if freezes else capture(gm, example_inputs)
    except (BackendKwargsError, TorchDynamoException):  # dynamo may trace again
        raise
    except Exception as error:  # such as a view of what a decomposition lays out otherwise
        if compiler.fallback == "error":
            raise
        reason = f"AOTAutograd cannot trace it with {compiler.name}'s decompositions: {error_text(error)}"
        warn_once(f"{compiler.name} compiles nothing of a graph, which runs in eager: {reason}.")
        return None, reason
    slower = not trains and bool(steps.summary.partitions) and compiler.why_eager(gm, example_inputs, compiled)
    return (None, slower) if slower else (compiled, "")


class _Steps:
    """Compiles each graph that AOTAutograd makes from one of dynamo's."""

    def __init__(self, compiler: PartCompiler, summary: PartsSummary) -> None:
        self.compiler, self.summary = compiler, summary

    def compile(
        self, graph: str, gm: GraphModule, example_inputs: Inputs, attributes: GraphModule | None = None
    ) -> Boxed:
        """Return a callable for `gm`, the forward, backward or inference `graph`.

        The parameters and buffers of `attributes` become constants, except those that the graph writes.
        """
        keeps = self.compiler.verify or self.compiler.fallback == "graph"
        eager, before = GraphModule(gm, copy.deepcopy(gm.graph)) if keeps else gm, len(self.summary.partitions)
        try:
            # AOTAutograd's fake tensor mode is active, but constants are real tensors.
            with without_modes():
                compiles = self._compile_parts(graph, gm, _constants_of(gm, attributes))
        except _InEagerError:
            del self.summary.partitions[before:]
            return boxed(eager)
        return (
            _verified(boxed(gm), eager, graph, self.compiler.name) if compiles and self.compiler.verify else boxed(gm)
        )

    def _compile_parts(self, graph: str, gm: GraphModule, constants: Mapping[str, torch.Tensor]) -> int:
        """Compile the parts of a graph, and return their number."""
        if written := writes_in_place(gm):
            self._leave(written, "it writes in place")
            return 0
        nodes = [node for node in gm.graph.nodes if node.op == "call_function" and tensors_of(node)]
        reasons = {node: self._why_not(node) for node in nodes}
        for node, reason in reasons.items():
            if reason and reason not in self.compiler.unreported and node.target is not operator.getitem:
                self._leave(op_name(node), reason)
        least = self.compiler.min_block_size
        too_small = partial(is_too_small, min_block_size=least) if least else None
        for node in split(gm, [node for node, reason in reasons.items() if not reason], too_small):
            why = f"a part of fewer than {least} operators and little work costs more than eager"
            self._leave(op_name(node), why)
        parts = parts_of(gm)
        for call in parts:
            self._compile_part(graph, gm, call, constants)
        return len(parts)

    def _why_not(self, node: Node) -> str:
        """Return why a node runs in eager, "" if its compiler takes it."""
        try:
            return why_not(node, self.compiler)
        except Exception as error:  # noqa: BLE001 - a library may raise anything; such a node runs in eager
            return error_text(error)

    def _leave(self, op: str, reason: str) -> None:
        """Record that `op` runs in eager, if that is allowed."""
        self.summary.leave(op, reason)
        if self.compiler.fallback == "error":
            raise BackendKwargsError(
                f"{self.compiler.name} cannot have {op!r}: {reason}. Write fallback='partition' to leave it to eager."
            )
        if self.compiler.fallback == "graph":
            raise _InEagerError

    def _compile_part(self, graph: str, gm: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> None:
        """Replace the call of a part by the compiler's callable; a part that it fails at stays in eager."""
        part = gm.get_submodule(str(call.target))
        assert isinstance(part, GraphModule)
        summary, may_fail, started = self.summary, self.compiler.fallback != "error", time.perf_counter()
        name = summary.compiler
        attach(part, call, constants)
        try:
            compiled = self.compiler.compile(part)
        except BackendKwargsError:  # a wrong option
            raise
        except Unsupported as unsupported:
            return self._leave(operators_of(part), unsupported.reason)
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            if may_fail:
                warn_once(f"{name} failed to compile a part of a graph, which runs in eager: {error_text(error)}.")
            return self._leave(operators_of(part), error_text(error))
        seconds, operators = time.perf_counter() - started, operators_of(part)
        partition = Partition(graph, len(calls_of(part)), seconds, compiled.target, compiled.tuned, compiled.notes)
        summary.partitions.append(partition)

        def failed(error: Exception) -> None:  # without `self`, which keeps what the compiler keeps for one compile
            reason = error_text(error)
            warn_once(f"{name} failed to run a part of a graph, which runs in eager from now on: {reason}.")
            summary.fail(partition, operators, reason)

        run = finished(compiled.run, part, visible_results(call))
        return replace_part(call, serving(run, part, failed) if may_fail else run)


def _verified(run: Boxed, eager: GraphModule, graph: str, name: str) -> Boxed:
    """Return `run` with its first results compared with eager's; if they differ, the graph runs in eager then."""
    chosen: list[Boxed] = []

    def call(args: list[Any]) -> object:
        if chosen:
            return chosen[0](args)
        inputs, what = list(args), f"{graph} output"  # a boxed call empties its list
        wanted = _in_eager(eager, inputs)
        named = lambda fn, given: {what: _in_eager(fn, given)}  # noqa: E731
        draws, again = bool(random_nodes(eager)), partial(named, eager, inputs)
        expected = Expected.of({what: wanted}, again, eager, tuple(inputs), named, random=draws)
        result = run(args)
        verdict = expected.check({what: result}, training=graph != "inference")
        if verdict.passed:
            chosen.append(run)
            return result
        warn_once(f"{name}'s results differ from eager's, so the {graph} graph runs in eager: {verdict.reason}.")
        chosen.append(boxed(eager))
        return wanted

    mark_boxed(call)
    return call


def _in_eager(eager: GraphModule, args: Inputs) -> object:
    """Return the graph's results in eager, without changes to inputs, and to random generators if it draws."""
    with generators.kept() if random_nodes(eager) else nullcontext():
        return accuracy.call(eager, tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args))


def _constants_of(gm: GraphModule, attributes: GraphModule | None) -> dict[str, torch.Tensor]:
    """Return, by placeholder, the parameters and buffers in `attributes` that the graph does not write."""
    if attributes is None:
        return {}
    outputs = gm.graph.output_node().meta.get("desc", ())
    written = {desc.mutated_input for desc in outputs if isinstance(desc, InputMutationAOTOutput)}
    described = {node.name: node.meta.get("desc") for node in gm.graph.find_nodes(op="placeholder")}
    return {
        name: operator.attrgetter(desc.target)(attributes).detach()
        for name, desc in described.items()
        if isinstance(desc, ParamAOTInput | BufferAOTInput) and desc not in written
    }
