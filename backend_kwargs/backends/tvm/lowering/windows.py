"""Convolutions and pools: each output element is computed from a window of the input."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import tirx, topi
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
    is_one,
)
from backend_kwargs.backends.tvm.lowering.reductions import SUM, axes_over, best, cast_to, lowest, reduced

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

    def element(i: tuple[Expr, ...]) -> tuple[Expr, Expr]:
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
