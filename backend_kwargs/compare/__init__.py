"""Compare one model under several backends: compile each by itself, check it, and time all of them interleaved."""

import contextlib
import copy
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from backend_kwargs.bundles.samples import sample_of
from backend_kwargs.compare.comparison import (
    Candidate,
    Comparison,
    Mode,
    Progress,
    Row,
    fastest,
    to_json,
)
from backend_kwargs.compile_records import RACED
from backend_kwargs.errors import BackendKwargsError, error_text, unknown, wrong_value
from backend_kwargs.harness.study import Inputs, Study, device_of, move
from backend_kwargs.harness.trial import Counted, Trial, counted, isolated, learn, room_to_compile, start_inductor
from backend_kwargs.report import Report
from backend_kwargs.torch_internals.dynamo import cache_counts
from backend_kwargs.trial import (
    Interval,
    KernelTime,
    Status,
    environment,
    generators,
    interleave,
    kernel_times,
    median_interval,
    moved,
    noise_floor,
    others_on,
    percentile,
    ratio_interval,
    status_of,
    tensors_of,
    within_noise,
)

__all__ = ["Candidate", "Comparison", "Row", "compare", "fastest", "to_json"]

LEAST_TIMING_S = 5.0  # under `limit_s`, whatever compiling took
APART = 1.05  # times the interval of a speedup: the ratio of medians is another one
DISTURBED = "Other work has disturbed the timing ({}): time it again on an idle machine."
AGAIN, ITSELF = "\0again", "\0itself"
COMPILE_NOTES = {
    True: "Compile seconds are the first call, with an empty Inductor cache for each candidate.",
    False: "Compile seconds are the first call, with Inductor's cache as it was: see each row's cache.",
}
NO_REPORT = Report((), ())
NO_DROPOUT = "Dropout is off: Inductor's random masks differ from eager's, so results could not be compared."


@dataclass(eq=False)
class CandidateTrial(Trial):
    """A candidate; if `cold`, compiled with an empty Inductor cache. `cache` is whether that cache was hit.

    If `profiled`, `kernels` are those of one call after the timing.
    """

    timed: ClassVar[frozenset[Status]] = frozenset({"pass", "unknown", "fell_back", "fail_accuracy"})
    candidate: Candidate
    cold: bool
    cache: str = ""
    report: Report = NO_REPORT
    profiled: bool = False
    kernels: tuple[KernelTime, ...] = ()

    @property
    def label(self) -> str:
        """Return the candidate's label."""
        return self.candidate.label

    def compile(self, model: Callable[..., object]) -> tuple[Callable[..., object], Counted | None]:
        """Compile as `torch.compile` does; eager is the model itself."""
        if self.candidate.backend is None:
            return model, None
        # A precision's error is measured by the study: what exceeds it is timed as well.
        measured = self.study.max_error is not None
        backend, left = counted(
            self.candidate.backend, self.candidate.mode, self.candidate.options, error_is_measured=measured
        )
        return isolated(model, backend=backend, **left), backend

    @contextlib.contextmanager
    def first_call(self) -> Iterator[None]:
        """Set up its cache, and record whether its graphs came from there."""
        before = cache_counts()
        with _empty_cache() if self.cold and self.counted else contextlib.nullcontext():
            yield
        if self.counted:
            after = cache_counts()
            # A race finds what it has compiled itself in the cache.
            raced = any(graph.cache == RACED for graph in self.counted.report().graphs)
            missed = "cold" if after["miss"] > before["miss"] else ""
            self.cache = "warm" if after["hit"] > before["hit"] and not raced else missed

    def finish(self) -> None:
        """Keep the report, and check the results again after timing."""
        if self.counted:
            self.report = self.counted.report()
        super().finish()
        if self.profiled and self.counted and self.passed:
            with contextlib.suppress(RuntimeError):  # as where another profiler is running
                self.kernels = kernel_times(self.step, self.study.device)

    def row(self, samples: list[float] | None) -> Row:
        """Return its row; `samples` are kept only if it ran."""
        timed = samples if self.passed and samples else []
        return Row(
            self.label,
            _shown(self.candidate.backend),
            self.status,
            self.reason,
            self.graphs,
            self.compile_s,
            self.cache,
            latency=median_interval(timed) if timed else None,
            peak_bytes=self.peak_bytes,
            accuracy=self.accuracy,
            tuning=self.report.tuning,
            samples=timed,
            report=str(self.report) if self.report.graphs else "",
            made=self.report.graphs,
            kernels=self.kernels,
        )


def _shown(backend: Callable[..., object] | str | None) -> str:
    if backend is None or isinstance(backend, str):
        return backend or "eager"
    return f"{backend.__module__}:{backend.__qualname__}" if inspect.isfunction(backend) else repr(backend)


@contextlib.contextmanager
def _empty_cache() -> Iterator[None]:
    """Give Inductor an empty cache, and races an empty store."""
    from backend_kwargs.auto.process_memory import nothing_decided
    from backend_kwargs.torch_internals.caches import fresh_cache

    error = None
    with fresh_cache(), nothing_decided():
        # An error raised inside torch's fresh_cache would leave its folder behind.
        try:
            yield
        except Exception as raised:  # noqa: BLE001 - raised again below
            error = raised
    if error is not None:
        raise error


def compare(
    model: Callable[..., object],
    example_inputs: object,
    candidates: Sequence[Candidate],
    *,
    mode: Mode = "inference",
    device: str | torch.device | None = None,
    rounds: int = 30,
    baseline: str | None = None,
    budget_s: float | None = None,
    limit_s: float | None = None,
    cold: bool = True,
    tolerance: float | None = None,
    max_error: float | None = None,
    kernels: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compile `model` under each candidate, check its results before and after timing, and time all interleaved.

    `example_inputs` is a tensor, a tuple of arguments, a dict of keywords, or (args, kwargs). With
    mode="training" a call is forward and backward, with random cotangents, and gradients and changed buffers are
    checked too. The model is copied and not changed. Calls are timed as in a plain loop: the compiled function as
    `torch.compile` returns it, each result kept until the next call returns, no steps marked; the model itself is
    timed too. The baseline is the candidate with that label, else eager, else the first with right results.
    `tolerance` is absolute and relative; None is 1e-3, in training 1e-2. `max_error` also accepts results beyond it
    whose relative RMSE to the float64 reference is at most that, in each output, gradient and changed tensor. Wrong
    results are timed too. `budget_s` limits only the timing; `limit_s` leaves out what would compile beyond it.
    `cold` gives each candidate an empty Inductor cache: otherwise one that shares kernels with an earlier one seems to
    compile for free. `kernels` profiles a call of each, for the page. `progress(label, stage, fraction)` gets the
    stages "reference", "compile", "compiled", "timing".

    Everything runs in this process, since interleaved timing needs that. What a process pays once (imports, start of
    Inductor) is paid before the first measurement, and `trial.peak_memory` does not depend on earlier candidates.

    A candidate that fails is a row with the reason. Raises BackendKwargsError for wrong arguments, a device that cannot
    be used here, or a model that cannot be copied.
    """
    ends = time.perf_counter() + (math.inf if limit_s is None else limit_s)
    _check_arguments(candidates, mode, rounds, baseline, tolerance, max_error)
    say = progress or (lambda label, stage, fraction: None)
    usable, inputs = None if device is None else _usable(device), sample_of(example_inputs)
    place = usable or device_of(model, inputs)
    others = {"others": busy} if (busy := others_on(place)) else {}  # before this process does anything
    with generators.kept(place), torch.set_grad_enabled(mode == "training"), room_to_compile():
        study, notes = _study(model, inputs, place, training=mode == "training")
        study.tolerance, study.max_error = tolerance, max_error
        trials = [CandidateTrial(study, candidate, cold, profiled=kernels) for candidate in candidates]
        eager = (trial for trial in trials if trial.candidate.backend is None)
        itself = next(eager, CandidateTrial(study, Candidate(ITSELF), cold))
        say("eager", "reference", 0.0)
        learn(study, list(dict.fromkeys([*trials, itself])))
        _warm_up(trials, place)
        notes += _start(trials, say, itself, ends)
        left_s = budget_s if limit_s is None else max(ends - time.perf_counter(), LEAST_TIMING_S)
        samples, first = _time(study, trials, rounds, baseline, left_s, say, itself)
    rows = [trial.row(samples.get(trial.label)) for trial in trials]
    noise, disturbed = _judge_speed(rows[trials.index(first)], rows, samples[AGAIN]) if first else (None, "")
    where = environment(place) | {"mode": mode, "rounds": rounds, "dtype": str(study.dtype)} | others
    base, notes = first.label if first else None, [COMPILE_NOTES[cold], *notes]
    return Comparison(rows, where, noise, base, mode, notes, samples.get(itself.label, []), disturbed)


def _start(trials: list[CandidateTrial], say: Progress, itself: CandidateTrial, ends: float) -> list[str]:
    """Compile and check each candidate that may still run, and the model itself; return a note on those left out.

    The first one that compiles always does. A later one is left out where less time is left than the longest took.
    """
    longest_s, late = 0.0, []
    for done, trial in enumerate(trials, 1):
        began = time.perf_counter()
        if trial.passed and longest_s and began + longest_s > ends - LEAST_TIMING_S:
            trial.status, trial.reason = "timeout", f"left out: {max(ends - began, 0.0):.0f} s were left"
            late.append(trial.label)
        elif trial.passed:
            fraction = done / (len(trials) + 2)
            say(trial.label, "compile", fraction)
            trial.attempt(trial.start)
            say(trial.label, "compiled", fraction)
            longest_s = max(longest_s, time.perf_counter() - began if trial.counted else 0.0)
    if itself not in trials and itself.passed:
        itself.attempt(itself.start)
    return [f"Left out for lack of time: {', '.join(late)}."] if late else []


def _study(
    model: Callable[..., object], inputs: Inputs, device: torch.device, *, training: bool
) -> tuple[Study, list[str]]:
    """Return the study of a copy on `device`, with notes; raise BackendKwargsError if it cannot be copied."""
    try:
        model, inputs = copy.deepcopy((model, inputs))
    except Exception as error:
        reason = status_of(error)[1]
        raise BackendKwargsError(f"compare copies the model and its inputs, which failed: {reason}") from error
    inputs = moved(inputs, device)
    notes = [NO_DROPOUT] if move(model, device, training=training) else []
    tensors = [*(model.parameters() if isinstance(model, torch.nn.Module) else ()), *tensors_of(inputs)]
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    dtype = min(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return Study(model, inputs, "fwd_bwd" if training else "fwd", device, dtype), notes


def _warm_up(trials: list[CandidateTrial], device: torch.device) -> None:
    """Import and start Inductor now, so that no candidate's compile time includes it."""
    from backend_kwargs.torch_internals import compile_fx, dynamo  # noqa: F401 - for what they import

    backends = [trial.candidate.backend for trial in trials if trial.passed]
    if any("inductor" in f"{backend!r} {getattr(backend, 'compiler_name', '')}" for backend in backends):
        start_inductor(device)


def _check_arguments(
    candidates: Sequence[Candidate],
    mode: str,
    rounds: int,
    baseline: str | None,
    tolerance: float | None,
    max_error: float | None,
) -> None:
    """Raise if an argument of `compare` is wrong."""
    labels = [candidate.label for candidate in candidates]
    for twice in (label for label in labels if labels.count(label) > 1):
        raise BackendKwargsError(
            f"Candidate {twice!r} is given twice: name it once, or give each Candidate its own label."
        )
    for right, name, wanted, value in (
        (mode in ("inference", "training"), "mode", "'inference' or 'training'", mode),
        (isinstance(rounds, int) and rounds >= 1, "rounds", "a whole number of at least 1", rounds),
        (tolerance is None or tolerance > 0, "tolerance", "a number above 0", tolerance),
        (max_error is None or 0 < max_error < 1, "max_error", "a number above 0 and below 1", max_error),
    ):
        if not right:
            raise wrong_value(name, wanted, value)
    if baseline is not None and baseline not in labels:
        raise unknown("baseline", baseline, labels, otherwise="It is the label of one of the candidates.")


def _usable(device: str | torch.device) -> torch.device:
    """Return the device; raise if it cannot be used here."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError) as error:  # torch raises another class for each kind of device
        raise BackendKwargsError(f"Cannot run on device {str(device)!r}, try 'cpu': {error_text(error)}.") from error
    return place


def _time(
    study: Study,
    trials: list[CandidateTrial],
    rounds: int,
    baseline: str | None,
    budget_s: float | None,
    say: Progress,
    itself: CandidateTrial,
) -> tuple[dict[str, list[float]], CandidateTrial | None]:
    """Return the samples by label, those of the model `itself` too, and the baseline that was timed with them."""
    racing = {trial.label: trial for trial in (*trials, itself) if trial.passed}
    first = _baseline(trials, baseline)
    if first is None:
        return {}, None
    start = 1 - 1 / (len(trials) + 2)
    say("", "timing", start)
    samples = interleave(
        {label: trial.step for label, trial in racing.items()} | {AGAIN: first.step},
        rounds=rounds,
        device=study.device,
        budget_s=budget_s,
        progress=lambda fraction: say("", "timing", start + fraction * (1 - start)),
        failed=lambda label, error: (first if label == AGAIN else racing[label]).fail(error),
    )
    for trial in racing.values():
        if trial.passed:
            trial.attempt(trial.finish)
    # A ratio needs a baseline from the same rounds: if it failed, the others are timed again without it.
    if _baseline(trials, baseline) is first:
        return samples, first
    return _time(study, trials, rounds, baseline, budget_s, say, itself)


def _baseline(trials: list[CandidateTrial], wanted: str | None) -> CandidateTrial | None:
    """Return the trial that others are compared with: the one `wanted`, else eager, else the first that ran."""
    timed = [trial for trial in trials if trial.passed]
    racing = [trial for trial in timed if trial.status != "fail_accuracy"] or timed
    eager = (trial for trial in racing if trial.candidate.backend is None)
    named = (trial for trial in racing if trial.label == wanted)
    return next(named, None) or next(eager, None) or next(iter(racing), None)


def _judge_speed(first: Row, rows: list[Row], again: list[float]) -> tuple[Interval, str]:
    """Note each row's speedup over the first and the latency that follows; return the noise, and what disturbed it.

    Calls are compared with those of their round, so that what slows a whole round does not count. Medians are not.
    """
    noise = noise_floor(ratio_interval(first.samples, again))
    base, apart = percentile(first.samples, 0.5), []
    for row in (row for row in rows if row.latency):
        row.speedup = of = ratio_interval(first.samples, row.samples)
        row.verdict = "within noise" if within_noise(of, noise) else ""
        medians = base / percentile(row.samples, 0.5)
        if not of.low / APART <= medians <= of.high * APART:
            apart.append(f"{row.label} {of.median:.2f}x, by medians {medians:.2f}x")
        if row is not first:
            row.latency = Interval(base / of.median, base / of.high, base / of.low)
    first.verdict = "baseline"
    return noise, DISTURBED.format("; ".join(apart)) if apart else ""


# ---- a candidate's trial
