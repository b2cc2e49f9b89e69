"""Products and convolutions, accumulated in float32 for half precision, as in ATen."""

import operator
from collections.abc import Sequence

from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import Converter, Node, cast, compute, computed_in, load
from backend_kwargs.backends.tvm.lowering.reductions import SUM, axes_over, cast_to, reduced
from backend_kwargs.backends.tvm.opaque import number


def matmul(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Lower mm and bmm."""
    return cast_to(product(x, y, node.shape, computed_in(node.dtype)), node.dtype)


def product(x: Tensor, y: Tensor, shape: Sequence[Expr], within: str) -> Tensor:
    """Return the product over the last dimension of x and the second to last of y."""
    axes, (k,) = axes_over(x.shape[-1:])
    rows = len(x.shape) - 1

    def element(i: tuple[Expr, ...]) -> Expr:
        factors = x(*i[:rows], k), y(*i[: rows - 1], k, *i[rows:])
        return reduced(SUM, operator.mul(*(cast(each, within) for each in factors)), axes)

    return compute(shape, element, "matmul")


def addmm(node: Node, bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Lower addmm and addmv: with beta zero the bias may be nan."""
    within = computed_in(node.dtype)
    xy = product(x, y, node.shape, within)

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
    "addmm": addmm,
    "addmv": addmm,
}
