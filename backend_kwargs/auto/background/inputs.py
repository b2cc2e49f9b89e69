"""The inputs of a later call: a race runs on them in one slice, and keeps none afterwards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.race import Race
from backend_kwargs.auto.result_checks import SLOWER_IN_PRECISION, ResultChecks
from backend_kwargs.graphs.replay import Task
from backend_kwargs.graphs.writes import has_memory
from backend_kwargs.measure import Accuracy
from backend_kwargs.measure.trees import Results

REFERENCE_S = 0.3  # a reference that takes longer is computed only for a candidate that would fail without


@dataclass
class LaterChecks(ResultChecks):
    """Checks of results on the inputs of a later call: eager's are computed when a candidate has some."""

    def of_results(self, seen: Results) -> Accuracy:
        """Check results by eager's; by those in higher precision too, only where they would fail."""
        if self.expected is None:
            self.expected = self.task.observe(self.task.copy())
            self.of_eager(self.expected)  # prepares runs of eager that round otherwise
            if SLOWER_IN_PRECISION * self.budget.call_s < REFERENCE_S:
                self.compute_reference()
        accuracy = super().of_results(seen)
        if accuracy.passed or self.reference is not None:
            return accuracy
        self.compute_reference()
        return accuracy if self.reference is None else super().of_results(seen)


def bind(race: Race, runners: Iterable[Runner], values: Sequence[Any], begin: Callable[[], None]) -> None:
    """Let the race run on the inputs of one call; `begin` comes before each run."""
    _exchange(race, replace(race.task, inputs=race.task.inputs.following(values), begin=begin), values)
    for runner in runners:
        if runner.made is not None:
            runner.call = race.caller(runner.made)


def part(race: Race, runners: Iterable[Runner], written: Sequence[int]) -> None:
    """Keep nothing of a call's inputs and results, but the memory into which those that are `written` were copied."""
    race.checks.roundings = ()
    vars(race.checks).pop("precise", None)
    kept = vars(race.task.inputs).get("staged") if written else None
    inputs = replace(race.task.inputs, values=())
    if kept:
        vars(inputs)["staged"] = [v if at in written else None for at, v in enumerate(kept)]
    _exchange(race, replace(race.task, inputs=inputs), ())
    for runner in runners:
        runner.call = _between_calls


def ordinary(inputs: Sequence[Any]) -> bool:
    """Return whether candidates can be called now: on plain tensors, and not while a CUDA graph is captured."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return all(map(has_memory, tensors)) and not capturing


def _exchange(race: Race, task: Task, values: Sequence[Any]) -> None:
    request = replace(race.request, graph=replace(race.request.graph, example_inputs=values))
    race.task = race.checks.task = race.selection.task = race.compiles.task = task
    race.request = race.selection.request = race.compiles.request = request
    race.checks.expected = race.checks.reference = None


def _between_calls() -> object:
    raise RuntimeError("a candidate is called only in a slice of its race")
