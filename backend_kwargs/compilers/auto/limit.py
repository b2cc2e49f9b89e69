"""The least seconds that a graph can take on a GPU: its bytes at the memory's speed, or its flops at a matmul's."""

import math
from collections.abc import Callable
from functools import cache, partial

import torch

from backend_kwargs import measure
from backend_kwargs.compilers.auto.facts import Facts


def limit_of(facts: Facts, device: torch.device) -> float:
    """Return the least seconds: bytes at the memory's speed, or flops at a matmul's; 0 where unknown.

    Memory is as fast as for a copy where as much is written as read, as fast as for a fill where all goes one way.
    """
    if not facts.gpu:
        return 0.0
    copy, fill, peak = _ceilings(device)
    moved = facts.bytes_read + facts.bytes_written
    turned = 2 * min(facts.bytes_read, facts.bytes_written)  # what a copy could have moved
    return max(turned / copy + (moved - turned) / fill, facts.flops / peak)


@cache
def _ceilings(device: torch.device) -> tuple[float, float, float]:
    """Measure bytes per second of a copy and of a fill, and bf16 flops, once for each device: some milliseconds."""
    try:
        return _measured(device)
    except Exception:  # noqa: BLE001 - little memory is left, say: then nothing is known to be at its limit
        return math.inf, math.inf, math.inf


def _measured(device: torch.device) -> tuple[float, float, float]:
    held = torch.randn(1 << 26, device=device)
    square = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], object]] = {
        "copy": partial(torch.clone, held),
        "fill": held.zero_,
        "matmul": partial(torch.mm, square, square),
    }
    seconds = {name: min(each) for name, each in measure.interleave(calls, rounds=5, device=device).items()}
    return 2 * held.nbytes / seconds["copy"], held.nbytes / seconds["fill"], 2 * 8192**3 / seconds["matmul"]
