"""Triton kernels of our own that work row by row: layer norm's gradients, the rotary embedding, sums of gathered rows.

Their configurations are the fastest of those that were timed on an H200; the benchmark suite searches the first two's.
"""
# ruff: noqa: N803  Triton constants are written in capitals.

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]
from torch._subclasses.functional_tensor import FunctionalTensor

TILE = 4096  # elements of a layer norm's tile: more warps or registers than it needs were slower
PROGRAMS_PER_SM, STAGES = 2, 3
STAGED_BYTES = 16384  # of a row; that of float32 and 8192 columns has no place in shared memory three times
ROWS_TO_TURN = 8
# A warp reads a row of up to 128 columns. Triton unrolls the loop: unrolled by Python, it took Inductor twice as long.
WIDEST, NARROW, UNROLLED = 1024, 128, 4


Wrap = Callable[[Any], Any]  # `as_it_is`, to launch a kernel, or `torch.library.wrap_triton`, to trace the launch


def on_device_of(tensor: torch.Tensor) -> Any:
    """Return a context in which kernels run on the tensor's GPU; Inductor has its own for a launch that is traced."""
    launched = tensor.is_cuda and not isinstance(tensor, FunctionalTensor)
    return torch.cuda.device(tensor.device) if launched else contextlib.nullcontext()


def processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 2 for another device, and where no GPU is seen."""
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if on_gpu else 2


def as_it_is(kernel: Any) -> Any:
    """Return the kernel."""
    return kernel


# ---- layer norm


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
    return grad_x, of_weight, of_bias


# ---- rotary embedding


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def turned(  # type: ignore[no-untyped-def]
    x, cos, sin, out, rows, middle, last, half, x_0, x_1, x_2, out_0, out_1, out_2, cos_0, cos_1, cos_2, sin_0, sin_1,
    sin_2, SHARED: tl.constexpr, BACK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of each row by the angles of its position, or backwards if `BACK`.

    Each half has its own angles unless they are `SHARED`.
    """
    at = tl.arange(0, HALF)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = (row < rows)[:, None] & (at < half)[None, :]
    outer, between = (row // last // middle).to(tl.int64), (row // last % middle).to(tl.int64)
    inner = (row % last).to(tl.int64)
    at_x = x + (outer * x_0 + between * x_1 + inner * x_2)[:, None] + at[None, :]
    at_out = out + (outer * out_0 + between * out_1 + inner * out_2)[:, None] + at[None, :]
    at_cos = cos + (outer * cos_0 + between * cos_1 + inner * cos_2)[:, None] + at[None, :]
    at_sin = sin + (outer * sin_0 + between * sin_1 + inner * sin_2)[:, None] + at[None, :]
    first = tl.load(at_x, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(at_x + half, mask=keep, other=0.0).to(tl.float32)
    cosine = tl.load(at_cos, mask=keep, other=0.0).to(tl.float32)
    sine = tl.load(at_sin, mask=keep, other=0.0).to(tl.float32)
    cosine_of_second, sine_of_second = cosine, sine
    if not SHARED:
        cosine_of_second = tl.load(at_cos + half, mask=keep, other=0.0).to(tl.float32)
        sine_of_second = tl.load(at_sin + half, mask=keep, other=0.0).to(tl.float32)
    if BACK:
        tl.store(at_out, first * cosine + second * sine_of_second, mask=keep)
        tl.store(at_out + half, second * cosine_of_second - first * sine, mask=keep)
    else:
        tl.store(at_out, first * cosine - second * sine, mask=keep)
        tl.store(at_out + half, second * cosine_of_second + first * sine_of_second, mask=keep)


def sizes_and_strides(
    x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[int, int, int, int, list[int]]:
    """Return rows, both inner sizes, half the width, and all strides of [.., .., .., width], in memory order."""
    order = sorted(range(3), key=x.stride, reverse=True)  # so that successive rows are adjacent in memory
    sizes = [x.shape[dim] for dim in order]
    angles = [each.expand(*x.shape[:3], each.shape[-1]) for each in (cos, sin)]
    strides = [each.stride(dim) for each in (x, out, *angles) for dim in order]
    return sizes[0] * sizes[1] * sizes[2], sizes[1], sizes[2], x.shape[3] // 2, strides


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, back: bool, wrap: Wrap = as_it_is
) -> torch.Tensor:
    """Write `x` [.., .., .., width], with both halves rotated by the angles, which broadcast, to `out` and return it.

    The angles have the width of `x` or half of it.
    """
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    rows, middle, last, half, strides = sizes_and_strides(x, out, cos, sin)
    with on_device_of(x):
        wrap(turned)[(triton.cdiv(rows, ROWS_TO_TURN),)](
            x, cos, sin, out, rows, middle, last, half, *strides, bool(cos.shape[-1] == half), back,
            triton.next_power_of_2(int(half)), ROWS_TO_TURN,
        )  # fmt: skip
    return out


# ---- sums of gathered rows


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
