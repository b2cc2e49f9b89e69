"""Reductions: sums and extrema over dimensions, products, and over windows convolutions and pools."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import te, tirx, topi
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import (
    DTYPES,
    Converter,
    Index,
    Node,
    cast,
    cast_to,
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
from backend_kwargs.torch_internals.pytree import tree_leaves

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


def reduction(reducer: Reducer, node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False, **_: object) -> Tensor:
    """Lower sum, prod, amax, amin and similar operators."""
    over = dims_of(dims, len(x.shape))
    within = accumulated_in(x, over, node.dtype) if reducer is SUM else computed_in(node.dtype)
    return cast_to(reduce(x, over, keepdim, reducer, within), node.dtype)


def mean(node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False, **_: object) -> Tensor:
    """Lower mean."""
    total, count = total_and_count(x, dims_of(dims, len(x.shape)), keepdim, node.dtype)
    return compute(total.shape, lambda i: cast(total(*i) / count, node.dtype))


def total_and_count(x: Tensor, over: Sequence[int], keepdim: bool, dtype: str) -> tuple[Tensor, Expr]:
    """Return a sum over dimensions, and the number of its terms, in the dtype of its accumulator."""
    within = accumulated_in(x, over, dtype)
    return reduce(x, over, keepdim, SUM, within), cast(math.prod(x.shape[d] for d in over), within)


def any_true(node: Node, x: Tensor, dims: Dims = None, keepdim: bool = False) -> Tensor:
    """Lower any, reduced as ints."""
    largest = reduce(x, dims_of(dims, len(x.shape)), keepdim, MAX, "bool", lambda v, _: cast(v, "int32"))
    return cast_to(largest, node.dtype)


def var_mean(
    node: Node, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> list[Tensor]:
    """Lower var_mean.correction, in two passes for accuracy."""
    correction, dtype = 1 if correction is None else correction, DTYPES[tree_leaves(node.out)[0].dtype]
    over = dims_of(dims, len(x.shape))
    total, count = total_and_count(x, over, True, dtype)
    within = str(total.dtype)
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
        return [variance, compute(squares.shape, lambda i: unless_infinite(i, average(*i)))]

    def spread(i: Index) -> list[Expr]:
        rest = iter(i)
        return [0 if d in over else next(rest) for d in range(len(x.shape))]

    return [variance, compute(squares.shape, lambda i: unless_infinite(i, average(*spread(i))))]


def best(
    shape: Sequence[Expr], element: Callable[[Index], tuple[Expr, Expr]], axes: Sequence[Expr], dtype: str, *,
    largest: bool, positions: bool, last_nan: bool = False,
) -> list[Tensor | None]:  # fmt: skip
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
    "mean": mean,
    **{name: functools.partial(reduction, MAX) for name in ("amax", "max.default")},
    **{name: functools.partial(reduction, MIN) for name in ("amin", "min.default")},
    **{name: functools.partial(reduction, reducer) for name, reducer in (("sum", SUM), ("prod", PROD))},
    "max.dim": functools.partial(extremum, largest=True),
    "min.dim": functools.partial(extremum, largest=False),
    "argmax": functools.partial(extremum, largest=True, only_position=True),
    "argmin": functools.partial(extremum, largest=False, only_position=True),
    "any": any_true,
    "var.correction": lambda *args, **kwargs: var_mean(*args, **kwargs)[0],
    "var_mean.correction": var_mean,
}


Widths: TypeAlias = int | Sequence[int]  # one for all dimensions of a window, or one for each


def convolution(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Widths, padding: Widths,
    dilation: Widths, transposed: bool, _: object, groups: int,
) -> Tensor:  # fmt: skip
    """Lower convolution of any rank."""
    within, rank = computed_in(node.dtype), len(x.shape) - 2
    strides, paddings, dilations = (spread(v, rank) for v in (stride, padding, dilation))
    if transposed or all(map(is_one, weight.shape[1:])):
        raise node.deny("a transposed convolution" if transposed else "each sum has one term")
    result = topi.nn.conv(x, weight, strides, paddings, dilations, groups, f"NC{'DHW'[3 - rank :]}", "", within)
    if bias is None:
        return cast_to(result, node.dtype)
    return compute(node.shape, lambda i: cast(result(*i) + cast(bias(i[1]), within), node.dtype))


def spread(values: Widths, rank: int, default: Sequence[int] = ()) -> list[int]:
    """Return one value for each dimension of a window."""
    widths = [values] if isinstance(values, int) else list(values)
    widths = widths or list(default)
    return widths * rank if len(widths) == 1 else widths


def windowed(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[list[Expr], Callable[[Index], tuple[list[Expr], Expr]]]:
    """Return the axes of a window, and a function from an output index to the input's and whether it is not padding."""
    axes, within = axes_over(list(map(int64, kernel)))
    lead = len(x.shape) - len(kernel)

    def index(i: Index) -> tuple[list[Expr], Expr]:
        at = [
            j * int64(s) + a * int64(d) - int64(p)
            for j, a, s, p, d in zip(i[lead:], within, stride, padding, dilation, strict=True)
        ]
        bounds = [tirx.all(j >= int64(0), j < size) for j, size in zip(at, x.shape[lead:], strict=True)]
        return [*i[:lead], *at], tirx.all(*bounds)

    return axes, index


def avg_pool(
    rank: int, node: Node, x: Tensor, kernel: Widths, stride: Widths = (), padding: Widths = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Lower avg_pool2d or 3d."""
    kernels = spread(kernel, rank)
    strides, paddings = spread(stride, rank, kernels), spread(padding, rank)
    if not node.out.is_floating_point():
        raise node.deny("an average of ints")
    axes, index = windowed(x, kernels, strides, paddings, [1] * rank)
    within = computed_in(node.dtype)

    def total(i: tuple[Expr, ...]) -> Expr:
        at, inside = index(i)
        return reduced(SUM, tirx.if_then_else(inside, cast(x(*at), within), tirx.const(0, within)), axes)

    def count(i: Index) -> Expr | int:
        if divisor_override is not None:
            return divisor_override
        counts = []
        for at, k, s, p, size in zip(i[-rank:], kernels, strides, paddings, x.shape[-rank:], strict=True):
            start = at * int64(s) - int64(p)
            end = tirx.min(start + int64(k), size + int64(p))
            counts.append(end - start if count_include_pad else tirx.min(end, size) - tirx.max(start, int64(0)))
        return math.prod(counts, start=int64(1))

    totals = compute(node.shape, total)
    return compute(node.shape, lambda i: cast(totals(*i) / cast(count(i), within), node.dtype))


def max_pool(
    rank: int, node: Node, x: Tensor, kernel: Widths, stride: Widths = (), padding: Widths = 0, dilation: Widths = 1,
    _: bool = False,
) -> list[Tensor | None]:  # fmt: skip
    """Lower max_pool2d_with_indices or its 3d variant; a position is one flat index in the last dimensions."""
    kernels = spread(kernel, rank)
    strides, paddings, dilations = spread(stride, rank, kernels), spread(padding, rank), spread(dilation, rank)
    values, kind = node.out[0], dtype(node.out[0])
    axes, index = windowed(x, kernels, strides, paddings, dilations)

    def element(i: Index) -> tuple[Expr, Expr]:
        at, inside = index(i)
        pairs = zip(at[-rank:], x.shape[-rank:], strict=True)
        position = functools.reduce(lambda total, pair: total * pair[1] + pair[0], pairs, int64(0))
        value = tirx.if_then_else(inside, x(*at), lowest(kind))
        return value, tirx.if_then_else(inside, position, tirx.max_value("int64"))

    shape, positions = node.sizes(values.shape), node.used(1)
    largest, at = best(shape, element, axes, kind, largest=True, positions=positions, last_nan=True)
    return [cast_to(largest, kind), at]


WINDOWS: dict[str, Converter] = {
    "convolution": convolution,
    **{f"avg_pool{rank}d": functools.partial(avg_pool, rank) for rank in (2, 3)},
    **{f"max_pool{rank}d_with_indices": functools.partial(max_pool, rank) for rank in (2, 3)},
}
