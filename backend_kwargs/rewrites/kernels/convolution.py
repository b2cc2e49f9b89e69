"""Triton kernels of our own for convolutions in groups or of few channels, for which cuDNN's are slow.

Each program computes a tile of pixels for one group, or for a block of channels where each channel is a group. Inputs
are read once for each tap of the filter, from the caches after the first time. Sums are float32. The grid has one
dimension, since CUDA limits the others to 65535 programs.
"""
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: N803, RUF005  Triton constants are written in capitals, and tuples of Triton are joined by a sum.

import math
from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, on_device_of, processors

# Of a program for one group, the fastest on an H200: pixels and stages in narrow groups and in wide ones.
NARROW, OF_NARROW, FEW_INS, OF_FEW_INS, OF_WIDE, WARPS = 32, (256, 1), 16, (128, 1), (128, 3), 4
SIZES_OF_INS, SIZES_OF_OUTS = (64, 32, 16), (128, 64)  # of a group at a time
# Of a depthwise convolution: results of a step and rows of results, for small windows, larger ones and the largest, so
# that what a thread keeps fits into its registers; channels of a program; programs that a processor runs at once.
OF_WINDOWS, CHANNELS, PROGRAMS = ((9, 512, 4), (25, 256, 4), (49, 256, 2)), 32, 4
# Of a program for few channels, by the numbers of a window: pixels, and numbers at a time; results at a time.
OF_FEW_CHANNELS, RESULTS = ((32, 128, 32), (64, 64, 64), (math.inf, 128, 16)), 64


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
def _of_few_channels(  # type: ignore[no-untyped-def]
    x, w, scale, shift, out, pixels, height, width, out_height, out_width, x_image, x_in, x_row, x_column, w_out, w_in,
    w_row, w_column, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr, INS: tl.constexpr, OUTS: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, BY_CHANNEL: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Store a block of results for a tile of pixels: products with whole windows, whose numbers stand as in `x`."""
    blocks: tl.constexpr = (OUTS + BLOCK - 1) // BLOCK
    taps: tl.constexpr = KERNEL_H * KERNEL_W
    outs = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    pixel = tl.program_id(0) // blocks * PIXELS + tl.arange(0, PIXELS)
    column, row, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
    top, left = row * stride_h - pad_h, column * stride_w - pad_w
    at_pixel = (
        x + tl.cast(image, tl.int64) * x_image + tl.cast(top, tl.int64) * x_row + tl.cast(left, tl.int64) * x_column
    )
    total = tl.zeros((PIXELS, BLOCK), tl.float32)
    for first in tl.range(0, INS * taps, AT_ONCE):
        number = first + tl.arange(0, AT_ONCE)
        channel = number // taps if BY_CHANNEL else number % INS
        tap = number % taps if BY_CHANNEL else number // INS
        down, right = tap // KERNEL_W, tap % KERNEL_W
        y, z = top[:, None] + (down * dilation_h)[None, :], left[:, None] + (right * dilation_w)[None, :]
        inside = (y >= 0) & (y < height) & (z >= 0) & (z < width)
        known = number < INS * taps
        below, beside = tl.cast(down, tl.int64) * dilation_h, tl.cast(right, tl.int64) * dilation_w
        of_window = tl.cast(channel, tl.int64) * x_in + below * x_row + beside * x_column
        mask = inside & (pixel < pixels)[:, None] & known[None, :]
        value = tl.load(at_pixel[:, None] + of_window[None, :], mask=mask, other=0.0)
        at_w = w + (channel * w_in + down * w_row + right * w_column)[:, None] + (outs * w_out)[None, :]
        weight = tl.load(at_w, mask=known[:, None] & (outs < OUTS)[None, :], other=0.0)
        total = tl.dot(value, weight, total)
    factor = tl.load(scale + outs, mask=(outs < OUTS) & HAS_SCALE, other=0.0).to(tl.float32)[None, :]
    offset = tl.load(shift + outs, mask=(outs < OUTS) & HAS_SHIFT, other=0.0).to(tl.float32)[None, :]
    total = _ended(total, factor, offset, HAS_SCALE, HAS_SHIFT, ACTIVATION)
    at_out = out + tl.cast(pixel, tl.int64)[:, None] * OUTS + outs[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=(pixel < pixels)[:, None] & (outs < OUTS)[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _by_channel(  # type: ignore[no-untyped-def]
    x, w, scale, shift, out, positions, height, width, out_height, out_width, w_out, w_row, w_column,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr,
    ACTIVATION: tl.constexpr, CHANNELS: tl.constexpr, EACH: tl.constexpr, KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr, POSITIONS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store ROWS x COLUMNS results of a block of channels, at each of some positions in images.

    It goes through the columns of the input, reads each once, and adds it to all results that it is part of. EACH
    results are of one channel of the input.
    """
    blocks: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    position = tl.program_id(0) // blocks * POSITIONS + tl.arange(0, POSITIONS)
    parts, bands = (out_width + COLUMNS - 1) // COLUMNS, (out_height + ROWS - 1) // ROWS
    part, band, image = position % parts, position // parts % bands, position // (parts * bands)
    known, here = channel < CHANNELS, position < positions
    first, top = part * COLUMNS, band * (ROWS * STRIDE_H) - PAD_H
    left, of_image = first * STRIDE_W - PAD_W, tl.cast(image, tl.int64)
    ins: tl.constexpr = CHANNELS // EACH
    at_x = x + ((of_image * height + top) * width + left)[:, None] * ins + (channel // EACH)[None, :]
    at_out = out + ((of_image * out_height + band * ROWS) * out_width)[:, None] * CHANNELS + channel[None, :]
    weights = ()
    for tap in tl.static_range(KERNEL_H * KERNEL_W):
        at_w = w + channel * w_out + tap // KERNEL_W * w_row + tap % KERNEL_W * w_column
        weights = weights + (tl.load(at_w, mask=known, other=0.0).to(tl.float32)[None, :],)
    factor = tl.load(scale + channel, mask=known & HAS_SCALE, other=0.0).to(tl.float32)[None, :]
    offset = tl.load(shift + channel, mask=known & HAS_SHIFT, other=0.0).to(tl.float32)[None, :]
    unfinished: tl.constexpr = ((KERNEL_W - 1) * DILATION_W + STRIDE_W) // STRIDE_W  # columns of results at a time
    totals = ()
    for _ in tl.static_range(unfinished * ROWS):
        totals = totals + (tl.zeros((POSITIONS, BLOCK), tl.float32),)
    for step in tl.range(0, COLUMNS + unfinished - 1):
        for right in tl.static_range(STRIDE_W):
            z = left + step * STRIDE_W + right
            beside = here & (z >= 0) & (z < width)
            for down in tl.static_range((ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1):
                inside = (beside & (top + down >= 0) & (top + down < height))[:, None] & known[None, :]
                at = at_x + (step * STRIDE_W + right + down * width) * ins
                value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                added = ()
                for result in tl.static_range(unfinished * ROWS):
                    total = _with_tap(
                        totals[result], value, weights, down - result % ROWS * STRIDE_H, DILATION_H, KERNEL_H,
                        (unfinished - 1 - result // ROWS) * STRIDE_W + right, DILATION_W, KERNEL_W,
                    )  # fmt: skip
                    added = added + (total,)
                totals = added
        column = first + step - (unfinished - 1)
        for row in tl.static_range(ROWS):
            kept = here & (column >= first) & (column < out_width) & (band * ROWS + row < out_height)
            total = _ended(totals[row], factor, offset, HAS_SCALE, HAS_SHIFT, ACTIVATION).to(out.dtype.element_ty)
            at = at_out + ((column + row * out_width) * CHANNELS)[:, None]
            tl.store(at, total, mask=kept[:, None] & known[None, :])
        totals = _without_first(totals, ROWS, unfinished * ROWS)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _without_first(totals, ROWS: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return totals without the first column of ROWS, and zeros for another at the end."""
    moved = ()
    for result in tl.static_range(COUNT):
        moved = moved + (totals[result + ROWS] if result + ROWS < COUNT else tl.zeros_like(totals[0]),)
    return moved


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _with_tap(  # type: ignore[no-untyped-def]
    total, value, weights, DOWN: tl.constexpr, DILATION_H: tl.constexpr, KERNEL_H: tl.constexpr, RIGHT: tl.constexpr,
    DILATION_W: tl.constexpr, KERNEL_W: tl.constexpr,
):  # fmt: skip
    """Return `total` with a number of the input, DOWN and RIGHT of the first in its window, times its weight if any."""
    if (
        (DOWN >= 0 and DOWN % DILATION_H == 0 and DOWN // DILATION_H < KERNEL_H)
        and (RIGHT % DILATION_W == 0 and RIGHT // DILATION_W < KERNEL_W)
    ):  # fmt: skip
        total += value * weights[DOWN // DILATION_H * KERNEL_W + RIGHT // DILATION_W]
    return total


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _ended(x, factor, offset, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return `x` after a norm and an activation; nan stays nan."""
    if HAS_SCALE:
        x *= factor
    if HAS_SHIFT:
        x += offset
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    if ACTIVATION == "relu6":
        x = tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))
    if ACTIVATION == "silu":
        x = x / (1.0 + tl.exp(-x))
    if ACTIVATION == "hardswish":
        high = x + 3.0
        x = x * tl.where(high < 0, 0.0, tl.where(high > 6, 6.0, high)) / 6.0
    if ACTIVATION == "gelu":
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
    at_once, block = _least_empty(ins, SIZES_OF_INS), _least_empty(outs, SIZES_OF_OUTS)
    tile, stages = OF_NARROW if max(ins, outs) <= NARROW else OF_FEW_INS if ins <= FEW_INS else OF_WIDE
    with on_device_of(x):
        kernel: Any = _in_groups[(groups * triton.cdiv(outs, block) * triton.cdiv(pixels, tile),)]
        kernel(
            x, w, x if bias is None else bias, out, pixels, *x.shape[2:], *out.shape[2:], *w.stride(), *stride,
            *padding, *dilation, bias is not None, groups, ins, outs, kernel_h, kernel_w, tile, at_once, block,
            stages, num_warps=WARPS,
        )  # fmt: skip
    return out


def _least_empty(count: int, sizes: tuple[int, ...]) -> int:
    """Return the size of the blocks, one of `sizes`, that leave the fewest places empty; one block if it is small."""
    whole = max(triton.next_power_of_2(count), LEAST)
    return int(min((size for size in sizes if size <= whole), key=lambda size: -count % size, default=whole))


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
    images, _, height, width = out.shape
    seen = (dilation[0] * (kernel_h - 1) + 1) * (dilation[1] * (kernel_w - 1) + 1)
    tile, rows = next(each for most, *each in OF_WINDOWS if seen <= most)
    rows = min(rows if stride[0] == 1 else rows // 2, triton.next_power_of_2(height))
    block = min(triton.next_power_of_2(channels), CHANNELS)
    tile //= block
    bands, blocks = images * triton.cdiv(height, rows), triton.cdiv(channels, block)
    # Parts of rows share their edges, so there are no more than fill the GPU.
    parts = max(PROGRAMS * processors(x.device) // (triton.cdiv(bands, tile) * blocks), 1)
    parts = min(parts, triton.cdiv(width, 4))
    columns = triton.cdiv(width, parts)
    positions = bands * triton.cdiv(width, columns)
    with on_device_of(x):
        kernel: Any = _by_channel[(blocks * triton.cdiv(positions, tile),)]
        kernel(
            x, w, x if scale is None else scale, x if shift is None else shift, out, positions, *x.shape[2:], height,
            width, w.stride(0), *w.stride()[2:], *stride, *padding, *dilation, scale is not None, shift is not None,
            activation, channels, channels // x.shape[1], kernel_h, kernel_w, tile, block, rows, columns,
            num_warps=WARPS,
        )  # fmt: skip
    return out


def convolution_of_few_channels(
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
    """Fill `out` with a convolution without groups, times `scale`, plus `shift`, after an activation.

    `x` has any strides, and `out` is dense and channels last; `scale` and `shift` are float32.
    """
    outs, ins, *kernel = w.shape
    pixels = out.numel() // outs
    tile, at_once = next(each for most, *each in OF_FEW_CHANNELS if ins * math.prod(kernel) <= most)
    block = min(max(triton.next_power_of_2(outs), LEAST), RESULTS)
    with on_device_of(x):
        launch: Any = _of_few_channels[(triton.cdiv(outs, block) * triton.cdiv(pixels, tile),)]
        launch(
            x, w, x if scale is None else scale, x if shift is None else shift, out, pixels, *x.shape[2:],
            *out.shape[2:], *x.stride(), *w.stride(), *stride, *padding, *dilation, scale is not None,
            shift is not None, activation, ins, outs, *kernel, x.stride(1) > x.stride(3), tile, block, at_once,
            num_warps=WARPS,
        )  # fmt: skip
    return out
