"""Calls of a library's attention in a lowered graph, as `scaled_dot_product_attention` chose it."""

import operator

from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.matching import (
    HALF,
    aten,
    erase_dead,
    have_one_dtype,
    known_true,
    read,
    same_sizes,
    values_of,
)

HEADS_LAST = [0, 2, 1, 3]
# The first result of each is the attention's.
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def heads_last(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return an empty [batch, queries, heads, width]: kernels write this layout, and the next layer reads it."""
    batch, heads, queries, _width = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


def only_result(node: Node) -> bool:
    """Return whether only the first result is used, in the layout [batch, queries, heads, width] of our operators.

    The other results are for the backward pass of the same kernel. Keys and values must have as many heads as queries.
    """
    args = read(node)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return False
    if not all(user.meta["val"].transpose(1, 2).is_contiguous() for user in node.users):
        return False
    values = values_of(*(args[name] for name in ("query", "key", "value")))
    if values is None or not have_one_dtype(values, HALF):
        return False
    q, k, v = values
    if not same_sizes(k.shape, (*q.shape[:2], k.shape[2], q.shape[3])) or not same_sizes(v.shape[:3], k.shape[:3]):
        return False
    if not all(known_true(each.numel() > 0) for each in values):
        return False
    return not args["dropout_p"] and not args.get("return_debug_mask")


def scale_of(node: Node) -> float | None:
    """Return the scale of a call, or None if it is not a number above 0."""
    args = read(node)
    scale, width = args["scale"], args["query"].meta["val"].shape[-1]
    if scale is None and isinstance(width, int):
        return float(width**-0.5)
    return float(scale) if isinstance(scale, int | float) and scale > 0 else None


def replace_results(node: Node, attended: Node) -> None:
    """Replace the results of a library's call, of which only the first is used."""
    for user in [*node.users]:
        user.replace_all_uses_with(attended)
        node.graph.erase_node(user)
    erase_dead(node)
