"""Triton kernels of our own: cross-entropy, whose forward pass reads the logits once and whose backward pass once more."""
# ruff: noqa: N803  Triton writes constants large.

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK, WARPS = 8192, 16


@triton.jit  # type: ignore[misc]
def _losses(logits, target, losses, lse, columns, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one row's loss and the logarithm of its sum of exponentials."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    start_of_row = logits + tl.cast(row, tl.int64) * stride
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, columns, BLOCK):
        value = tl.load(start_of_row + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, value)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp2((top - base) * LOG2_E) + tl.exp2((value - base) * LOG2_E)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp2((top - highest) * LOG2_E), 0)
    logarithm = tl.log(total) + highest
    wanted = tl.load(target + row)
    counts = wanted != ignore_index
    picked = tl.load(start_of_row + tl.where(counts, wanted, 0)).to(tl.float32)
    tl.store(lse + row, logarithm)
    tl.store(losses + row, tl.where(counts, logarithm - picked, 0.0))


@triton.jit  # type: ignore[misc]
def _gradients(factor, logits, target, lse, out, columns, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one block of one row's gradient."""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    start_of_row = tl.cast(row, tl.int64) * stride
    wanted = tl.load(target + row)
    by = tl.where(wanted != ignore_index, tl.load(factor).to(tl.float32), 0.0)
    value = tl.load(logits + start_of_row + column, mask=keep, other=0.0, eviction_policy="evict_first").to(tl.float32)
    share = tl.exp2((value - tl.load(lse + row)) * LOG2_E)
    share = tl.where(column == wanted, share - 1.0, share) * by
    at = tl.cast(row, tl.int64) * columns + column
    tl.store(out + at, share, mask=keep, cache_modifier=".cs")


def loss_of_rows(logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's loss, 0 where its target is to be ignored, and the logarithm of its sum of exponentials."""
    rows, columns = logits.shape
    losses, lse = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(BLOCK, triton.next_power_of_2(columns))
    kernel: Any = _losses[(rows,)]
    with torch.cuda.device(logits.device):
        kernel(logits, target, losses, lse, columns, logits.stride(0), ignore_index, block, num_warps=_warps(block))
    return losses, lse


def gradient_of_rows(
    factor: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, ignore_index: int
) -> torch.Tensor:
    """Return the gradient of the sum of the rows' losses, times `factor`."""
    rows, columns = logits.shape
    out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    kernel: Any = _gradients[(triton.cdiv(columns, block), rows)]
    with torch.cuda.device(logits.device):
        kernel(
            factor, logits, target, lse, out, columns, logits.stride(0), ignore_index, block, num_warps=_warps(block)
        )
    return out


def _warps(block: int) -> int:
    return max(min(WARPS, block // 512), 1)
