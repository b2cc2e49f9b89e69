"""Cases: parts of models, larger than a kernel."""

from functools import partial
from typing import Any

import torch

from benchmarks.workloads.case import Case, Problem, Work
from benchmarks.workloads.cases.models import attention_flops
from benchmarks.workloads.nets.convs import UNetLevel
from benchmarks.workloads.nets.counting import made, nbytes, traced, unit
from benchmarks.workloads.nets.llama import Decoder, Shape
from benchmarks.workloads.nets.scan import Scan
from benchmarks.workloads.nets.sparse import Dlrm, MoE

LLAMA = {
    "full": (4, Shape(layers=2, hidden=4096, heads=32, kv_heads=8, inner=14_336, vocab=0, length=2048)),
    "smoke": (2, Shape(layers=1, hidden=64, heads=4, kv_heads=2, inner=128, vocab=0, length=32)),
}
MOE = {"full": (8192, 2048, 1024, 32, 8), "smoke": (64, 32, 16, 8, 2)}
UNET = {"full": (8, 320, 64, 8, 1280), "smoke": (2, 16, 8, 2, 32)}
SCAN = {"full": (4, 4096, 32, 64, 128, 128), "smoke": (2, 32, 2, 8, 8, 8)}
DLRM = {
    "full": (8192, 20, 26, 100_000, 128, 13, (512, 256), (1024, 1024, 512, 256)),
    "smoke": (16, 3, 4, 50, 16, 13, (32,), (32, 16)),
}


def llama(device: torch.device, dtype: torch.dtype, scale: str, passes: int) -> Problem:
    """Pass hidden states through two layers of Llama 3 8B, and back if `passes` is 3."""
    batch, shape = LLAMA[scale]
    model = made(partial(Decoder, shape), device, dtype)
    x = torch.randn(batch, shape.length, shape.hidden, device=device, dtype=dtype, requires_grad=passes > 1)
    given, outputs = traced(partial(Decoder, shape), (x,))
    forward = given - attention_flops(shape, batch, shape.length * (shape.length - 1) / 2)
    there = nbytes(model, x) + outputs
    # Backward: the output's gradient is read; those of the weights and of the input are written.
    moved, written = (there, outputs) if passes == 1 else (2 * there, there)
    return Problem(model, (x,), Work(passes * forward, moved, unit(dtype), written))


def moe(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Pass tokens through their experts."""
    rows, hidden, inner, experts, top = MOE[scale]
    model = made(partial(MoE, hidden, inner, experts, top), device, dtype)
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    flops = 2.0 * rows * hidden * (experts + 3 * top * inner)
    return Problem(model, (x,), Work(flops, nbytes(model, x) + x.nbytes, unit(dtype), x.nbytes))


def unet(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Pass a latent image through one level of a U-Net, channels last."""
    batch, channels, size, heads, time = UNET[scale]
    make = partial(UNetLevel, channels, heads, time)
    last: Any = {"memory_format": torch.channels_last}
    model = made(make, device, dtype).to(**last)
    x = torch.randn(batch, channels, size, size, device=device, dtype=dtype).contiguous(**last)
    args = (x, torch.randn(batch, time, device=device, dtype=dtype))
    given, outputs = traced(make, args)
    return Problem(model, args, Work(given, nbytes(model, args) + outputs, unit(dtype), outputs))


def scan(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build a scan; operations do not count towards the limit, since a sequential scan has far fewer of them."""
    batch, length, heads, channels, state, chunk = SCAN[scale]
    model = made(partial(Scan, heads, chunk), device, dtype)
    shapes = ((batch, length, heads, channels), (batch, length, heads), *((batch, length, state),) * 2)
    args = tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return Problem(model, args, Work(0, nbytes(model, args) + args[0].nbytes, unit(dtype), args[0].nbytes))


def dlrm(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Rank rows by dense features and bags of indices."""
    batch, bag, tables, rows, width, dense, bottom, top = DLRM[scale]
    make = partial(Dlrm, tables, rows, width, dense, bottom, top)
    model = made(make, device, dtype)
    x = torch.randn(batch, dense, device=device, dtype=dtype)
    bags = torch.randint(rows, (tables, batch, bag), device=device)
    given, outputs = traced(make, (x, bags))
    unasked = 2.0 * batch * width * ((tables + 1) ** 2 - tables * (tables + 1) / 2)  # each pair once, none with itself
    read = sum(bags[table].unique().numel() for table in range(tables)) * width * dtype.itemsize
    moved = nbytes(model) - nbytes(model.tables) + nbytes(x, bags) + read + outputs
    return Problem(model, (x, bags), Work(given - unasked, moved, unit(dtype), outputs))


CASES: tuple[Case, ...] = (
    Case("llama3_8b_layers", "segment", partial(llama, passes=1)),
    Case("llama3_8b_layers_backward", "segment", partial(llama, passes=3), modes=("fwd_bwd",)),
    Case("moe_8192_e32_top8", "segment", moe, suites=frozenset({"dev"})),
    Case("unet_level", "segment", unet),
    Case("mamba_scan", "segment", scan),
    Case("dlrm", "segment", dlrm, suites=frozenset({"smoke"})),
)
