"""Triton kernels of our own for convolutions in groups, channels last, for which cuDNN's are slow.

Each program computes a tile of pixels for one group, or for a block of channels where each channel is a group. Inputs
are read once for each tap of the filter, from the caches after the first time. Sums are float32. The grid has one
dimension, since CUDA limits the others to 65535 programs.
"""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, on_device_of

# Of a program for one group: pixels and stages in narrow groups, the fastest of 36 on an H200, and in wide ones.
NARROW, OF_NARROW, OF_WIDE, WARPS = 64, (256, 1), (128, 3), 4
MOST_INS, MOST_OUTS = 64, 128  # of a group at a time
PIXELS_OF_DEPTHWISE, CHANNELS, WARPS_OF_DEPTHWISE = 32, 64, 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _in_groups(  # type: ignore[no-untyped-def]
    x, w, bias, out, pixels, height, width, out_height, out_width, w_out, w_in, w_row, w_column, stride_h, stride_w,
    pad_h, pad_w, dilation_h, dilation_w, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, INS: tl.constexpr,
    OUTS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store a block of one group's results for a tile of pixels; inputs of a tap are read AT_ONCE of them at a time."""
    blocks: tl.constexpr = (OUTS + BLOCK - 1) // BLOCK
    parts: tl.constexpr = (INS + AT_ONCE - 1) // AT_ONCE
    group = tl.program_id(0) // blocks % GROUPS
    outs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pixel = tl.program_id(0) // (blocks * GROUPS) * PIXELS + tl.arange(0, PIXELS)
    column, row, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
    ins = tl.arange(0, AT_ONCE)
    top, left = row * stride_h - pad_h, column * stride_w - pad_w
    at_pixel = x + ((tl.cast(image, tl.int64) * height + top) * width + left) * (GROUPS * INS) + group * INS
    at_w = w + ins[:, None] * w_in + (group * OUTS + outs)[None, :] * w_out
    total = tl.zeros((PIXELS, BLOCK), tl.float32)
    for step in tl.range(0, KERNEL_H * KERNEL_W * parts, num_stages=STAGES):
        tap, first = step // parts, step % parts * AT_ONCE
        down, right = tap // KERNEL_W * dilation_h, tap % KERNEL_W * dilation_w
        y, z = top + down, left + right
        inside = (pixel < pixels) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        known = first + ins < INS
        at_x = at_pixel + ((down * width + right) * (GROUPS * INS) + first)
        value = tl.load(at_x[:, None] + ins[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        of_tap = at_w + (first * w_in + tap // KERNEL_W * w_row + tap % KERNEL_W * w_column)
        weight = tl.load(of_tap, mask=known[:, None] & (outs < OUTS)[None, :], other=0.0)
        total = tl.dot(value, weight, total)
    if HAS_BIAS:
        total += tl.load(bias + group * OUTS + outs, mask=outs < OUTS, other=0.0).to(tl.float32)[None, :]
    at_out = tl.cast(pixel, tl.int64)[:, None] * (GROUPS * OUTS) + group * OUTS + outs[None, :]
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & (outs < OUTS)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _by_channel(  # type: ignore[no-untyped-def]
    x, w, bias, out, pixels, height, width, out_height, out_width, w_out, w_row, w_column, stride_h, stride_w, pad_h,
    pad_w, dilation_h, dilation_w, HAS_BIAS: tl.constexpr, CHANNELS: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the results of a block of channels, each a group of its own, for a tile of pixels."""
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pixel = tl.program_id(0) // blocks * PIXELS + tl.arange(0, PIXELS)
    column, row, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
    of_image = tl.cast(image, tl.int64) * height
    known = channel < CHANNELS
    total = tl.zeros((PIXELS, BLOCK), tl.float32)
    for tap_h in range(KERNEL_H):
        y = row * stride_h - pad_h + tap_h * dilation_h
        for tap_w in range(KERNEL_W):
            z = column * stride_w - pad_w + tap_w * dilation_w
            inside = (pixel < pixels) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
            at_x = ((of_image + y) * width + z) * CHANNELS
            value = tl.load(x + at_x[:, None] + channel[None, :], mask=inside[:, None] & known[None, :], other=0.0)
            weight = tl.load(w + channel * w_out + tap_h * w_row + tap_w * w_column, mask=known, other=0.0)
            total += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    at_out = tl.cast(pixel, tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(out + at_out, total.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & known[None, :])


def convolution_in_groups(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> torch.Tensor:
    """Fill `out` with the convolution of `x` by `w`; `x` and `out` are dense and channels last."""
    _, _, height, width = x.shape
    _, ins, kernel_h, kernel_w = w.shape
    outs = out.shape[1] // groups
    pixels = out.numel() // out.shape[1]
    sizes = (pixels, height, width, out.shape[2], out.shape[3])
    given = x, w, x if bias is None else bias, out
    with on_device_of(x):
        if ins == outs == 1:
            block = min(triton.next_power_of_2(groups), CHANNELS)
            kernel: Any = _by_channel[(triton.cdiv(groups, block) * triton.cdiv(pixels, PIXELS_OF_DEPTHWISE),)]
            kernel(
                *given, *sizes, w.stride(0), *w.stride()[2:], *stride, *padding, *dilation, bias is not None, groups,
                kernel_h, kernel_w, PIXELS_OF_DEPTHWISE, block, num_warps=WARPS_OF_DEPTHWISE,
            )  # fmt: skip
        else:
            block = min(max(triton.next_power_of_2(outs), LEAST), MOST_OUTS)
            tile, stages = OF_NARROW if max(ins, outs) <= NARROW else OF_WIDE
            kernel = _in_groups[(groups * triton.cdiv(outs, block) * triton.cdiv(pixels, tile),)]
            kernel(
                *given, *sizes, *w.stride(), *stride, *padding, *dilation, bias is not None, groups, ins, outs,
                kernel_h, kernel_w, tile, _at_once(ins), block, stages, num_warps=WARPS,
            )  # fmt: skip
    return out


def _at_once(ins: int) -> int:
    """Return how many inputs of a group are multiplied at a time: a power of two that leaves the fewest empty."""
    sizes = [size for size in (MOST_INS, MOST_INS // 2, LEAST) if size < 2 * ins] or [LEAST]
    return min(sizes, key=lambda size: triton.cdiv(ins, size) * size)
