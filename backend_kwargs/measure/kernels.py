"""Where the time of a call goes: its kernels by time, on a CPU its operators and the generated code."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from backend_kwargs.measure.timing import synchronize
from backend_kwargs.measure.trees import tensors_of
from backend_kwargs.torch_internals.modes import OperatorMode, is_profiled
from backend_kwargs.torch_internals.operators import name_of

CALLS = 3  # profiled; the fastest counts
LEAST = 0.002  # of the call's time; a shorter kernel is left out
GENERATED = "generated code"  # on a CPU, where Inductor's kernels are not told apart
CALL_OF_A_GRAPH = "## Call CompiledFxGraph"  # as Inductor calls it
AROUND = "around the graph"  # guards, and what torch does before and after a compiled graph
CALLED_AROUND = ("TorchDynamo ", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher ")
MARK = "operator: "  # before the name of a call that is looked at
OF_AN_OPERATOR = re.compile(r"(?!triton_)([a-z_]\w*)_\d+")  # its Triton kernel, which generated code launches

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

    On a GPU also of the Triton kernels of operators that are inlined into generated code, by name; and its L2 cache is
    overwritten first, so that a call by itself finds there what one within a model does. The call has been made before.
    """

    def called(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        if not wanted(func):
            return func(*args, **kwargs)
        layouts = [f"{tuple(each.shape)} {each.stride()}" for each in tensors_of(args)]
        with record_function(f"{MARK}{name_of(func)} of {', '.join(layouts)}"):
            return func(*args, **kwargs)

    def marked() -> None:
        if on_gpu:
            torch.zeros(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
        with OperatorMode(called):
            call()

    found: Times = {}
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for event in _events(marked, device, activities):
        if (on_cpu := event.device_type.name == "CPU") and event.name.startswith(MARK):
            micros = _device_micros(event) if on_gpu else event.cpu_time_total
            _add(found, event.name.removeprefix(MARK), micros)
        elif not on_cpu and (kernel := OF_AN_OPERATOR.fullmatch(event.name)):
            _add(found, kernel[1], event.device_time)
    return found


def _device_micros(event: Any) -> float:
    """Return how long the kernels that an event launches take, without a GPU's own event for what is marked."""
    kernels = sum(each.duration for each in event.kernels if not each.name.startswith(MARK))
    return float(kernels + sum(map(_device_micros, event.cpu_children)))


def _profiled(call: Callable[[], object], device: torch.device) -> Times:
    on_gpu = device.type == "cuda"
    found: Times = {}
    for event in _events(call, device, [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]):
        if (event.device_type.name == "CUDA") == on_gpu:
            around = AROUND if event.name.startswith(CALLED_AROUND) else event.name
            name = GENERATED if event.name.startswith(CALL_OF_A_GRAPH) else around
            _add(found, name, event.device_time if on_gpu else event.self_cpu_time_total)
    return found


def _events(call: Callable[[], object], device: torch.device, activities: Iterable[ProfilerActivity]) -> list[Any]:
    if is_profiled():  # a second profiler would end the first one, whose events would be lost
        raise RuntimeError("another profiler is running")
    with profile(activities=activities, acc_events=True) as seen:
        call()
        synchronize(device)
    return [*(seen.events() or ())]


def _add(found: Times, name: str, micros: float) -> None:
    count, seconds = found.get(name, (0, 0.0))
    found[name] = count + 1, seconds + micros / 1e6
