"""SwiGLU and rotary embedding: each number read once and written once."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton
import triton.language as tl

from benchmarks.workloads.kernels.launch import config, persistent, tuned


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
    config(4, ROWS=2, PER_SM=1),
    [config(warps, ROWS=rows, PER_SM=1 << 20) for warps, rows in ((4, 8), (4, 16), (4, 32), (8, 32), (8, 64))],
    "half",
)
@triton.jit
def rotated(x, cos, sin, out, rows, positions, half, HALF: tl.constexpr, ROWS: tl.constexpr, PER_SM: tl.constexpr):
    """Turn the two halves of each row by the angles of its position."""
    at = tl.arange(0, HALF)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & (at < half)[None, :]
        angle = (row % positions)[:, None] * half + at[None, :]
        offsets = row.to(tl.int64)[:, None] * (2 * half) + at[None, :]
        cosine = tl.load(cos + angle, mask=keep, other=0.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=keep, other=0.0).to(tl.float32)
        first = tl.load(x + offsets, mask=keep, other=0.0).to(tl.float32)
        second = tl.load(x + offsets + half, mask=keep, other=0.0).to(tl.float32)
        tl.store(out + offsets, first * cosine - second * sine, mask=keep)
        tl.store(out + offsets + half, second * cosine + first * sine, mask=keep)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `q` and `k` [batch, heads, positions, 2 * half] turned by the angles [positions, half]."""
    return turn(q, cos, sin), turn(k, cos, sin)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return one tensor turned."""
    out, (positions, half) = torch.empty_like(x), cos.shape
    rows = x.numel() // (2 * half)
    rotated[persistent(x.device, rows)](x, cos, sin, out, rows, positions, half, triton.next_power_of_2(half))
    return out
