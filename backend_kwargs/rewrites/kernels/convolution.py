"""Triton kernels of our own for convolutions in groups, channels last, for which cuDNN's are slow.

Each program computes a tile of pixels for one group, or for a block of channels where each channel is a group. Inputs
are read once for each tap of the filter, from the caches after the first time. Sums are float32. The grid has one
dimension, since CUDA limits the others to 65535 programs.
"""
# ruff: noqa: N803, RUF005  Triton constants are written in capitals, and tuples of Triton are joined by a sum.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, on_device_of

# Of a program for one group: pixels and stages in narrow groups, the fastest of 36 on an H200, and in wide ones.
NARROW, OF_NARROW, OF_WIDE, WARPS = 64, (256, 1), (128, 3), 4
MOST_INS, MOST_OUTS = 64, 128  # of a group at a time
POSITIONS, CHANNELS, ROWS = 16, 64, 4  # of a program of a depthwise convolution


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
    x, w, scale, shift, out, positions, height, width, out_height, out_width, w_out, w_row, w_column,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, EACH: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store ROWS results below each other for a block of channels, at each of some positions in images.

    Each row of the input is read once for all of them. EACH results are of one channel of the input.
    """
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    position = tl.program_id(0) // blocks * POSITIONS + tl.arange(0, POSITIONS)
    bands = (out_height + ROWS - 1) // ROWS
    column, band, image = position % out_width, position // out_width % bands, position // (out_width * bands)
    of_image = tl.cast(image, tl.int64)
    known, here = channel < CHANNELS, position < positions
    top, left = band * (ROWS * STRIDE_H) - PAD_H, column * STRIDE_W - PAD_W
    totals = ()
    for _ in tl.static_range(ROWS):
        totals = totals + (tl.zeros((POSITIONS, BLOCK), tl.float32),)
    for tap_w in tl.range(0, KERNEL_W):
        z = left + tap_w * DILATION_W
        beside = here & (z >= 0) & (z < width)
        weights = ()
        for tap_h in tl.static_range(KERNEL_H):
            at_w = w + channel * w_out + tap_h * w_row + tap_w * w_column
            weights = weights + (tl.load(at_w, mask=known, other=0.0).to(tl.float32)[None, :],)
        for row in tl.static_range((ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1):
            y = top + row
            inside = beside & (y >= 0) & (y < height)
            at_x = ((of_image * height + y) * width + z) * (CHANNELS // EACH)
            read = x + at_x[:, None] + (channel // EACH)[None, :]
            value = tl.load(read, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)
            added = ()
            for at in tl.static_range(ROWS):
                added = added + (_with_tap(totals[at], value, weights, KERNEL_H, row - at * STRIDE_H, DILATION_H),)
            totals = added
    for row in tl.static_range(ROWS):
        total = totals[row]
        if HAS_SCALE:
            total *= tl.load(scale + channel, mask=known, other=0.0)[None, :]
        if HAS_SHIFT:
            total += tl.load(shift + channel, mask=known, other=0.0)[None, :]
        y = band * ROWS + row
        at_out = out + ((of_image * out_height + y) * out_width + column)[:, None] * CHANNELS + channel[None, :]
        kept = (here & (y < out_height))[:, None] & known[None, :]
        tl.store(at_out, _activated(total, ACTIVATION).to(out.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _with_tap(total, value, weights, KERNEL: tl.constexpr, AT: tl.constexpr, DILATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `total` with a row of the input, AT rows below the first that a result needs, times its weight if any."""
    if AT >= 0 and AT % DILATION == 0 and AT // DILATION < KERNEL:
        total += value * weights[AT // DILATION]
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _activated(x, NAME: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return an activation; nan stays nan."""
    if NAME == "relu":
        x = tl.where(x < 0, 0.0, x)
    if NAME == "relu6":
        x = tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))
    if NAME == "silu":
        x = x / (1.0 + tl.exp(-x))
    if NAME == "hardswish":
        high = x + 3.0
        x = x * tl.where(high < 0, 0.0, tl.where(high > 6, 6.0, high)) / 6.0
    if NAME == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


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
    _, ins, kernel_h, kernel_w = w.shape
    outs = out.shape[1] // groups
    pixels = out.numel() // out.shape[1]
    block = min(max(triton.next_power_of_2(outs), LEAST), MOST_OUTS)
    tile, stages = OF_NARROW if max(ins, outs) <= NARROW else OF_WIDE
    with on_device_of(x):
        kernel: Any = _in_groups[(groups * triton.cdiv(outs, block) * triton.cdiv(pixels, tile),)]
        kernel(
            x, w, x if bias is None else bias, out, pixels, *x.shape[2:], *out.shape[2:], *w.stride(), *stride,
            *padding, *dilation, bias is not None, groups, ins, outs, kernel_h, kernel_w, tile, _at_once(ins), block,
            stages, num_warps=WARPS,
        )  # fmt: skip
    return out


def _at_once(ins: int) -> int:
    """Return how many inputs of a group are multiplied at a time: a power of two that leaves the fewest empty."""
    sizes = [size for size in (MOST_INS, MOST_INS // 2, LEAST) if size < 2 * ins] or [LEAST]
    return min(sizes, key=lambda size: triton.cdiv(ins, size) * size)


def convolution_by_channel(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    out: torch.Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    activation: str,
) -> torch.Tensor:
    """Fill `out` with a depthwise convolution, times `scale`, plus `shift`, after an activation.

    `x` and `out` are dense and channels last; `scale` and `shift` are float32.
    """
    channels, _, kernel_h, kernel_w = w.shape
    rows = min(ROWS // stride[0], triton.next_power_of_2(out.shape[2])) or 1
    positions = x.shape[0] * triton.cdiv(out.shape[2], rows) * out.shape[3]
    block = min(triton.next_power_of_2(channels), CHANNELS)
    with on_device_of(x):
        kernel: Any = _by_channel[(triton.cdiv(channels, block) * triton.cdiv(positions, POSITIONS),)]
        kernel(
            x, w, x if scale is None else scale, x if shift is None else shift, out, positions, *x.shape[2:],
            *out.shape[2:], w.stride(0), *w.stride()[2:], *stride, *padding, *dilation, scale is not None,
            shift is not None, activation, channels, channels // x.shape[1], kernel_h, kernel_w, POSITIONS, block,
            rows, num_warps=WARPS,
        )  # fmt: skip
    return out
