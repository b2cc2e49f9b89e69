"""One candidate's trial, and the row made from it."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from backend_kwargs import trial
from backend_kwargs.compare.rows import Candidate, Row
from backend_kwargs.compile_records import RACED
from backend_kwargs.harness.isolation import Counted, counted, isolated
from backend_kwargs.harness.trial import Trial
from backend_kwargs.report import Graph
from backend_kwargs.torch_internals.dynamo import cache_counts
from backend_kwargs.trial import Status


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
        hits, misses = map(cache_counts, ("hit", "miss"))
        with _empty_cache() if self.cold and self.counted else contextlib.nullcontext():
            yield
        if self.counted:
            now_hits, now_misses = map(cache_counts, ("hit", "miss"))
            # A race finds what it has compiled itself in the cache.
            raced = any(graph.cache == RACED for graph in self.counted.report().graphs)
            self.cache = "warm" if now_hits > hits and not raced else "cold" if now_misses > misses else ""

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
