"""Sums of gathered rows; the configuration is the fastest of those timed on an H200."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import Wrap, as_it_is, on_device_of

# A warp reads a row of up to 128 columns. Triton unrolls the loop: unrolled by Python, it took Inductor twice as long.
WIDEST, NARROW, UNROLLED = 1024, 128, 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def summed(  # type: ignore[no-untyped-def]
    table, indices, weights, out, sums, length, rows, width, row_stride, index_0, index_1, weight_0, weight_1, padding,
    WEIGHTED: tl.constexpr, PADDED: tl.constexpr, MEAN: tl.constexpr, SUMS: tl.constexpr, WIDTH: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Store some columns of some sums; rows whose index is `padding` do not count, and one that is too large is nan."""
    parts = tl.cdiv(width, WIDTH)
    at = tl.cast(tl.program_id(0) // parts, tl.int64) * SUMS + tl.arange(0, SUMS)
    column = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    inside, in_width = at < sums, (column < width)[None, :]
    total = tl.zeros((SUMS, WIDTH), tl.float32)
    count = tl.zeros((SUMS,), tl.float32)
    at_index, at_weight = indices + at * index_0, weights + at * weight_0  # which move on, as offsets may need 64 bits
    for _ in tl.range(0, length, loop_unroll_factor=UNROLL):
        index = tl.load(at_index, mask=inside, other=0).to(tl.int64)
        counts = inside & (index != padding) if PADDED else inside
        index = tl.where(index < 0, index + rows, index)
        exists = (index >= 0) & (index < rows)
        missing = tl.where(counts & ~exists, float("nan"), 0.0)[:, None]
        at_row = table + index[:, None] * row_stride + column[None, :]
        value = tl.load(at_row, mask=(counts & exists)[:, None] & in_width, other=0.0).to(tl.float32) + missing
        if WEIGHTED:
            value *= tl.load(at_weight, mask=counts, other=0.0).to(tl.float32)[:, None]
            at_weight += weight_1
        total += value
        count += counts.to(tl.float32)
        at_index += index_1
    if MEAN:
        total = total / tl.maximum(count, 1.0)[:, None]
    tl.store(out + at[:, None] * width + column[None, :], total, mask=inside[:, None] & in_width)


def sum_of_rows(
    table: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor | None, padding: int | None, out: torch.Tensor,
    *, mean: bool, wrap: Wrap = as_it_is,
) -> torch.Tensor:  # fmt: skip
    """Write sums or means of the rows of `table` [rows, width] at `indices` [sums, length] to `out` and return it.

    `weights` [sums, length] multiply the rows. Those whose index is `padding` are left out.
    """
    sums, length = indices.shape
    rows, width = table.shape
    block = min(triton.next_power_of_2(width), WIDEST)
    warps = 8 if block <= NARROW else 4
    at_once = max(min(warps, WIDEST // block), 32 * warps // block)
    of_weights = (0, 0) if weights is None else weights.stride()
    with on_device_of(table):
        wrap(summed)[(triton.cdiv(sums, at_once) * triton.cdiv(width, block),)](
            table, indices, table if weights is None else weights, out, sums, length, rows, width, table.stride(0),
            *indices.stride(), *of_weights, 0 if padding is None else padding, weights is not None, padding is not None,
            mean, at_once, block, min(length, UNROLLED), num_warps=warps,
        )  # fmt: skip
    return out
