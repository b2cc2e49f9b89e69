"""Many small computations on parameters, such as weights with a norm folded in, in few kernels.

Inductor compiles each of them to a kernel of its own, which on a GPU takes longer to launch than to run.
"""

from operator import getitem
from typing import TypeVar

import torch
from torch.fx import Graph, Node

from backend_kwargs.rewrites.matching import aten, insert, prims, value_of

T = TypeVar("T")
FOLDED = "backend_kwargs_folded"  # in the meta of a node that `fold_together` may join with others
DEVICES = ("cuda",)  # a CPU has no launches, and weights that are folded just before their use are in its cache
AT_ONCE = 32  # tensors of one list: a kernel of Inductor has up to 250 arguments, and long ones compile slowly
VIEWS = (aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.permute.default)


def mark_folded(value: T) -> T:
    """Let `fold_together` compute this node together with others, and return it; an input is there already."""
    if isinstance(value, Node) and value.op == "call_function":
        value.meta[FOLDED] = True
    return value


def fold_together(graph: Graph) -> None:
    """Compute marked nodes that depend on inputs of the graph only, elementwise, in lists of `AT_ONCE` tensors.

    Inductor makes one kernel of each list of a `_foreach` operator, with all that leads to its tensors.
    """
    marked = [node for node in graph.nodes if node.meta.pop(FOLDED, False)]
    here = [node for node in marked if node.meta["val"].device.type in DEVICES]
    sources = {node: leading for node in here if (leading := _sources(node)) is not None}
    inner = set().union(*sources.values())  # such as two biases whose sum is marked too
    folds = [node for node in sources if node not in inner]
    for start in range(0, len(folds), AT_ONCE):
        part = folds[start : start + AT_ONCE]
        if len(part) > 1:
            _in_one_list(graph, part, {each for node in part for each in (node, *sources[node])})


def _sources(node: Node) -> set[Node] | None:
    """Return the nodes that lead from the graph's inputs to `node`, or None if one is not elementwise."""
    found: set[Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.op in ("placeholder", "get_attr"):
            continue
        if not _is_elementwise(each):
            return None
        for source in each.all_input_nodes:
            if source.op not in ("placeholder", "get_attr") and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _is_elementwise(node: Node) -> bool:
    """Return whether each number of a result is of one number of each argument, and never random."""
    if node.op != "call_function" or value_of(node) is None:
        return False
    if node.target in (*VIEWS, aten.full.default, prims.convert_element_type.default):
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _in_one_list(graph: Graph, part: list[Node], needed: set[Node]) -> None:
    """Compute `part` by one operator before its first user, where all `needed` nodes come first."""
    first = min(user for node in part for user in node.users)
    for node in [each for each in graph.nodes if each in needed and each > first]:
        first.prepend(node)
    with graph.inserting_before(first):
        # A multiplication by 1 changes nothing. Operators that copy a list have no lowering in some releases.
        together = insert(graph, aten._foreach_mul.Scalar, part, 1)
        for at, node in enumerate(part):
            item = graph.call_function(getitem, (together, at))
            item.meta["val"] = together.meta["val"][at]
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user is not together)
