"""Cross-entropy whose forward pass writes the gradient too: logits are read twice and their gradient written once."""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.workloads.kernels.launch import config, multiprocessors, persistent, tuned
from benchmarks.workloads.kernels.softmax import online

LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_SM = 8
RESCALED = 8192  # numbers at a time


# Few programs with prefetching keep few rows in flight, so that a row's second read may hit the L2.
@tuned(
    config(4, BLOCK=32, STAGES=2, PER_SM=1),
    [
        config(warps, BLOCK=block, STAGES=stages, PER_SM=per_sm)
        for warps, block, stages, per_sm in (
            (8, 4096, 1, 4096), (16, 8192, 4, 1), (8, 4096, 4, 2), (16, 4096, 4, 2), (8, 4096, 4, 1), (8, 4096, 3, 4),
            (32, 8192, 4, 1), (16, 8192, 1, 4096), (32, 16384, 1, 4096),
        )
    ],
    "columns",
)  # fmt: skip
@triton.jit
def loss_and_gradient(
    logits,
    target,
    losses,
    gradient,
    rows,
    columns,
    WITH_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Store each row's loss and the gradient of the mean loss."""
    at = tl.arange(0, BLOCK)
    mine = 1.0 / rows
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start_of_row = tl.cast(row, tl.int64) * columns
        wanted = tl.load(target + row)
        highest, total = online(logits + start_of_row, columns, BLOCK, STAGES)
        tl.store(losses + row, tl.log(total) + highest - tl.load(logits + start_of_row + wanted).to(tl.float32))
        if WITH_GRADIENT:
            less = tl.log2(
                total * rows
            )  # both divisions in the exponent, since special functions are as scarce as bytes
            # Backwards, since the caches still have the end of the row; and stored bypassing them.
            for back in tl.range(0, columns, BLOCK, num_stages=STAGES):
                column = (tl.cdiv(columns, BLOCK) - 1) * BLOCK - back + at
                keep = column < columns
                value = tl.load(logits + start_of_row + column, mask=keep, other=0.0).to(tl.float32)
                share = tl.exp2((value - highest) * LOG2_E - less)
                share = tl.where(column == wanted, share - mine, share)
                tl.store(gradient + start_of_row + column, share, mask=keep, cache_modifier=".cs")


@triton.jit
def rescale(gradient, factor, count, BLOCK: tl.constexpr):
    """Multiply in place, unless the factor is one, where a few programs only read it."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(gradient + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(gradient + at, value * by, mask=at < count)


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy; its gradient may be taken once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, and save the gradient if it is required."""
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss_and_gradient[persistent(logits.device, rows)](
            logits, target, losses, gradient, rows, columns, gradient is not None
        )
        ctx.gradient = gradient
        return losses.mean().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """Return the gradient of the logits, scaled in place."""
        gradient, ctx.gradient = ctx.gradient, None
        programs = multiprocessors(gradient.device) * PROGRAMS_PER_SM
        rescale[(programs,)](gradient, grad, gradient.numel(), RESCALED, num_warps=8)
        return gradient, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of `logits` [rows, classes]; every target is a class."""
    return CrossEntropy.apply(logits.contiguous(), target)
