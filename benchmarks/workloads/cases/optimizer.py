"""Cases of optimizers: one AdamW step, as in compiled training."""

from functools import partial
from typing import Any

import torch
from torch.optim.adamw import adamw

from benchmarks.workloads.case import Case, Problem
from benchmarks.workloads.cases.norms import moved

Tensors = list[torch.Tensor]
# As torch.optim.AdamW chooses; a CPU's foreach kernels take no tensor as step size, which compiling makes it.
IMPLEMENTATION: dict[str, dict[str, bool]] = {"cuda": {"foreach": True, "capturable": True}, "cpu": {"foreach": False}}


def step(params: Tensors, grads: Tensors, averages: Tensors, squares: Tensors, steps: Tensors, **how: Any) -> Tensors:
    """Take one step in place and return the parameters."""
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    adamw(params, grads, averages, squares, [], steps, amsgrad=False, maximize=False, **rates, **how)
    return params


def adamw_case(device: torch.device, dtype: torch.dtype, scale: str) -> Problem:
    """Build a step of 250 million parameters, in forty tensors."""
    tensors, size = (40, 6_250_000) if scale == "full" else (3, 500)

    def normal() -> Tensors:
        return [torch.randn(size, device=device, dtype=dtype) for _ in range(tensors)]

    params, grads, averages, squares = normal(), normal(), normal(), [values.square() for values in normal()]
    steps = [torch.tensor(10.0, device=device) for _ in range(tensors)]
    written = 3 * tensors * size * dtype.itemsize
    work = moved(read=(*params, *grads, *averages, *squares), written=written)
    how = IMPLEMENTATION["cuda" if device.type == "cuda" else "cpu"]
    fused = {"fused": True, "capturable": device.type == "cuda"}
    args = (params, grads, averages, squares, steps)
    return Problem(partial(step, **how), args, work, {"adamw_fused": partial(step, **fused)})


CASES: tuple[Case, ...] = (
    Case("adamw", "optimizer", adamw_case, dtype=torch.float32, suites=frozenset({"smoke", "start"})),
)
