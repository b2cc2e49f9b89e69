"""Triton kernels of our own, where libraries have no kernel or a slow one.

Cross-entropy reads the logits once forward and once backward; attention over few keys keeps all scores of a tile.
"""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.compilers.inductor.rewrites.row_kernels import Wrap, as_it_is, on_device_of

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK, NUMBERS_OF_A_THREAD = 4096, 8  # of a row that is read; 8192 and 16 took 1.3 times as long
PART = 2048  # of a row that is written


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _losses(logits, target, losses, tops, logs, columns, stride, ignore_index, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store one row's loss, its largest logit, and the logsumexp of the logits minus the largest."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    start_of_row = logits + tl.cast(row, tl.int64) * stride
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, columns, BLOCK):
        value = tl.load(start_of_row + start + at, mask=start + at < columns, other=-float("inf")).to(tl.float32)
        # Either the old maximum stays or the value is the new one, so one exponential suffices.
        power = tl.exp2(-tl.abs(value - top) * LOG2_E)
        more = tl.where(value > top, total * power + 1.0, total + power)
        total = tl.where(value == -float("inf"), total, more)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    highest = tl.max(top, 0)
    total = tl.sum(tl.where(top == -float("inf"), 0.0, total * tl.exp2((top - highest) * LOG2_E)), 0)
    logarithm = tl.log(total)
    wanted = tl.load(target + row)
    counts = wanted != ignore_index
    exists = (wanted >= 0) & (wanted < columns)  # other classes make the loss nan
    picked = tl.load(start_of_row + tl.where(exists, wanted, 0)).to(tl.float32)
    picked = tl.where(exists, picked, float("nan"))
    tl.store(tops + row, highest)
    tl.store(logs + row, logarithm)
    tl.store(losses + row, tl.where(counts, logarithm - (picked - highest), 0.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradients(  # type: ignore[no-untyped-def]
    factor, logits, target, tops, logs, out, columns, stride, ignore_index, parts, BLOCK: tl.constexpr
):  # fmt: skip
    """Store one of the `parts` of one row's gradient."""
    row = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    keep = column < columns
    start_of_row = tl.cast(row, tl.int64) * stride
    wanted = tl.load(target + row)
    by = tl.where(wanted != ignore_index, tl.load(factor).to(tl.float32), 0.0)
    value = tl.load(logits + start_of_row + column, mask=keep, other=0.0).to(tl.float32)
    share = tl.exp2(((value - tl.load(tops + row)) - tl.load(logs + row)) * LOG2_E)
    share = tl.where(column == wanted, share - 1.0, share) * by
    at = tl.cast(row, tl.int64) * columns + column
    tl.store(out + at, share, mask=keep, cache_modifier=".cs")


def loss_of_rows(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, *, wrap: Wrap = as_it_is
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's loss (0 if its target is `ignore_index`), largest logit, and logsumexp minus that logit."""
    rows, columns = logits.shape
    target = target.contiguous()
    losses, tops, logs = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    block = _block(columns, BLOCK)
    with on_device_of(logits):
        wrap(_losses)[(rows,)](
            logits, target, losses, tops, logs, columns, logits.stride(0), ignore_index, block,
            num_warps=max(block // (32 * NUMBERS_OF_A_THREAD), 1),
        )  # fmt: skip
    return losses, tops, logs


def gradient_of_rows(
    factor: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    tops: torch.Tensor,
    logs: torch.Tensor,
    ignore_index: int,
    *,
    wrap: Wrap = as_it_is,
) -> torch.Tensor:
    """Return the gradient of the sum of the rows' losses, times `factor`."""
    rows, columns = logits.shape
    target = target.contiguous()
    out = torch.empty((rows, columns), dtype=logits.dtype, device=logits.device)
    block = _block(columns, PART)
    parts = triton.cdiv(columns, block)
    with on_device_of(logits):
        wrap(_gradients)[(rows * parts,)](  # one dimension, since others end at 65535
            factor, logits, target, tops, logs, out, columns, logits.stride(0), ignore_index, parts, block
        )
    return out


def _block(columns: int, most: int) -> int:
    """Return the numbers of a row at a time; `most` if the number of columns is a symbol, which stays one."""
    return min(most, int(triton.next_power_of_2(columns))) if isinstance(columns, int) else most


# ---- attention over few keys

LEAST = 16  # the smallest size for tensor cores


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
    power = tl.exp2((score - tl.max(score, 1)[:, None]) * LOG2_E)
    total = tl.sum(power, 1)
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
