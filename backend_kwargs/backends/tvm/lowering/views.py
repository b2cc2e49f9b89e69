"""Rearrangements of elements: each operator as a function from the output's index to the input's.

Indices that may be out of bounds run in eager, which raises: TVM's code would read any memory there.
"""

import functools
import itertools
from collections.abc import Sequence

import torch
from tvm import tirx, topi
from tvm.te import Tensor
from tvm.tirx import Expr

from backend_kwargs.backends.tvm.lowering.node import (
    Converter,
    Node,
    axis,
    cast,
    cast_to,
    compute,
    int64,
    load,
    replaced,
)

# The same memory with another shape: TVM's own operator, which copies nothing.
RESHAPED = frozenset({"view", "_reshape_copy", "view_copy", "squeeze", "unsqueeze"})
# These return their input: the runner copies an output that is an input.
SAME = frozenset({"alias", "clone", "lift_fresh_copy"})


def rank(node: Node) -> int:
    """Return the rank of the first input."""
    return len(node.fakes[0].shape)


def permute(node: Node, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Lower permute."""
    order = [axis(d, len(dims)) for d in dims]
    return compute(node.shape, lambda i: x(*(i[order.index(d)] for d in range(len(order)))))


def start_of(node: Node, start: object, size: int | torch.SymInt) -> Expr:
    """Return where a slice starts: sizes come from the fake tensors, so only bounds need care."""
    if start is None:
        return 0
    if not isinstance(start, int):
        raise node.deny("a slice that starts at a symbolic size")
    (length,) = node.sizes([size])
    return tirx.max(length + start, int64(0)) if start < 0 else tirx.min(int64(start), length)


def slice_(node: Node, x: Tensor, dim: int = 0, start: object = None, end: object = None, step: int = 1) -> Tensor:
    """Lower slice."""
    at = axis(dim, rank(node))
    first = start_of(node, node.fakes[2] if len(node.fakes) > 2 else None, node.fakes[0].shape[at])
    return compute(node.shape, lambda i: x(*replaced(i, at, first + i[at] * step)))


def select(node: Node, x: Tensor, dim: int, index: object) -> Tensor:
    """Lower select."""
    at = axis(dim, rank(node))
    if not isinstance(index, int):
        raise node.deny("a symbolic index")
    index = index if index >= 0 else node.size(node.fakes[0].shape[at]) + index
    return compute(node.shape, lambda i: x(*i[:at], index, *i[at:]))


def cat(node: Node, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Lower cat."""
    at = axis(dim, node.out.dim())
    return topi.concatenate([cast_to(x, node.dtype) for x in tensors], at)


def split(node: Node, x: Tensor, _: object, dim: int = 0) -> list[Tensor | None]:
    """Lower split_with_sizes: one slice for each output."""
    at = axis(dim, rank(node))
    begins = itertools.accumulate((node.size(out.shape[at]) for out in node.out), initial=0)
    moved = [lambda i, begin=begin: x(*replaced(i, at, i[at] + begin)) for begin in begins]
    return [compute(node.sizes(out.shape), part) for out, part in zip(node.out, moved, strict=False)]


def flip(node: Node, x: Tensor, dims: Sequence[int]) -> Tensor:
    """Lower flip."""
    return functools.reduce(topi.flip, dims, x)


def repeat(node: Node, x: Tensor, _: object) -> Tensor:
    """Lower repeat: the index modulo the repeated tensor's sizes."""
    lead = node.out.dim() - rank(node)
    return compute(node.shape, lambda i: x(*(tirx.floormod(j, s) for j, s in zip(i[lead:], x.shape, strict=True))))


def roll(node: Node, x: Tensor, shifts: Sequence[Expr], dims: Sequence[int] = ()) -> Tensor:
    """Lower roll: the element at the index minus the shift, wrapped around."""
    if not dims and rank(node) > 1:
        raise node.deny("a roll of all dimensions as one")
    moved = dict.fromkeys(range(rank(node)), int64(0))
    for dim, shift in zip(dims or (0,), shifts, strict=True):
        moved[axis(dim, rank(node))] += shift

    def element(i: tuple[Expr, ...]) -> Expr:
        return x(*(tirx.floormod(j - moved[d], size) for d, (j, size) in enumerate(zip(i, x.shape, strict=True))))

    return compute(node.shape, element)


def diagonal(node: Node, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Lower diagonal, which becomes the last dimension."""
    first, second = axis(dim1, rank(node)), axis(dim2, rank(node))

    def element(i: tuple[Expr, ...]) -> Expr:
        rest, along = iter(i[:-1]), i[-1]
        at = {first: along + max(-offset, 0), second: along + max(offset, 0)}
        return x(*(at[d] if d in at else next(rest) for d in range(rank(node))))

    return compute(node.shape, element)


def constant_pad(node: Node, x: Tensor, pad: Sequence[Expr], value: float = 0) -> Tensor:
    """Lower constant_pad_nd; a negative pad crops."""
    before = [0] * (rank(node) - len(pad) // 2) + node.sizes(node.fakes[1][::2])[::-1]

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
