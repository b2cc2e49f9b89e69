"""SwiGLU and rotary embedding: each number read once and written once."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton
import triton.language as tl

from backend_kwargs.rewrites.kernels import rotary
from benchmarks.workloads.kernels.launch import config, tuned


@tuned(
    config(4, BLOCK=64),
    [config(warps, BLOCK=block) for warps, block in ((8, 2048), (4, 1024), (4, 2048), (8, 4096), (8, 8192))],
    "count",
)
@triton.jit
def gated(gate, up, out, count, BLOCK: tl.constexpr):
    """Store `silu(gate) * up`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    left = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    right = tl.load(up + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, left * tl.sigmoid(left) * right, mask=at < count)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up`."""
    out, count = torch.empty_like(gate), gate.numel()
    gated[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](gate, up, out, count)
    return out


turned = tuned(
    config(4, ROWS=2),
    [config(warps, ROWS=rows) for warps, rows in ((4, 8), (4, 16), (4, 32), (8, 32), (8, 64))],
    "half",
)(rotary.turned)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` [batch, heads, positions, 2 * half] turned by the angles [positions, half]."""
    return turn(q, cos, sin), turn(k, cos, sin)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return one tensor turned."""
    out = torch.empty_like(x)
    rows, middle, last, half, strides = rotary.sizes_and_strides(x, out, cos, sin)
    width = triton.next_power_of_2(half)
    turned[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
        x, cos, sin, out, rows, middle, last, half, *strides, True, False, width
    )
    return out
