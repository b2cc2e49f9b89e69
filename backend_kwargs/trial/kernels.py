"""Where the time of a call goes: its kernels by time, on a CPU its operators and the generated code."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

from backend_kwargs.torch_internals.modes import OperatorMode, is_profiled
from backend_kwargs.torch_internals.operators import name_of
from backend_kwargs.torch_internals.tensors import keep_device_busy
from backend_kwargs.trial.timing import CYCLES_PER_S, host_seconds, synchronize
from backend_kwargs.trial.trees import tensors_of

CALLS = 3  # profiled; the fastest counts
LEAST = 0.002  # of the call's time; a shorter kernel is left out
GENERATED = "generated code"  # on a CPU, where Inductor's kernels are not told apart
CALL_OF_A_GRAPH = "## Call CompiledFxGraph"  # as Inductor calls it
AROUND = "around the graph"  # guards, and what torch does before and after a compiled graph
CALLED_AROUND = ("TorchDynamo ", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher ")
ADDED = {"aten::addmm": "aten::mm", "aten::baddbmm": "aten::bmm"}  # which Inductor may take apart, to fuse the addition
COVER = 2  # times as long as the launches take a GPU is kept busy

Times: TypeAlias = dict[str, tuple[int, float]]  # how often each is called in one call, and its seconds in all


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


def operator_times(call: Callable[[], object], device: torch.device, wanted: Callable[[Any], bool]) -> Times:
    """Return the times in one call of the operators that are `wanted`, by name with the layouts of what each reads.

    On a GPU it is kept busy until all is launched, and its L2 cache is overwritten first: a call by itself finds there
    what one within a model does. Not by a profiler: CUPTI stays attached afterwards, or fails beside CUDA graphs. The
    call has been made before.
    """
    noted: list[tuple[str, Any, Any]] = []

    def called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        if not wanted(func):
            return func(*args, **kwargs)
        name = name_of(func)
        layouts = map(_layout_of, tensors_of(args[name in ADDED :]))
        start = _time_of(device)
        result = func(*args, **kwargs)
        noted.append((f"{ADDED.get(name, name)} of {', '.join(layouts)}", start, _time_of(device)))
        return result

    def watched() -> None:
        with OperatorMode(called):
            call()

    if device.type == "cuda":
        host_s = host_seconds(watched)
        torch.zeros(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
        keep_device_busy(int(COVER * host_s * CYCLES_PER_S))
        noted.clear()
    watched()
    synchronize(device)
    found: Times = {}
    for name, start, end in noted:
        _add(found, name, start.elapsed_time(end) / 1e3 if device.type == "cuda" else end - start)
    return found


def _layout_of(tensor: torch.Tensor) -> str:
    """Return the sizes, and the strides of those above 1: the others reach no other number, and are as it comes."""
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return f"{tuple(tensor.shape)} {tuple(strides)}"


def _time_of(device: torch.device) -> Any:
    """Return the time as a device comes to it: on a GPU an event, which is read later."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _profiled(call: Callable[[], object], device: torch.device) -> Times:
    on_gpu = device.type == "cuda"
    found: Times = {}
    if is_profiled():  # a second profiler would end the first one, whose events would be lost
        raise RuntimeError("another profiler is running")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU], acc_events=True) as seen:
        call()
        synchronize(device)
    for event in seen.events() or ():
        if (event.device_type.name == "CUDA") == on_gpu:
            around = AROUND if event.name.startswith(CALLED_AROUND) else event.name
            name = GENERATED if event.name.startswith(CALL_OF_A_GRAPH) else around
            _add(found, name, (event.device_time if on_gpu else event.self_cpu_time_total) / 1e6)
    return found


def _add(found: Times, name: str, more_s: float) -> None:
    count, seconds = found.get(name, (0, 0.0))
    found[name] = count + 1, seconds + more_s
