"""The rotary embedding; the benchmark suite searches its configuration."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import Wrap, as_it_is, on_device_of

ROWS_TO_TURN = 8


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def turned(  # type: ignore[no-untyped-def]
    x, cos, sin, out, rows, middle, last, half, x_0, x_1, x_2, out_0, out_1, out_2, cos_0, cos_1, cos_2, sin_0, sin_1,
    sin_2, SHARED: tl.constexpr, BACK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of each row by the angles of its position, or backwards if `BACK`.

    Each half has its own angles unless they are `SHARED`.
    """
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
    cosine_of_second, sine_of_second = cosine, sine
    if not SHARED:
        cosine_of_second = tl.load(at_cos + half, mask=keep, other=0.0).to(tl.float32)
        sine_of_second = tl.load(at_sin + half, mask=keep, other=0.0).to(tl.float32)
    if BACK:
        tl.store(at_out, first * cosine + second * sine_of_second, mask=keep)
        tl.store(at_out + half, second * cosine_of_second - first * sine, mask=keep)
    else:
        tl.store(at_out, first * cosine - second * sine, mask=keep)
        tl.store(at_out + half, second * cosine_of_second + first * sine_of_second, mask=keep)


def sizes_and_strides(
    x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[int, int, int, int, list[int]]:
    """Return rows, both inner sizes, half the width, and all strides of [.., .., .., width], in memory order."""
    order = sorted(range(3), key=x.stride, reverse=True)  # so that successive rows are adjacent in memory
    sizes = [x.shape[dim] for dim in order]
    angles = [each.expand(*x.shape[:3], each.shape[-1]) for each in (cos, sin)]
    strides = [each.stride(dim) for each in (x, out, *angles) for dim in order]
    return sizes[0] * sizes[1] * sizes[2], sizes[1], sizes[2], x.shape[3] // 2, strides


def turn(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, back: bool, wrap: Wrap = as_it_is
) -> torch.Tensor:
    """Write `x` [.., .., .., width], with both halves rotated by the angles, which broadcast, to `out` and return it.

    The angles have the width of `x` or half of it.
    """
    x, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, cos, sin))
    rows, middle, last, half, strides = sizes_and_strides(x, out, cos, sin)
    with on_device_of(x):
        wrap(turned)[(triton.cdiv(rows, ROWS_TO_TURN),)](
            x, cos, sin, out, rows, middle, last, half, *strides, bool(cos.shape[-1] == half), back,
            triton.next_power_of_2(int(half)), ROWS_TO_TURN,
        )  # fmt: skip
    return out
