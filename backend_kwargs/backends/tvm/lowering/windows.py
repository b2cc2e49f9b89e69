"""Convolutions and pools: each output element is computed from a window of the input."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import te, tirx, topi
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import Converter, Index, Node, cast, compute, computed_in, dtype, int64
from backend_kwargs.backends.tvm.lowering.reductions import best, cast_to, lowest

Widths: TypeAlias = int | Sequence[int]  # one for all dimensions of a window, or one for each


def convolution(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Widths, padding: Widths,
    dilation: Widths, transposed: bool, _: object, groups: int,
) -> Tensor:  # fmt: skip
    """Lower convolution of any rank."""
    within, rank = computed_in(node.dtype), len(x.shape) - 2
    strides, paddings, dilations = (spread(v, rank) for v in (stride, padding, dilation))
    if transposed:
        result = deconvolved(node, x, weight, strides, paddings, dilations, groups, within)
    else:
        layout = "NC" + "DHW"[3 - rank :]
        result = topi.nn.conv(x, weight, strides, paddings, dilations, groups, layout, "", within)
    if bias is None:
        return cast_to(result, node.dtype)
    return compute(node.shape, lambda i: cast(result(*i) + cast(bias(i[1]), within), node.dtype))


def deconvolved(
    node: Node, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int, within: str,
) -> Tensor:  # fmt: skip
    """Return a transposed convolution: each output element gathers the inputs that contribute to it."""
    per_group = weight.shape[1]
    inner = tirx.floordiv(x.shape[1], int64(groups))
    channel = te.reduce_axis((0, inner), "c")
    kernel = [te.reduce_axis((0, size), "k") for size in weight.shape[2:]]

    def element(i: tuple[Expr, ...]) -> Expr:
        group, out = tirx.floordiv(i[1], per_group), tirx.floormod(i[1], per_group)
        at, fits = source_of(i[2:], kernel, x.shape[2:], stride, padding, dilation)
        c = group * inner + channel
        value = cast(x(i[0], c, *at), within) * cast(weight(c, out, *kernel), within)
        return te.sum(tirx.if_then_else(fits, value, tirx.const(0, within)), axis=[channel, *kernel])

    return compute(node.shape, element)


def source_of(
    at: Index, kernel: Sequence[Expr], sizes: Sequence[Expr], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[list[Expr], Expr]:  # fmt: skip
    """Return the window with a given position at a given place of its kernel, and whether there is one."""
    index, fits = [], []
    for i, k, size, s, p, d in zip(at, kernel, sizes, stride, padding, dilation, strict=True):
        reach = i + int64(p) - k * int64(d)
        index.append(tirx.floordiv(reach, int64(s)))
        fits += [tirx.EQ(tirx.floormod(reach, int64(s)), int64(0)), reach >= int64(0), index[-1] < size]
    return index, tirx.all(*fits)


def spread(values: Widths, rank: int, default: Sequence[int] = ()) -> list[int]:
    """Return one value for each dimension of a window."""
    widths = [values] if isinstance(values, int) else list(values)
    widths = widths or list(default)
    return widths * rank if len(widths) == 1 else widths


def windowed(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[list[Expr], Callable[[Index], tuple[list[Expr], Expr]]]:
    """Return the axes of a window, and a function from an output index to the input's and whether it is not padding."""
    axes = [te.reduce_axis((0, int64(k)), "w") for k in kernel]
    lead = len(x.shape) - len(kernel)

    def index(i: Index) -> tuple[list[Expr], Expr]:
        at = [
            j * int64(s) + a * int64(d) - int64(p)
            for j, a, s, p, d in zip(i[lead:], axes, stride, padding, dilation, strict=True)
        ]
        bounds = [tirx.all(j >= int64(0), j < size) for j, size in zip(at, x.shape[lead:], strict=True)]
        return [*i[:lead], *at], tirx.all(*bounds)

    return axes, index


def avg_pool(rank: int) -> Converter:
    """Return a converter of avg_pool2d or 3d."""

    def convert(
        node: Node, x: Tensor, kernel: Widths, stride: Widths = (), padding: Widths = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:  # fmt: skip
        kernels = spread(kernel, rank)
        strides, paddings = spread(stride, rank, kernels), spread(padding, rank)
        if not node.out.is_floating_point():
            raise node.deny("an average of ints")
        axes, index = windowed(x, kernels, strides, paddings, [1] * rank)

        def count(i: Index) -> Expr | int:
            if divisor_override is not None:
                return divisor_override
            counts = [
                covered(j, k, s, p, size, count_include_pad)
                for j, k, s, p, size in zip(i[-rank:], kernels, strides, paddings, x.shape[-rank:], strict=True)
            ]
            return math.prod(counts, start=int64(1))

        return averaged(node, x, axes, index, count)

    return convert


def averaged(
    node: Node, x: Tensor, axes: Sequence[Expr], index: Callable[[Index], tuple[list[Expr], Expr]],
    count: Callable[[Index], Expr | int],
) -> Tensor:  # fmt: skip
    """Return the sum over windows of what `index` says is inside, divided by `count`."""
    within = computed_in(node.dtype)

    def total(i: tuple[Expr, ...]) -> Expr:
        at, inside = index(i)
        return te.sum(tirx.if_then_else(inside, cast(x(*at), within), tirx.const(0, within)), axis=axes)

    totals = compute(node.shape, total)
    return compute(node.shape, lambda i: cast(totals(*i) / cast(count(i), within), node.dtype))


def covered(at: Expr, kernel: int, stride: int, padding: int, size: Expr, with_padding: bool) -> Expr:
    """Return the number of a window's elements that count along one dimension."""
    start = at * int64(stride) - int64(padding)
    end = tirx.min(start + int64(kernel), size + int64(padding))
    if with_padding:
        return end - start
    return tirx.min(end, size) - tirx.max(start, int64(0))


def max_pool(rank: int) -> Converter:
    """Return a converter of max_pool2d_with_indices or its 3d variant."""

    def convert(
        node: Node, x: Tensor, kernel: Widths, stride: Widths = (), padding: Widths = 0, dilation: Widths = 1,
        _: bool = False,
    ) -> list[Tensor | None]:  # fmt: skip
        kernels = spread(kernel, rank)
        strides, paddings, dilations = spread(stride, rank, kernels), spread(padding, rank), spread(dilation, rank)
        values, kind = node.out[0], dtype(node.out[0])
        axes, index = windowed(x, kernels, strides, paddings, dilations)

        def element(i: tuple[Expr, ...]) -> tuple[Expr, Expr]:
            at, inside = index(i)
            value = tirx.if_then_else(inside, x(*at), lowest(kind))
            return value, tirx.if_then_else(inside, position_in(at, x.shape, rank), tirx.max_value("int64"))

        shape, positions = node.sizes(values.shape), node.used(1)
        largest, at = best(shape, element, axes, kind, largest=True, positions=positions, last_nan=True)
        return [cast_to(largest, kind), at]

    return convert


def position_in(at: Index, shape: Sequence[Expr], rank: int) -> Expr:
    """Return a position in the last dimensions as one flat index."""
    pairs = zip(at[-rank:], shape[-rank:], strict=True)
    return functools.reduce(lambda total, pair: total * pair[1] + pair[0], pairs, int64(0))


def max_pool_backward(
    node: Node, grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Widths, padding: Widths, dilation: Widths,
    _: bool, indices: Tensor,
) -> Tensor:  # fmt: skip
    """Lower max_pool2d_with_indices_backward: each input element gathers from the windows that chose it."""
    rank = len(kernel)
    strides, paddings, dilations = spread(stride, rank, kernel), spread(padding, rank), spread(dilation, rank)
    within, lead = computed_in(node.dtype), len(x.shape) - rank
    axes = [te.reduce_axis((0, int64(k)), "w") for k in kernel]

    def element(i: tuple[Expr, ...]) -> Expr:
        at, fits = source_of(i[lead:], axes, grad.shape[lead:], strides, paddings, dilations)
        window = (*i[:lead], *at)
        chose = tirx.EQ(tirx.if_then_else(fits, indices(*window), int64(-1)), position_in(i, x.shape, rank))
        return te.sum(tirx.if_then_else(chose, cast(grad(*window), within), tirx.const(0, within)), axis=axes)

    return cast_to(compute(node.shape, element), node.dtype)


def avg_pool_backward(
    node: Node, grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Widths, padding: Widths, _: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    """Lower avg_pool2d_backward: each input element gathers its share of the windows over it."""
    rank = len(kernel)
    strides, paddings = spread(stride, rank, kernel), spread(padding, rank)
    within, lead = computed_in(node.dtype), len(x.shape) - rank
    axes = [te.reduce_axis((0, int64(k)), "w") for k in kernel]

    def element(i: tuple[Expr, ...]) -> Expr:
        at, fits = source_of(i[lead:], axes, grad.shape[lead:], strides, paddings, [1] * rank)
        counts = [
            covered(j, k, s, p, size, count_include_pad)
            for j, k, s, p, size in zip(at, kernel, strides, paddings, x.shape[lead:], strict=True)
        ]
        count = int64(divisor_override) if divisor_override else math.prod(counts, start=int64(1))
        share = cast(grad(*i[:lead], *at), within) / cast(count, within)
        return te.sum(tirx.if_then_else(fits, share, tirx.const(0, within)), axis=axes)

    return cast_to(compute(node.shape, element), node.dtype)


def adaptive_avg_pool(rank: int) -> Converter:
    """Return a converter of _adaptive_avg_pool2d or 3d, whose windows may differ in size by one."""

    def convert(node: Node, x: Tensor, _: object) -> Tensor:
        sizes = list(zip(node.fakes[0].shape[-rank:], node.out.shape[-rank:], strict=True))
        if not all(isinstance(n, int) for pair in sizes for n in pair):
            raise node.deny("symbolic sizes")
        lead = len(x.shape) - rank
        # The largest number of elements in a window.
        axes = [te.reduce_axis((0, int64(-(-n // m) + (n % m != 0))), "w") for n, m in sizes]

        def bounds(i: Index) -> list[tuple[Expr, Expr]]:
            return [
                (
                    tirx.floordiv(j * int64(n), int64(m)),
                    tirx.floordiv((j + int64(1)) * int64(n) + int64(m - 1), int64(m)),
                )
                for j, (n, m) in zip(i[lead:], sizes, strict=True)
            ]

        def index(i: Index) -> tuple[list[Expr], Expr]:
            at = [start + a for (start, _), a in zip(bounds(i), axes, strict=True)]
            inside = tirx.all(*(j < end for j, (_, end) in zip(at, bounds(i), strict=True)))
            return [*i[:lead], *at], inside

        def count(i: Index) -> Expr:
            return math.prod((end - start for start, end in bounds(i)), start=int64(1))

        return averaged(node, x, axes, index, count)

    return convert


WINDOWS: dict[str, Converter] = {
    "convolution": convolution,
    "avg_pool2d": avg_pool(2),
    "avg_pool3d": avg_pool(3),
    "avg_pool2d_backward": avg_pool_backward,
    "avg_pool3d_backward": avg_pool_backward,
    "_adaptive_avg_pool2d": adaptive_avg_pool(2),
    "_adaptive_avg_pool3d": adaptive_avg_pool(3),
    "max_pool2d_with_indices": max_pool(2),
    "max_pool3d_with_indices": max_pool(3),
    "max_pool2d_with_indices_backward": max_pool_backward,
}
