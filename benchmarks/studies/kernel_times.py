"""Where the time of a case goes: the kernels of one call, by time, compiled under some options."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from backend_kwargs import Backend, measure
from backend_kwargs.tables import as_text
from benchmarks.execution.study import CaseStudy
from benchmarks.workloads.case import Case

CALLS = 4  # profiled; the fastest counts
LONGEST_NAME = 90


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The seconds of the first call, and for each kernel of a later one its name, launches and seconds, longest first.

    On a CPU, which has no kernels, operators take their place.
    """

    first_s: float
    kernels: tuple[tuple[str, int, float], ...]

    def __str__(self) -> str:
        total_s = sum(seconds for _, _, seconds in self.kernels)
        count = sum(launches for _, launches, _ in self.kernels)
        rows = [
            (f"{seconds * 1e6:.1f}", f"{seconds / total_s:.0%}", str(launches), name[:LONGEST_NAME])
            for name, launches, seconds in self.kernels
        ]
        summary = f"first call {self.first_s:.1f} s; {count} kernels, {total_s * 1e6:.1f} µs"
        return f"{summary}\n{as_text(('µs', 'share', 'launches', 'kernel'), rows)}"


def measure_kernels(case: Case, device: str, scale: str, backend: Backend | None) -> KernelTimes:
    """Compile a case under a backend, None for eager, and profile one call in its first mode."""
    study = CaseStudy.of(case, case.modes[0], torch.device(device), case.dtype, scale)
    torch.set_grad_enabled(study.mode != "fwd")
    study.prepare()
    subject = study.subject()
    if backend is not None:
        subject = subject._replace(call=torch.compile(subject.call, backend=backend))
    step = study.step(subject)
    began = perf_counter()
    step()
    measure.synchronize(study.device)
    first_s = perf_counter() - began
    for _ in range(2):  # CUDA graphs are recorded
        step()
    profiles = [_profiled(step, study.device) for _ in range(CALLS)]
    fastest = min(profiles, key=lambda each: sum(seconds for _, seconds in each.values()))
    rows = ((name, count, seconds) for name, (count, seconds) in fastest.items())
    return KernelTimes(first_s, tuple(sorted(rows, key=lambda row: -row[2])))


def _profiled(step: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as seen:
        step()
        measure.synchronize(device)
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in seen.events():
        if (event.device_type == DeviceType.CUDA) == on_gpu:
            count, seconds = found[event.name]
            micros = event.device_time if on_gpu else event.self_cpu_time_total
            found[event.name] = count + 1, seconds + micros / 1e6
    return dict(found)
