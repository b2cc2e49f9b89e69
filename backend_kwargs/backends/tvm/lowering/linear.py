"""Products and convolutions, accumulated in float32 for half precision, as in ATen."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from tvm import te
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import Converter, Node, cast, compute, computed_in, load
from backend_kwargs.backends.tvm.lowering.reductions import cast_to
from backend_kwargs.backends.tvm.opaque import number

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


def matmul(node: Node, x: Tensor, y: Tensor, *, transposed: bool = False) -> Tensor:
    """Lower mm and bmm."""
    return cast_to(product(x, y, node.shape, computed_in(node.dtype), transposed), node.dtype)


def product(x: Tensor, y: Tensor, shape: Sequence[Expr], within: str, transposed: bool) -> Tensor:
    """Return the product over the last dimension of x and the second to last of y, or its last one if `transposed`."""
    k = te.reduce_axis((0, x.shape[-1]), "k")
    rows = len(x.shape) - 1

    def element(i: tuple[Expr, ...]) -> Expr:
        batch, column = i[: rows - 1], i[rows:]
        factor = y(*column, k) if transposed else y(*batch, k, *column)
        return te.sum(cast(x(*i[:rows], k), within) * cast(factor, within), axis=k)

    return compute(shape, element, "matmul")


def linear(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Lower linear: the weight is read in place, since transposing it can take longer than the product."""
    if bias is None:
        return matmul(node, x, weight, transposed=True)
    return addmm(node, bias, x, weight, transposed=True)


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
    """Replace a product by a transposed weight, if it is one, by a linear layer."""
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


def addmm(
    node: Node, bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1, transposed: bool = False
) -> Tensor:
    """Lower addmm and addmv: with beta zero the bias may be nan."""
    within = computed_in(node.dtype)
    xy = product(x, y, node.shape, within, transposed)

    def element(i: tuple[Expr, ...]) -> Expr:
        scaled = xy(*i) if alpha == 1 else xy(*i) * number(alpha, within)
        if beta == 0:
            return cast(scaled, node.dtype)
        start = cast(load(bias, i), within)
        return cast(scaled + (start if beta == 1 else start * number(beta, within)), node.dtype)

    return compute(node.shape, element)


LINEAR: dict[str, Converter] = {
    "mm": matmul,
    "bmm": matmul,
    "linear": linear,
    "addmm": addmm,
    "addmv": addmm,
}
