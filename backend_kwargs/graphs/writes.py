"""Dynamo's graphs: copy one, find what its calls may write, and whether they can be repeated on copies of inputs."""

import copy
import inspect
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import checkpoint

from backend_kwargs.torch_internals.dynamo import hand_on
from backend_kwargs.torch_internals.pytree import tree_leaves
from backend_kwargs.torch_internals.tensors import (
    OPERATORS,
    WRITES_AS_DECLARED,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    arguments_of,
    counted_writes,
    has_effects,
    has_kernel,
    has_plain_dispatch,
    is_wrapped,
    memory_id,
    name_of,
    overloads_of,
    schema_of,
    unwrapped,
    version_of,
)
from backend_kwargs.trial.trees import tensors_of

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
    values = (leaf.meta.get("example_value", leaf.meta.get("val")) for leaf in leaves if isinstance(leaf, Node))
    return {each for value in values for each in storages_of(value)}


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
    if getattr(function, "__module__", None) == "torch":
        function = getattr(torch.ops.aten, function.__name__, None)
    overloads = [function] if isinstance(function, OpOverload) else []
    if isinstance(function, OpOverloadPacket):
        every = overloads_of(function)
        overloads = [each for each in every if "out" not in schema_of(each).overload_name and has_kernel(each)]
    declared = map(arguments_of, overloads)
    return tuple(([each.name for each in all_], [each.name for each in all_ if each.is_write]) for all_ in declared)


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


TINY_OPS, TINY_BYTES = 3, 1 << 20  # a graph below both saves less than its race costs, whichever candidate wins

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
# Operators in other namespaces, and functions of other modules, may communicate with other ranks.
LOCAL = frozenset({"", "torch", "torch_attn", "higher_order", "_operator", "builtins", "math", *OPERATORS})

# Functions and methods that take positions in a tensor, without underscores around their names; those whose first
# argument has the positions.
INDEXING = frozenset(
    {
        *("getitem", "setitem", "gather", "take", "take_along_dim", "index"),
        *("scatter", "scatter_add", "scatter_reduce"),
        *(f"index_{what}" for what in ("select", "copy", "add", "fill", "put", "reduce")),
        *("cross_entropy", "cross_entropy_loss", "nll_loss"),
    }
)
BY_FIRST = frozenset({"embedding", "embedding_bag", "one_hot"})
# Functions whose integers are in a range that no rounding exceeds; `PAIRED` ones also return values.
IN_RANGE = frozenset({"argmax", "argmin", "argsort", "nonzero", "multinomial", "bucketize", "searchsorted"})
PAIRED = frozenset({"sort", "topk", "kthvalue", "median", "mode", "max", "min", "unique"})
BOUNDS = frozenset({"clamp_max", "remainder", "fmod", "mod", "and", "bitwise_and"})
ROUNDINGS = frozenset({"floor", "ceil", "round", "trunc"})
# Functions whose values come from their first argument alone, and from no tensor: of others they take the shape.
SHAPED = frozenset({"expand_as", "view_as", "reshape_as"})
# Functions whose results are the same in each call where their inputs are.
CONSTANT = frozenset({"arange", "add", "sub", "rsub", "mul", "truediv", "div", "neg", "getitem", "unsqueeze"})
CHANGING = frozenset({"iadd", "isub", "imul"})
CONSTANT |= {"view", "reshape", "to", "type", "float", "long", "int", *CHANGING}
ROUNDING = 1e-5  # of a number's size: more than a few operations in float32 can move it
FILLED = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})
ROUNDED = "its positions are rounded from floating-point numbers: another rounding could lead outside a tensor, after "
ROUNDED += "which no call on this GPU would work"


def why_not_repeatable(gm: GraphModule, example_inputs: Sequence[object], *, custom_ops: bool = True) -> str:
    """Return why the graph cannot be called many times, "" if it can; `custom_ops` allows operators not of torch's."""
    tensors = tensors_of(example_inputs)
    if not tensors:
        return "no input is a tensor"
    if not all(map(has_memory, tensors)):
        return "an input is not a plain tensor"
    if any(isinstance(value, list) for value in example_inputs):  # of compiled autograd
        return "an input is a list, which each call empties"
    if any(isinstance(value, torch.SymInt) and not value.node.has_hint() for value in example_inputs):
        return "a size is unknown until it runs"
    if has_side_effects(gm):
        return "it has side effects, which a race would repeat"
    if not custom_ops and may_communicate(gm):
        return "it has operators that are not torch's, and race_custom_ops is False"
    if holds_state(gm):
        return "it contains tensors, which a race would change"
    if any(tensor.is_cuda for tensor in tensors) and rounds_positions(gm):
        return ROUNDED
    if torch.is_grad_enabled() and _changes_what_trains(gm, example_inputs):
        return "it changes in place an input that requires grad"
    return ""


def is_tiny(gm: GraphModule, example_inputs: Sequence[object]) -> bool:
    """Return whether the graph saves less than its race costs, whichever candidate wins."""
    computing = [node for node in gm.graph.nodes if node.op.startswith("call")]
    bytes_read = sum(tensor.numel() * tensor.itemsize for tensor in tensors_of(example_inputs))
    return len(computing) < TINY_OPS and bytes_read < TINY_BYTES


def _changes_what_trains(gm: GraphModule, example_inputs: Sequence[object]) -> bool:
    """Return whether an input with gradient history is mutated: a copy has no such history to mutate."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    training = [
        node.meta.get("example_value")
        for node, value in zip(placeholders, example_inputs, strict=True)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    return any(map(counted_writes, tensors_of(training)))


def rounds_positions(gm: GraphModule) -> bool:
    """Return whether the graph indexes a tensor by integers that it makes of floating-point numbers without a bound.

    Compiled code rounds otherwise than eager does: by one position, which may be one past the end. Positions that are
    the same in each call, such as distances within a window, are computed: most are whole numbers before the cast too.
    """
    rounded, constant = set[Node](), set[Node]()
    for node in nodes_of(gm):
        name = name_of_call(node)
        if name in INDEXING | BY_FIRST:
            # The nodes whose values a call takes as positions.
            first = node.args[0] if node.args else node.kwargs.get("input")
            taken = (each for each in node.all_input_nodes if (each is first) is (name in BY_FIRST))
            if not rounded.isdisjoint(taken):
                return True
        is_constant = name in CONSTANT and constant.issuperset(node.all_input_nodes)
        if written := written_storages(node):
            constant = {each for each in constant if written.isdisjoint(storages_of(each.meta["example_value"]))}
        if is_constant and (name in CHANGING or not written):
            constant.add(node)
        if _is_rounded(node, name, rounded) and not (node in constant and _stays(node)):
            rounded.add(node)
    return False


def _stays(node: Node) -> bool:
    """Return whether a cast of numbers that come from no input gives no larger integers after another rounding."""
    known: dict[Node, torch.Tensor] = {}
    numbers = _value(node.all_input_nodes[0], known).double()
    return torch.equal((numbers + numbers * ROUNDING).trunc(), _value(node, known).double())


def _value(node: Node, known: dict[Node, torch.Tensor]) -> torch.Tensor:
    """Return what a node of constants gives."""
    if node not in known:
        given: Any = map_arg((node.args, node.kwargs), partial(_value, known=known))
        args, kwargs = given
        if name_of_call(node) in CHANGING:
            args = args[0].clone(), *args[1:]  # what was computed before reads the values before
        call = methodcaller(node.target, *args[1:], **kwargs) if isinstance(node.target, str) else node.target
        known[node] = call(args[0]) if isinstance(node.target, str) else call(*args, **kwargs)
    return known[node]


def _is_rounded(node: Node, name: str, rounded: Collection[Node]) -> bool:
    """Return whether a node gives integers that come from floating-point numbers, without a bound."""
    if not _holds(node, _is_integer) or name in IN_RANGE | FILLED or name.endswith("_like") or _bounds(node, name):
        return False
    inputs = node.all_input_nodes[: 1 if name in SHAPED else None]
    if name in ("minimum", "min") and len(inputs) == 2:
        return all(each in rounded for each in inputs)
    if name == "getitem" and name_of_call(inputs[0]) in PAIRED and node.args[1] == 1:
        return False
    floats = [] if name in PAIRED else [each for each in inputs if _holds(each, torch.is_floating_point)]
    return any(each in rounded for each in inputs) or not all(map(_bounded, floats))


def _bounds(node: Node, name: str) -> bool:
    """Return whether a call gives its result an upper bound."""
    if name in ("clamp", "clip"):
        return (node.args[2] if len(node.args) > 2 else node.kwargs.get("max")) is not None
    return name in BOUNDS


def _bounded(node: Node) -> bool:
    """Return whether a node has an upper bound, perhaps under roundings."""
    while name_of_call(node) in ROUNDINGS:
        node = node.all_input_nodes[0]
    return _bounds(node, name_of_call(node))


def name_of_call(node: Node) -> str:
    """Return the name of the function or method that a node calls, without underscores around it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0].strip("_") if node.op.startswith("call") else ""


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _holds(node: Node, test: Callable[[torch.Tensor], bool]) -> bool:
    """Return whether `test` holds for a tensor that the node gives."""
    return any(map(test, tensors_of(node.meta.get("example_value"))))


def communicates(gm: GraphModule) -> bool:
    """Return whether the graph communicates with other ranks, so that one rank alone cannot run it."""
    return any(_namespace(node.target) in COLLECTIVES for node in nodes_of(gm))


def may_communicate(gm: GraphModule) -> bool:
    """Return whether the graph has operators that are not torch's, which may communicate with other ranks."""
    return any(_namespace(node.target) not in LOCAL | COLLECTIVES for node in nodes_of(gm))


def has_side_effects(gm: GraphModule) -> bool:
    """Return whether the graph has operators with a registered effect, such as printing, which must run once."""
    return any(has_effects(node.target) for node in nodes_of(gm))


def recomputes(gm: GraphModule) -> bool:
    """Return whether the graph checkpoints activations: its backward pass in eager draws other random numbers."""
    return any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in nodes_of(gm))


class _Checkpointing(Interpreter):
    """A call whose checkpointed parts draw the same numbers in the backward pass: torch leaves that to Inductor."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            return super().call_function(target, args, kwargs)
        kept = {**kwargs, "use_reentrant": False, "preserve_rng_state": True}
        return checkpoint(_Checkpointing(args[0]).run, *args[1:], **kept)


def in_eager(gm: GraphModule) -> Callable[..., Any]:
    """Return the graph's own call: one of dynamo's has it once its code is generated, and is slower until then."""
    assert gm.code
    return (lambda *args: _Checkpointing(gm).run(*args)) if recomputes(gm) else gm.forward


def holds_state(gm: GraphModule) -> bool:
    """Return whether the graph has modules or tensors that are not inputs; graphs within it do not count."""
    nodes = [node for node in nodes_of(gm) if node.op in ("call_module", "get_attr")]
    return any(
        node.op == "call_module" or isinstance(attrgetter(str(node.target))(node.graph.owning_module), torch.Tensor)
        for node in nodes
    )


def _namespace(target: object) -> str:
    """Return the namespace of an operator, and of other functions the package of their module."""
    packet: object = getattr(target, "overloadpacket", target)
    if isinstance(packet, OpOverloadPacket):
        return name_of(packet).partition("::")[0]
    module = str(getattr(target, "__module__", None) or "")
    return "c10d" if module.startswith("torch.distributed") else module.partition(".")[0]


def nodes_of(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes of a graph and of all graphs within it."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
