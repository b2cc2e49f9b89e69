"""Cross-entropy whose forward pass writes the gradient too: logits are read twice and their gradient written once."""
# ruff: noqa: N803  Triton writes constants large.

from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels.launch import config, tuned
from benchmarks.kernels.softmax import online


@tuned(
    config(4, BLOCK=32),
    [config(warps, BLOCK=block) for warps, block in ((8, 4096), (8, 8192), (16, 8192), (32, 16384), (32, 32768))],
    "columns",
)
@triton.jit
def loss_and_gradient(
    logits, target, losses, gradient, rows, columns, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Store one row's loss and the gradient of the mean loss."""
    row = tl.program_id(0)
    start_of_row = row.to(tl.int64) * columns
    wanted = tl.load(target + row)
    highest, total = online(logits + start_of_row, columns, BLOCK)
    tl.store(losses + row, tl.log(total) + highest - tl.load(logits + start_of_row + wanted).to(tl.float32))
    if WITH_GRADIENT:
        at = tl.arange(0, BLOCK)
        # Backwards, for the end of the row is what the caches still hold.
        for back in tl.range(0, columns, BLOCK):
            column = (tl.cdiv(columns, BLOCK) - 1) * BLOCK - back + at
            keep = column < columns
            value = tl.load(logits + start_of_row + column, mask=keep, other=0.0).to(tl.float32)
            share = tl.exp(value - highest) / total
            tl.store(gradient + start_of_row + column, (share - (column == wanted)) / rows, mask=keep)


@triton.jit
def rescale(gradient, factor, count, BLOCK: tl.constexpr):
    """Multiply in place, unless the factor is one, which costs nothing but the look."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(gradient + at, mask=at < count, other=0.0).to(tl.float32)
        tl.store(gradient + at, value * by, mask=at < count)


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy; its gradient may be taken once."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, and keep the gradient where one is wanted."""
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss_and_gradient[(rows,)](logits, target, losses, gradient, rows, columns, gradient is not None)
        ctx.gradient = gradient
        return losses.mean().to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        """Return the gradient of the logits, scaled in place."""
        gradient, ctx.gradient = ctx.gradient, None
        rescale[(triton.cdiv(gradient.numel(), 32768),)](gradient, grad, gradient.numel(), 32768, num_warps=16)
        return gradient, None


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of `logits` [rows, classes]; every target is a class."""
    return CrossEntropy.apply(logits.contiguous(), target)
