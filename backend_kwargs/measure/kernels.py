"""Where the time of a call goes: its kernels by time, on a CPU its operators and the generated code."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from backend_kwargs.measure.timing import synchronize

CALLS = 3  # profiled; the fastest counts
LEAST = 0.002  # of the call's time; a shorter kernel is left out
GENERATED = "generated code"  # on a CPU, where Inductor's kernels are not told apart
CALL_OF_A_GRAPH = "## Call CompiledFxGraph"  # as Inductor calls it
AROUND = "around the graph"  # guards, and what torch does before and after a compiled graph
CALLED_AROUND = ("TorchDynamo ", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher ")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The launches of a kernel in one call, and their seconds."""

    name: str
    calls: int
    seconds: float


def kernel_times(call: Callable[[], object], device: torch.device, least: float = LEAST) -> tuple[KernelTime, ...]:
    """Return the kernels of one call, longest first, of at least this share of it; the call has been made before."""
    profiles = [_profiled(call, device) for _ in range(CALLS)]
    fastest = min(profiles, key=lambda each: sum(seconds for _, seconds in each.values()))
    total = sum(seconds for _, seconds in fastest.values())
    kernels = (KernelTime(name, count, seconds) for name, (count, seconds) in fastest.items())
    return tuple(sorted((k for k in kernels if k.seconds >= least * total), key=lambda kernel: -kernel.seconds))


def _profiled(call: Callable[[], object], device: torch.device) -> dict[str, tuple[int, float]]:
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as seen:
        call()
        synchronize(device)
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events() or ():
        if (event.device_type.name == "CUDA") == on_gpu:
            around = AROUND if event.name.startswith(CALLED_AROUND) else event.name
            name = GENERATED if event.name.startswith(CALL_OF_A_GRAPH) else around
            count, seconds = found.get(name, (0, 0.0))
            micros = event.device_time if on_gpu else event.self_cpu_time_total
            found[name] = count + 1, seconds + micros / 1e6
    return found
