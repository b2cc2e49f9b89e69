"""Dynamo's graphs: copy one for a compiler that changes it, and find what it may mutate."""

import copy
import inspect
import operator
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

# The key in the `meta` of a placeholder that stays an input of the graph, also where parameters become constants.
STAYS_INPUT = "backend_kwargs_stays_input"
# Modules whose functions write into no argument but the first and `out`. Norms also write into statistics, and
# embeddings with `max_norm`, which is an argument at this position or later, into weights.
OF_TORCH = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator", "builtins", "math")
NORMS, EMBEDDINGS, MAX_NORM = ("batch_norm", "instance_norm"), ("embedding", "embedding_bag"), 3


def may_be_written(placeholder: Node, version: int = 0) -> bool:
    """Return whether the graph may mutate this input.

    `version` is that of a new fake of the input; it is above 0 if another input shares its memory.
    """
    # Dynamo has run the graph on this fake tensor, and in-place operators increment its version. Inference tensors have
    # no version, and a higher-order operator (a Triton kernel) may write without incrementing it.
    fake = placeholder.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or fake.is_inference() or fake._version > version:
        return True
    return any(isinstance(user.target, torch._ops.HigherOrderOperator) for user in placeholder.users)


def exposes_data(placeholder: Node) -> bool:
    """Return whether the graph takes `.data` of this input or of a view of it; writes to that change no version."""
    taken = placeholder.graph.find_nodes(op="call_function", target=torch._C._autograd._get_data_attr)  # type: ignore[attr-defined]
    return any(origin(node) is placeholder for node in taken)


def writes(node: Node) -> bool:
    """Return whether a call of torch's writes into its first argument or into `out`."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in ("setitem", "copy_", "__setitem__")
    dunder = node.op == "call_method" and name.startswith("__")
    operation = name[2:-2] if dunder else name if getattr(operator, name, None) is node.target else ""
    augmented = operation.startswith("i") and operation[1:] in dir(operator)
    inplace = node.kwargs.get("inplace") is True or True in node.args[slice(*_inplace_at(node.target))]
    return node.op.startswith("call") and (in_place or augmented or inplace or "out" in node.kwargs)


@cache
def _inplace_at(function: Any) -> tuple[int, int]:
    """Return the range of the positional arguments of a function in which `inplace` is, an empty one if in none."""
    if getattr(function, "__module__", "") != "torch.nn.functional":
        return 0, 0
    names = [*inspect.signature(function).parameters]
    return (names.index("inplace"), names.index("inplace") + 1) if "inplace" in names else (0, 0)


def written_between(first: Node, last: Node, read: Iterable[Node]) -> bool:
    """Return whether a call between `first` and `last`, a later node, may write into memory of the nodes `read`."""
    storages = {each for node in read for each in storages_of(node.meta.get("example_value"))}
    node = first
    while (node := node.next) is not last:
        given = node.all_input_nodes if _may_write_any(node) else _written(node) if writes(node) else []
        if any(storages & storages_of(each.meta.get("example_value")) for each in given):
            return True
    return False


def _may_write_any(node: Node) -> bool:
    """Return whether a call may write into any of its arguments: all but torch's own functions and methods may."""
    target: Any = node.target
    if node.op != "call_function":
        return node.op == "call_module"
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
        return any(each._schema.is_mutable for each in overloads if "out" not in each._overloadname)
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    if name in NORMS or (name in EMBEDDINGS and (len(node.args) > MAX_NORM or node.kwargs.get("max_norm"))):
        return True
    return module not in OF_TORCH


def _written(node: Node) -> list[Node]:
    given = [*node.args[:1], node.kwargs.get("input"), node.kwargs.get("out")]
    return [each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, Node)]


def storages_of(value: Any) -> set[int]:
    """Return what identifies the memory of a tensor, or of those in a list."""
    tensors = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else ()
    return {
        each.untyped_storage()._cdata
        for each in tensors
        if isinstance(each, torch.Tensor) and each.layout == torch.strided
    }


def origin(node: Node, passes: Callable[[Node], bool] = lambda node: True) -> Node:
    """Follow first arguments while `passes` holds."""
    while node.args and isinstance(node.args[0], Node) and passes(node):
        node = node.args[0]
    return node


def copy_of_graph(gm: GraphModule) -> GraphModule:
    """Return a copy for a compiler to change, with dynamo's attributes of the graph; tensors and modules are shared."""
    # A copy, since dynamo reads the placeholders of its graph again after the backend, to generate the call.
    graph: Graph = copy.deepcopy(gm.graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    # AOTAutograd recognizes a graph of dynamo's by these two and `meta`; without them it fails or forgets static
    # inputs.
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
    return copied


def has_memory(value: Any) -> bool:
    """Return whether `value` is a plain tensor with memory: not fake, not a subclass, not sparse."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta


def is_bare_subclass(value: Any) -> bool:
    """Return whether `value` is of a class with `__torch_function__` alone, which AOTAutograd does not unwrap.

    At the first call of compiled code, torch refuses such tensors as arguments of operators that are not its own.
    """
    plain: Any = torch._C._disabled_torch_dispatch_impl
    return torch.overrides.has_torch_function((value,)) and type(value).__torch_dispatch__ is plain


def has_transforms(gm: GraphModule) -> bool:
    """Return whether the graph applies `torch.func.grad`, `vmap` and the like, which dynamo captures as calls.

    The example values between such calls are wrappers of levels that no longer exist.
    """
    return any(getattr(node.target, "__name__", "").endswith("_increment_nesting") for node in gm.graph.nodes)
