"""Helpers for patterns: fake values of nodes, insertion and removal of nodes, and patterns traced from functions."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch._guards import tracing
from torch._inductor.pattern_matcher import PatternExpr, fwd_only, fx_to_pattern
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

aten, prims = torch.ops.aten, torch.ops.prims
# Conversions between these only round, as Inductor's own do; one to 8 bits is a quantisation that the user wants.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the kernels and of the libraries' calls
HALF = (torch.bfloat16, torch.float16)
# The forms of an operation in dynamo's graph; strings are names of methods.
ADD = (operator.add, torch.add, "add")
MUL = (operator.mul, torch.mul, "mul")

# torch types a node's arguments as a union of everything that a graph can contain. The patterns narrow that down.
AnyNode: TypeAlias = Any


def value_of(node: Any) -> torch.Tensor | None:
    """Return the fake tensor of a node, or None if it has none."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def calls(node: Any, *targets: Any) -> bool:
    """Return whether `node` calls one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def arguments(node: AnyNode, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def used_once(node: Node) -> bool:
    """Return whether `node` has exactly one user, so that replacing that user makes `node` dead."""
    return len(node.users) == 1


UNKNOWN = 8192  # in place of a size that only the run will tell, as Inductor assumes it


def known_true(condition: Any) -> bool:
    """Return whether a condition on sizes is true for all values of its symbols."""
    return bool(statically_known_true(condition))


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are known to be equal."""
    return len(one) == len(other) and all(known_true(a == b) for a, b in zip(one, other, strict=True))


def hint(size: Any) -> int:
    """Return a size in this call: where it varies, `int` would make it constant for all others."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else UNKNOWN


def bytes_of(value: torch.Tensor) -> float:
    """Return the bytes of a fake tensor in this call."""
    return float(hint(value.numel()) * value.element_size())


def insert(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of `target` at the graph's insertion point, with its fake result as `meta["val"]`."""
    node = graph.call_function(target, args, kwargs)
    values = map_arg((args, kwargs), lambda each: each.meta["val"])
    mode = next((v.fake_mode for v in _fakes(values)), None)
    with mode or FakeTensorMode():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _fakes(values: Any) -> list[Any]:
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(values) if hasattr(leaf, "fake_mode")]


def replace(old: Node, new: Node) -> None:
    """Replace `old` by `new`; erase `old` and the nodes that only it used."""
    new.meta = {**old.meta, **new.meta}
    old.replace_all_uses_with(new)
    erase_dead(old)


def erase_dead(node: Node) -> None:
    """Erase `node` if nothing uses it, then its inputs likewise."""
    if node.users or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        if not each._erased:
            erase_dead(each)


def pattern_of(function: Callable[..., Any], *example_inputs: torch.Tensor) -> PatternExpr:
    """Trace `function` with Inductor's decompositions and return its graph as a pattern.

    Each argument matches any node, as a keyword of the argument's name. Constants match only themselves.
    """
    import inspect

    names = [*inspect.signature(function).parameters]
    with tracing(None), unset_fake_temporarily(), FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in example_inputs]
        gm = fwd_only(function, fakes)
    return fx_to_pattern(gm, argnames=names)
