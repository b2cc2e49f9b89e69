"""The error of a compiled graph in a lower precision, measured against float64 on the inputs of a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule

from backend_kwargs import trial
from backend_kwargs.backends import Inputs
from backend_kwargs.errors import error_text
from backend_kwargs.facts import Call
from backend_kwargs.graphs.eligibility import communicates, why_not_repeatable
from backend_kwargs.graphs.replay import Task, unpacked
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.options.precisions import UnfitPrecisionError, UnmeasuredError
from backend_kwargs.precision.reference import InFloat64, check_room
from backend_kwargs.trial import Accuracy, Results, is_number, walk

# What sums in another order may change from call to call: this part of the error, or float32's rounding.
VARYING, ROUNDING = 0.5, 1e-5
UNMEASURED = "its error cannot be measured"


@dataclass(frozen=True)
class Truth:
    """What a graph computes on some inputs, in eager and in float64; the inputs stay unchanged.

    `task` calls graphs on copies of the inputs that are written to.
    """

    task: Task
    eager: dict[str, object]
    precise: dict[str, object]

    @classmethod
    def of(cls, gm: GraphModule, inputs: Inputs) -> "Truth":
        """Run `gm` in eager and in float64; raise UnfitPrecisionError if the error cannot be measured."""
        if why := "it communicates with other ranks" if communicates(gm) else why_not_repeatable(gm, inputs):
            raise UnfitPrecisionError(f"{UNMEASURED}: {why}")
        with _unfit():
            task = Task.of(copy_of_graph(gm), inputs)
            with task.generators_kept():
                eager = task.observe(task.copy())
                if task.has_drawn():
                    raise UnfitPrecisionError(f"{UNMEASURED}: it draws random numbers")
                return cls(task, eager, in_float64(task))

    def error_of(self, compiled: Call, max_error: float) -> float:
        """Return the error of two calls of `compiled`; raise UnfitPrecisionError if it exceeds `max_error`.

        Results that vary from call to call are refused too: they contain memory that nobody wrote.
        """
        with _unfit(), self.task.generators_kept():
            device = next(value.device for value in self.task.inputs.values if isinstance(value, torch.Tensor))
            trial.fill_free_memory(device)
            seen = self.task.observe(compiled)
            trial.fill_free_memory(device)
            again = self.task.observe(compiled)
            error = max(_passed(against(each, self.eager, self.precise, max_error)) for each in (seen, again))
            if not against(again, seen, seen, max(ROUNDING, VARYING * error)).passed:
                raise UnfitPrecisionError("its results differ from call to call")
            return error


@contextmanager
def _unfit() -> Iterator[None]:
    """Raise UnfitPrecisionError for any failure."""
    with unpacked():
        try:
            yield
        except UnfitPrecisionError:
            raise
        except Exception as error:
            # A graph exceeds the cap on memory at other calls too.
            unfit = UnfitPrecisionError if isinstance(error, MemoryError) else UnmeasuredError
            raise unfit(f"{UNMEASURED}: {error_text(error)}") from error


def _passed(accuracy: Accuracy) -> float:
    if not accuracy.passed:
        unmeasured = accuracy.reason.startswith(UNMEASURED)
        raise (UnmeasuredError if unmeasured else UnfitPrecisionError)(accuracy.reason)
    return accuracy.error or 0.0


def in_float64(task: Task) -> dict[str, object]:
    """Return the results of the task in float64; raise if they cannot be computed."""
    if task.inputs.aliased:
        raise ValueError("inputs that it writes to share memory")
    trains = {at for at, each in enumerate(task.inputs.values) if isinstance(each, torch.Tensor) and each.requires_grad}
    whole = task.inputs.written | (trains if task.training else set())
    check_room(2 * sum(task.inputs.values[at].nbytes for at in whole))
    values = list(task.inputs.values)
    for at in whole:
        if (value := values[at]).is_floating_point():
            values[at] = value.detach().double().requires_grad_(value.requires_grad)
    wide = replace(task, inputs=replace(task.inputs, values=values))
    return wide.observe(lambda *given: InFloat64(task.copy(), keeps=task.training).run(*given))


def against(seen: Results, eager: Results, precise: Results, max_error: float) -> Accuracy:
    """Check outputs, written inputs and gradients, each by itself."""
    numbers = [leaf for what in precise for _, leaf in walk(what, precise[what]) if is_number(leaf) and leaf.numel()]
    if numbers and not any(bool(leaf.any()) for leaf in numbers):  # as of a last layer that starts with zeros
        return Accuracy("fail_accuracy", f"{UNMEASURED}: all results are 0")
    return trial.check_errors(seen, eager, precise, max_error)
