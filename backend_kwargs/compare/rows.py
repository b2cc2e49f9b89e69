"""Input and output of `compare`: candidates with their trials, rows, and the comparison as data."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from backend_kwargs import trial
from backend_kwargs.compile_records import RACED
from backend_kwargs.harness.trial import Counted, Trial, counted, isolated
from backend_kwargs.options.option import Options
from backend_kwargs.report import Graph
from backend_kwargs.tables import as_text
from backend_kwargs.torch_internals.dynamo import cache_counts
from backend_kwargs.trial import Accuracy, Interval, Status

Mode = Literal["inference", "training"]
Progress = Callable[[str, str, float], None]

VERSION = 1
MEANINGLESS = 0.5  # of an output's size: a larger error is not one of precision
COLUMNS = ("backend", "speedup", "95 %", "latency", "compile", "memory", "graphs", "accuracy", "")


@dataclass(frozen=True)
class Candidate:
    """One way to run the model: a label, and `torch.compile`'s `backend` (None: eager), `mode` and `options`."""

    label: str
    backend: Callable[..., object] | str | None = None
    mode: str | None = None
    options: Options | None = None


@dataclass
class Row:
    """The result of one candidate; it has a latency if it ran, also with wrong results ("fail_accuracy").

    `graphs` is the number of graphs that its backend compiled: more than 1 means graph breaks. `compile_s` is the time
    of the first call in seconds, `cache` whether Inductor's cache was hit ("warm", "cold", "" if unknown). `samples`
    are seconds per call, `speedup` is over the baseline, and `latency` is that of the baseline divided by it.
    `peak_bytes` is the memory of one call beyond what was allocated before (on CUDA: before the compile). `verdict` is
    "baseline", "within noise" or ""; `tuning` is "tuned" or "untuned" if TVM has kernels, else ""; `report` is the text
    of `bk.report` for a backend of this package, and `made` the graphs of that report, which only a page shows, as it
    does `kernels`: those of one call by time.
    """

    label: str
    backend: str
    status: Status = "pass"
    reason: str = ""
    graphs: int = 0
    compile_s: float | None = None
    cache: str = ""
    latency: Interval | None = None
    speedup: Interval | None = None
    peak_bytes: int | None = None
    accuracy: Accuracy | None = None
    verdict: str = ""
    tuning: str = ""
    samples: list[float] = field(default_factory=list)
    report: str = ""
    made: tuple[Graph, ...] = field(default=(), repr=False)
    kernels: tuple[trial.KernelTime, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        """Return whether the backend itself ran it, with right results."""
        return self.status == "pass"

    @property
    def right(self) -> bool:
        """Return whether it ran with right results, on the backend or on a fallback."""
        return self.latency is not None and self.status != "fail_accuracy"


@dataclass
class Comparison:
    """The rows in the order of the candidates, and what is needed to interpret them.

    `noise` is the interval of the baseline against itself, timed twice; None if nothing was timed. `itself` are the
    samples of the model itself, without torch.compile, whether it is a candidate or not. `disturbed` says which timings
    other work has changed, "" if none.
    """

    rows: list[Row]
    environment: dict[str, Any]
    noise: Interval | None
    baseline: str | None
    mode: Mode
    notes: list[str]
    itself: list[float] = field(default_factory=list)
    disturbed: str = ""

    def over_itself(self, row: Row) -> Interval | None:
        """Return a row's speedup over the model itself, None unless that is surely below 1."""
        if not row.samples or len(row.samples) != len(self.itself):
            return None
        ratio = trial.ratio_interval(self.itself, row.samples)
        beyond = self.noise is None or not trial.within_noise(ratio, self.noise)
        return ratio if ratio.high < 1 and beyond else None

    def __str__(self) -> str:
        return "\n".join([as_text(COLUMNS, map(cells, self.rows)), "", *self.reading()])

    def reading(self) -> list[str]:
        """Return the lines that explain the table: where it was measured, and against what."""
        where = f"{self.mode} on {self.environment['device_name']}, torch {self.environment['torch']}"
        base = self.baseline
        over = f"Speedup is over {base}, with the 95 % interval of its median; latency is that of {base} divided by it."
        warm = "warm: Inductor's cache already had the code." if any(row.cache == "warm" for row in self.rows) else ""
        held = any(row.peak_bytes is not None for row in self.rows)
        memory = "Memory is the peak during one call, beyond what was allocated before it." if held else ""
        about = filter(None, ("" if base is None else over, warm, memory, self.disturbed))
        return [where, *about, *self.notes]


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's cells in the order of COLUMNS."""
    speedup, interval, latency = "", "", ""
    if row.latency is not None:
        seconds = row.latency.median
        latency = f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
        if row.speedup:
            speedup, interval = f"{row.speedup.median:.2f}x", f"{row.speedup.low:.2f} to {row.speedup.high:.2f}"
    compiled = "" if row.compile_s is None else f"{row.compile_s:.1f} s{' warm' if row.cache == 'warm' else ''}"
    memory = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f} MiB"
    remarks = ", ".join(filter(None, (_beyond(row) or row.reason or row.verdict, row.tuning)))
    return (row.label, speedup, interval, latency, compiled, memory, str(row.graphs or ""), row.status, remarks)


def _beyond(row: Row) -> str:
    """Return the error, the limit and the remedy of a result that is only less precise, or ""."""
    accuracy = row.accuracy
    if row.status != "fail_accuracy" or accuracy is None or accuracy.error is None or accuracy.bound is None:
        return ""
    if accuracy.error > MEANINGLESS:
        return ""
    return f"error {accuracy.error:.1e}, above the limit {accuracy.bound:.1e}: raise --max-error to accept it"


def fastest(comparison: Comparison) -> Row | None:
    """Return the row with the highest speedup over the baseline, None if none exceeds the noise.

    Among rows whose intervals overlap the highest one's, it is the one that compiled in the least time. Rows that fell
    back are left out, since their backend did not run.
    """
    able = [row for row in comparison.rows if row.status in ("pass", "unknown")]
    faster = [(row, row.speedup) for row in able if row.speedup and not row.verdict]
    faster = [(row, speedup) for row, speedup in faster if speedup.low > 1]
    if not faster:
        return None
    best = max((speedup for _, speedup in faster), key=lambda speedup: speedup.median)
    return min((row for row, speedup in faster if speedup.high >= best.low), key=lambda row: row.compile_s or 0.0)


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain JSON values: seconds, bytes, raw samples, and the version of the layout."""
    return {
        "version": VERSION,
        "environment": comparison.environment,
        "mode": comparison.mode,
        "baseline": comparison.baseline,
        "noise": dataclasses.asdict(comparison.noise) if comparison.noise else None,
        "notes": list(comparison.notes),
        "candidates": [_row_json(row) for row in comparison.rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    spread = {f"p{q}": trial.percentile(row.samples, q / 100) for q in (20, 80)} if row.samples else {}
    fields = dataclasses.asdict(dataclasses.replace(row, made=()))
    del fields["made"], fields["kernels"]
    if row.latency:
        fields["latency"] |= spread
    return fields


# ---- a candidate's trial


@dataclass(eq=False)
class CandidateTrial(Trial):
    """A candidate; if `cold`, compiled with an empty Inductor cache. `cache` is whether that cache was hit.

    If `profiled`, `kernels` are those of one call after the timing.
    """

    timed: ClassVar[frozenset[Status]] = frozenset({"pass", "unknown", "fell_back", "fail_accuracy"})
    candidate: Candidate
    cold: bool
    cache: str = ""
    report: str = ""
    tuning: str = ""
    made: tuple[Graph, ...] = ()
    profiled: bool = False
    kernels: tuple[trial.KernelTime, ...] = ()

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
        if self.counted and (reported := self.counted.report()).graphs:
            self.report, self.tuning, self.made = str(reported), reported.tuning, reported.graphs
        super().finish()
        if self.profiled and self.counted and self.passed:
            with contextlib.suppress(RuntimeError):  # as where another profiler is running
                self.kernels = trial.kernel_times(self.step, self.study.device)

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
            latency=trial.median_interval(timed) if timed else None,
            peak_bytes=self.peak_bytes,
            accuracy=self.accuracy,
            tuning=self.tuning,
            samples=timed,
            report=self.report,
            made=self.made,
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
