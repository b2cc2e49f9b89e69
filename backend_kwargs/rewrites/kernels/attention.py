"""Attention over few keys, which keeps all scores of a tile."""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, LOG2_E, on_device_of


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, bias, out, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, b_batch, b_head, b_row,
    b_column, period, heads, rows, keys, width, width_of_v, scale, HAS_BIAS: tl.constexpr, EXACT: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_OF_V: tl.constexpr,
):  # fmt: skip
    """Compute attention for one tile of queries of one head, with all keys at once."""
    batch, head = tl.cast(tl.program_id(0) // heads, tl.int64), tl.program_id(0) % heads
    row, key = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    column, column_of_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_OF_V)
    in_rows, in_keys = (row < rows)[:, None], (key < keys)[None, :]
    at_q = q + batch * q_batch + head * q_head + row[:, None] * q_row + column[None, :]
    at_k = k + batch * k_batch + head * k_head + key[None, :] * k_row + column[:, None]
    at_v = v + batch * v_batch + head * v_head + key[:, None] * v_row + column_of_v[None, :]
    query = tl.load(at_q, mask=in_rows & (column < width)[None, :], other=0.0)
    keys_of_head = tl.load(at_k, mask=in_keys & (column < width)[:, None], other=0.0)
    score = tl.dot(query, keys_of_head, input_precision="ieee" if EXACT else "tf32") * scale
    if HAS_BIAS:
        at_bias = bias + batch % period * b_batch + head * b_head + row[:, None] * b_row + key[None, :] * b_column
        score += tl.load(at_bias, mask=in_rows & in_keys, other=0.0).to(tl.float32)
    score = tl.where(in_keys, score, -float("inf"))
    top = tl.max(score, 1)
    top = tl.where(top == -float("inf"), 0.0, top)  # of a query that sees no key, whose result is 0
    power = tl.exp2((score - top[:, None]) * LOG2_E)
    total = tl.sum(power, 1)
    total = tl.where(total == 0.0, 1.0, total)
    value = tl.load(at_v, mask=(key < keys)[:, None] & (column_of_v < width_of_v)[None, :], other=0.0)
    made = tl.dot(power.to(value.dtype), value, input_precision="ieee" if EXACT else "tf32") / total[:, None]
    at_out = ((batch * rows + row[:, None]) * heads + head) * width_of_v + column_of_v[None, :]
    tl.store(out + at_out, made.to(out.dtype.element_ty), mask=in_rows & (column_of_v < width_of_v)[None, :])


def attention_over_few_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return attention as [batch, queries, heads, width]; all keys of a head must fit into one tile.

    The bias may have fewer batches, which repeat.
    """
    batch, heads, rows, width = q.shape
    keys, width_of_v = v.shape[2:]
    q, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v))
    out = torch.empty(batch, rows, heads, width_of_v, dtype=q.dtype, device=q.device)
    period = bias.shape[0] if bias is not None and bias.dim() == 4 else 1
    of_bias = (0, 0, 0, 0) if bias is None else bias.expand(period, heads, rows, keys).stride()
    tile = min(triton.next_power_of_2(max(rows, LEAST)), 64)
    padded = [max(triton.next_power_of_2(size), LEAST) for size in (keys, width, width_of_v)]
    kernel: Any = _attend[(batch * heads, triton.cdiv(rows, tile))]
    strides = (stride for each in (q, k, v) for stride in each.stride()[:3])
    with on_device_of(q):
        kernel(
            q, k, v, q if bias is None else bias, out, *strides, *of_bias, period, heads, rows, keys, width, width_of_v,
            scale, bias is not None, q.dtype == torch.float32, tile, *padded, num_warps=4 if padded[0] <= 128 else 8,
        )  # fmt: skip
    return out
