"""Cases that reduce rows, bound by memory: norms with their gradients, softmax, cross-entropy."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Problem, Work
from benchmarks.workloads.cases.gemm import START
from benchmarks.workloads.kernels import kernel

EPS = 1e-5


def moved(*, read: tuple[torch.Tensor, ...], written: int) -> Work:
    """Return the work of a memory-bound case: the tensors read, once each, and bytes written."""
    return Work(0, sum(tensor.nbytes for tensor in read) + written, written=written)


def rms_norm_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of a sum, and the sum, as between the halves of a decoder's layer."""
    added = x + residual
    return functional.rms_norm(added, weight.shape, weight, EPS), added


def rms_norm(device: torch.device, dtype: torch.dtype, scale: str, *, full: tuple[int, int], columns: int) -> Problem:
    """Build RMSNorm + residual; `columns` are the smoke size's."""
    shape = full if scale == "full" else (16, columns)
    x, residual = torch.randn(2, *shape, device=device, dtype=dtype)
    weight = torch.randn(shape[1], device=device, dtype=dtype)
    by_hand = kernel("norms.rms_norm", device)
    return Problem(
        rms_norm_residual,
        (x, residual, weight),
        moved(read=(x, residual, weight), written=2 * x.nbytes),
        {"triton_rms_norm": lambda *args: by_hand(*args, EPS)},
    )


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the layer norm over the last dimension."""
    return functional.layer_norm(x, weight.shape, weight, bias, EPS)


def layer_norm_arguments(device: torch.device, dtype: torch.dtype, scale: str) -> tuple[torch.Tensor, ...]:
    """Return rows to normalise, a weight and a bias."""
    rows, columns = (32768, 4096) if scale == "full" else (16, 64)
    weight, bias = torch.randn(2, columns, device=device, dtype=dtype)
    return torch.randn(rows, columns, device=device, dtype=dtype), weight, bias


def layer_norm_forward(device: torch.device, dtype: torch.dtype, scale: str, *, gradients: bool = False) -> Problem:
    """Build LayerNorm; with `gradients`, the work counts each tensor of both passes once."""
    args = layer_norm_arguments(device, dtype, scale)
    size = sum(tensor.nbytes for tensor in args)
    forward = moved(read=args, written=args[0].nbytes)
    # Reads the gradient of the output besides the arguments; writes their gradients besides the output.
    both = Work(0, forward.bytes + args[0].nbytes + size, written=args[0].nbytes + size)
    by_hand = kernel("norms.layer_norm", device)
    peers = {"triton_layer_norm": lambda *given: by_hand(*given, EPS)}
    return Problem(layer_norm, args, both if gradients else forward, peers)


def layer_norm_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of layer norm's three arguments from the forward pass's saved values."""
    return torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, [True] * 3)


def layer_norm_backward(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the backward kernel of LayerNorm alone."""
    x, weight, bias = layer_norm_arguments(device, dtype, scale)
    grad = torch.randn_like(x)
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, EPS)
    by_hand = kernel("norms.layer_norm_backward", device)
    return Problem(
        layer_norm_gradients,
        (grad, x, mean, rstd, weight, bias),
        moved(read=(grad, x, mean, rstd, weight), written=x.nbytes + weight.nbytes + bias.nbytes),
        {"triton_layer_norm_backward": lambda *args: by_hand(*args[:-1])},
    )


def softmax(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build softmax of an 8192 x 8192 matrix."""
    x = torch.randn((8192, 8192) if scale == "full" else (16, 48), device=device, dtype=dtype)
    work = moved(read=(x,), written=x.nbytes)
    return Problem(partial(torch.softmax, dim=-1), (x,), work, {"triton_softmax": kernel("softmax.softmax", device)})


def cross_entropy(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the loss of 8192 tokens over Llama 3's vocabulary; its work is that of both passes, fused."""
    rows, classes = (8192, 128256) if scale == "full" else (16, 96)
    logits = torch.randn(rows, classes, device=device, dtype=dtype)
    target = torch.randint(classes, (rows,), device=device)
    return Problem(
        functional.cross_entropy,
        (logits, target),
        moved(read=(logits, target), written=logits.nbytes),
        {"triton_cross_entropy": kernel("cross_entropy.cross_entropy", device)},
    )


def row(name: str, build: Any, *suites: str, **more: Any) -> Case:
    """Return a case of this group that is among those to run first."""
    return Case(name, "norm", build, suites=START | set(suites), **more)


CASES: tuple[Case, ...] = (
    row("rms_norm_residual", partial(rms_norm, full=(16384, 4096), columns=64), "smoke", "dev", headline=True),
    # As many numbers, in rows that are not aligned to 16 bytes.
    row("rms_norm_residual_1023", partial(rms_norm, full=(65536, 1023), columns=63)),
    row("layer_norm", layer_norm_forward),
    row("layer_norm_backward", layer_norm_backward),
    row("layer_norm_fwd_bwd", partial(layer_norm_forward, gradients=True), "smoke", modes=("fwd_bwd",)),
    row("softmax", softmax, "dev"),
    row("cross_entropy", cross_entropy, "smoke", modes=("fwd_bwd",)),
)
