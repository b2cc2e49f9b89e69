"""The error of a graph in a lower precision, measured uncompiled against float64, on the inputs of the call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from backend_kwargs import measure
from backend_kwargs.compilers.auto.eligibility import communicates, why_never
from backend_kwargs.compilers.auto.settings import Settings
from backend_kwargs.compilers.auto.workload import Task, cuda_devices, has_drawn
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.precision.reference import InFloat64
from backend_kwargs.errors import error_text
from backend_kwargs.measure import Accuracy
from backend_kwargs.measure.accuracy import is_number
from backend_kwargs.measure.trees import walk

LARGEST_WIDE = 2 << 30  # bytes of inputs widened at the same time: those written to, and those that need gradients


def measured_error(
    gm: GraphModule, lowered: Callable[..., Any], example_inputs: Sequence[Any], max_error: float
) -> Accuracy:
    """Run the graph in eager, in float64 and as `lowered` on its inputs, and compare. The inputs stay unchanged."""
    if why := "it communicates with other ranks" if communicates(gm) else why_never(gm, example_inputs, Settings()):
        return Accuracy("fail_accuracy", f"its error cannot be measured: {why}")
    with torch.random.fork_rng(devices=cuda_devices()):
        try:
            task = Task.of(copy_of_graph(gm), example_inputs)
            eager = task.observe(task.copy())
            if has_drawn():
                return Accuracy("fail_accuracy", "its error cannot be measured: it draws random numbers")
            precise = in_float64(task)
            return against(task.observe(lowered), eager, precise, max_error)
        except Exception as error:  # noqa: BLE001 - a kernel without float64, no memory left, a kernel missing
            return Accuracy("fail_accuracy", f"its error cannot be measured: {error_text(error)}")


def in_float64(task: Task) -> dict[str, Any]:
    """Return the results of the task in float64; raise if they cannot be computed."""
    if task.inputs.aliased:
        raise ValueError("inputs that it writes to share memory")
    whole = {at for at, value in enumerate(task.inputs.values) if at in task.inputs.written or _trains(task, value)}
    if sum(task.inputs.values[at].nbytes for at in whole) > LARGEST_WIDE:
        raise ValueError(f"the inputs to keep in float64 exceed {LARGEST_WIDE >> 30} GiB")
    values = [_wide(value) if at in whole else value for at, value in enumerate(task.inputs.values)]
    wide = replace(task, inputs=replace(task.inputs, values=values))
    return wide.observe(InFloat64(task.copy()).run)


def _trains(task: Task, value: Any) -> bool:
    return task.training and isinstance(value, torch.Tensor) and value.requires_grad


def _wide(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def against(seen: dict[str, Any], eager: dict[str, Any], precise: dict[str, Any], max_error: float) -> Accuracy:
    """Check outputs, written inputs and gradients, each by itself."""
    judged = [measure.check_error(seen[what], eager[what], precise[what], max_error, what=what) for what in seen]
    numbers = [leaf for what in precise for _, leaf in walk(what, precise[what]) if is_number(leaf) and leaf.numel()]
    if numbers and not any(bool(leaf.any()) for leaf in numbers):  # as of a last layer that starts with zeros
        return Accuracy("fail_accuracy", "its error cannot be measured: all results are 0")
    failed = [accuracy for accuracy in judged if not accuracy.passed]
    return failed[0] if failed else max(judged, key=lambda accuracy: accuracy.error or 0.0)
