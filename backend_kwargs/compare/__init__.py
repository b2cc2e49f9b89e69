"""One model under several backends: each compiled for itself, checked, and timed against the others in turn."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from backend_kwargs import measure
from backend_kwargs.compare.drawing import plot
from backend_kwargs.compare.isolation import undisturbed
from backend_kwargs.compare.rows import Candidate, Comparison, Mode, Progress, Row, fastest, to_json
from backend_kwargs.compare.study import Inputs, Study, tensors
from backend_kwargs.compare.trial import Trial, warm_up
from backend_kwargs.errors import BackendKwargsError, said, unknown, wrong_value
from backend_kwargs.measure import Interval

__all__ = ["Candidate", "Comparison", "Row", "compare", "fastest", "plot", "to_json"]

AGAIN = "\0again"
COMPILE_NOTES = {
    True: "Compile seconds are the first call, with an empty Inductor cache for each candidate.",
    False: "Compile seconds are the first call, with Inductor's cache as it was found: see each row's cache.",
}


def compare(
    model: Callable[..., Any],
    example_inputs: Any,
    candidates: Sequence[Candidate],
    *,
    mode: Mode = "inference",
    device: str | torch.device | None = None,
    rounds: int = 30,
    baseline: str | None = None,
    budget_s: float | None = None,
    cold: bool = True,
    progress: Progress | None = None,
) -> Comparison:
    """Compile `model` under each candidate, check its numbers before and after timing, and time all of them in turn.

    `example_inputs` is a tensor, a sequence of positional or a mapping of keyword arguments. In "training" a call is
    forward and backward, with random cotangents; gradients and changed buffers are checked too. The model is copied
    and comes back untouched. The baseline is the candidate so labelled, else eager, else the first that passes.
    `budget_s` bounds the timing alone. `cold` gives each candidate an empty Inductor cache: else a peer that shares
    kernels with an earlier one, or an earlier run, seems to compile for nothing. `progress(label, stage, fraction)`
    hears the stages "reference", "compile", "compiled", "timing".

    Everything runs in this process: peers must be timed interleaved, and a child process for each of twelve candidates
    would cost twelve imports of torch. So what a process pays once (imports, Inductor's start) is paid before the first
    clock, and memory is a count that earlier candidates do not disturb (`measure.peak_memory`).

    A candidate's failure becomes its row. Raises BackendKwargsError for wrong arguments, a device that cannot be used
    here, or a model that cannot be copied.
    """
    _check_arguments(candidates, mode, rounds, baseline)
    wanted = _usable(device) if device is not None else None
    say = progress or _silence
    inputs = _arguments(example_inputs)
    place = wanted or _device_of(model, inputs)
    with undisturbed(place, training=mode == "training"):
        study = Study.of(model, inputs, mode, place)
        trials = [Trial(candidate, Row(candidate.label, _shown(candidate))) for candidate in candidates]
        say("eager", "reference", 0.0)
        study.settle([trial.row for trial in trials])
        warm_up(trials, place)
        for done, trial in enumerate(trials, 1):
            if trial.row.passed:
                fraction = done / (len(trials) + 2)
                say(trial.row.label, "compile", fraction)
                trial.attempt(partial(trial.start, study, cold=cold))
                say(trial.row.label, "compiled", fraction)
        noise, chosen = _time(study, trials, rounds, baseline, budget_s, say)
    environment = measure.environment(place) | {"mode": mode, "rounds": rounds, "dtype": str(study.dtype)}
    return Comparison([t.row for t in trials], environment, noise, chosen, mode, [COMPILE_NOTES[cold], *study.notes])


def _silence(label: str, stage: str, fraction: float) -> None:
    pass


def _check_arguments(candidates: Sequence[Candidate], mode: str, rounds: int, baseline: str | None) -> None:
    labels = [candidate.label for candidate in candidates]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise BackendKwargsError(f"Candidate {twice!r} is given twice: give each its own label.")
    if mode not in ("inference", "training"):
        raise wrong_value("mode", "'inference' or 'training'", mode)
    if not isinstance(rounds, int) or rounds < 1:
        raise wrong_value("rounds", "a whole number of at least 1", rounds)
    if baseline is not None and baseline not in labels:
        raise unknown("baseline", baseline, labels, otherwise="It is the label of one of the candidates.")


def _arguments(example_inputs: Any) -> Inputs:
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise wrong_value("example_inputs", "a tensor, a sequence of arguments or a mapping of keywords", example_inputs)


def _usable(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch has one for each kind of device
        raise BackendKwargsError(f"Cannot run on device {str(device)!r}, try 'cpu': {said(error)}.") from error
    return place


def _device_of(model: Callable[..., Any], inputs: Inputs) -> torch.device:
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    return next((tensor.device for tensor in [*parameters, *tensors(inputs)]), torch.device("cpu"))


def _shown(candidate: Candidate) -> str:
    if candidate.backend is None or isinstance(candidate.backend, str):
        return candidate.backend or "eager"
    if inspect.isfunction(candidate.backend):
        return f"{candidate.backend.__module__}:{candidate.backend.__qualname__}"
    return repr(candidate.backend)


def _time(
    study: Study, trials: list[Trial], rounds: int, baseline: str | None, budget_s: float | None, say: Progress
) -> tuple[Interval | None, str | None]:
    racing = {trial.row.label: trial for trial in trials if trial.row.passed}
    first = _baseline(list(racing.values()), baseline)
    if first is None:
        return None, None
    calls = {label: trial.step for label, trial in racing.items()} | {AGAIN: first.step}
    start = 1 - 1 / (len(trials) + 2)
    say("", "timing", start)
    samples = measure.interleave(
        calls,
        rounds=rounds,
        device=study.device,
        budget_s=budget_s,
        progress=lambda fraction: say("", "timing", start + fraction * (1 - start)),
        failed=lambda label, error: (first if label == AGAIN else racing[label]).failed(error),
    )
    for label, trial in racing.items():
        if label in samples:
            trial.attempt(partial(trial.finish, study, samples[label]))
    if not first.row.passed:
        # Ratios need a baseline that ran beside: the others race again without it.
        return _time(study, trials, rounds, baseline, budget_s, say)
    return _judge_speed(first, list(racing.values()), samples[AGAIN])


def _baseline(racing: list[Trial], wanted: str | None) -> Trial | None:
    eager = (trial for trial in racing if trial.candidate.backend is None)
    named = (trial for trial in racing if trial.row.label == wanted)
    return next(named, None) or next(eager, None) or next(iter(racing), None)


def _judge_speed(first: Trial, racing: list[Trial], again: list[float]) -> tuple[Interval, str]:
    noise = measure.noise_floor(measure.ratio_interval(first.row.samples, again))
    for row in (trial.row for trial in racing if trial.row.passed):
        row.speedup = measure.ratio_interval(first.row.samples, row.samples)
        row.verdict = "within noise" if measure.within_noise(row.speedup, noise) else ""
    first.row.verdict = "baseline"
    return noise, first.row.label
