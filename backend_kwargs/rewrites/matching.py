"""Helpers for patterns: fake values of nodes, insertion and removal of nodes, and patterns traced from functions."""

import inspect
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.fx.operator_schemas import get_signature_for_torch_op, normalize_function

from backend_kwargs.torch_internals.fake_tensors import FakeTensorMode, unset_fake_temporarily
from backend_kwargs.torch_internals.fx import is_erased
from backend_kwargs.torch_internals.guards import tracing
from backend_kwargs.torch_internals.operators import OpOverload
from backend_kwargs.torch_internals.pattern_matcher import PatternExpr, fwd_only, fx_to_pattern

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


# Python's operators, and methods named after them, as functions that have a schema.
FUNCTIONS = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.matmul: torch.matmul,
    operator.neg: torch.neg,
    operator.pow: torch.pow,
    "__add__": torch.add,
    "__sub__": torch.sub,
    "__mul__": torch.mul,
    "__truediv__": torch.div,
    "__matmul__": torch.matmul,
    "__neg__": torch.neg,
    "__pow__": torch.pow,
}
# What torch takes for each type of a schema.
_NUMBERS = (int, torch.SymInt), (int, float, torch.SymInt, torch.SymFloat)
TAKEN = {
    "TensorType": torch.Tensor,
    "IntType": _NUMBERS[0],
    "SymIntType": _NUMBERS[0],
    "FloatType": _NUMBERS[1],
    "NumberType": (*_NUMBERS[1], complex),
    "BoolType": bool,
    "StringType": str,
    "ScalarTypeType": torch.dtype,
    "LayoutType": torch.layout,
    "MemoryFormatType": torch.memory_format,
    "DeviceObjType": (torch.device, str),
}


def arguments_of(node: Any) -> dict[str, Any] | None:
    """Return the arguments of a call by their names in its schema, with defaults, or None where they are not known.

    The names are those of the function, or of the ATen operator with a method's name; a method's own tensor, and what
    ATen calls `self`, is "input". A number in place of a list, as in `stride=2`, becomes that list. None stands for a
    target without schema (such as `operator.getitem`), for an overload that the arguments do not tell, and for calls
    with `out`.
    """
    if not isinstance(node, Node) or node.op not in ("call_function", "call_method"):
        return None
    target: Any = FUNCTIONS.get(node.target, node.target)
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        target = method if isinstance(method, FunctionType) else getattr(torch.ops.aten, target, None)
    given = {name: value for name, value in node.kwargs.items() if name != "out" or value is not None}
    if isinstance(target, FunctionType | OpOverload):
        return _by_the_only_schema(target, node.args, given)
    if target is None or not callable(target):
        return None
    signatures, schemas = get_signature_for_torch_op(target, return_schemas=True)
    for signature, schema in zip(signatures or (), schemas or (), strict=True):
        args = _listed(node.args, schema) if node.op == "call_method" else node.args
        if (found := _bound(signature, schema, args, given)) is not None:
            return found if "out" not in found else None
    return None


def _by_the_only_schema(target: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    try:
        found = normalize_function(target, args, kwargs, normalize_to_only_use_kwargs=True)
    except (TypeError, ValueError):  # arguments that the function itself unpacks
        return None
    return {"input" if name == "self" else name: value for name, value in found.kwargs.items()} if found else None


def _listed(args: Any, schema: Any) -> Any:
    """Return a method's arguments, with sizes that it was given one by one, as in `x.view(2, 3)`, as a list."""
    own = [each for each in schema.arguments if not each.kwarg_only]
    sizes = args[1:]
    one_by_one = len(own) == 2 and own[1].type.kind() == "ListType" and all(_taken(TAKEN["IntType"], e) for e in sizes)
    return (args[0], [*sizes]) if one_by_one and sizes else args


def _bound(signature: inspect.Signature, schema: Any, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Return the arguments by the names of one overload, or None if it does not take them."""
    if not any("Tensor" in str(each.type) for each in schema.arguments):  # TorchScript's, of numbers
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return None
    given = bound.arguments
    for name, argument in zip(signature.parameters, schema.arguments, strict=True):
        if name not in given:
            continue
        if argument.N and _taken(TAKEN["IntType"], given[name]):
            given[name] = [given[name]] * argument.N
        if not _fits(argument.real_type, given[name]):
            return None
    bound.apply_defaults()
    return bound.arguments


def _fits(kind: Any, value: Any) -> bool:
    """Return whether an argument may be of a schema's type."""
    name = kind.kind()
    if name == "OptionalType":
        return value is None or _fits(kind.getElementType(), value)
    if name == "ListType":
        return isinstance(value, list | tuple) and all(_fits(kind.getElementType(), each) for each in value)
    return name in TAKEN and _taken(TAKEN[name], value)


def _taken(types: Any, value: Any) -> bool:
    """Return whether an argument, or the value of a node that is one, has one of `types`."""
    if isinstance(value, Node):
        value = value.meta.get("example_value", value.meta.get("val"))
    return isinstance(value, types)


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
    from backend_kwargs.torch_internals import pytree

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
        if not is_erased(each):
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
