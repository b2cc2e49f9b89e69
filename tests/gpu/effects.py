"""Observations of a compiled function: its code, kernels, launches, and autotuned choices."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backend_kwargs import BackendKwargsWarning, make_backend, report
from backend_kwargs.errors import warn_once

CALLS = 4
DECIDING_CALLS = 2000  # whether CUDA graphs serve: three ways, twelve blocks of 50 calls each
COMPILES = 5

# ---- cases: each makes a function and its inputs


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relu_of_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def gelu_and_scale(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x) * 3


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(torch.sigmoid(x) * x, x.shape[-1:])


def add_in_place(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def rounded_steps(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return ((a * b + c) * a - b) / (c * c + 1)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b


def mlp(width: int = 256, depth: int = 4) -> nn.Module:
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16).eval()


def conv_net() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()).cuda().eval()
    nn.init.uniform_(net[1].running_mean)
    nn.init.uniform_(net[1].running_var, 0.5, 2)
    return net


CASES: dict[str, Callable[[], tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]] = {
    "relu(mm) 2048³ bf16": lambda: (relu_of_mm, (on_gpu(2048, 2048), on_gpu(2048, 2048))),
    "relu(mm) 4096³ bf16": lambda: (relu_of_mm, (on_gpu(4096, 4096), on_gpu(4096, 4096))),
    "relu(mm) 1021 x 2047 x 1023 bf16": lambda: (relu_of_mm, (on_gpu(1021, 2047), on_gpu(2047, 1023))),
    "mm 512³ bf16": lambda: (mm, (on_gpu(512, 512), on_gpu(512, 512))),
    "mm 512³ float64": lambda: (mm, (on_gpu(512, 512, dtype=torch.float64), on_gpu(512, 512, dtype=torch.float64))),
    "gelu 1024²": lambda: (gelu_and_scale, (on_gpu(1024, 1024),)),
    "sigmoid+layer_norm 2048²": lambda: (layer_norm, (on_gpu(2048, 2048),)),
    "input changed in place": lambda: (add_in_place, (on_gpu(256, 256),)),
    "MLP 4 x 256": lambda: (mlp(), (on_gpu(64, 256),)),
    "conv+bn+relu": lambda: (conv_net(), (on_gpu(8, 16, 32, 32, dtype=torch.float32),)),
    "chain of bf16 steps": lambda: (rounded_steps, tuple(on_gpu(512, 512) for _ in range(3))),
    "chain of float32 steps": lambda: (
        rounded_steps,
        tuple(on_gpu(512, 512, dtype=torch.float32) for _ in range(3)),
    ),
    "one product": lambda: (product, (on_gpu(512, 512, dtype=torch.float32), on_gpu(512, 512, dtype=torch.float32))),
}

# ---- looking


@dataclass(frozen=True)
class Seen:
    """The observations of one case; `kernels` and `runtime` are counts over CALLS calls, `choices` are in ms.

    `decided` are the options of the candidate that `auto` chose.
    """

    code: str
    kernels: Counter[str]
    runtime: Counter[str]
    choices: dict[str, float]
    counters: dict[str, int]
    copied: tuple[tuple[int, ...], ...]
    warned: tuple[str, ...]
    result: Any = field(repr=False)
    expected: Any = field(repr=False)
    decided: Mapping[str, Any]

    @property
    def graph_launches(self) -> float:
        """The number of CUDA graphs that one call launches."""
        return self.runtime["cudaGraphLaunch"] / CALLS

    @property
    def error(self) -> float:
        """The largest difference from eager."""
        pairs = zip(pytree.tree_leaves(self.result), pytree.tree_leaves(self.expected), strict=True)
        return max((a.double() - b.double()).abs().max().item() for a, b in pairs)

    @property
    def inputs(self) -> int:
        """The number of inputs that the generated code unpacks."""
        unpacking = re.search(r"^\s*((?:\w+, )*\w+),? = args$", self.code, re.MULTILINE)
        return unpacking.group(1).count(",") + 1 if unpacking else 0

    def fastest_choices(self) -> dict[str, str]:
        """Return, for each kind of kernel that was timed, their number and the best time."""
        kinds: dict[str, list[float]] = {}
        for name, ms in self.choices.items():
            kinds.setdefault(re.match(r"cutlass|(?:_?[a-z]+)+", name)[0], []).append(ms)
        return {kind: f"{len(each)}, best {min(each) * 1e3:.1f} µs" for kind, each in kinds.items()}

    def brief(self) -> dict[str, Any]:
        """Return a summary for the evidence."""
        names = [name if len(name) < 90 else f"{name[:87]}..." for name in self.kernels]
        return {
            "kernels": names,
            "kernels_per_call": sum(self.kernels.values()) / CALLS,
            "graph_launches": self.graph_launches,
            "timed": self.fastest_choices(),
            "extern": sorted(set(re.findall(r"extern_kernels\.\w+", self.code))),
            "copied": self.copied,
            "warned": self.warned,
            "error": self.error,
        }


@cache
def look(spec: str, case: str, **options: Any) -> Seen:
    """Compile `case` with `spec` and an empty cache, call it, and return the observations."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache, run_and_get_code

    torch._dynamo.reset()
    counters.clear()
    warn_once.cache_clear()
    torch.manual_seed(0)
    fn, inputs = CASES[case]()
    compiled = torch.compile(fn, backend=spec if spec == "inductor" else make_backend(spec, options))
    with torch.no_grad(), fresh_cache(), _recorded_warnings() as warned, _recorded_choices() as choices:
        expected = fn(*_clones(inputs))
        result, codes = run_and_get_code(compiled, *_clones(inputs))
        result = pytree.tree_map(torch.clone, result)
        for _ in range(DECIDING_CALLS if spec.endswith(":auto") else 0):
            compiled(*inputs)
        kernels, runtime, copied = _traced(lambda: compiled(*inputs))
    race = None if spec == "inductor" else report(compiled).graphs[0].race
    return Seen(
        # Without what differs between two compiles of one graph.
        re.sub(r"^# (kernel path|AOT ID):.*$", "", "\n".join(codes), flags=re.MULTILINE),
        kernels,
        runtime,
        choices,
        dict(counters["inductor"]),
        copied,
        tuple(str(w.message) for w in warned if issubclass(w.category, BackendKwargsWarning)),
        result,
        expected,
        race.options if race else {},
    )


def _clones(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.clone() for x in inputs)


@contextmanager
def _recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@contextmanager
def _recorded_choices() -> Iterator[dict[str, float]]:
    """Collect the kernels that Inductor times against each other, with their times in ms."""
    from torch._inductor.select_algorithm import add_feedback_saver, clear_feedback_savers

    times: dict[str, float] = {}
    add_feedback_saver(lambda timings, *_: times.update({choice.name: ms for choice, ms in timings.items()}))
    try:
        yield times
    finally:
        clear_feedback_savers()


def _traced(call: Callable[[], object]) -> tuple[Counter[str], Counter[str], tuple[tuple[int, ...], ...]]:
    """Return the kernels and runtime calls of CALLS warm calls, and the shapes that one call copies into graphs."""
    for _ in range(3):
        call()
    with copies_into_graphs() as copied:
        call()
    with traced() as events:
        for _ in range(CALLS):
            call()
    on_device = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    on_host = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU)
    return on_device, on_host, tuple(copied)


@contextmanager
def traced() -> Iterator[list[Any]]:
    """Collect the profiler's events of the code inside."""
    from torch.profiler import ProfilerActivity, profile

    events: list[Any] = []
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        yield events
        torch.cuda.synchronize()
    events.extend(trace.events())


@contextmanager
def copies_into_graphs() -> Iterator[list[tuple[int, ...]]]:
    """Collect the shapes that CUDA-graph trees copy into a graph's inputs."""
    shapes: list[tuple[int, ...]] = []
    copy = torch._foreach_copy_

    def noted(dsts: list[torch.Tensor], srcs: list[torch.Tensor], *args: Any) -> Any:
        shapes.extend(tuple(src.shape) for src in srcs)
        return copy(dsts, srcs, *args)

    with mock.patch.object(torch, "_foreach_copy_", noted):
        yield shapes


# ---- the seconds until a first result


class Encoder(nn.Module):
    """Two transformer layers: attention, norms and activations for Inductor."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer, nn.Linear(width, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.softmax(layer(x), -1).cumsum(-1) + x
        return x


@cache
def compile_seconds(specs: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the seconds of a first call for each spec, COMPILES times interleaved, each with an empty cache."""
    model, x = Encoder().cuda().train(), on_gpu(4, 128, 512, dtype=torch.float32)
    seconds: dict[str, list[float]] = {spec: [] for spec in specs}
    _first_call(model, x, specs[0])
    for _ in range(COMPILES):
        for spec in specs:
            seconds[spec].append(_first_call(model, x, spec))
    return seconds


def _first_call(model: nn.Module, x: torch.Tensor, spec: str) -> float:
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        torch.cuda.synchronize()
        started = perf_counter()
        torch.compile(model, backend=make_backend(spec))(x).sum().backward()
        torch.cuda.synchronize()
        return perf_counter() - started


def compile_ratio(spec: str) -> float:
    """Return how many times sooner than default `spec` gives its first result: a median over rounds."""
    default, seconds = compile_seconds(("tmpl-inductor:default", spec)).values()
    return median(d / s for d, s in zip(default, seconds, strict=True))
