"""Attention over few keys, which keeps all scores of a tile, and its gradients."""
# ruff: noqa: N803  Triton constants are written in capitals.

from typing import Any

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, LOG2_E, on_device_of, processors

MOST_AT_ONCE, TILE = 128, 64  # keys whose scores stay in registers; queries and further keys of a tile
PROGRAMS = 8  # of a multiprocessor, if each sums the gradient of a bias over several batches


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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _attend_in_tiles(  # type: ignore[no-untyped-def]
    q, k, v, bias, out, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, b_batch, b_head, b_row,
    b_column, period, heads, rows, keys, width, width_of_v, scale, TILE: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_OF_V: tl.constexpr,
):  # fmt: skip
    """Compute attention for one tile of queries of one head, a tile of keys at a time; after them the bias is -inf."""
    batch, head = tl.cast(tl.program_id(0) // heads, tl.int64), tl.program_id(0) % heads
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column, column_of_v = tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH_OF_V)[None, :]
    in_rows = (row < rows)[:, None]
    at_q = q + batch * q_batch + head * q_head + row[:, None] * q_row + column
    query = tl.load(at_q, mask=in_rows & (column < width), other=0.0)
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total, made = tl.zeros((TILE,), tl.float32), tl.zeros((TILE, WIDTH_OF_V), tl.float32)
    for first in range(0, keys, TILE):
        key = first + tl.arange(0, TILE)
        in_keys = (key < keys)[:, None]
        at_k = k + batch * k_batch + head * k_head + key[:, None] * k_row + column
        at_bias = bias + batch % period * b_batch + head * b_head + row[:, None] * b_row + key[None, :] * b_column
        score = tl.dot(query, tl.trans(tl.load(at_k, mask=in_keys & (column < width), other=0.0))) * scale
        score += tl.load(at_bias, mask=in_rows, other=0.0).to(tl.float32)
        largest = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(largest == -float("inf"), 0.0, largest)  # of a query that sees no key, whose result is 0
        power, before = tl.exp2((score - shift[:, None]) * LOG2_E), tl.exp2((top - shift) * LOG2_E)
        at_v = v + batch * v_batch + head * v_head + key[:, None] * v_row + column_of_v
        value = tl.load(at_v, mask=in_keys & (column_of_v < width_of_v), other=0.0)
        total, top = total * before + tl.sum(power, 1), largest
        made = made * before[:, None] + tl.dot(power.to(value.dtype), value)
    made = made / tl.where(total == 0.0, 1.0, total)[:, None]
    at_out = ((batch * rows + row[:, None]) * heads + head) * width_of_v + column_of_v
    tl.store(out + at_out, made.to(out.dtype.element_ty), mask=in_rows & (column_of_v < width_of_v))


def attention_over_few_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return attention as [batch, queries, heads, width].

    The bias may have fewer batches, which repeat. Of more than `MOST_AT_ONCE` keys there must be one.
    """
    batch, heads, rows, width = q.shape
    keys, width_of_v = v.shape[2:]
    q, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v))
    out = torch.empty(batch, rows, heads, width_of_v, dtype=q.dtype, device=q.device)
    in_tiles = bias is not None and keys > MOST_AT_ONCE
    if bias is not None and in_tiles:  # Triton reads rows that are no multiple of 16 numbers one by one
        bias = torch.nn.functional.pad(bias.expand(*bias.shape[:-1], keys), (0, -keys % TILE), value=-torch.inf)
    period = bias.shape[0] if bias is not None and bias.dim() == 4 else 1
    in_row = bias.shape[-1] if bias is not None and in_tiles else keys
    of_bias = (0, 0, 0, 0) if bias is None else bias.expand(period, heads, rows, in_row).stride()
    tile = TILE if in_tiles else min(triton.next_power_of_2(max(rows, LEAST)), TILE)
    padded = [max(triton.next_power_of_2(size), LEAST) for size in (keys, width, width_of_v)]
    kernel: Any = (_attend_in_tiles if in_tiles else _attend)[(batch * heads, triton.cdiv(rows, tile))]
    strides = (stride for each in (q, k, v) for stride in each.stride()[:3])
    options = (tile, *padded[1:]) if in_tiles else (bias is not None, q.dtype == torch.float32, tile, *padded)
    with on_device_of(q):
        kernel(
            q, k, v, q if bias is None else bias, out, *strides, *of_bias, period, heads, rows, keys, width, width_of_v,
            scale, *options, num_warps=4 if in_tiles or padded[0] <= MOST_AT_ONCE else 8,
            num_stages=2 if in_tiles else 3,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _gradients(  # type: ignore[no-untyped-def]
    grad, q, k, v, bias, of_q, of_k, of_v, of_bias, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head,
    v_row, b_batch, b_head, b_row, b_column, batches, period, step, heads, rows, keys, width, width_of_v, scale,
    SUMS: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_OF_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one head for every `step`-th batch, with all queries and keys at once.

    If it `SUMS`, it writes the sum of the gradients of the bias, which is the same for these batches.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    first, head = tl.cast(tl.program_id(0) // heads, tl.int64), tl.program_id(0) % heads
    row, key = tl.arange(0, ROWS)[:, None], tl.arange(0, KEYS)[None, :]
    column, column_of_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_OF_V)
    of_rows = (row < rows) & (column < width)[None, :]
    of_keys = (tl.trans(key) < keys) & (column < width)[None, :]
    values = (tl.trans(key) < keys) & (column_of_v < width_of_v)[None, :]
    results = (row < rows) & (column_of_v < width_of_v)[None, :]
    scores = (row < rows) & (key < keys)
    at_bias = bias + first % period * b_batch + head * b_head + row * b_row + key * b_column
    added = tl.where(key < keys, tl.load(at_bias, mask=scores, other=0.0).to(tl.float32), -float("inf"))
    total = tl.zeros([ROWS, KEYS], tl.float32)
    for batch in range(first, batches, step):
        at_q = q + batch * q_batch + head * q_head + row * q_row + column[None, :]
        at_k = k + batch * k_batch + head * k_head + tl.trans(key) * k_row + column[None, :]
        at_v = v + batch * v_batch + head * v_head + tl.trans(key) * v_row + column_of_v[None, :]
        query, of_head = tl.load(at_q, mask=of_rows, other=0.0), tl.load(at_k, mask=of_keys, other=0.0)
        value = tl.load(at_v, mask=values, other=0.0)
        at_row, at_key = (batch * rows + row) * heads + head, (batch * keys + tl.trans(key)) * heads + head
        given = tl.load(grad + at_row * width_of_v + column_of_v[None, :], mask=results, other=0.0)
        score = tl.dot(query, tl.trans(of_head), input_precision=precision) * scale + added
        top = tl.max(score, 1)
        top = tl.where(top == -float("inf"), 0.0, top)  # of a query that sees no key, whose gradients are 0
        weight = tl.exp2((score - top[:, None]) * LOG2_E)
        sums = tl.sum(weight, 1)
        weight = tl.where(scores, weight / tl.where(sums == 0.0, 1.0, sums)[:, None], 0.0)
        of_weight = tl.dot(given, tl.trans(value), input_precision=precision)
        of_score = tl.where(scores, weight * (of_weight - tl.sum(weight * of_weight, 1)[:, None]), 0.0)
        total += of_score
        weight, low = weight.to(given.dtype), of_score.to(query.dtype)
        made = tl.dot(tl.trans(weight), given, input_precision=precision)
        tl.store(of_v + at_key * width_of_v + column_of_v[None, :], made.to(of_v.dtype.element_ty), mask=values)
        made = tl.dot(low, of_head, input_precision=precision) * scale
        tl.store(of_q + at_row * width + column[None, :], made.to(of_q.dtype.element_ty), mask=of_rows)
        made = tl.dot(tl.trans(low), query, input_precision=precision) * scale
        tl.store(of_k + at_key * width + column[None, :], made.to(of_k.dtype.element_ty), mask=of_keys)
    if SUMS:
        at_sum = ((first * heads + head) * rows + row) * keys + key
        tl.store(of_bias + at_sum, total.to(of_bias.dtype.element_ty), mask=scores)


def gradients_over_few_keys(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    *,
    of_bias: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v as [batch, length, heads, width], and sums of the bias's.

    These are [sums, period, heads, queries, keys], in an order that does not vary; without `of_bias` they are empty.
    All queries and keys of a head must fit into one tile. `grad` is [batch, queries, heads, width of v].
    """
    batch, heads, rows, width = q.shape
    keys, width_of_v = v.shape[2:]
    q, k, v = (each if each.stride(3) == 1 else each.contiguous() for each in (q, k, v))
    grad = grad.contiguous()
    made = [each.new_empty(batch, each.shape[2], heads, each.shape[3]) for each in (q, k, v)]
    period = bias.shape[0] if bias.dim() == 4 else 1
    sums = batch // period
    if of_bias:
        sums = max(min(sums, PROGRAMS * processors(q.device) // (heads * period)), 1)
    strides_of_bias = bias.expand(period, heads, rows, keys).stride()
    summed = q.new_empty((sums, period, heads, rows, keys) if of_bias else (0,), dtype=torch.float32)
    padded = [max(triton.next_power_of_2(size), LEAST) for size in (rows, keys, width, width_of_v)]
    kernel: Any = _gradients[(sums * period * heads,)]
    strides = (stride for each in (q, k, v) for stride in each.stride()[:3])
    with on_device_of(q):
        kernel(
            grad, q, k, v, bias, *made, summed, *strides, *strides_of_bias, batch, period, sums * period, heads, rows,
            keys, width, width_of_v, scale, of_bias, q.dtype == torch.float32, *padded, num_warps=4,
        )  # fmt: skip
    return (*made, summed)
