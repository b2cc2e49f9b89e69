"""Cases of the tensor cores: matrix products of every shape that a model has, and convolutions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads.case import Case, Problem, Unit, Work
from benchmarks.workloads.kernels import kernel

UNITS: dict[torch.dtype, Unit] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Shape = tuple[int, int, int]  # rows, depth, columns
START = frozenset({"start"})  # the suite of the rows to run first


def contraction(flops: float, *, read: tuple[torch.Tensor, ...], written: int, dtype: torch.dtype) -> Work:
    """Return the work of a product that reads each of `read` once; `written` counts elements of `dtype`."""
    stored = written * dtype.itemsize
    return Work(flops, sum(tensor.nbytes for tensor in read) + stored, UNITS[dtype], stored)


def normal_(module: nn.Module) -> nn.Module:
    """Fill the weights with normal numbers that keep the scale of activations; they require no gradients."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 1.0)
    return module.requires_grad_(False)


def product(device: torch.device, dtype: torch.dtype, scale: str, *, full: Shape, smoke: Shape) -> Problem:
    """Build `a @ b`, both stored by rows."""
    m, k, n = full if scale == "full" else smoke
    a = torch.randn(m, k, device=device, dtype=dtype)
    b = torch.randn(k, n, device=device, dtype=dtype)
    names = ("matmul", "matmul_tma") if k % 8 == n % 8 == 0 else ("matmul", "matmul_padded")
    return Problem(
        torch.matmul,
        (a, b),
        contraction(2 * m * k * n, read=(a, b), written=m * n, dtype=dtype),
        {f"triton_{name}": kernel(f"matmul.{name}", device) for name in names},
    )


def linear(device: torch.device, dtype: torch.dtype, scale: str, *, full: Shape, smoke: Shape) -> Problem:
    """Build a linear layer without bias."""
    m, k, n = full if scale == "full" else smoke
    layer = normal_(nn.Linear(k, n, bias=False, device=device, dtype=dtype))
    x = torch.randn(m, k, device=device, dtype=dtype)
    return Problem(
        layer,
        (x,),
        contraction(2 * m * k * n, read=(x, layer.weight), written=m * n, dtype=dtype),
        {f"triton_{name}": with_weights(f"matmul.{name}", device, layer.weight.t()) for name in peers_for(m)},
    )


def peers_for(rows: int) -> tuple[str, ...]:
    """Return the products to try: with few rows, a tensor descriptor's tile is mostly empty."""
    return ("matmul",) if rows <= 16 else ("matmul", "matmul_tma")


def with_weights(name: str, device: torch.device, *weights: torch.Tensor) -> Callable[..., Any]:
    """Return a kernel of a layer's input, with the layer's weights."""
    call = kernel(name, device)
    return lambda x: call(x, *weights)


def linear_gelu(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build linear, bias and GELU: the first half of a transformer's MLP."""
    m, k, n = (16384, 1024, 4096) if scale == "full" else (48, 32, 64)
    layer = normal_(nn.Linear(k, n, device=device, dtype=dtype))
    x = torch.randn(m, k, device=device, dtype=dtype)
    return Problem(
        nn.Sequential(layer, nn.GELU()),
        (x,),
        contraction(2 * m * k * n, read=(x, layer.weight, layer.bias), written=m * n, dtype=dtype),
        {
            f"triton_{name}": with_weights(f"matmul.{name}", device, layer.weight, layer.bias)
            for name in ("linear_gelu", "linear_gelu_tma")
        },
    )


def fp8_rowwise(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build a product of fp8 matrices with a scale for each row and column, in bf16; `dtype` is ignored."""
    m, k, n = (4096, 7168, 4096) if scale == "full" else (48, 64, 80)
    a, a_scale = to_fp8(torch.randn(m, k, device=device))
    b, b_scale = to_fp8(torch.randn(n, k, device=device))
    args = (a, b.t(), a_scale, b_scale.t())
    read = sum(tensor.nbytes for tensor in args)
    written = 2 * m * n
    return Problem(
        scaled_mm,
        args,
        Work(2 * m * k * n, read + written, "fp8", written),
        {f"triton_{name}": kernel(f"matmul.{name}", device) for name in ("scaled_matmul", "scaled_matmul_tma")},
    )


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in fp8 and the factor for each row that restores it."""
    scale = x.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def scaled_mm(a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> torch.Tensor:
    """Return the product of two scaled fp8 matrices in bf16, summed as fast as the device can."""
    if a.dtype != torch.float8_e4m3fn:  # the reference's precision
        return (a * a_scale) @ (b * b_scale)
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def conv(
    device: torch.device,
    dtype: torch.dtype,
    scale: str,
    *,
    channels: tuple[int, int],
    size: int,
    window: int,
    stride: int,
) -> Problem:
    """Build a convolution of 128 images in channels_last, padded to keep their size before the stride."""
    images, size = (128, size) if scale == "full" else (2, 8)
    given, made = channels if scale == "full" else (3, 8)
    layer = nn.Conv2d(given, made, window, stride, window // 2, bias=False, device=device, dtype=dtype)
    normal_(layer).to(memory_format=torch.channels_last)
    x = torch.randn(images, given, size, size, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    pixels = images * (size // stride) ** 2
    flops = 2 * pixels * layer.weight.numel()
    work = contraction(flops, read=(x, layer.weight), written=pixels * made, dtype=dtype)
    return Problem(layer, (x,), work, {"cudnn_benchmark": partial(searched, layer)} if device.type == "cuda" else {})


def searched(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Return the convolution by the fastest of cuDNN's algorithms, found at the first call."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        return functional.conv2d(x, layer.weight, None, layer.stride, layer.padding)


CASES: tuple[Case, ...] = (
    Case(
        "gemm_8192",
        "gemm",
        partial(product, full=(8192, 8192, 8192), smoke=(48, 64, 80)),
        suites=START,
    ),
    Case(
        "gemm_prefill",
        "gemm",
        partial(linear, full=(4096, 4096, 28672), smoke=(32, 48, 96)),
        suites=START,
        headline=True,
    ),
    Case(
        "gemm_decode_16",
        "gemm",
        partial(linear, full=(16, 14336, 4096), smoke=(16, 96, 32)),
        suites=START | {"dev"},
        headline=True,
    ),
    Case(
        "gemm_decode_1",
        "gemm",
        partial(linear, full=(1, 8192, 57344), smoke=(1, 32, 96)),
        suites=START,
    ),
    Case(
        "gemm_odd",
        "gemm",
        partial(product, full=(1021, 2047, 4093), smoke=(13, 31, 29)),
        suites=START | {"dev"},
    ),
    Case("linear_bias_gelu", "gemm", linear_gelu, suites=START | {"smoke", "dev"}),
    Case("gemm_fp8_rowwise", "gemm", fp8_rowwise, dtype=torch.float8_e4m3fn, suites=START),
    Case("conv_3x3_64", "conv", partial(conv, channels=(64, 64), size=56, window=3, stride=1)),
    Case("conv_3x3_256", "conv", partial(conv, channels=(256, 256), size=14, window=3, stride=1)),
    Case(
        "conv_1x1_1024",
        "conv",
        partial(conv, channels=(256, 1024), size=14, window=1, stride=1),
        suites=frozenset({"dev"}),
    ),
    Case("conv_7x7_stride_2", "conv", partial(conv, channels=(3, 64), size=224, window=7, stride=2)),
)
