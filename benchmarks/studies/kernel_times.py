"""Where the time of a case goes: the kernels of one call, by time, compiled under some options."""

from dataclasses import dataclass

import torch

from backend_kwargs import Backend, trial
from backend_kwargs.compare import Candidate, CandidateTrial
from backend_kwargs.tables import as_text
from benchmarks.execution.study import CaseStudy
from benchmarks.workloads.case import Case

LONGEST_NAME = 90


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """The seconds of the first call if it compiles, and the kernels of a later one: on a CPU its code as one."""

    first_s: float | None
    kernels: tuple[trial.KernelTime, ...]

    def __str__(self) -> str:
        total_s, count = sum(each.seconds for each in self.kernels), sum(each.calls for each in self.kernels)
        rows = [
            (f"{each.seconds * 1e6:.1f}", f"{each.seconds / total_s:.0%}", str(each.calls), each.name[:LONGEST_NAME])
            for each in self.kernels
        ]
        first = f"first call {self.first_s:.1f} s; " if self.first_s is not None else ""
        summary = f"{first}{count} kernels, {total_s * 1e6:.1f} µs"
        return f"{summary}\n{as_text(('µs', 'share', 'launches', 'kernel'), rows)}"


def measure_kernels(case: Case, device: str, scale: str, backend: Backend | None) -> KernelTimes:
    """Compile a case under a backend, None for eager, and profile one call in its first mode."""
    study = CaseStudy.of(case, case.modes[0], torch.device(device), case.dtype, scale)
    torch.set_grad_enabled(study.mode != "fwd")
    study.prepare()
    run = CandidateTrial(study, Candidate("", backend), cold=False)
    run.build()
    return KernelTimes(run.compile_s, trial.kernel_times(run.step, study.device, least=0.0))
