"""Cross-entropy, which reads the logits once forward and once backward."""
# ruff: noqa: N803  Triton constants are written in capitals.

import torch
import triton  # type: ignore[import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-untyped,unused-ignore]

from backend_kwargs.rewrites.kernels.launch import LOG2_E, Wrap, as_it_is, on_device_of

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
