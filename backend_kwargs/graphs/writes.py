"""Dynamo's graphs: copy one for a compiler that changes it, and find what its calls may write."""

import copy
import inspect
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Node

# The key in the `meta` of a placeholder that stays an input of the graph, also where parameters become constants.
STAYS_INPUT = "backend_kwargs_stays_input"
# Modules whose functions write only into what their names, signatures and schemas say.
OF_TORCH = frozenset(
    {
        *("torch", "torch.functional", "torch.nn.functional", "_operator", "builtins", "math"),
        *("torch._functorch.predispatch", "torch._functorch.eager_transforms"),
        *(f"torch._C._{name}" for name in ("nn", "autograd", "fft", "functorch", "linalg", "special")),
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
    if not isinstance(fake, torch.Tensor) or fake.is_inference() or fake._version > version:
        return True
    return not storages_of(fake).isdisjoint(written)


def keep_inputs(placeholders: Iterable[Node]) -> None:
    """Let these inputs of a graph stay inputs, also where parameters become constants."""
    for placeholder in placeholders:
        placeholder.meta[STAYS_INPUT] = True


def written_memory(graph: Graph) -> set[int]:
    """Return the storages into which calls of the graph may write."""
    return {each for node in graph.nodes for each in written_storages(node)}


def written_between(first: Node, last: Node, read: Iterable[Node]) -> bool:
    """Return whether a call between `first` and `last`, a later node, may write into memory of the nodes `read`."""
    storages = {each for node in read for each in storages_of(node.meta.get("example_value"))}
    node = first
    while (node := node.next) is not last:
        if storages & written_storages(node):
            return True
    return False


def written_storages(node: Node) -> set[int]:
    """Return the storages into which a call may write: any that it reads, unless its function is one of torch's."""
    if not node.op.startswith("call"):
        return set()
    leaves = node.all_input_nodes if _is_unknown(node) else torch.utils._pytree.tree_leaves(_written(node))
    return {each for leaf in leaves if isinstance(leaf, Node) for each in storages_of(leaf.meta.get("example_value"))}


def _is_unknown(node: Node) -> bool:
    """Return whether a call may write into anything that it reads, since its function is not torch's."""
    if node.op != "call_function":
        return node.op == "call_module"
    of_torch = getattr(node.target, "__module__", None) in OF_TORCH
    return not of_torch and not isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def _written(node: Node) -> list[Any]:
    """Return the arguments into which a call of torch's writes, also lists of nodes."""
    arguments = [node.kwargs.get("out")]
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
    if isinstance(function, torch._ops.OpOverload):
        return (_names(function),)
    if getattr(function, "__module__", None) == "torch":
        function = getattr(torch.ops.aten, function.__name__, None)
    if not isinstance(function, torch._ops.OpOverloadPacket):
        return ()
    overloads = [getattr(function, name) for name in function.overloads()]  # type: ignore[no-untyped-call]
    return tuple(
        _names(each)
        for each in overloads
        if "out" not in each._overloadname and torch._C._dispatch_has_kernel(each.name())  # not TorchScript's alone
    )


def _names(overload: Any) -> tuple[list[str], list[str]]:
    """Return the names of an operator's arguments, and of those into which it writes."""
    arguments = overload._schema.arguments
    mutable = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    return [each.name for each in arguments], mutable


def storages_of(value: object) -> set[int]:
    """Return what identifies the memory of a tensor, or of those in a list."""
    tensors = [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list | tuple) else ()
    plain = [_unwrapped(each) for each in tensors if isinstance(each, torch.Tensor)]
    return {each.untyped_storage()._cdata for each in plain if each.layout == torch.strided}


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `torch.func`'s transforms have wrapped, which has the memory."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


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
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if not with_inputs:
            # A weak reference to the input, with which `torch.utils.swap_tensors` refuses it. Dynamo drops its own.
            new.meta.pop("grapharg", None)
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    # AOTAutograd recognizes a graph of dynamo's by the first two and `meta`; without them it fails or forgets static
    # inputs.
    for name in ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
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
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether `value` is exactly a tensor or parameter: not fake, not a subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


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


@contextmanager
def modes_restored() -> Iterator[None]:
    """Restore the modes that a graph sets and, where a call raises in between, does not reset.

    They are those of `torch.func`'s transforms, which a graph enters and leaves by separate calls, and the grad mode.
    """
    functorch = torch._C._functorch
    depth, in_place = functorch.get_dynamic_layer_stack_depth(), functorch.get_inplace_requires_grad_allowed()
    grad, forward_grad = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
    no_hooks = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    finally:
        functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        functorch.set_inplace_requires_grad_allowed(in_place)
        if torch.autograd.forward_ad._current_level < 0:  # the user has entered none, and levels do not nest
            with suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        torch._C._set_grad_enabled(grad)
        torch._C._set_fwd_grad_enabled(forward_grad)
        if no_hooks is None:
            torch._C._autograd._saved_tensors_hooks_enable()
        else:
            torch._C._autograd._saved_tensors_hooks_disable(no_hooks)
