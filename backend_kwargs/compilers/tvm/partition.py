"""Which nodes of a graph TVM compiles and how they are grouped; which run in eager, and why."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import create_op_support

from backend_kwargs.compilers.tvm.settings import Settings
from backend_kwargs.compilers.tvm.shapes import expression, symbols_of
from backend_kwargs.compilers.tvm.supported import LEFT_TO_ATEN, why_not
from backend_kwargs.errors import error_text

PREFIX = "tvm_"
MARK = "backend_kwargs.tvm"
# Each returns its input with another dtype or place: a kernel for it alone gains nothing over eager's.
COPIES = frozenset({"_to_copy", "alias", "clone", "copy", "detach", "lift_fresh_copy"})


def reasons(gm: GraphModule, settings: Settings) -> dict[Node, str]:
    """Return, for each node that computes tensors, the reason why TVM cannot have it, "" if it can."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and _tensors(node):
            found[node] = _why_not(node, settings)
    return found


def unwanted(found: dict[Node, str]) -> list[tuple[str, str]]:
    """Return the operators that TVM cannot have, with reasons other than the option `aten_ops`."""
    own = {node: reason for node, reason in found.items() if reason and node.target is not operator.getitem}
    return [(op_name(node), reason) for node, reason in own.items() if reason != LEFT_TO_ATEN]


def split(gm: GraphModule, taken: Iterable[Node]) -> None:
    """Move the nodes `taken` into submodules "tvm_...", each on one device; groups not worth it stay in eager."""
    devices: dict[torch.device, str] = {}
    for node in _without_views_for_eager(gm, set(taken)):
        # A mark in `meta`, since splitting copies the nodes.
        node.meta[MARK] = devices.setdefault(device_of(node), f"{PREFIX}{len(devices)}_")
    with _random_in_order(gm):
        for prefix in devices.values():
            support = create_op_support(partial(_is_marked, prefix))
            partitioner = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True)
            worthwhile = [part for part in partitioner.propose_partitions() if _computes(part)]
            partitioner.fuse_partitions(worthwhile, prefix=prefix)
    for call in parts_of(gm):
        _hand_in_sizes(gm, call)


def _hand_in_sizes(gm: GraphModule, call: Node) -> None:
    """Pass a part the symbolic sizes that occur in it: not all of them are sizes of its tensors."""
    part: Any = gm.get_submodule(str(call.target))
    wanted = symbols_of(node.meta.get("val") for node in part.graph.nodes)
    sizes = [node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    for size in sizes:
        if expression(size.meta["val"]) in wanted and size not in call.args:
            with part.graph.inserting_before(part.graph.output_node()):
                part.graph.placeholder(size.name).meta = size.meta
            call.args = (*call.args, size)
    part.recompile()


def _is_marked(prefix: str, _: Mapping[str, Any], node: Node) -> bool:
    return node.meta.get(MARK) == prefix


def is_part(node: Node) -> bool:
    """Return whether a node calls a submodule of `split`, or TVM's replacement of one."""
    return node.op == "call_module" and str(node.target).startswith(PREFIX)


def parts_of(gm: GraphModule) -> list[Node]:
    """Return the calls of the submodules that `split` made."""
    return [node for node in gm.graph.nodes if is_part(node)]


def results_of(part: Node) -> list[Node]:
    """Return the nodes for a part's outputs, in order."""
    items = [user for user in part.users if user.target is operator.getitem]
    return sorted(items, key=lambda node: node.args[1]) if items else [part]  # type: ignore[arg-type,return-value]


def op_name(node: Node) -> str:
    """Return the operator's name in ATen, without namespace and overload; other targets in full."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.removeprefix("aten::")
    return str(node.target)


def device_of(node: Node) -> torch.device:
    """Return the device of a node's first tensor."""
    return _tensors(node)[0].device


def random_nodes(gm: GraphModule) -> list[Node]:
    """Return the nodes that draw random numbers."""
    return [node for node in gm.graph.nodes if _draws(node.target)]


def _draws(target: Any) -> bool:
    # Activation checkpointing wraps random operators in higher-order ones, which have no tags.
    seeded = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return seeded or "rng_state" in getattr(target, "__name__", "")


def writes_in_place(gm: GraphModule) -> str:
    """Return the name of an operator that mutates one of its arguments, "" if AOTAutograd left none."""
    calls = [n for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return next((op_name(node) for node in calls if node.target._schema.is_mutable), "")


def _why_not(node: Node, settings: Settings) -> str:
    try:
        return why_not(node, settings)
    except Exception as error:  # noqa: BLE001 - TVM may raise any exception; such a node runs in eager
        return error_text(error)


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values: Sequence[Any] = value if isinstance(value, list | tuple) else (value,)
    return [value for value in values if isinstance(value, torch.Tensor)]


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _without_views_for_eager(gm: GraphModule, taken: set[Node]) -> set[Node]:
    """Return `taken` without the views that feed eager nodes; one that feeds both sides is copied.

    So TVM never returns a view: eager's views share memory with the caller as in eager, and have eager's strides.
    """
    for node in reversed(gm.graph.nodes):
        if node in taken and _is_view(node):
            in_eager = [user for user in node.users if user not in taken]
            if len(in_eager) == len(node.users):
                taken.discard(node)
            elif in_eager:
                with gm.graph.inserting_after(node):
                    twin = gm.graph.node_copy(node)
                for user in in_eager:
                    user.replace_input_with(node, twin)
    return taken


def _computes(part: Partition) -> bool:
    return any(not _is_view(node) and op_name(node) not in COPIES and node.all_input_nodes for node in part.nodes)


@contextmanager
def _random_in_order(gm: GraphModule) -> Iterator[None]:
    """Chain the random operators while the graph is split and sorted: they must draw in eager's order."""
    for earlier, later in pairwise(random_nodes(gm)):
        later.kwargs = {**later.kwargs, MARK: earlier}
    yield
    for node in random_nodes(gm):
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != MARK}
