"""Layer norm's gradients; the benchmark suite searches their configurations."""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import on_device_of, processors

TILE = 4096  # elements: more warps or registers than it needs were slower
PROGRAMS_PER_SM, STAGES = 2, 3
ALIGNMENT = 16  # bytes, at which Inductor expects each result
STAGED_BYTES = 16384  # of a row; that of float32 and 8192 columns has no place in shared memory three times


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def layer_norm_gradients(  # type: ignore[no-untyped-def]
    grad, x, mean, rstd, weight, grad_x, partial_weight, partial_bias, rows, columns,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PER_SM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store the gradient of `x`, and each program's share of those of weight and bias."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((BLOCK,), tl.float32)
    of_bias = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & inside[None, :]
        offsets = row.to(tl.int64)[:, None] * columns + at[None, :]
        value = tl.load(x + offsets, mask=keep, other=0.0).to(tl.float32)
        above = tl.load(grad + offsets, mask=keep, other=0.0).to(tl.float32)
        reciprocal = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        centre = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.where(keep, (value - centre) * reciprocal, 0.0)
        scaled = above * scale[None, :]
        along = tl.sum(scaled * normal, 1)[:, None] / columns
        level = tl.sum(scaled, 1)[:, None] / columns
        tl.store(grad_x + offsets, (scaled - level - normal * along) * reciprocal, mask=keep)
        of_weight += tl.sum(above * normal, 0)
        of_bias += tl.sum(above, 0)
    share = tl.program_id(0) * columns + at
    tl.store(partial_weight + share, of_weight, mask=inside)
    tl.store(partial_bias + share, of_bias, mask=inside)


def gradients_of_layer_norm(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `x`, weight and bias; `mean` and `rstd` are float32, one for each row."""
    columns = x.shape[-1]
    rows = x.numel() // columns
    grad, x, mean, rstd, weight = (each.contiguous() for each in (grad, x, mean, rstd, weight))
    grad_x = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    at_once = max(min(TILE // block, 8), 1)
    programs = min(triton.cdiv(rows, at_once), processors(x.device) * PROGRAMS_PER_SM)
    partial = torch.empty(2, programs, columns, dtype=torch.float32, device=x.device)
    kernel: Any = layer_norm_gradients[(programs,)]
    with on_device_of(x):
        kernel(
            grad, x, mean, rstd, weight, grad_x, partial[0], partial[1], rows, columns, block, at_once, PROGRAMS_PER_SM,
            STAGES if block * x.element_size() <= STAGED_BYTES else 1, num_warps=16 if block > TILE else 8,
        )  # fmt: skip
    of_weight, of_bias = partial.sum(1).to(weight.dtype)
    aligned = columns * of_bias.element_size() % ALIGNMENT == 0
    return grad_x, of_weight, of_bias if aligned else of_bias.clone()
