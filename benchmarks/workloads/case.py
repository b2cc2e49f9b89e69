"""A case of the suite, one instance of it, and the least work that it must do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from backend_kwargs.harness.study import Mode

Unit = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]


@dataclass(frozen=True, slots=True)
class Work:
    """The least that a case must do: floating-point operations on `unit`, and bytes of unique inputs plus outputs.

    `written` is how many of the bytes are outputs; None: not known.
    """

    flops: float
    bytes: float
    unit: Unit = "bf16"
    written: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance of a case, on its device: what is compiled, what it is called with, and peers written by hand.

    `fn` is a module or a function of `args`. Each of `peers` takes the same arguments and returns the same results; it
    is timed uncompiled. `work` is None if no limit is known. `optimizer` makes the optimizer that "train" steps after
    the backward pass: it takes the parameters. `sweep`: a call runs `fn` on each of `args`, with a single dynamic
    compile.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    work: Work | None = None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    sweep: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the suite's table.

    `build(device, dtype, scale)` makes the Problem with random normal data, seeded by the caller; `scale` is "full" or
    "smoke", the same computation at sizes that a CPU runs in milliseconds. `version` changes when results of two
    versions are not comparable. `suites` are those that it belongs to besides "full": "smoke" runs in CI, "dev" is the
    set on which candidates are developed. The Problem's work is that of the first of `modes`.
    """

    name: str
    group: str
    build: Callable[[torch.device, torch.dtype, str], Problem]
    version: int = 1
    dtype: torch.dtype = torch.bfloat16
    modes: tuple[Mode, ...] = ("fwd",)
    suites: frozenset[str] = frozenset()
    headline: bool = False  # three fresh compiles
    gpus_only: bool = False
