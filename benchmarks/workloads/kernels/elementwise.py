"""SwiGLU and rotary embedding: each number read once and written once."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton
import triton.language as tl

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


@tuned(
    config(4, ROWS=2),
    [config(warps, ROWS=rows) for warps, rows in ((4, 8), (4, 16), (4, 32), (8, 32), (8, 64))],
    "half",
)
@triton.jit
def turned(
    x, cos, sin, out, rows, middle, last, half, x_0, x_1, x_2, out_0, out_1, out_2, cos_0, cos_1, cos_2, sin_0, sin_1,
    sin_2, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of each row by the angles of its position."""
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
    tl.store(at_out, first * cosine - second * sine, mask=keep)
    tl.store(at_out + half, second * cosine + first * sine, mask=keep)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` [batch, heads, positions, 2 * half] turned by the angles [positions, half]."""
    return turn(q, cos, sin), turn(k, cos, sin)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return one tensor turned."""
    out = torch.empty_like(x)
    order = sorted(range(3), key=x.stride, reverse=True)  # so that successive rows are adjacent in memory
    sizes, half = [x.shape[dim] for dim in order], x.shape[3] // 2
    rows = sizes[0] * sizes[1] * sizes[2]
    angles = [each.expand(*x.shape[:3], half) for each in (cos, sin)]
    strides = [each.stride(dim) for each in (x, out, *angles) for dim in order]
    turned[lambda meta: (triton.cdiv(rows, meta["ROWS"]),)](
        x, cos, sin, out, rows, *sizes[1:], half, *strides, triton.next_power_of_2(half)
    )
    return out
