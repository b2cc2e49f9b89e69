"""The protocol of an engine: the nodes that it may compile, and how a part becomes a callable."""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from backend_kwargs.compilers.parts import op_name

Run = Callable[[Sequence[Any]], list[torch.Tensor]]

TAGS = {
    torch.Tag.nondeterministic_seeded: "draws random numbers",
    torch.Tag.data_dependent_output: "its result is a number on the host",
    torch.Tag.dynamic_output_shape: "its size depends on data",
}
MEMORY = frozenset(
    {"as_strided", "as_strided_copy", "as_strided_scatter", "empty", "empty_like", "empty_permuted", "empty_strided"}
    | {"new_empty", "new_empty_strided", "view_copy.dtype", "view.dtype"}
)


# The elements that a part reads and writes, or its floating-point operations, from which it is compiled however few
# operators it has. Measured on 2 cores: a call of a part costs 10 us on ONNX Runtime and 25 us on OpenVINO, and an
# operator in eager from 3 us. On 4096 elements parts of 4 and 8 operators are level with eager, and a single one takes
# 2 and 5 times as long. On 2**18 elements, two operators are level.
MUCH_WORK = 2**20


class Engine(Protocol):
    """A library that compiles parts of a graph for inference on a CPU."""

    @property
    def name(self) -> str:
        """The name in reports."""

    @property
    def dtypes(self) -> Collection[torch.dtype]:
        """The dtypes that tensors of a part may have."""

    @property
    def min_block_size(self) -> int:
        """The least number of operators in a part of little work."""

    @property
    def denied(self) -> Mapping[str, str]:
        """The operators left to eager and the reasons, by ATen name with or without overload."""

    @property
    def denied_floats(self) -> Mapping[str, str]:
        """The operators left to eager where an input or a result is of floating point, and the reasons."""

    def lacks(self, node: fx.Node) -> str:
        """Return why the engine has no translation of the operator that gives torch's results, "" if it has one."""

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return the decompositions applied before the graph is split."""

    def build(self, part: fx.GraphModule) -> Run:
        """Compile a part, whose constants are attributes; any exception leaves it to eager."""


def why_not(node: fx.Node, engine: Engine, in_eager: Collection[str]) -> str:
    """Return why a node runs in eager, or "" if the engine may compile it; operators `in_eager` always do."""
    if node.target is operator.getitem:
        return why_not(node.args[0], engine, in_eager)  # type: ignore[arg-type]
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return "not an ATen operator"
    op, names = node.target, {op_name(node), f"{op_name(node)}.{node.target._overloadname}"}
    if names & set(in_eager):
        return "left to ATen by aten_ops"
    if op._schema.is_mutable:
        return "writes in place"
    if names & MEMORY:
        return "depends on the memory layout"
    tagged = (reason for tag, reason in TAGS.items() if tag in op.tags)
    tables = (engine.denied, engine.denied_floats) if _has_floats([*node.all_input_nodes, node]) else (engine.denied,)
    denied = (table[name] for table in tables for name in names if name in table)
    return next(denied, "") or next(tagged, "") or _unfit_values(node, engine) or engine.lacks(node)


def is_too_small(nodes: Sequence[fx.Node], min_block_size: int) -> bool:
    """Return whether a part that computes `nodes` would cost more to call than it saves."""
    return len(nodes) < min_block_size and sum(map(_work, nodes)) < MUCH_WORK


def _work(node: fx.Node) -> int:
    """Return the larger of a node's floating-point operations and the elements that it reads and writes."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: _of_known_size(each.meta["val"]))
    result = _of_known_size(node.meta["val"])
    tensors = [value for value in tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
    elements = sum(tensor.numel() for tensor in tensors)
    counts = flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    return max(elements, counts(*args, **kwargs, out_val=result)) if counts else elements


def _of_known_size(value: Any) -> Any:
    """Return a value of a node with its tensors on the meta device, and the sizes of the call that compiles."""

    def known(each: Any) -> Any:
        if isinstance(each, torch.Tensor):
            return torch.empty([known(size) for size in each.shape], dtype=each.dtype, device="meta")
        return int(each.node.hint) if isinstance(each, torch.SymInt) else each

    return tree_map(known, value)


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator by its name in the schema, whether given or not; None where it has no such."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for at, each in enumerate(node.target._schema.arguments):
        if each.name == name:
            return node.args[at] if at < len(node.args) else node.kwargs.get(name, each.default_value)
    return None


def reads_floats(node: fx.Node) -> bool:
    """Return whether an input is of floating point."""
    return _has_floats(node.all_input_nodes)


def _has_floats(nodes: Sequence[fx.Node]) -> bool:
    values = tree_leaves([each.meta["val"] for each in nodes])
    return any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values)


def uses_more_than_first(node: fx.Node) -> bool:
    """Return whether another result of a node than its first one is used."""
    return any(user.target is operator.getitem and user.args[1] != 0 for user in node.users)


def _used(node: fx.Node) -> list[Any]:
    """Return the results of a node that are used: a norm's statistics for the backward pass are empty in inference."""
    value = node.meta["val"]
    if not isinstance(value, list | tuple):
        return tree_leaves(value)
    return tree_leaves([value[user.args[1]] for user in node.users if user.target is operator.getitem])  # type: ignore[index]


def _unfit_values(node: fx.Node, engine: Engine) -> str:
    inputs = tree_leaves(fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"]))
    values = [*inputs, *_used(node)]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    sizes = [size for tensor in tensors for size in tensor.shape] + [v for v in values if isinstance(v, torch.SymInt)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return f"{engine.name} runs on a CPU here"
    if any(tensor.layout != torch.strided or tensor.is_quantized for tensor in tensors):
        return "not a dense tensor"
    if unknown := {str(tensor.dtype) for tensor in tensors} - {str(dtype) for dtype in engine.dtypes}:
        return f"{engine.name} is not used for {', '.join(sorted(unknown))}"
    if any(isinstance(value, torch.SymFloat | torch.SymBool | complex) for value in values):
        return "a symbolic float or bool, or a complex number"
    if any(isinstance(value, float) and math.isnan(value) for value in values):
        return "an argument is nan"
    if not all(size.node.has_hint() for size in sizes if isinstance(size, torch.SymInt)):
        return "its size is known only at run time"
    if any(isinstance(size, int) and size == 0 for tensor in tensors for size in tensor.shape):
        return "an empty tensor"
    return ""
