"""Products and convolutions: totals in float32 for halves, as ATen keeps them."""

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from backend_kwargs.compilers.tvm.lowering.node import Node, cast, compute, computed_in, load
from backend_kwargs.compilers.tvm.lowering.reductions import cast_to


def matmul(node: Node, x: Any, y: Any) -> Any:
    """Lower mm, bmm, mv and dot."""
    return cast_to(product(x, y, node.shape, computed_in(node.dtype)), node.dtype)


def product(x: Any, y: Any, shape: Sequence[Any], within: str) -> Any:
    """Return the product over x's last and y's last but one dimension."""
    k = te.reduce_axis((0, x.shape[-1]), "k")
    rows = len(x.shape) - 1

    def element(i: tuple[Any, ...]) -> Any:
        batch, row, column = i[: max(rows - 1, 0)], i[max(rows - 1, 0) : rows], i[rows:]
        return te.sum(cast(x(*batch, *row, k), within) * cast(y(*batch, k, *column), within), axis=k)

    return compute(shape, element, "matmul")


def addmm(node: Node, bias: Any, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Lower addmm, baddbmm and addmv: with beta zero the bias may be nan."""
    within = computed_in(node.dtype)
    xy = product(x, y, node.shape, within)

    def element(i: tuple[Any, ...]) -> Any:
        scaled = xy(*i) if alpha == 1 else xy(*i) * tirx.const(alpha, within)
        if beta == 0:
            return cast(scaled, node.dtype)
        start = cast(load(bias, i), within)
        return cast(scaled + (start if beta == 1 else start * tirx.const(beta, within)), node.dtype)

    return compute(node.shape, element)


LINEAR: dict[str, Callable[..., Any]] = {
    "mm": matmul,
    "bmm": matmul,
    "mv": matmul,
    "dot": matmul,
    "addmm": addmm,
    "baddbmm": addmm,
    "addmv": addmm,
}
