"""Triton kernels for the attention of a few queries over many keys, which several programs share: flash decoding."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LEAST, LOG2_E, Wrap, as_it_is, on_device_of, processors
from backend_kwargs.rewrites.matching import hint

# The fastest of 54 configurations, or within a tenth of it, on nine shapes on an H200. Two splits took longer than one.
KEYS, WARPS = 64, 4
PROGRAMS_PER_SM, FEWEST_SPLITS, MOST_SPLITS, SHORTEST_SPLIT = 4, 3, 64, 128
BYTES_IN_THREE_STAGES, BYTES_OF_A_TILE = 256, 32768  # of a key and its value; of a tile of them


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def attended(  # type: ignore[no-untyped-def]
    q, k, v, mask, out, sums, logs, q_0, q_1, q_2, k_0, k_1, k_2, v_0, v_1, v_2, mask_0, mask_1, mask_2, mask_3, out_0,
    out_1, out_2, heads, rows, queries, keys, per_split, width, width_of_v, SCALE: tl.constexpr, MASKED: tl.constexpr,
    ADDED: tl.constexpr, SAME: tl.constexpr, EXACT: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_OF_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend over one split of the keys of one of `heads`, for the `rows` that it has: heads that share keys, queries.

    SAME: all rows have one mask; ADDED: to the scores. A result of more than one split goes to `sums`
    [batch and head, split, row, width], and the logarithm of its weight to `logs`. Inductor would pass `SCALE` as fp64.
    """
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    place, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    batch, head = tl.cast(place // heads, tl.int64), place % heads
    row, column, column_of_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_OF_V)
    of_head, query = head * (rows // queries) + row // queries, row % queries
    in_rows = (row < rows)[:, None]
    at_q = q + batch * q_0 + (of_head * q_1 + query * q_2)[:, None] + column[None, :]
    asked = tl.load(at_q, mask=in_rows & (column < width)[None, :], other=0.0)
    start_of_k, start_of_v = k + batch * k_0 + head * k_1, v + batch * v_0 + head * v_1
    acc = tl.zeros((ROWS, WIDTH_OF_V), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    end = tl.minimum((split + 1) * per_split, keys)
    for start in tl.range(split * per_split, end, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        seen = key < end
        if MASKED:
            if SAME:
                at_mask = mask + batch * mask_0 + key[None, :] * tl.cast(mask_3, tl.int64)
                allowed = tl.load(at_mask, mask=seen[None, :], other=0)
            else:
                of_row = mask + batch * mask_0 + (of_head * mask_1 + query * mask_2)[:, None]
                allowed = tl.load(of_row + key[None, :] * mask_3, mask=in_rows & seen[None, :], other=0)
        if MASKED and SAME and not ADDED:  # what nobody sees is not read
            seen = seen & (tl.max(allowed.to(tl.int32), 0) > 0)
        at_k = start_of_k + key[None, :] * tl.cast(k_2, tl.int64) + column[:, None]
        of_keys = tl.load(at_k, mask=seen[None, :] & (column < width)[:, None], other=0.0)
        score = tl.dot(asked, of_keys, input_precision=precision) * (SCALE * LOG2_E)
        if ADDED:
            score += allowed.to(tl.float32) * LOG2_E
        if MASKED and not SAME and not ADDED:
            score = tl.where(allowed != 0, score, -float("inf"))
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # nothing was seen yet
        power, kept = tl.exp2(score - base[:, None]), tl.exp2(top - base)
        at_v = start_of_v + key[:, None] * tl.cast(v_2, tl.int64) + column_of_v[None, :]
        value = tl.load(at_v, mask=seen[:, None] & (column_of_v < width_of_v)[None, :], other=0.0)
        acc = acc * kept[:, None] + tl.dot(power.to(value.dtype), value, input_precision=precision)
        total = total * kept + tl.sum(power, 1)
        top = higher
    made = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # 0 for a row that sees nothing
    if SPLITS == 1:
        at_out = out + batch * out_0 + (of_head * out_1 + query * out_2)[:, None] + column_of_v[None, :]
        tl.store(at_out, made, mask=in_rows & (column_of_v < width_of_v)[None, :])
    else:
        at_row = tl.cast(tl.program_id(0), tl.int64) * rows + row
        tl.store(sums + at_row[:, None] * WIDTH_OF_V + column_of_v[None, :], made, mask=in_rows)
        tl.store(logs + at_row, top + tl.log2(total), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def joined(  # type: ignore[no-untyped-def]
    sums, logs, out, out_0, out_1, out_2, heads, rows, queries, width_of_v, SPLITS: tl.constexpr,
    POWER_OF_2: tl.constexpr, WIDTH_OF_V: tl.constexpr,
):  # fmt: skip
    """Store the mean of one row's splits, weighed by their sums of exponentials."""
    place, row = tl.cast(tl.program_id(0) // rows, tl.int64), tl.program_id(0) % rows
    split, column = tl.arange(0, POWER_OF_2), tl.arange(0, WIDTH_OF_V)
    exists = split < SPLITS
    at = (place * SPLITS + split) * rows + row
    log = tl.load(logs + at, mask=exists, other=-float("inf"))
    highest = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(highest == -float("inf"), 0.0, highest))
    part = tl.load(sums + at[:, None] * WIDTH_OF_V + column[None, :], mask=exists[:, None], other=0.0)
    total = tl.sum(weight, 0)
    made = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    of_head, query = place % heads * (rows // queries) + row // queries, row % queries
    tl.store(out + place // heads * out_0 + of_head * out_1 + query * out_2 + column, made, mask=column < width_of_v)


def attention_in_splits(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, out: torch.Tensor,
    *, wrap: Wrap = as_it_is, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write the attention of `q` [batch, heads, queries, width] over `k` and `v` to `out` and return it.

    `k` and `v` [batch, fewer heads, keys, width] and `q` have a last stride of 1. `mask` can be expanded to
    [batch, heads, queries, keys]: it is added to the scores, or tells which keys are seen.
    """
    batch, heads, queries, width = q.shape
    shared, keys, width_of_v = k.shape[1], k.shape[2], v.shape[3]
    places, rows = batch * shared, heads // shared * queries
    splits = splits or splits_of(processors(q.device), hint(batch) * shared, hint(keys))
    block, block_of_v = (max(triton.next_power_of_2(each), LEAST) for each in (width, width_of_v))
    of_a_key = (block + block_of_v) * k.element_size()
    tile = max(min(KEYS, BYTES_OF_A_TILE // of_a_key), LEAST)
    sums, logs = out, out
    if splits > 1:
        sums = torch.empty(places * splits * rows, block_of_v, dtype=torch.float32, device=q.device)
        logs = torch.empty(places * splits * rows, dtype=torch.float32, device=q.device)
    masked, added = mask is not None, mask is not None and mask.dtype != torch.bool
    mask = q if mask is None else mask.expand(batch, heads, queries, keys)
    same = (heads == 1 or mask.stride(1) == 0) and (queries == 1 or mask.stride(2) == 0)
    with on_device_of(q):
        wrap(attended)[(places * splits,)](
            q, k, v, mask, out, sums, logs, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask.stride(),
            *out.stride()[:3], shared, rows, queries, keys, triton.cdiv(triton.cdiv(keys, splits), tile) * tile, width,
            width_of_v, scale, masked, added, same, q.dtype == torch.float32, splits,
            max(triton.next_power_of_2(rows), LEAST), tile, block, block_of_v,
            3 if of_a_key <= BYTES_IN_THREE_STAGES else 2, num_warps=WARPS,
        )  # fmt: skip
        if splits > 1:
            wrap(joined)[(places * rows,)](
                sums, logs, out, *out.stride()[:3], shared, rows, queries, width_of_v, splits,
                triton.next_power_of_2(splits), block_of_v,
            )  # fmt: skip
    return out


def splits_of(processors: int, places: int, keys: int) -> int:
    """Return how many programs share the keys of each of `places` heads, so that all processors have work."""
    splits = min(processors * PROGRAMS_PER_SM // places, MOST_SPLITS, keys // SHORTEST_SPLIT)
    return splits if splits >= FEWEST_SPLITS else 1
