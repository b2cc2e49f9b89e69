"""Rows in the order of their indices, and reductions of those that share one; timed on an H200."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import Wrap, as_it_is, on_device_of

INDICES = 256  # that a program orders
WIDEST, NUMBERS = 256, 1024  # columns of a program, and numbers that a warp reads at once
MANY, NARROW, AT_ONCE = 512, 32, 128  # of so many rows in a segment, several warps read some columns of some at once

SIGNS = {"amax": 1, "amin": -1}


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def counted(index, counts, ranks, length, segments, stride, INDICES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the rows of each segment, one place further, and store how many of its segment came before each row."""
    at = tl.program_id(0) * INDICES + tl.arange(0, INDICES)
    segment = tl.load(index + at * stride, mask=at < length, other=-1).to(tl.int64)
    exists = (segment >= 0) & (segment < segments)
    rank = tl.atomic_add(counts + segment + 1, 1, mask=exists, sem="relaxed")
    tl.store(ranks + at, rank, mask=exists)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def placed(  # type: ignore[no-untyped-def]
    index, starts, ranks, order, length, segments, stride, INDICES: tl.constexpr,
):  # fmt: skip
    """Store each row behind those of its segment that came before it."""
    at = tl.program_id(0) * INDICES + tl.arange(0, INDICES)
    segment = tl.load(index + at * stride, mask=at < length, other=-1).to(tl.int64)
    exists = (segment >= 0) & (segment < segments)
    rank = tl.load(starts + segment, mask=exists, other=0) + tl.load(ranks + at, mask=exists, other=0)
    tl.store(order + rank, at, mask=exists)


def rows_in_order(index: torch.Tensor, segments: int, wrap: Wrap = as_it_is) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of each segment in turn, in any order within it, and where in them each begins, and the end."""
    (length,) = index.shape
    counts = index.new_zeros(segments + 1, dtype=torch.int32)
    ranks, order = (index.new_empty(length, dtype=torch.int32) for _ in range(2))
    grid = (triton.cdiv(length, INDICES),)
    with on_device_of(index):
        wrap(counted)[grid](index, counts, ranks, length, segments, index.stride(0), INDICES)
        starts = counts.cumsum(0, dtype=torch.int32)
        wrap(placed)[grid](index, starts, ranks, order, length, segments, index.stride(0), INDICES)
    return order, starts


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def larger(one, other):  # type: ignore[no-untyped-def]
    """Return the larger one, or nan."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reduced(  # type: ignore[no-untyped-def]
    own, src, order, starts, out, segments, length, width, src_row, SIGN: tl.constexpr, MEAN: tl.constexpr,
    INCLUDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store some columns of the largest row of a segment, the smallest with a `SIGN` of -1, or the sum with 0.

    Its own row counts if it has no other, or if that is `INCLUDED`. All are nan if a row is of no segment: then the
    last one ends too early.
    """
    parts = tl.cdiv(width, WIDTH)
    segment = tl.cast(tl.program_id(0) // parts, tl.int64)
    column = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    first, end = tl.load(starts + segment), tl.load(starts + segment + 1)
    missing = tl.where(tl.load(starts + segments) == length, 0.0, float("nan"))
    nothing: tl.constexpr = -float("inf") if SIGN else 0.0
    total = tl.full((ROWS, WIDTH), nothing, tl.float32)
    for at in range(first, end, ROWS):
        entry = at + tl.arange(0, ROWS)
        row = tl.load(order + entry, mask=entry < end, other=0).to(tl.int64)
        inside = (entry < end)[:, None] & (column < width)[None, :]
        value = tl.load(src + row[:, None] * src_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total = larger(total, tl.where(inside, value * SIGN, nothing)) if SIGN else total + value
    counts_own = column < (width if INCLUDED else tl.where(first == end, width, 0))
    mine = tl.load(own + segment * width + column, mask=counts_own, other=0.0).to(tl.float32)
    if SIGN:
        made = larger(tl.reduce(total, 0, larger), tl.where(counts_own, mine * SIGN, nothing)) * SIGN
    else:
        made = tl.sum(total, 0) + mine
        if MEAN:
            made = made / tl.maximum(end - first + (1 if INCLUDED else 0), 1).to(tl.float32)
    tl.store(out + segment * width + column, (made + missing).to(out.dtype.element_ty), mask=column < width)


def reduce_segments(
    own: torch.Tensor, src: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, reduction: str,
    *, included: bool, mean_rows: int, wrap: Wrap = as_it_is,
) -> torch.Tensor:  # fmt: skip
    """Write reductions of the rows of `src` in each segment to `out` and return it.

    The rows of segment i are those of `order` from `starts[i]` to `starts[i + 1]`, `mean_rows` on average. If there are
    none, or it is `included`, the row of `own` counts.
    """
    segments, width = own.shape
    are_many = mean_rows > MANY
    block = min(triton.next_power_of_2(width), NARROW if are_many else WIDEST)
    rows = AT_ONCE if are_many else max(min(triton.next_power_of_2(mean_rows), NUMBERS // block), 1)
    with on_device_of(src):
        wrap(reduced)[(segments * triton.cdiv(width, block),)](
            own, src, order, starts, out, segments, src.shape[0], width, src.stride(0), SIGNS.get(reduction, 0),
            reduction == "mean", included, rows, block, num_warps=8 if are_many else 1,
        )  # fmt: skip
    return out
