"""Compile one graph of dynamo with a compiler of parts: it compiles what it takes, and the rest runs in eager.

A `PartCompiler` says which nodes it takes; `Engine` is the base of ONNX Runtime's and OpenVINO's.
"""

import copy
import math
import operator
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.facts import Call, Compiled, CompileFacts, Partition, PartsSummary
from backend_kwargs.graphs.freezing import compile_frozen
from backend_kwargs.graphs.memory import SHARED, SharedMemory, unless_shared
from backend_kwargs.graphs.parts import (
    Boxed,
    Decompositions,
    Run,
    attach,
    boxed,
    calls_of,
    finished,
    names_of,
    op_name,
    operators_of,
    parts_of,
    random_nodes,
    replace_part,
    serving,
    split,
    tensors_of,
    visible_results,
    with_eagers_layouts,
    writes_in_place,
)
from backend_kwargs.graphs.writes import copy_of_graph, in_eager
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.dynamo import TorchDynamoException, dropping_guards, mark_boxed
from backend_kwargs.torch_internals.functorch import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput, aot_autograd
from backend_kwargs.torch_internals.pytree import tree_leaves, tree_map
from backend_kwargs.torch_internals.tensors import OpOverload, schema_of, without_modes
from backend_kwargs.trial import Expected, accuracy, generators

WHOLE = "the graph"
TRAINS = "it records gradients: call the model under torch.no_grad()"


LEFT_TO_ATEN = "left to ATen by aten_ops"
TAGS: Mapping[torch.Tag, str] = MappingProxyType(
    {
        torch.Tag.nondeterministic_seeded: "draws random numbers",
        torch.Tag.data_dependent_output: "its result is a number on the host",
    }
)
# The elements that a part reads and writes, or its floating-point operations, from which it is compiled however few
# operators it has. Measured on 2 cores: a call of a part costs 10 us on ONNX Runtime and 25 us on OpenVINO, and an
# operator in eager from 3 us. On 4096 elements parts of 4 and 8 operators are level with eager, and a single one takes
# 2 and 5 times as long. On 2**18 elements, two operators are level.
MUCH_WORK = 2**20


class Unsupported(Exception):  # noqa: N818 - a request for eager, not an error
    """A node that a compiler cannot have, and the reason: a part whose `compile` raises it runs in eager."""

    def __init__(self, node: fx.Node | str, reason: str):
        super().__init__(f"{node}: {reason}")
        self.node, self.reason = node, reason


@dataclass(frozen=True)
class CompiledPart:
    """A compiled part, and what a report says about it; `tuned` counts its tuned kernels."""

    run: Run
    target: str = ""
    tuned: int = 0
    notes: tuple[str, ...] = ()


class PartCompiler(ABC):
    """A library that compiles parts of a graph, while eager runs the rest: `partitioned` drives it by these facts.

    Tables of operators have ATen names, with or without overload, and the reasons why these are left to eager.
    """

    name: ClassVar[str]  # in reports and warnings
    namespaces: ClassVar[Collection[str]] = ("aten",)
    dtypes: ClassVar[Collection[torch.dtype]]
    tags: ClassVar[Mapping[torch.Tag, str]] = TAGS
    denied: ClassVar[Mapping[str, str]]
    denied_floats: ClassVar[Mapping[str, str]] = MappingProxyType({})  # where an input or a result is of these
    takes_nan: ClassVar[bool] = True  # as an argument that is a number
    unreported: ClassVar[Collection[str]] = ()  # reasons that are no fallback
    trains: ClassVar[bool] = False  # else a graph that records gradients runs in eager
    # By options:
    min_block_size: int = 0  # the least number of operators in a part of little work
    freezes: bool = True  # parameters become constants, unless gradients are recorded
    fallback: str = "partition"  # what may run in eager: a "partition", the whole "graph", nothing ("error")
    verify: bool = False  # whether results of the first call are compared with eager's

    @abstractmethod
    def decompositions(self, trains: bool) -> Decompositions:
        """Return the decompositions applied before a graph is split; `trains` if it records gradients."""

    @abstractmethod
    def aten_ops(self, node: fx.Node) -> Collection[str]:
        """Return the operators that are left to ATen where `node` is."""

    @abstractmethod
    def lacks(self, node: fx.Node) -> str:
        """Return why the compiler cannot translate a node to what gives torch's results, "" if it can."""

    @abstractmethod
    def compile(self, part: fx.GraphModule) -> CompiledPart:
        """Compile a part, whose constants are attributes; any exception leaves it to eager."""

    def compile_graph(self, graph: CapturedGraph, options: Options) -> Compiled:
        """Compile dynamo's graph by parts."""
        return compile_by_parts(graph, options, self)

    def misplaced(self, devices: Collection[torch.device]) -> str:
        """Return why a node on these devices runs in eager, "" if it need not."""
        return "" if all(device.type == "cpu" for device in devices) else f"{self.name} runs on a CPU here"

    def why_eager(self, gm: fx.GraphModule, example_inputs: Inputs, compiled: Call) -> str:
        """Return why the whole of dynamo's graph should run in eager although `compiled` works, "" if it should not."""
        return ""


def why_not(node: fx.Node, compiler: PartCompiler) -> str:
    """Return why a node runs in eager, "" if the compiler takes it."""
    if node.target is operator.getitem:
        return why_not(node.args[0], compiler)  # type: ignore[arg-type]
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace not in compiler.namespaces:
        return "not an ATen operator"
    names = names_of(node)
    if set(names) & set(compiler.aten_ops(node)):
        return LEFT_TO_ATEN
    if schema_of(op).is_mutable:
        return "writes in place"
    tables = (compiler.denied, compiler.denied_floats if has_floats([*node.all_input_nodes, node]) else {})
    denied = (table[name] for table in tables for name in names if name in table)
    tagged = (reason for tag, reason in compiler.tags.items() if tag in op.tags)
    return next(denied, "") or next(tagged, "") or why_unfit(_values(node), compiler) or compiler.lacks(node)


def why_unfit(values: Collection[object], compiler: PartCompiler) -> str:
    """Return why a node with these inputs and results runs in eager, "" if the compiler takes them."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape] + [v for v in values if isinstance(v, torch.SymInt)]
    if misplaced := compiler.misplaced({tensor.device for tensor in tensors}):
        return misplaced
    if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
        return "not a dense tensor"
    if unknown := {str(tensor.dtype) for tensor in tensors} - {str(dtype) for dtype in compiler.dtypes}:
        return f"{compiler.name} is not used for {', '.join(sorted(unknown))}"
    if any(isinstance(value, torch.SymFloat | torch.SymBool | complex) for value in values):
        return "a symbolic float or bool, or a complex number"
    if not compiler.takes_nan and any(isinstance(value, float) and math.isnan(value) for value in values):
        return "an argument is nan"
    if not all(size.node.has_hint() for size in sizes if isinstance(size, torch.SymInt)):
        return "its size is known only at run time"
    return "an empty tensor" if any(isinstance(size, int) and size == 0 for size in sizes) else ""


def _values(node: fx.Node) -> list[object]:
    """Return a node's arguments and used results: a norm's statistics for the backward pass are empty in inference."""
    args, value = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"]), node.meta["val"]
    if isinstance(value, list | tuple):
        value = [value[user.args[1]] for user in node.users if user.target is operator.getitem]  # type: ignore[index]
    return tree_leaves((args, value))


def has_floats(nodes: Sequence[fx.Node]) -> bool:
    """Return whether a node gives a tensor of floating point."""
    values = tree_leaves([each.meta["val"] for each in nodes])
    return any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def work(node: fx.Node) -> int:
    """Return the larger of a node's floating-point operations and the elements that it reads and writes."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: _of_known_size(each.meta["val"]))
    result = _of_known_size(node.meta["val"])
    tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    counts = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    return max(elements, counts(*args, **kwargs, out_val=result)) if counts else elements


def _of_known_size(value: object) -> Any:
    """Return a value of a node with its tensors on the meta device, and the sizes of the call that compiles."""

    def known(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return torch.empty([known(size) for size in each.shape], dtype=each.dtype, device="meta")
        return int(each.node.hint) if isinstance(each, torch.SymInt) else each

    return tree_map(known, value)


LAYOUT = "depends on the memory layout"
MEMORY: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter", "view_copy.dtype", "view.dtype"), LAYOUT)
    | dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), LAYOUT
    )
)


class Engine(PartCompiler):
    """An inference engine on a CPU; parameters are its constants."""

    tags: ClassVar[Mapping[torch.Tag, str]] = MappingProxyType(
        {**TAGS, torch.Tag.dynamic_output_shape: "its size depends on data"}
    )
    takes_nan: ClassVar[bool] = False
    settings: Any

    def __init__(self, settings: Any) -> None:
        self.settings, self.min_block_size = settings, settings.min_block_size

    def aten_ops(self, node: fx.Node) -> tuple[str, ...]:
        return self.settings.aten_ops  # type: ignore[no-any-return]


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator by its name in the schema, whether given or not; None where it has no such."""
    assert isinstance(node.target, OpOverload)
    for at, each in enumerate(schema_of(node.target).arguments):
        if each.name == name:
            return node.args[at] if at < len(node.args) else node.kwargs.get(name, each.default_value)
    return None


def uses_more_than_first(node: fx.Node) -> bool:
    """Return whether another result of a node than its first one is used."""
    return any(user.target is operator.getitem and user.args[1] != 0 for user in node.users)


def fixed_sizes(node: fx.Node) -> tuple[int, ...] | None:
    """Return the sizes of a node's result, or None if one is symbolic."""
    shape = node.meta["val"].shape
    return tuple(shape) if all(isinstance(size, int) for size in shape) else None


def dense(value: torch.Tensor | torch.SymInt | int) -> torch.Tensor:
    """Return an argument in the form that engines read: contiguous, detached, without a pending negation."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(int(value))
    if value.is_contiguous() and not (value.requires_grad or value.is_neg()):
        return value
    return value.detach().resolve_neg().contiguous()


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
        # A part that would cost more to call than it saves.
        too_small = (lambda nodes: len(nodes) < least and sum(map(work, nodes)) < MUCH_WORK) if least else None
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
    """Return the graph's results in eager; inputs stay unchanged, and random generators if it draws."""
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
