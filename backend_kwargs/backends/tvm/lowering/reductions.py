"""Converters of reductions (sums, extrema, products, convolutions, pools), and of views and rearrangements.

A rearrangement of elements is a function from the output's index to the input's.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from tvm import te, tirx, topi
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.partitioned import Unsupported
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
    maximum,
    minimum,
    replaced,
)
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

    squares = reduce(x, over, True, SUM, within, square)
    free = tirx.max(count - cast(1.0 * correction, within), number(0.0, within))

    def at(i: Index) -> Index:
        rest = iter(i)
        return i if keepdim else [0 if d in over else next(rest) for d in range(len(x.shape))]

    def unless_infinite(i: Index) -> Expr:
        # As ATen's running mean, which is nan after an infinity.
        return cast(tirx.Select(isnan(squares(*at(i))), squares(*at(i)), average(*at(i))), dtype)

    shape = node.sizes(tree_leaves(node.out)[0].shape)
    variance = compute(shape, lambda i: cast(squares(*at(i)) / free, dtype), "variance")
    return [variance, compute(shape, unless_infinite)]


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
        raise Unsupported(node.fx, "a transposed convolution" if transposed else "each sum has one term")
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
        raise Unsupported(node.fx, "an average of ints")
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


# The same memory with another shape: TVM's own operator, which copies nothing.
RESHAPED = frozenset({"view", "_reshape_copy", "view_copy", "squeeze", "unsqueeze"})
# These return their input: the runner copies an output that is an input.
SAME = frozenset({"alias", "clone", "lift_fresh_copy"})


def permute(node: Node, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Lower permute."""
    order = [d % len(dims) for d in dims]
    return compute(node.shape, lambda i: x(*(i[order.index(d)] for d in range(len(order)))))


def start_of(node: Node, start: object, size: int | torch.SymInt) -> Expr:
    """Return where a slice starts: sizes come from the fake tensors, so only bounds need care."""
    if start is None:
        return 0
    if not isinstance(start, int):
        raise Unsupported(node.fx, "a slice that starts at a symbolic size")
    (length,) = node.sizes([size])
    return tirx.max(length + start, int64(0)) if start < 0 else tirx.min(int64(start), length)


def slice_(node: Node, x: Tensor, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> Tensor:
    """Lower slice."""
    at = dim % len(x.shape)
    first = start_of(node, node.fakes[2] if len(node.fakes) > 2 else None, node.fakes[0].shape[at])
    return compute(node.shape, lambda i: x(*replaced(i, at, first + i[at] * step)))


def select(node: Node, x: Tensor, dim: int, index: object) -> Tensor:
    """Lower select."""
    at = dim % len(x.shape)
    if not isinstance(index, int):
        raise Unsupported(node.fx, "a symbolic index")
    index = index if index >= 0 else node.size(node.fakes[0].shape[at]) + index
    return compute(node.shape, lambda i: x(*i[:at], index, *i[at:]))


def cat(node: Node, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Lower cat."""
    at = dim % node.out.dim()
    return topi.concatenate([cast_to(x, node.dtype) for x in tensors], at)


def split(node: Node, x: Tensor, _: object, dim: int = 0) -> list[Tensor | None]:
    """Lower split_with_sizes: one slice for each output."""
    at = dim % len(x.shape)
    begins = itertools.accumulate((node.size(out.shape[at]) for out in node.out), initial=0)
    moved = [lambda i, begin=begin: x(*replaced(i, at, i[at] + begin)) for begin in begins]
    return [compute(node.sizes(out.shape), part) for out, part in zip(node.out, moved, strict=False)]


def flip(node: Node, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Lower flip."""
    return functools.reduce(topi.flip, dims, x)


def repeat(node: Node, x: Tensor, _: object) -> Tensor:
    """Lower repeat: the index modulo the repeated tensor's sizes."""
    lead = node.out.dim() - len(x.shape)
    return compute(node.shape, lambda i: x(*(tirx.floormod(j, s) for j, s in zip(i[lead:], x.shape, strict=True))))


def roll(node: Node, x: Tensor, shifts: Sequence[Expr], dims: Sequence[int] = ()) -> Tensor:
    """Lower roll: the element at the index minus the shift, wrapped around."""
    if not dims and len(x.shape) > 1:
        raise Unsupported(node.fx, "a roll of all dimensions as one")
    moved = [int64(0)] * len(x.shape)
    for dim, shift in zip(dims or (0,), shifts, strict=True):
        moved[dim] += shift

    def element(i: tuple[Expr, ...]) -> Expr:
        return x(*(tirx.floormod(j - by, size) for j, by, size in zip(i, moved, x.shape, strict=True)))

    return compute(node.shape, element)


def diagonal(node: Node, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Lower diagonal, which becomes the last dimension."""
    first, second = dim1 % len(x.shape), dim2 % len(x.shape)

    def element(i: tuple[Expr, ...]) -> Expr:
        rest, along = iter(i[:-1]), i[-1]
        at = {first: along + max(-offset, 0), second: along + max(offset, 0)}
        return x(*(at[d] if d in at else next(rest) for d in range(len(x.shape))))

    return compute(node.shape, element)


def constant_pad(node: Node, x: Tensor, pad: Sequence[Expr], value: float = 0) -> Tensor:
    """Lower constant_pad_nd; a negative pad crops."""
    before = [0] * (len(x.shape) - len(pad) // 2) + node.sizes(node.fakes[1][::2])[::-1]

    def element(i: tuple[Expr, ...]) -> Expr:
        source = [j - b for j, b in zip(i, before, strict=True)]
        within = [tirx.all(j >= 0, j < s) for j, s in zip(source, x.shape, strict=True)]
        return tirx.if_then_else(tirx.all(*within), x(*source), cast(value, node.dtype)) if within else x()

    return compute(node.shape, element)


def arange(node: Node, *_: object, **__: object) -> Tensor:
    """Lower arange.start_step."""
    start, _end, step = (*node.fakes, 1)[:3] if len(node.fakes) > 1 else (0, node.fakes[0], 1)
    within = "int64" if all(isinstance(n, int | torch.SymInt) for n in (start, step)) else "float64"
    first, by = (cast(node.size(n), within) for n in (start, step))
    return compute(node.shape, lambda i: cast(first + cast(i[0], within) * by, node.dtype))


def chosen(index: Expr, size: Expr) -> Expr:
    """Return a valid position for an index, which counts from the end if it is negative."""
    index = cast(index, "int64")
    from_front = tirx.Select(index < int64(0), index + size, index)
    return tirx.max(tirx.min(from_front, size - int64(1)), int64(0))


def index(node: Node, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Lower an index by tensors that torch knows to be within bounds.

    Their common shape replaces the indexed dimensions, or comes first if these are not adjacent.
    """
    fakes = [f for f in node.fakes[1] if f is not None]
    if any(f.dtype in (torch.bool, torch.uint8) for f in fakes):
        raise Unsupported(node.fx, "a mask as index")
    places = [d for d, t in enumerate(indices) if t is not None]
    between = places[-1] - places[0] + 1 != len(places)
    front, count = 0 if between else places[0], max(f.dim() for f in fakes)

    def element(i: tuple[Expr, ...]) -> Expr:
        common, rest = i[front : front + count], iter(i[:front] + i[front + count :])
        return x(
            *(chosen(load(indices[d], common), x.shape[d]) if d in places else next(rest) for d in range(len(x.shape)))
        )

    return compute(node.shape, element)


VIEWS: dict[str, Converter] = {
    "permute": permute,
    "slice": slice_,
    "select": select,
    "cat": cat,
    "split_with_sizes": split,
    "flip": flip,
    "repeat": repeat,
    "roll": roll,
    "diagonal": diagonal,
    "constant_pad_nd": constant_pad,
    "arange": arange,
    "_unsafe_index": index,
}
