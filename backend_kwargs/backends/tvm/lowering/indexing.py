"""Indexing: by indices that torch itself computed, and by slices.

Indices that may be out of bounds run in eager, which raises: TVM's code would read any memory there.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tvm import tirx
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import Converter, Node, axis, cast, compute, int64, load, replaced


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
        raise node.deny("a mask as index")
    places = [d for d, t in enumerate(indices) if t is not None]
    between = places[-1] - places[0] + 1 != len(places)
    front, count = 0 if between else places[0], max(f.dim() for f in fakes)

    def element(i: tuple[Expr, ...]) -> Expr:
        common, rest = i[front : front + count], iter(i[:front] + i[front + count :])
        return x(
            *(chosen(load(indices[d], common), x.shape[d]) if d in places else next(rest) for d in range(len(x.shape)))
        )

    return compute(node.shape, element)


def slice_scatter(
    node: Node, x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: object = None, step: int = 1
) -> Tensor:
    """Lower slice_scatter: the source inside the slice."""
    at = axis(dim, len(x.shape))
    size, length = node.fakes[0].shape[at], source.shape[at]
    if not isinstance(size, int) or not isinstance(start or 0, int):
        raise node.deny("a slice of symbolic size")
    first = start or 0
    first = min(max(first + size if first < 0 else first, 0), size)

    def element(i: tuple[Expr, ...]) -> Expr:
        apart = i[at] - int64(first)
        place = tirx.floordiv(apart, int64(step))
        within = tirx.all(apart >= int64(0), place < length, tirx.EQ(tirx.floormod(apart, int64(step)), int64(0)))
        inside = source(*replaced(i, at, place))
        return tirx.if_then_else(within, cast(inside, node.dtype), x(*i))

    return compute(node.shape, element)


INDEXING: dict[str, Converter] = {
    "_unsafe_index": index,
    "slice_scatter": slice_scatter,
}
