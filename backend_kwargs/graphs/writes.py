"""Dynamo's graphs: copy one for a compiler that changes it, and find what its calls may write."""

import copy
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node

from backend_kwargs.torch_internals import operators
from backend_kwargs.torch_internals.fake_tensors import FakeTensorMode
from backend_kwargs.torch_internals.fx import hand_on
from backend_kwargs.torch_internals.modules import WRITES_AS_DECLARED
from backend_kwargs.torch_internals.operators import OpOverload, OpOverloadPacket
from backend_kwargs.torch_internals.pytree import tree_leaves
from backend_kwargs.torch_internals.tensors import (
    counted_writes,
    has_plain_dispatch,
    is_wrapped,
    memory_id,
    unwrapped,
    version_of,
)

# The key in the `meta` of a placeholder that stays an input of the graph, also where parameters become constants.
STAYS_INPUT = "backend_kwargs_stays_input"
# Modules whose functions write only into what their names, signatures and schemas say.
OF_TORCH = frozenset(
    {
        *("torch", "torch.functional", "torch.nn.functional", "_operator", "builtins", "math"),
        *WRITES_AS_DECLARED,
    }
)
# Schemas do not say that norms write into these, unless one of the flags is False.
STATISTICS, FLAGS = ("running_mean", "running_var"), ("training", "train", "use_input_stats")


def may_be_written(placeholder: Node, written: Collection[int], version: int = 0) -> bool:
    """Return whether the graph may mutate this input; `written` is the graph's `written_memory`.

    `version` is that of a new fake of the input; it is above 0 if another input shares its memory.
    """
    # Dynamo has run the graph on this fake tensor, and in-place operators increment its version. Inference tensors have
    # no version; `torch._foreach_mul_`, the statistics of a norm, and writes into `.data` increment none.
    fake = placeholder.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or fake.is_inference() or version_of(fake) > version:
        return True
    return not storages_of(fake).isdisjoint(written)


def written_inputs(gm: GraphModule, example_inputs: Sequence[object]) -> set[int]:
    """Return the positions of the plain tensors among the inputs that dynamo's graph may mutate."""
    memory, mode = written_memory(gm.graph), FakeTensorMode()
    plain = {at: value for at, value in enumerate(example_inputs) if has_memory(value)}
    fresh = {at: mode.from_tensor(value) for at, value in plain.items()}  # all alive, so that shared memory is detected
    placeholders = gm.graph.find_nodes(op="placeholder")
    versions = {at: counted_writes(fake) for at, fake in fresh.items()}
    return {at for at, version in versions.items() if may_be_written(placeholders[at], memory, version)}


def keep_inputs(placeholders: Iterable[Node]) -> None:
    """Let these inputs of a graph stay inputs, also where parameters become constants."""
    for placeholder in placeholders:
        placeholder.meta[STAYS_INPUT] = True


def written_memory(graph: Graph) -> set[int]:
    """Return the storages into which calls of the graph may write."""
    return {each for node in graph.nodes for each in written_storages(node)}


def written_between(first: Node, last: Node, read: Iterable[Node], but: Collection[Node] = ()) -> bool:
    """Return whether a call between `first` and `last`, a later node, may write into memory of the nodes `read`.

    Calls in `but` are not looked at.
    """
    storages = {each for node in read for each in storages_of(node.meta.get("example_value"))}
    node = first
    while (node := node.next) is not last:
        if node not in but and storages & written_storages(node):
            return True
    return False


def written_storages(node: Node) -> set[int]:
    """Return the storages into which a call may write: any that it reads, unless its function is one of torch's."""
    if not node.op.startswith("call"):
        return set()
    leaves = node.all_input_nodes if is_unknown(node) else tree_leaves(_written(node))
    return {each for leaf in leaves if isinstance(leaf, Node) for each in storages_of(leaf.meta.get("example_value"))}


def is_unknown(node: Node) -> bool:
    """Return whether a call may write into anything that it reads, since its function is not torch's."""
    if node.op != "call_function":
        return node.op == "call_module"
    of_torch = getattr(node.target, "__module__", None) in OF_TORCH
    return not of_torch and not isinstance(node.target, OpOverload | OpOverloadPacket)


def _written(node: Node) -> list[object]:
    """Return the arguments into which a call of torch's writes, also lists of nodes."""
    arguments: list[object] = [node.kwargs.get("out")]
    if _is_in_place(node):
        arguments += [*node.args[:1], node.kwargs.get("input")]
    for names, mutable in _signatures(node.target):
        by_name = dict(zip(names, node.args, strict=False)) | node.kwargs
        arguments += [by_name.get(name) for name in mutable]
        if not any(by_name.get(flag) is False for flag in FLAGS):
            arguments += [by_name.get(name) for name in STATISTICS]
        if by_name.get("inplace") is True:
            arguments.append(by_name.get(names[0]))
        if by_name.get("max_norm") is not None:
            arguments.append(by_name.get("weight"))
    return arguments


def _is_in_place(node: Node) -> bool:
    """Return whether the name of a function or method says that it writes into its first argument."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    dunder = node.op == "call_method" and name.startswith("__")
    if dunder or getattr(operator, name, None) is node.target:
        operation = name[2:-2] if dunder else name
        return operation == "setitem" or (operation.startswith("i") and hasattr(operator, f"__{operation[1:]}__"))
    return name.endswith("_")


@cache
def _signatures(function: Any) -> tuple[tuple[list[str], list[str]], ...]:
    """Return, for each overload of a function, the names of its arguments, and of those into which it writes."""
    if inspect.isfunction(function):
        return (([*inspect.signature(function).parameters], []),)
    if isinstance(function, OpOverload):
        return (_names(function),)
    if getattr(function, "__module__", None) == "torch":
        function = getattr(torch.ops.aten, function.__name__, None)
    if not isinstance(function, OpOverloadPacket):
        return ()
    return tuple(
        _names(overload)
        for overload in operators.overloads_of(function)
        if "out" not in operators.schema_of(overload).overload_name and operators.has_kernel(overload)
    )


def _names(overload: OpOverload) -> tuple[list[str], list[str]]:
    """Return the names of an operator's arguments, and of those into which it writes."""
    arguments = operators.arguments_of(overload)
    return [each.name for each in arguments], [each.name for each in arguments if each.is_write]


def storages_of(value: object) -> set[int]:
    """Return what identifies the memory of a tensor, or of those in a list."""
    tensors = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else ()
    plain = [unwrapped(each) for each in tensors if isinstance(each, torch.Tensor)]
    return {memory_id(each) for each in plain if each.layout == torch.strided}


def origin(node: Node, passes: Callable[[Node], bool] = lambda node: True) -> Node:
    """Follow first arguments while `passes` holds."""
    while node.args and isinstance(node.args[0], Node) and passes(node):
        node = node.args[0]
    return node


def copy_of_graph(gm: GraphModule, *, with_inputs: bool = False) -> GraphModule:
    """Return a copy for a compiler to change, with dynamo's attributes of the graph; tensors and modules are shared.

    It has dynamo's weak references to the inputs only `with_inputs`.
    """
    # A copy, since dynamo reads the placeholders of its graph again after the backend, to generate the call.
    graph: Graph = copy.deepcopy(gm.graph)
    if not with_inputs:
        for node in graph.nodes:
            # A weak reference to the input, with which `torch.utils.swap_tensors` refuses it. Dynamo drops its own.
            node.meta.pop("grapharg", None)
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    hand_on(gm, copied)
    # AOTAutograd's cache has its key from the pickled attributes, in their order.
    held = vars(copied)
    ordered = {name: held[name] for name in (*vars(gm), *held) if name in held}
    held.clear()
    held.update(ordered)
    return copied


def replace_by_attribute(placeholder: Node, name: str) -> None:
    """Let a graph read the attribute `name` of its module in place of an input."""
    graph = placeholder.graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        attribute = graph.get_attr(name)
    attribute.meta = dict(placeholder.meta)
    placeholder.replace_all_uses_with(attribute)
    graph.erase_node(placeholder)


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is a plain tensor with memory: not fake, not a subclass, not sparse, not wrapped."""
    if not is_plain(value) or value.layout != torch.strided or value.is_meta:
        return False
    return not is_wrapped(value)


def by_memory(values: Iterable[object]) -> list[set[int]]:
    """Return the positions of plain tensors with memory, those that share it together."""
    found = defaultdict[int, set[int]](set)
    for at, value in enumerate(values):
        if has_memory(value):
            found[memory_id(value)].add(at)
    return [*found.values()]


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is exactly a tensor or parameter: not fake, not a subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def is_bare_subclass(value: Any) -> bool:
    """Return whether `value` is of a class with `__torch_function__` alone, which AOTAutograd does not unwrap.

    At the first call of compiled code, torch refuses such tensors as arguments of operators that are not its own.
    """
    return torch.overrides.has_torch_function((value,)) and has_plain_dispatch(value)


def has_transforms(gm: GraphModule) -> bool:
    """Return whether the graph applies `torch.func.grad`, `vmap`, dual numbers and the like, which dynamo captures.

    The example values between such calls are wrappers of levels that no longer exist.
    """
    begin = ("_increment_nesting", "_enter_dual_level")
    return any(getattr(node.target, "__name__", "").endswith(begin) for node in gm.graph.nodes)
