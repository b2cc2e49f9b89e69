"""Attention: causal with grouped heads (FlashAttention-2), and decoding one token over splits of a long cache."""
# ruff: noqa: N803  Triton constants are written in capitals.

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from backend_kwargs.harness.trial import UnavailableError
from benchmarks.workloads.kernels.launch import INTERPRETED, config, dot, multiprocessors, tuned

LOG2_E = 1.4426950408889634
FEWEST_ROWS = 16  # of a tile that tensor cores multiply
PROGRAMS_PER_SM = 8
MOST_SPLITS = 64
LEAST_SPLIT = 16 if INTERPRETED.value else 128


def set_blocks(arguments: dict[str, Any]) -> None:
    """Give the descriptors the shapes of a configuration's tiles."""
    for name, rows in (("q", "BM"), ("k", "BN"), ("v", "BN"), ("out", "BM")):
        arguments[name].block_shape = [1, arguments[rows], arguments["WIDTH"]]


@triton.jit
def attend(
    q, k, v, head, acc, total, top, row, start, scale, MASKED: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr
):
    """Add one tile of keys and values to the sums of a tile of queries."""
    score = dot(q, k.load([head, start, 0]).reshape(BN, WIDTH).T, tl.zeros((q.shape[0], BN), tl.float32))
    if MASKED:
        score = tl.where(row[:, None] >= start + tl.arange(0, BN)[None, :], score, -float("inf"))
    higher = tl.maximum(top, tl.max(score, 1) * scale)
    power = tl.exp2(score * scale - higher[:, None])
    kept = tl.exp2(top - higher)
    value = v.load([head, start, 0]).reshape(BN, WIDTH)
    acc = dot(power.to(value.dtype), value, acc * kept[:, None])
    return acc, total * kept + tl.sum(power, 1), higher


@tuned(
    config(4, 1, set_blocks, BM=16, BN=16),
    [
        config(warps, stages, set_blocks, BM=bm, BN=bn)
        for bm, bn, warps, stages in (
            (128, 128, 8, 3), (128, 32, 8, 3), (64, 64, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3), (128, 128, 8, 2),
            (64, 128, 4, 3), (64, 64, 4, 4),
        )
    ],
    "heads", "length", "WIDTH",
)  # fmt: skip
@triton.jit
def causal(
    q, k, v, out, scale, heads, length, GROUP: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Compute one tile of queries of one head; the tiles with the most keys go first."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    head = tl.program_id(0)
    row = tile * BM + tl.arange(0, BM)
    query = q.load([head, tile * BM, 0]).reshape(BM, WIDTH)
    acc = tl.zeros((BM, WIDTH), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), -float("inf"), tl.float32)
    whole = tile * BM // BN * BN
    for start in tl.range(0, whole, BN):
        acc, total, top = attend(query, k, v, head // GROUP, acc, total, top, row, start, scale, False, BN, WIDTH)
    for start in tl.range(whole, min((tile + 1) * BM, length), BN):
        acc, total, top = attend(query, k, v, head // GROUP, acc, total, top, row, start, scale, True, BN, WIDTH)
    out.store([head, tile * BM, 0], (acc / total[:, None]).to(out.dtype).reshape(1, BM, WIDTH))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of `q` [batch, heads, length, width] over `k` and `v`, which may have fewer heads."""
    batch, heads, length, width = q.shape
    if width * q.itemsize % 16:
        raise UnavailableError(f"TMA requires rows of multiples of 16 bytes, got width {width!r} in {q.dtype!r}.")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    described = [
        TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [1, 1, 1])
        for flat in (tensor.contiguous().flatten(0, 1) for tensor in (q, k, v, out))
    ]
    causal[lambda meta: (batch * heads, triton.cdiv(length, meta["BM"]))](
        *described,
        LOG2_E / math.sqrt(width),
        batch * heads,
        length,
        heads // k.shape[1],
        max(triton.next_power_of_2(width), FEWEST_ROWS),
    )
    return out


@tuned(
    config(4, BN=16),
    [
        config(warps, stages, BN=bn)
        for bn, warps, stages in ((128, 4, 3), (64, 4, 4), (128, 8, 3), (64, 4, 3), (32, 4, 5))
    ],
    "length", "splits", "WIDTH",
)  # fmt: skip
@triton.jit
def decode_split(
    q,
    k,
    v,
    sums,
    logs,
    scale,
    length,
    per_split,
    splits,
    width,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BN: tl.constexpr,
):
    """Attend over one split of one head's cache, for all the query heads that share it."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = column < width
    at_query = (head * GROUP + row)[:, None] * width + column[None, :]
    query = tl.load(q + at_query, mask=(row < GROUP)[:, None] & inside[None, :], other=0.0)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    for start in tl.range(split * per_split, min((split + 1) * per_split, length), BN):
        at = start + tl.arange(0, BN)
        keep = (at < min((split + 1) * per_split, length))[:, None] & inside[None, :]
        offsets = head * length * width + at[:, None] * width + column[None, :]
        key = tl.load(k + offsets, mask=keep, other=0.0)
        score = dot(query, key.T, tl.zeros((ROWS, BN), tl.float32))
        score = tl.where((at < min((split + 1) * per_split, length))[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        power = tl.exp2(score * scale - higher[:, None])
        kept = tl.exp2(top - higher)
        value = tl.load(v + offsets, mask=keep, other=0.0)
        acc = dot(power.to(value.dtype), value, acc * kept[:, None])
        total = total * kept + tl.sum(power, 1)
        top = higher
    kept_row = (head * splits + split) * GROUP + row
    tl.store(sums + kept_row[:, None] * WIDTH + column[None, :], acc / total[:, None], mask=(row < GROUP)[:, None])
    tl.store(logs + kept_row, top + tl.log2(total), mask=row < GROUP)


@triton.jit
def decode_join(sums, logs, out, splits, width, GROUP: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Weigh the splits of one query head by the logarithms of their sums."""
    query, split, column = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    at = (query // GROUP * splits + split) * GROUP + query % GROUP
    log = tl.load(logs + at, mask=split < splits, other=-float("inf"))
    weight = tl.exp2(log - tl.max(log, 0))
    part = tl.load(sums + at[:, None] * WIDTH + column[None, :], mask=(split < splits)[:, None], other=0.0)
    joined = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(out + query * width + column, joined, mask=column < width)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of one token `q` [batch, heads, 1, width] over a cache [batch, fewer heads, length, width]."""
    batch, shared, length, width = k.shape
    group, wide = q.shape[1] // shared, max(triton.next_power_of_2(width), FEWEST_ROWS)
    wanted = triton.cdiv(multiprocessors(q.device) * PROGRAMS_PER_SM, batch * shared)
    per_split = triton.cdiv(triton.cdiv(length, min(wanted, MOST_SPLITS)), LEAST_SPLIT) * LEAST_SPLIT
    splits = triton.cdiv(length, per_split)  # none is empty
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(batch * shared * splits * group, wide, dtype=torch.float32, device=q.device)
    logs = torch.empty(batch * shared * splits * group, dtype=torch.float32, device=q.device)
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    decode_split[(batch * shared, splits)](
        q,
        k,
        v,
        sums,
        logs,
        LOG2_E / math.sqrt(width),
        length,
        per_split,
        splits,
        width,
        group,
        max(triton.next_power_of_2(group), FEWEST_ROWS),
        wide,
    )
    decode_join[(q.shape[0] * q.shape[1],)](sums, logs, out, splits, width, group, triton.next_power_of_2(splits), wide)
    return out
