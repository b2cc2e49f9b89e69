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

PIXELS, WARPS = 256, 4  # of a program for one group: the fastest of 36 on an H200, without stages
PIXELS_OF_DEPTHWISE, CHANNELS, WARPS_OF_DEPTHWISE = 32, 64, 4


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _in_groups(  # type: ignore[no-untyped-def]
    x, w, bias, out, pixels, height, width, out_height, out_width, w_out, w_in, w_row, w_column, stride_h, stride_w,
    pad_h, pad_w, dilation_h, dilation_w, HAS_BIAS: tl.constexpr, GROUPS: tl.constexpr, INS: tl.constexpr,
    OUTS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, PIXELS: tl.constexpr, PADDED_INS: tl.constexpr,
    PADDED_OUTS: tl.constexpr,
):  # fmt: skip
    """Store the results of one group for a tile of pixels."""
    group = tl.program_id(0) % GROUPS
    pixel = tl.program_id(0) // GROUPS * PIXELS + tl.arange(0, PIXELS)
    column, row, image = pixel % out_width, pixel // out_width % out_height, pixel // (out_width * out_height)
    ins, outs = tl.arange(0, PADDED_INS), tl.arange(0, PADDED_OUTS)
    of_image = tl.cast(image, tl.int64) * height
    at_w = w + (group * OUTS + outs)[:, None] * w_out + ins[None, :] * w_in
    kept = (outs < OUTS)[:, None] & (ins < INS)[None, :]
    total = tl.zeros((PIXELS, PADDED_OUTS), tl.float32)
    for tap in tl.range(0, KERNEL_H * KERNEL_W, num_stages=1):
        tap_h, tap_w = tap // KERNEL_W, tap % KERNEL_W
        y = row * stride_h - pad_h + tap_h * dilation_h
        z = column * stride_w - pad_w + tap_w * dilation_w
        inside = (pixel < pixels) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        at_x = ((of_image + y) * width + z) * (GROUPS * INS) + group * INS
        value = tl.load(x + at_x[:, None] + ins[None, :], mask=inside[:, None] & (ins < INS)[None, :], other=0.0)
        weight = tl.load(at_w + tap_h * w_row + tap_w * w_column, mask=kept, other=0.0)
        total = tl.dot(value, tl.trans(weight), total)
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
            padded = [max(triton.next_power_of_2(size), LEAST) for size in (ins, outs)]
            kernel = _in_groups[(groups * triton.cdiv(pixels, PIXELS),)]
            kernel(
                *given, *sizes, *w.stride(), *stride, *padding, *dilation, bias is not None, groups, ins, outs,
                kernel_h, kernel_w, PIXELS, *padded, num_warps=WARPS,
            )  # fmt: skip
    return out
