"""Products and convolutions, accumulated in float32 for half precision, as in ATen."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from tvm import te

from backend_kwargs.backends.tvm.lowering.node import Node, cast, compute, computed_in, load
from backend_kwargs.backends.tvm.lowering.reductions import cast_to
from backend_kwargs.backends.tvm.opaque import number

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


def matmul(node: Node, x: Any, y: Any) -> Any:
    """Lower mm and bmm."""
    return cast_to(product(x, y, node.shape, computed_in(node.dtype)), node.dtype)


def product(x: Any, y: Any, shape: Sequence[Any], within: str) -> Any:
    """Return the product over the last dimension of x and the second to last of y."""
    k = te.reduce_axis((0, x.shape[-1]), "k")
    rows = len(x.shape) - 1

    def element(i: tuple[Any, ...]) -> Any:
        batch, column = i[: rows - 1], i[rows:]
        return te.sum(cast(x(*i[:rows], k), within) * cast(y(*batch, k, *column), within), axis=k)

    return compute(shape, element, "matmul")


def linear(node: Node, x: Any, weight: Any, bias: Any = None) -> Any:
    """Lower linear: the weight is read in place, since transposing it can take longer than the product."""
    within = computed_in(node.dtype)
    k = te.reduce_axis((0, x.shape[-1]), "k")

    def element(i: tuple[Any, ...]) -> Any:
        return te.sum(cast(x(*i[:-1], k), within) * cast(weight(i[-1], k), within), axis=k)

    xw = compute(node.shape, element, "matmul")
    if bias is None:
        return cast_to(xw, node.dtype)
    return compute(node.shape, lambda i: cast(xw(*i) + cast(bias(i[-1]), within), node.dtype))


def join_transposed(gm: fx.GraphModule) -> None:
    """Turn products by a transposed weight back into linear, which decompositions had replaced.

    Constants are left out: TVM transposes them at compile time.
    """
    for node in [*gm.graph.nodes]:
        if node.target in PRODUCTS and not node.kwargs:
            _join(gm.graph, node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _join(graph: fx.Graph, node: fx.Node) -> None:
    args: Any = node.args
    *bias, x, transposed = args
    if transposed.target is not aten.permute.default or [dim % 2 for dim in transposed.args[1]] != [1, 0]:
        return
    if transposed.args[0].op == "get_attr":
        return
    if any(each.meta["val"].shape != node.meta["val"].shape[1:] for each in bias):
        return
    with graph.inserting_before(node):
        joined = graph.call_function(aten.linear.default, (x, transposed.args[0], *bias))
    joined.meta = node.meta
    node.replace_all_uses_with(joined)
    graph.erase_node(node)


def addmm(node: Node, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Lower addmm and addmv: with beta zero the bias may be nan."""
    within = computed_in(node.dtype)
    xy = product(x, y, node.shape, within)

    def element(i: tuple[Any, ...]) -> Any:
        scaled = xy(*i) if alpha == 1 else xy(*i) * number(alpha, within)
        if beta == 0:
            return cast(scaled, node.dtype)
        start = cast(load(bias, i), within)
        return cast(scaled + (start if beta == 1 else start * number(beta, within)), node.dtype)

    return compute(node.shape, element)


LINEAR: dict[str, Callable[..., Any]] = {
    "mm": matmul,
    "bmm": matmul,
    "linear": linear,
    "addmm": addmm,
    "addmv": addmm,
}
