"""A compiler of parts of graphs as a descriptor, and which nodes it takes."""

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from backend_kwargs.backends import Inputs
from backend_kwargs.facts import Call
from backend_kwargs.graphs.layouts import Decompositions
from backend_kwargs.graphs.parts import Run, names_of
from backend_kwargs.torch_internals.operators import OpOverload, schema_of
from backend_kwargs.torch_internals.pytree import tree_leaves, tree_map

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


def is_too_small(nodes: Sequence[fx.Node], min_block_size: int) -> bool:
    """Return whether a part that computes `nodes` would cost more to call than it saves."""
    return len(nodes) < min_block_size and sum(map(work, nodes)) < MUCH_WORK


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
