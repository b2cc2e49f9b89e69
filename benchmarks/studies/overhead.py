"""The package's overhead over plain torch.compile with equal options: per call, at import, and for a name's look-up."""

import itertools
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch

import backend_kwargs
from backend_kwargs import trial
from benchmarks.analysis.markdown import table

PLAIN, AGAIN = "torch.compile", "torch.compile again"
# An option without effect on a graph this small, so that every peer has one.
OPTIONS = {"max_fusion_size": 32}
PEERS: Mapping[str, Callable[[], dict[str, Any]]] = {
    PLAIN: lambda: {"backend": "inductor", "options": OPTIONS},
    AGAIN: lambda: {"backend": "inductor", "options": OPTIONS},
    "tmpl-inductor, options": lambda: {"backend": "tmpl-inductor", "options": OPTIONS},
    "make_backend": lambda: {"backend": backend_kwargs.make_backend("tmpl-inductor", OPTIONS)},
    "auto, decided": lambda: {"backend": backend_kwargs.make_backend("tmpl-inductor:auto", OPTIONS, race="never")},
}
# The cost of copying CUDA graphs' results, for a graph with two.
CUDA_GRAPHS = "CUDA graphs, two results"
COPYING: Mapping[str, Callable[[], dict[str, Any]]] = {
    CUDA_GRAPHS: lambda: {"backend": "inductor", "options": {"triton.cudagraphs": True}},
    "CUDA graphs, copied results": lambda: {
        "backend": backend_kwargs.make_backend("tmpl-inductor:cudagraphs", clone_outputs=True)
    },
}
COUNTED_CALLS = 10
EVENTS = {"call": "python_calls", "c_call": "c_calls", "opcode": "bytecodes"}
# Each list runs in a fresh process; steps with a name are timed.
IMPORT = ("import torch", "import torch")
LISTS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("import backend_kwargs, no torch", "import backend_kwargs"),),
    (
        IMPORT,
        ("", "import torch._dynamo.backends.registry as registry"),
        ("look up 'inductor'", "registry.lookup_backend('inductor')"),
        ("then look up an entry point of ours", "registry.lookup_backend('tmpl-inductor:max_autotune')"),
        ("then again", "registry.lookup_backend('tmpl-inductor:max_autotune')"),
    ),
    (
        IMPORT,
        ("then import backend_kwargs", "from backend_kwargs import make_backend"),
        ("", "import torch._dynamo, torch._inductor.compile_fx"),
        ("then make a backend", "make_backend('tmpl-inductor:max_autotune')"),
        ("then make it again", "make_backend('tmpl-inductor:max_autotune')"),
    ),
)
CLOCKED = """\
import sys, time
for step in sys.argv[1:]:
    started = time.perf_counter()
    exec(step)
    print(time.perf_counter() - started)
"""


def measure_overhead(
    device: str | torch.device = "cpu", *, rounds: int = 300, processes: int = 3
) -> list[dict[str, Any]]:
    """Return one row per figure, as JSON values; `kind` is "call" or "step": an import or a look-up.

    A call's row has the wall time of calling an almost empty graph (the device's work included), its difference to
    plain torch.compile paired by round (to plain CUDA graphs, for those with copied results), both in nanoseconds with
    95 % intervals, and what one call executes: Python calls, C calls made from Python, bytecode instructions. These
    are exact, but blind to work inside C.
    """
    device = torch.device(device)
    rows = list(_call_rows(_calls(_step, PEERS, device), PLAIN, device, rounds))
    if device.type == "cuda":
        rows += _call_rows(_calls(_two_steps, COPYING, device), CUDA_GRAPHS, device, rounds)
    return [*rows, *_step_rows(processes)]


def as_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as two Markdown tables."""
    return "\n\n".join(
        "\n".join(table(headers, [cells(row) for row in rows if row["kind"] == kind]))
        for kind, (headers, cells) in TABLES.items()
    )


def call_counts(call: Callable[[], object]) -> dict[str, float]:
    """Return what one call executes, on average: Python calls, C calls from Python, bytecode instructions."""
    call()
    seen: Counter[str] = Counter()
    # Two passes, since the profiler would count the tracer's own frames.
    for hook, count in ((sys.setprofile, partial(_profiled, seen)), (sys.settrace, partial(_traced, seen))):
        with _hooked(hook, count):
            for _ in range(COUNTED_CALLS):
                call()
    return {figure: seen[event] / COUNTED_CALLS for event, figure in EVENTS.items()}


@contextmanager
def _hooked(install: Callable[[Any], None], hook: Callable[..., Any]) -> Iterator[None]:
    before = sys.getprofile() if install is sys.setprofile else sys.gettrace()
    install(hook)
    try:
        yield
    finally:
        install(before)


def _profiled(seen: Counter[str], frame: Any, event: str, arg: Any) -> None:
    seen[event] += 1


def _traced(seen: Counter[str], frame: Any, event: str, arg: Any) -> Callable[..., Any]:
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    seen[event] += event == "opcode"
    return partial(_traced, seen)


def _calls(
    function: FunctionType, peers: Mapping[str, Callable[[], dict[str, Any]]], device: torch.device
) -> dict[str, Callable[[], object]]:
    x = torch.ones(4, device=device)
    calls = {
        name: partial(torch.compile(_fresh(function), fullgraph=True, **kwargs()), x) for name, kwargs in peers.items()
    }
    with torch.no_grad():
        for _, call in itertools.product(range(4), calls.values()):  # CUDA graphs warm up, then record
            call()
    return calls


def _step(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _two_steps(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


def _fresh(function: FunctionType) -> FunctionType:
    """Return a copy with its own code object: dynamo keeps and walks one list of compiled graphs per code object."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


@torch.no_grad()
def _call_rows(
    calls: Mapping[str, Callable[[], object]], plain: str, device: torch.device, rounds: int
) -> Iterator[dict[str, Any]]:
    with torch.compiler.set_stance("fail_on_recompile"):
        samples = trial.interleave(calls, rounds=rounds, device=device, hold=True)
    for name, call in calls.items():
        pairs = zip(samples[name], samples[plain], strict=True)
        yield {
            "kind": "call",
            "name": name,
            "device": str(device),
            "ns": _nanoseconds(samples[name]),
            "extra_ns": _nanoseconds([own - plain for own, plain in pairs]),
            **call_counts(call),
        }


def _nanoseconds(seconds: list[float]) -> list[float]:
    interval = trial.median_interval([value * 1e9 for value in seconds])
    return [interval.median, interval.low, interval.high]


def _step_rows(processes: int) -> Iterator[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for steps in LISTS for name, _ in steps if name}
    for steps in LISTS:  # writes the bytecode of every module, as an installation does
        _in_fresh_process([step for _, step in steps])
    for _, steps in itertools.product(range(processes), LISTS):
        for (name, _), elapsed in zip(steps, _in_fresh_process([step for _, step in steps]), strict=True):
            if name:
                seconds[name].append(elapsed)
    for name, each in seconds.items():
        yield {"kind": "step", "name": name, "ms": statistics.median(each) * 1e3, "seconds": each}


def _in_fresh_process(steps: list[str]) -> list[float]:
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", CLOCKED, *steps]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=writing)
    return list(map(float, done.stdout.split()))


def _call_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    median, *_ = row["ns"]
    extra, low, high = row["extra_ns"]
    counts = (f"{row[figure]:.0f}" for figure in EVENTS.values())
    return (row["name"], f"{median:.0f}", f"{extra:+.0f}", f"{low:+.0f} to {high:+.0f}", *counts)


def _step_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    each = [value * 1e3 for value in row["seconds"]]
    return (row["name"], f"{row['ms']:.2f}", f"{min(each):.2f} to {max(each):.2f}")


TABLES: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], tuple[str, ...]]]] = {
    "call": (("per call", "ns", "extra ns", "95 %", "Python calls", "C calls", "bytecodes"), _call_cells),
    "step": (("in a fresh process", "ms", "least to most"), _step_cells),
}
