"""Cases that only move data: gates, rotations, gathers, sums, transpositions."""

import torch
from torch.nn import functional

from benchmarks.workloads.case import Case, Problem
from benchmarks.workloads.cases.gemm import START
from benchmarks.workloads.cases.norms import moved
from benchmarks.workloads.kernels import kernel


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return the gated half of a decoder's MLP."""
    return functional.silu(gate) * up


def swiglu_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build SwiGLU of 8192 tokens of Llama 3 8B."""
    gate, up = torch.randn(2, *((8192, 14336) if scale == "full" else (16, 56)), device=device, dtype=dtype)
    work = moved(read=(gate, up), written=gate.nbytes)
    return Problem(swiglu, (gate, up), work, {"triton_swiglu": kernel("elementwise.swiglu", device)})


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return both halves of each head turned by the angles of its position."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with their positions."""
    return turned(q, cos, sin), turned(k, cos, sin)


def rope_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the rotary embedding of four sequences of Llama 3 8B."""
    batch, heads, shared, length, width = (4, 32, 8, 4096, 128) if scale == "full" else (2, 4, 2, 10, 16)
    q = torch.randn(batch, heads, length, width, device=device, dtype=dtype)
    k = torch.randn(batch, shared, length, width, device=device, dtype=dtype)
    angles = torch.randn(length, width // 2, device=device)
    args = (q, k, angles.cos().to(dtype), angles.sin().to(dtype))
    work = moved(read=args, written=q.nbytes + k.nbytes)
    return Problem(rope, args, work, {"triton_rope": kernel("elementwise.rope", device)})


def embedding_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the look-up of 16384 different tokens, so that each reads its own row."""
    tokens, width, vocabulary = (16384, 4096, 32000) if scale == "full" else (16, 32, 40)
    table = torch.randn(vocabulary, width, device=device, dtype=dtype)
    ids = torch.randperm(vocabulary, device=device)[:tokens]
    rows = table[:tokens]
    return Problem(functional.embedding, (ids, table), moved(read=(ids, rows), written=rows.nbytes))


def sum_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the sum of 2^28 numbers."""
    x = torch.randn(2**28 if scale == "full" else 1000, device=device, dtype=dtype)
    return Problem(torch.sum, (x,), moved(read=(x,), written=x.itemsize))


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy with the last two dimensions swapped."""
    return x.transpose(1, 2).contiguous()


def permute_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build the transposition of 16 matrices."""
    x = torch.randn((16, 4096, 1024) if scale == "full" else (2, 24, 16), device=device, dtype=dtype)
    return Problem(transposed, (x,), moved(read=(x,), written=x.nbytes))


CASES: tuple[Case, ...] = (
    Case("swiglu", "elementwise", swiglu_case, suites=START | {"dev"}),
    Case("rope", "elementwise", rope_case, suites=START),
    Case("embedding", "elementwise", embedding_case),
    Case("sum", "elementwise", sum_case),
    Case("permute", "elementwise", permute_case),
)
