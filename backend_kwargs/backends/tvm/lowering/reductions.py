"""Reductions, and products, which are sums."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import te, tirx
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import (
    Converter,
    Index,
    Node,
    cast,
    compute,
    computed_in,
    dtype,
    int64,
    is_float,
    is_one,
    isnan,
    load,
)
from backend_kwargs.backends.tvm.lowering.pointwise import maximum, minimum
from backend_kwargs.backends.tvm.opaque import number

# With more elements, one float32 total loses digits that ATen's pairwise sums keep.
LONG = 4096

Dims: TypeAlias = int | Sequence[int] | None  # None: all
Reducer: TypeAlias = Callable[..., Expr]  # of te.comm_reducer


def lowest(dtype: str) -> Expr:
    """Return a lower bound of a dtype's numbers."""
    return tirx.const(-math.inf, dtype) if is_float(dtype) else tirx.min_value(dtype)


def highest(dtype: str) -> Expr:
    """Return an upper bound of a dtype's numbers."""
    return tirx.const(math.inf, dtype) if is_float(dtype) else tirx.max_value(dtype)


SUM = te.comm_reducer(lambda x, y: x + y, lambda dtype: tirx.const(0, dtype), "sum")
PROD = te.comm_reducer(lambda x, y: x * y, lambda dtype: tirx.const(1, dtype), "prod")
MAX = te.comm_reducer(maximum, lowest, "max")
MIN = te.comm_reducer(minimum, highest, "min")


def dims_of(dims: Dims, rank: int) -> list[int]:
    """Return the reduced dimensions, all if none is named."""
    dims = [dims] if isinstance(dims, int) else dims
    return sorted({d % rank for d in dims} if dims and rank else range(rank))


def axes_over(sizes: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Return the axes of a reduction, and an index along each size; one element needs no axis.

    dlight takes a reduction over one element for elementwise code, since it drops loops of one iteration, and merges
    what follows into it and into its initial value: `sum(x) + b` becomes `(0 + b) + x + b`.
    """
    at = [int64(0) if is_one(size) else te.reduce_axis((0, size), "r") for size in sizes]
    return [each for each in at if isinstance(each, tirx.IterVar)], [getattr(each, "var", each) for each in at]


def reduced(reducer: Reducer, value: Expr, axes: Sequence[Expr]) -> Expr:
    """Return the reduction of a value over axes; of one element the value, to which a sum adds zero for -0."""
    if axes:
        return reducer(value, axis=axes)
    return value + number(0, value.ty.dtype) if reducer is SUM else value


def spans(
    x: Tensor, over: Sequence[int], keepdim: bool
) -> tuple[list[Expr], list[Expr], Callable[[Index], list[Expr]]]:
    """Return the axes of a reduction, its output's shape, and a function from an output index to the input's."""
    axes, at = axes_over([x.shape[d] for d in over])
    shape = [int64(1) if d in over else size for d, size in enumerate(x.shape) if keepdim or d not in over]

    def index(outer: Index) -> list[Expr]:
        rest, inner = iter([i for d, i in enumerate(outer) if d not in over] if keepdim else outer), iter(at)
        return [next(inner) if d in over else next(rest) for d in range(len(x.shape))]

    return axes, shape, index


def reduce(
    x: Tensor, over: Sequence[int], keepdim: bool, reducer: Reducer, within: str,
    value: Callable[[Expr, Index], Expr] = lambda v, i: v,
) -> Tensor:  # fmt: skip
    """Return the reduction over some dimensions of `value(element, index)`, computed in dtype `within`."""
    axes, shape, index = spans(x, over, keepdim)

    def element(outer: tuple[Expr, ...]) -> Expr:
        at = index(outer)
        return reduced(reducer, value(cast(x(*at), within), at), axes)

    return compute(shape, element, "reduced")


def accumulated_in(x: Tensor, over: Sequence[int], dtype: str) -> str:
    """Return the dtype of an accumulator: float64 if there are many elements, or an unknown number."""
    within = computed_in(dtype)
    count = math.prod(int(x.shape[d]) if isinstance(x.shape[d], tirx.IntImm) else LONG for d in over)
    return "float64" if within == "float32" and count >= LONG else within


def cast_to(x: Tensor, dtype: str) -> Tensor:
    """Return a tensor in another dtype, or itself if it has that dtype."""
    return x if x.dtype == dtype else compute(x.shape, lambda i: cast(x(*i), dtype))


def reduction(reducer: Reducer, node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False, **_: object) -> Tensor:
    """Lower sum, prod, amax, amin and similar operators."""
    over = dims_of(dims, len(x.shape))
    within = accumulated_in(x, over, node.dtype) if reducer is SUM else computed_in(node.dtype)
    return cast_to(reduce(x, over, keepdim, reducer, within), node.dtype)


def mean(node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False, **_: object) -> Tensor:
    """Lower mean."""
    over = dims_of(dims, len(x.shape))
    within = accumulated_in(x, over, node.dtype)
    total, count = (
        reduce(x, over, keepdim, SUM, within),
        cast(math.prod(x.shape[d] for d in over), within),
    )
    return compute(total.shape, lambda i: cast(total(*i) / count, node.dtype))


def any_true(node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """Lower any, reduced as ints."""
    largest = reduce(x, dims_of(dims, len(x.shape)), keepdim, MAX, "bool", lambda v, _: cast(v, "int32"))
    return cast_to(largest, node.dtype)


def moments(node: Node, x: Tensor, dims: Dims, correction: float, keepdim: bool, dtype: str) -> tuple[Tensor, Tensor]:
    """Return variance and mean, in two passes for accuracy."""
    over = dims_of(dims, len(x.shape))
    within = accumulated_in(x, over, dtype)
    total, count = (
        reduce(x, over, True, SUM, within),
        cast(math.prod(x.shape[d] for d in over), within),
    )
    average = compute(total.shape, lambda i: total(*i) / count, "mean")

    def square(v: Expr, index: Index) -> Expr:
        apart = v - average(*(0 if d in over else i for d, i in enumerate(index)))
        return apart * apart

    squares = reduce(x, over, keepdim, SUM, within, square)
    free = tirx.max(count - cast(1.0 * correction, within), number(0.0, within))
    variance = compute(squares.shape, lambda i: cast(squares(*i) / free, dtype), "variance")

    def unless_infinite(i: Index, value: Expr) -> Expr:
        # As ATen's running mean, which is nan after an infinity.
        return cast(tirx.Select(isnan(squares(*i)), squares(*i), value), dtype)

    if keepdim:
        return variance, compute(squares.shape, lambda i: unless_infinite(i, average(*i)))

    def spread(i: Index) -> list[Expr]:
        rest = iter(i)
        return [0 if d in over else next(rest) for d in range(len(x.shape))]

    return variance, compute(squares.shape, lambda i: unless_infinite(i, average(*spread(i))))


def var(node: Node, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Lower var.correction."""
    return moments(node, x, dims, 1 if correction is None else correction, keepdim, node.dtype)[0]


def var_mean(
    node: Node, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> list[Tensor]:
    """Lower var_mean.correction."""
    return list(moments(node, x, dims, 1 if correction is None else correction, keepdim, dtype(node.out[0])))


def best(
    shape: Sequence[Expr],
    element: Callable[[tuple[Expr, ...]], tuple[Expr, Expr]],
    axes: Sequence[Expr],
    dtype: str,
    *,
    largest: bool,
    positions: bool,
    last_nan: bool = False,
) -> list[Tensor | None]:
    """Return the best values of `element(index) -> (value, position)` over axes, and on request their first positions.

    Of nan with `last_nan` the last position, as ATen's pooling has it.
    A second reduction finds the positions: TVM does not vectorize a reduction of pairs, and breaks it for bfloat16.
    """
    within = computed_in(dtype)
    values = compute(shape, lambda i: reduced(MAX if largest else MIN, cast(element(i)[0], within), axes), "best")

    def first(i: tuple[Expr, ...]) -> Expr:
        value, position = element(i)
        value = cast(value, within)
        is_best = tirx.any(tirx.EQ(value, values(*i)), tirx.all(isnan(value), isnan(values(*i))))
        if last_nan:
            position = tirx.Select(isnan(value), -position, position)
        return reduced(MIN, tirx.Select(is_best, position, tirx.max_value("int64")), axes)

    if not positions:
        return [values, None]
    at = compute(shape, first, "position")
    return [values, compute(shape, lambda i: tirx.abs(at(*i))) if last_nan else at]


def extremum(
    node: Node, x: Tensor, dim: int | None = None, keepdim: bool = False, *, largest: bool, only_position: bool = False
) -> Tensor | list[Tensor | None]:
    """Lower max.dim or min.dim, or argmax or argmin."""
    over, kind = dims_of(dim, len(x.shape)), str(x.dtype)
    axes, shape, index = spans(x, over, keepdim)

    def element(outer: Index) -> tuple[Expr, Expr]:
        at = index(outer)
        return x(*at), functools.reduce(lambda total, d: total * x.shape[d] + at[d], over, int64(0))

    positions = only_position or node.used(1)
    results = best(shape, element, axes, kind, largest=largest, positions=positions)
    return results[1] if only_position else [cast_to(results[0], kind), results[1]]


# ---- products, accumulated in float32 for half precision, as in ATen


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


REDUCTIONS: dict[str, Converter] = {
    "mm": matmul,
    "bmm": matmul,
    "addmm": addmm,
    "addmv": addmm,
    "sum": functools.partial(reduction, SUM),
    "prod": functools.partial(reduction, PROD),
    "amax": functools.partial(reduction, MAX),
    "amin": functools.partial(reduction, MIN),
    "mean": mean,
    "max.default": functools.partial(reduction, MAX),
    "min.default": functools.partial(reduction, MIN),
    "max.dim": functools.partial(extremum, largest=True),
    "min.dim": functools.partial(extremum, largest=False),
    "argmax": functools.partial(extremum, largest=True, only_position=True),
    "argmin": functools.partial(extremum, largest=False, only_position=True),
    "any": any_true,
    "var.correction": var,
    "var_mean.correction": var_mean,
}
