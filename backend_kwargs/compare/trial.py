"""One candidate: compiled, warmed up, checked, timed, checked again."""

import contextlib
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from backend_kwargs import measure
from backend_kwargs.compare.isolation import Counted, cache_counts, cache_word, compiler, empty_cache, isolated
from backend_kwargs.compare.rows import Candidate, Row
from backend_kwargs.compare.study import Study
from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.measure import Accuracy
from backend_kwargs.report import report

WARM_CALLS = 3


@dataclass
class Trial:
    """A candidate on its way through compiling, checking and timing, and the row it becomes."""

    candidate: Candidate
    row: Row
    call: Callable[..., Any] = field(init=False)
    model: Callable[..., Any] = field(init=False)
    step: Callable[[], object] = field(init=False)
    counted: Counted | None = None

    def attempt(self, what: Callable[[], None]) -> None:
        """Do `what`; a failure becomes the row's."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the row tells it
            self.failed(error)
        if not self.row.graphs and self.counted:
            self.row.graphs = self.counted.graphs

    def failed(self, error: Exception) -> None:
        """Write an error into the row."""
        self.row.status, self.row.reason = measure.status_of(error)

    def start(self, study: Study, *, cold: bool) -> None:
        """Compile, warm up, count memory, and check on inputs not seen before."""
        self.call = self.model = copy.deepcopy(study.model) if study.training else study.model
        gc.collect()  # what an earlier candidate left in cycles would be counted as held, and freed meanwhile
        held = torch.cuda.memory_allocated(study.device) if study.device.type == "cuda" else None
        if self.candidate.backend is not None:
            self.counted, left = compiler(self.candidate)
            self.call = isolated(self.model, backend=self.counted, **left)
        step = self.step = study.step(self.call, self.model)
        self._first_call(step, study.device, cold=cold)
        if self.counted is not None and not self.counted.graphs:
            self.row.status, self.row.reason = "fail_to_run", "no graph reached the backend: this would run in eager"
            return
        self.row.peak_bytes = measure.peak_memory(
            lambda: [step() for _ in range(WARM_CALLS)] and None, study.device, held
        )
        self.judge(study.verify(self.call, self.model, study.truths[0]))
        self.row.graphs = self.counted.graphs if self.counted else 0

    def _first_call(self, step: Callable[[], object], device: torch.device, *, cold: bool) -> None:
        if self.counted is None:
            step()
            return
        with empty_cache() if cold else contextlib.nullcontext():
            cache, started, error = cache_counts(), perf_counter(), None
            # Raised out of torch's empty cache, an error would leave the folder behind.
            try:
                step()
                measure.synchronize(device)
            except Exception as raised:  # noqa: BLE001 - raised again below
                error = raised
        if error is not None:
            raise error
        self.row.compile_s = perf_counter() - started
        self.row.cache = cache_word(cache, cache_counts())

    def judge(self, accuracy: Accuracy) -> None:
        """Write an accuracy into the row."""
        self.row.accuracy = accuracy
        if not accuracy.passed:
            self.row.status, self.row.reason = accuracy.status, accuracy.reason

    def finish(self, study: Study, samples: list[float]) -> None:
        """Check again, on other inputs, that the callable which was timed is right and was compiled all along."""
        self.judge(study.verify(self.call, self.model, study.truths[1]))
        more = self.counted.graphs - self.row.graphs if self.counted else 0
        if more:
            self.row.status, self.row.reason = "fail_to_run", f"recompiled {more} times while it was timed"
        if self.row.passed:
            self.row.samples, self.row.latency = samples, measure.median_interval(samples)
        with contextlib.suppress(BackendKwargsError):  # eager, and backends that are not ours, have no report
            told = report(self.call)
            self.row.report, self.row.tuning = str(told), told.tuning


def warm_up(trials: list[Trial], device: torch.device) -> None:
    """Pay once, on no candidate's clock, for the imports and for Inductor's compiler processes and headers."""
    import torch._dynamo
    import torch._inductor.compile_fx

    backends = [trial.candidate.backend for trial in trials if trial.row.passed]
    named = [f"{backend!r} {getattr(backend, 'compiler_name', '')}" for backend in backends]
    if any("inductor" in name for name in named):
        # Where Inductor cannot work each candidate says so itself.
        with contextlib.suppress(Exception):
            isolated(lambda x: x + 1, backend="inductor")(torch.ones(8, device=device))
