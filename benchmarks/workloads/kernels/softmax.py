"""Softmax over the last dimension: rows that fit in registers in one pass, wider ones online in two."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton
import triton.language as tl

from benchmarks.workloads.kernels.launch import config, persistent, tuned

WIDEST_ROW = 32768


@tuned(
    config(4, ROWS=2, PER_SM=1),
    [
        config(warps, ROWS=1, PER_SM=per_sm)
        for warps, per_sm in ((8, 4096), (16, 4096), (8, 4), (4, 4), (16, 2), (8, 2), (32, 1))
    ],
    "columns",
)
@triton.jit
def narrow(x, out, rows, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr, PER_SM: tl.constexpr):
    """Process `ROWS` whole rows at a time."""
    at = tl.arange(0, BLOCK)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & (at < columns)[None, :]
        offsets = row.to(tl.int64)[:, None] * columns + at[None, :]
        value = tl.load(x + offsets, mask=keep, other=-float("inf")).to(tl.float32)
        power = tl.exp(value - tl.max(value, 1)[:, None])
        tl.store(out + offsets, power / tl.sum(power, 1)[:, None], mask=keep)


@triton.jit
def online(x, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Return the maximum of one row and the sum of its exponentials relative to that maximum, in one pass."""
    at = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        value = tl.load(x + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
        # Either the old maximum stays or the value is the new one, so one exponential suffices.
        power = tl.exp(-tl.abs(value - top))
        more = tl.where(value > top, total * power + 1.0, total + power)
        total = tl.where(value == -float("inf"), total, more)  # -inf adds nothing, and -inf minus -inf would be NaN
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    highest = tl.max(top, 0)
    return highest, tl.sum(tl.where(top == -float("inf"), 0.0, total * tl.exp(top - highest)), 0)


@tuned(
    config(4, BLOCK=32, STAGES=2),
    [
        config(warps, BLOCK=block, STAGES=stages)
        for warps, stages, block in ((8, 1, 4096), (16, 1, 8192), (16, 3, 4096))
    ],
    "columns",
)
@triton.jit
def wide(x, out, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Read one row for its maximum and sum, and again for its values."""
    row = tl.program_id(0).to(tl.int64) * columns
    highest, total = online(x + row, columns, BLOCK, STAGES)
    at = tl.arange(0, BLOCK)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        keep = start + at < columns
        value = tl.load(x + row + start + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + row + start + at, tl.exp(value - highest) / total, mask=keep)


def softmax(x: torch.Tensor, widest: int = WIDEST_ROW) -> torch.Tensor:
    """Return softmax over the last dimension; rows above `widest` are read twice."""
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    if columns <= widest:
        narrow[persistent(x.device, rows)](x, out, rows, columns, triton.next_power_of_2(columns))
    else:
        wide[(rows,)](x, out, columns)
    return out
