"""RMS norm with a residual, layer norm and its gradients, as persistent programs with several rows each."""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton
import triton.language as tl

from backend_kwargs.rewrites.kernels import layer_norm as layer_norm_kernel
from benchmarks.workloads.kernels.launch import config, persistent, tuned

SMALL = config(4, ROWS=2, PER_SM=1)
# Few wide rows per program keep 16-byte loads in flight; many narrow ones share the weights.
FORWARD = [
    config(warps, ROWS=rows, PER_SM=per_sm)
    for warps, rows, per_sm in ((8, 4, 4096), (4, 1, 4096), (8, 1, 4096), (4, 4, 4), (8, 1, 4), (4, 1, 4), (4, 2, 4))
]
# The sums of two gradients allow few programs per multiprocessor, so the loop prefetches rows.
BACKWARD = [
    config(warps, ROWS=1, PER_SM=per_sm, STAGES=stages)
    for warps, per_sm, stages in (
        (8, 2, 3), (16, 2, 3), (8, 2, 1), (8, 2, 4), (4, 2, 4), (16, 1, 4), (16, 2, 1), (4, 4, 1), (8, 4, 1),
    )
]  # fmt: skip
MOST_PROGRAMS_PER_SM = max(c.kwargs["PER_SM"] for c in BACKWARD)


@tuned(SMALL, FORWARD, "columns")
@triton.jit
def rms_norm_rows(
    x, residual, weight, out, added, rows, columns, eps, BLOCK: tl.constexpr, ROWS: tl.constexpr, PER_SM: tl.constexpr
):
    """Store `x + residual`, and that divided by its root mean square."""
    at = tl.arange(0, BLOCK)
    scale = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & (at < columns)[None, :]
        offsets = row.to(tl.int64)[:, None] * columns + at[None, :]
        value = tl.load(x + offsets, mask=keep, other=0.0).to(tl.float32)
        value += tl.load(residual + offsets, mask=keep, other=0.0).to(tl.float32)
        total = value.to(added.dtype.element_ty)  # normalize the rounded sum, which the next layer gets
        tl.store(added + offsets, total, mask=keep)
        value = total.to(tl.float32)
        root = tl.rsqrt(tl.sum(value * value, 1) / columns + eps)
        tl.store(out + offsets, value * root[:, None] * scale[None, :], mask=keep)


def rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RMS norm of `x + residual` over the last dimension, and that sum."""
    out, added, columns = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // columns
    rms_norm_rows[persistent(x.device, rows)](
        x, residual, weight, out, added, rows, columns, eps, triton.next_power_of_2(columns)
    )
    return out, added


@tuned(SMALL, FORWARD, "columns")
@triton.jit
def layer_norm_rows(
    x,
    weight,
    bias,
    out,
    mean,
    rstd,
    rows,
    columns,
    eps,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PER_SM: tl.constexpr,
):
    """Store normalised rows, and the mean and reciprocal deviation that the gradients need."""
    at = tl.arange(0, BLOCK)
    scale = tl.load(weight + at, mask=at < columns, other=0.0).to(tl.float32)
    shift = tl.load(bias + at, mask=at < columns, other=0.0).to(tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & (at < columns)[None, :]
        offsets = row.to(tl.int64)[:, None] * columns + at[None, :]
        value = tl.load(x + offsets, mask=keep, other=0.0).to(tl.float32)
        centre = tl.sum(value, 1) / columns
        centred = tl.where(keep, value - centre[:, None], 0.0)
        reciprocal = tl.rsqrt(tl.sum(centred * centred, 1) / columns + eps)
        tl.store(out + offsets, centred * reciprocal[:, None] * scale[None, :] + shift[None, :], mask=keep)
        tl.store(mean + row, centre, mask=row < rows)
        tl.store(rstd + row, reciprocal, mask=row < rows)


layer_norm_gradients = tuned(config(4, ROWS=2, PER_SM=1, STAGES=2), BACKWARD, "columns")(
    layer_norm_kernel.layer_norm_gradients
)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layer norm of `x` over the last dimension, and each row's mean and reciprocal deviation."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    out, (mean, rstd) = torch.empty_like(x), torch.empty(2, rows, dtype=torch.float32, device=x.device)
    layer_norm_rows[persistent(x.device, rows)](
        x, weight, bias, out, mean, rstd, rows, columns, eps, triton.next_power_of_2(columns)
    )
    return out, mean, rstd


def layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `x`, weight and bias."""
    grad, columns = grad.contiguous(), x.shape[-1]
    rows, grad_x = x.numel() // columns, torch.empty_like(x)
    launched: list[int] = []

    def grid(meta: dict[str, Any]) -> tuple[int]:
        launched[:] = persistent(x.device, rows)(meta)
        return (launched[0],)

    most = persistent(x.device, rows)({"ROWS": 1, "PER_SM": MOST_PROGRAMS_PER_SM})[0]
    partial = torch.empty(2, most, columns, dtype=torch.float32, device=x.device)
    layer_norm_gradients[grid](
        grad, x, mean, rstd, weight, grad_x, *partial, rows, columns, triton.next_power_of_2(columns)
    )
    of_weight, of_bias = partial[:, : launched[0]].sum(1).to(weight.dtype)
    return grad_x, of_weight, of_bias


class LayerNorm(torch.autograd.Function):
    """Layer norm that saves its input and two numbers per row for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the rows of `x`."""
        out, mean, rstd = forward(x, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the three tensors."""
        return *layer_norm_backward(grad, *ctx.saved_tensors), None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the layer norm of `x` over the last dimension, with its gradients."""
    return LayerNorm.apply(x, weight, bias, eps)
