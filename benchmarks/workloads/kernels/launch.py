"""Utilities of the Triton kernels: tuning, grids, and a dot that works in the interpreter."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

KEPT = 3  # configurations of a table to try; each adds seconds of compiling and timing in every process
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def config(warps: int, stages: int = 1, pre_hook: Callable[..., None] | None = None, **blocks: int) -> triton.Config:
    """Return a configuration of a kernel: its constants, its warps and the depth of its pipeline."""
    return triton.Config(blocks, num_warps=warps, num_stages=stages, pre_hook=pre_hook)


def tuned(small: triton.Config, searched: list[triton.Config], *key: str) -> Callable[[Any], Any]:
    """Return a decorator that lets Triton choose, for each `key`, among the first `KEPT` of `searched`.

    `searched` has the best one on an H200 first; `tune_kernels` tries all. The interpreter uses `small`.
    """
    configs = [small] if INTERPRETED.value else searched

    def decorate(function: Any) -> Any:
        tuner = triton.autotune(configs[:KEPT], key=list(key), cache_results=True)(function)
        tuner.searched = configs
        return tuner

    return decorate


@cache
def multiprocessors(device: torch.device) -> int:
    """Return how many programs run in parallel; two in the interpreter, so that persistent loops repeat there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def persistent(device: torch.device, rows: int) -> Callable[[dict[str, Any]], tuple[int]]:
    """Return a grid of at most `PER_SM` programs on each multiprocessor, each for `ROWS` rows (or one) at a time."""
    return lambda meta: (min(triton.cdiv(rows, meta.get("ROWS", 1)), multiprocessors(device) * meta["PER_SM"]),)


@triton.jit
def dot(a, b, acc):
    """Multiply two tiles and add them to `acc`, in the full precision of their type."""
    if INTERPRETED:  # the interpreter stores bf16 as integers, and would multiply those
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
