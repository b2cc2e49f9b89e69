"""A graph cut into the parts that a compiler takes, and the callables that run them; the rest runs in eager.

A part's results get the strides of torch's fake tensors: operators that have others in eager are decomposed.
"""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support

from backend_kwargs.graphs.writes import replace_by_attribute
from backend_kwargs.torch_internals.dynamo import boxed_forward, mark_boxed
from backend_kwargs.torch_internals.tensors import OpOverload, name_of, schema_of, suggest_memory_format
from backend_kwargs.trial import trees

PREFIX = "part_"
MARK = "backend_kwargs_part"  # an identifier, since it is a keyword for a while
Boxed = Callable[[list[object]], object]
Run = Callable[[Sequence[object]], list[torch.Tensor]]
# Each returns its input in another dtype or on another device: a part of only these gains nothing over eager.
COPIES = frozenset({"_to_copy", "alias", "clone", "copy", "detach", "lift_fresh_copy"})


def split(
    gm: GraphModule, taken: Iterable[Node], too_small: Callable[[Sequence[Node]], bool] | None = None
) -> list[Node]:
    """Move the nodes `taken` into submodules "part_...", each on one device; parts that compute nothing stay.

    So do parts whose computing nodes are `too_small`; these nodes are returned.
    """
    left: list[Node] = []
    with _random_in_order(gm):
        devices = _mark(gm, set(taken))
        while too_small and (
            small := [
                part
                for prefix in devices.values()
                for part in _partitioner(gm, prefix).propose_partitions()
                if too_small(computing(part.nodes))
            ]
        ):
            left += [node for part in small for node in computing(part.nodes)]
            # Anew, since views that feed these nodes now feed eager.
            inside = {node for part in small for node in part.nodes}
            devices = _mark(gm, {node for node in gm.graph.nodes if MARK in node.meta} - inside)
        for prefix in devices.values():
            partitioner = _partitioner(gm, prefix)
            worthwhile = [part for part in partitioner.propose_partitions() if computing(part.nodes)]
            partitioner.fuse_partitions(worthwhile, prefix=prefix)
    for call in parts_of(gm):
        _hand_in_sizes(gm, call)
    return left


def _mark(gm: GraphModule, taken: set[Node]) -> dict[torch.device, str]:
    """Mark the nodes that parts may have by the prefix of their device's parts; return the prefixes."""
    devices: dict[torch.device, str] = {}
    for node in gm.graph.nodes:
        node.meta.pop(MARK, None)
    for node in _without_inputs_of_eager(gm, taken):
        # A mark in `meta`, since the partitioner copies the nodes.
        node.meta[MARK] = devices.setdefault(device_of(node), f"{PREFIX}{len(devices)}_")
    return devices


def _partitioner(gm: GraphModule, prefix: str) -> CapabilityBasedPartitioner:
    support = create_op_support(lambda _, node: node.meta.get(MARK) == prefix)
    return CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)


def _hand_in_sizes(gm: GraphModule, call: Node) -> None:
    """Pass a part the symbolic sizes that occur in it: not all can be read from the shapes of its tensors."""
    part: Any = gm.get_submodule(str(call.target))
    wanted = symbols_of(node.meta.get("val") for node in part.graph.nodes)
    sizes = [node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    for size in sizes:
        if expression(size.meta["val"]) in wanted and size not in call.args:
            with part.graph.inserting_before(part.graph.output_node()):
                part.graph.placeholder(size.name).meta = size.meta
            call.args = (*call.args, size)
    part.recompile()


def is_part(node: Node) -> bool:
    """Return whether a node calls a part that `split` made, compiled or not."""
    return node.op == "call_module" and str(node.target).startswith(PREFIX)


def parts_of(gm: GraphModule) -> list[Node]:
    """Return the calls of the submodules that `split` made."""
    return [node for node in gm.graph.nodes if is_part(node)]


def visible_results(part: Node) -> list[int]:
    """Return the positions of a part's results that others than parts read."""
    items = [user for user in part.users if user.target is operator.getitem]
    results = sorted(items, key=lambda node: node.args[1]) if items else [part]  # type: ignore[arg-type,return-value]
    return [at for at, result in enumerate(results) if not all(map(is_part, result.users))]


def returned_by(part: GraphModule) -> list[Node]:
    """Return the nodes that a part returns."""
    result: Any = part.graph.output_node().args[0]
    return list(result) if isinstance(result, tuple | list) else [result]


def op_name(node: Node) -> str:
    """Return an ATen operator's name without namespace and overload, and other operators' names in full."""
    if isinstance(node.target, OpOverload):
        return name_of(node.target).removeprefix("aten::")
    return str(node.target)


def names_of(node: Node) -> tuple[str, str]:
    """Return an operator's name with its overload, and without: ("add.Tensor", "add")."""
    schema = schema_of(node.target)
    if schema is None:
        return str(node.target), str(node.target)
    name = schema.name.split("::")[1]
    return f"{name}.{schema.overload_name or 'default'}", name


def device_of(node: Node) -> torch.device:
    """Return the device of a node's first tensor."""
    return tensors_of(node)[0].device


def random_nodes(gm: GraphModule) -> list[Node]:
    """Return the nodes that draw random numbers; checkpointing wraps some in higher-order ones, which have no tags."""
    seeded = torch.Tag.nondeterministic_seeded
    calls = ((node, node.target) for node in gm.graph.nodes)
    return [
        node for node, of in calls if seeded in getattr(of, "tags", ()) or "rng_state" in getattr(of, "__name__", "")
    ]


def writes_in_place(gm: GraphModule) -> str:
    """Return the name of an operator that writes into one of its arguments, or "" if AOTAutograd left none."""
    calls = [n for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    return next((op_name(node) for node in calls if schema_of(node.target).is_mutable), "")


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node computes."""
    return trees.tensors_of(node.meta.get("val"))


def _is_view(node: Node) -> bool:
    """Return whether a node gives a view of one of its inputs, or an item of such."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, OpOverload) and node.target.is_view


def _without_inputs_of_eager(gm: GraphModule, taken: set[Node]) -> set[Node]:
    """Return `taken` without the views and constants that feed eager nodes; one that feeds both sides is copied.

    So a part never returns a view: views run in eager, where they share memory and have strides as the caller expects.
    Nor does it return a constant, which would be written long before eager reads it.
    """
    for node in reversed(gm.graph.nodes):
        if node in taken and (_is_view(node) or not node.all_input_nodes):
            in_eager = [user for user in node.users if user not in taken]
            if len(in_eager) == len(node.users):
                taken.discard(node)
            elif in_eager:
                with gm.graph.inserting_after(node):
                    twin = gm.graph.node_copy(node)
                for user in in_eager:
                    user.replace_input_with(node, twin)
    return taken


def computing(nodes: Collection[Node]) -> list[Node]:
    """Return the nodes that compute: not views, copies, constants, or items of a result."""
    free = {node for node in nodes if node.target is operator.getitem or _is_view(node) or op_name(node) in COPIES}
    return [node for node in nodes if node not in free and node.all_input_nodes]


@contextmanager
def _random_in_order(gm: GraphModule) -> Iterator[None]:
    """Chain the random operators while the graph is split and sorted: they must draw in eager's order."""
    for earlier, later in pairwise(random_nodes(gm)):
        later.kwargs = {**later.kwargs, MARK: earlier}
    yield
    for node in random_nodes(gm):
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != MARK}


def expression(size: int | torch.SymInt | sympy.Expr) -> sympy.Expr:
    """Return a size as torch's sympy expression."""
    if isinstance(size, torch.SymInt):
        return size.node.expr
    return sympy.sympify(size)


def symbols_of(values: Iterable[object]) -> set[sympy.Symbol]:
    """Return the symbols in sizes, tensors' shapes, and lists of these."""
    found: set[sympy.Symbol] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found |= symbols_of(value.shape)
        elif isinstance(value, torch.SymInt | sympy.Expr):
            found |= expression(value).free_symbols
        elif isinstance(value, list | tuple):
            found |= symbols_of(value)
    return found


def calls_of(gm: GraphModule) -> list[Node]:
    """Return the nodes that call an operator."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def operators_of(gm: GraphModule) -> str:
    """Return the names of a graph's operators, each once."""
    return ", ".join(dict.fromkeys(map(op_name, calls_of(gm))))


def attach(part: GraphModule, call: Node, constants: Mapping[str, torch.Tensor]) -> None:
    """Make the arguments of a part that are `constants` its attributes, and pass it only the others."""
    placeholders = part.graph.find_nodes(op="placeholder")
    for placeholder, argument in zip(placeholders, call.args, strict=True):
        if (value := constants.get(str(argument))) is None:
            continue
        name = f"constant_{placeholder.name}"
        part.register_buffer(name, value, persistent=False)
        replace_by_attribute(placeholder, name)
    call.args = tuple(argument for argument in call.args if str(argument) not in constants)
    part.recompile()


def replace_part(call: Node, run: Callable[..., object]) -> None:
    """Replace the call of a part by a call of `run`."""
    graph = call.graph
    run.__name__ = str(call.target)
    with graph.inserting_before(call):
        replacement = graph.call_function(run, call.args)
    replacement.meta = call.meta
    call.replace_all_uses_with(replacement)
    graph.erase_node(call)


def finished(run: Run, part: GraphModule, visible: Collection[int]) -> Callable[..., object]:
    """Return a callable of `run` with the results of `part`; the `visible` ones get eager's strides."""
    single = not isinstance(part.graph.output_node().args[0], tuple | list)
    values = [node.meta["val"] for node in returned_by(part)]
    orders = {at: order for at in visible if (order := _order(values[at]))}

    def call(*args: object) -> object:
        outputs = run(args)
        for at, (order, inverse) in orders.items():
            outputs[at] = outputs[at].permute(order).contiguous().permute(inverse)
        return outputs[0] if single else outputs

    return call


def _order(value: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """Return the permutation from slowest to fastest dimension in memory and its inverse; None if already in order."""
    # Hints, since comparing symbols would add a guard, and recompile for other sizes.
    strides = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return None if order == [*range(value.dim())] else (order, [order.index(dim) for dim in range(value.dim())])


def serving(
    run: Callable[..., object], part: GraphModule, failed: Callable[[Exception], None]
) -> Callable[..., object]:
    """Return a callable of `run`, and of `part` in eager from the first call at which `run` fails and `part` does not.

    `failed` gets the exception.
    """

    def call(*args: object) -> object:
        nonlocal run
        try:
            return run(*args)
        except Exception as error:
            if run is part:
                raise
            result = part(*args)
            run = part
            failed(error)
            return result

    return call


def boxed(gm: GraphModule) -> Boxed:
    """Return a callable that runs `gm` on a list of arguments, and empties it so that each can be freed early."""
    forward = boxed_forward(gm)

    def run(args: list[object]) -> object:
        return forward(args)

    mark_boxed(run)
    return run


aten = torch.ops.aten
Rule = Callable[..., object]
Decompositions = Mapping[OpOverload, Rule]
# The position of the argument that they take their strides from. In eager the first ones keep channels last and no
# other layout; the results of the second ones are contiguous.
CHANNELS_LAST: Mapping[OpOverload, int] = dict.fromkeys(
    (
        aten.roll.default,
        aten.reflection_pad3d.default,
        aten.replication_pad3d.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._native_batch_norm_legit_no_training.default,
    ),
    0,
)
CONTIGUOUS: Mapping[OpOverload, int] = {
    **dict.fromkeys(
        (
            aten._weight_norm_interface.default,
            aten.baddbmm.default,
            aten.isin.Tensor_Scalar,
            aten.log_sigmoid_forward.default,
        ),
        0,
    ),
    aten.pow.Scalar: 1,
}


def with_eagers_layouts(table: Decompositions) -> dict[OpOverload, Rule]:
    """Return decompositions whose results have eager's strides."""
    decompositions = dict(table)
    for ops, keeps in ((CHANNELS_LAST, True), (CONTIGUOUS, False)):
        decompositions |= {op: partial(_laid_out, op, decompositions.get(op), at, keeps) for op, at in ops.items()}
    return decompositions


def _laid_out(op: OpOverload, rule: Rule | None, at: int, keeps: bool, *args: Any, **kwargs: Any) -> Any:
    """Compute on a contiguous argument, of which fake tensors are right, and lay the first result out as eager does."""
    x = args[at]
    if x.is_contiguous():
        return rule(*args, **kwargs) if rule else NotImplemented
    result = op(*args[:at], x.contiguous(), *args[at + 1 :], **kwargs)
    layout = suggest_memory_format(x) if keeps else torch.contiguous_format
    if isinstance(result, torch.Tensor):
        return result.contiguous(memory_format=layout)
    first, *others = result
    return first.contiguous(memory_format=layout), *others
