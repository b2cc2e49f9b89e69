"""The best rates of the device, measured in the same way as the cases: bandwidths, matmuls, launches."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from backend_kwargs import trial
from benchmarks.execution import device_timer
from benchmarks.workloads.kernels import kernel

ROUNDS = 30
BANDWIDTHS = ("copy", "read", "write")
UNITS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the attempts at each ceiling: bytes of a buffer, and sides of square matmuls for each unit."""

    bytes: tuple[int, ...]
    sides: Mapping[str, tuple[int, ...]]


GPU = Sizes(
    (2**28, 2**30),
    {"bf16": (4096, 8192), "fp16": (4096, 8192), "fp8": (4096, 8192), "tf32": (4096, 8192), "fp32": (4096,)},
)
CPU = Sizes((2**26,), {"fp32": (512, 1024), "bf16": (512,)})


@dataclass(frozen=True, slots=True)
class Figure:
    """One ceiling: its best attempt, with an interval, and the name of that attempt.

    For times and bandwidths it is the median with its bootstrap 95 % interval. For arithmetic it is the fastest sample:
    under a sustained load of matmuls the clock drops, and a case between others runs cooler.
    """

    value: float
    low: float
    high: float
    unit: str  # "B/s" | "FLOP/s" | "s"
    attempt: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The figures of one device by name, and the bytes of its L2; figures that the device cannot have are absent.

    "copy", "read", "write": B/s. "bf16", "fp16", "tf32", "fp32", "fp8": FLOP/s of a matmul. "launch", "graph_replay":
    seconds of an empty kernel on the device, alone and in a CUDA graph.
    """

    device: str
    l2_bytes: int
    figures: Mapping[str, Figure]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> "Ceilings":
        """Read the values of `to_json`."""
        figures = {name: Figure(**figure) for name, figure in written["figures"].items()}
        return cls(written["device"], written["l2_bytes"], figures)

    @classmethod
    def best(cls, several: Sequence["Ceilings"]) -> "Ceilings":
        """Return the best figure of each name: devices of one kind share a ceiling."""
        figures: dict[str, Figure] = {}
        for name, figure in (pair for each in several for pair in each.figures.items()):
            figures[name] = _better(figures.get(name, figure), figure)
        return cls(several[-1].device, several[-1].l2_bytes, figures)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to reach a ceiling: the call, and its amount of work (0: the time itself is the figure)."""

    figure: str
    how: str
    call: Callable[[], object]
    amount: float
    unit: str


def measure_ceilings(device: torch.device, rounds: int = ROUNDS, sizes: Sizes | None = None) -> Ceilings:
    """Measure each ceiling by several attempts on random data, with the timer of the cases, and keep the best."""
    sizes = sizes or (CPU if device.type == "cpu" else GPU)
    torch.manual_seed(0)
    best: dict[str, Figure] = {}
    for attempts in _groups(device, sizes):
        for figure, found in _race(attempts, rounds, device):
            best[figure] = _better(best.get(figure, found), found)
    name = str(trial.environment(device)["device_name"])
    return Ceilings(name, device_timer.l2_bytes(device), best)


def _better(one: Figure, other: Figure) -> Figure:
    return (min if one.unit == "s" else max)(one, other, key=lambda figure: figure.value)


def _race(attempts: list[_Attempt], rounds: int, device: torch.device) -> Iterator[tuple[str, Figure]]:
    calls = {f"{attempt.figure} {attempt.how}": attempt.call for attempt in attempts}
    # A dtype that this device cannot multiply is dropped, and its figure is absent.
    samples = device_timer.device_times(calls, rounds, device, failed=lambda name, error: None)
    for attempt in attempts:
        if times := samples.get(f"{attempt.figure} {attempt.how}"):
            yield attempt.figure, _figure(attempt, times)


def _figure(attempt: _Attempt, times: Sequence[float]) -> Figure:
    time = trial.median_interval(times)
    if attempt.unit == "FLOP/s":
        fastest = attempt.amount / min(times)
        return Figure(fastest, fastest, fastest, attempt.unit, attempt.how)
    if not attempt.amount:
        return Figure(time.median, time.low, time.high, attempt.unit, attempt.how)
    # The longest time is the lowest rate.
    median, low, high = (attempt.amount / seconds for seconds in (time.median, time.high, time.low))
    return Figure(median, low, high, attempt.unit, attempt.how)


def _groups(device: torch.device, sizes: Sizes) -> Iterator[list[_Attempt]]:
    """Yield attempts that are timed together; the buffers of one group are freed before the next."""
    for size in sizes.bytes:
        yield list(_bandwidths(size, device))
    for unit, sides in sizes.sides.items():
        yield [attempt for side in sides for attempt in _matmuls(unit, side, device)]
    yield list(_launches(device))


def _bandwidths(size: int, device: torch.device) -> Iterator[_Attempt]:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    of = f"of {size // 2**20} MiB"
    ways: tuple[tuple[str, str, Callable[[], object], int], ...] = (
        ("copy", "copy_", lambda: target.copy_(source), 2),
        ("copy", "neg", lambda: torch.neg(source, out=target), 2),
        ("copy", "Triton", partial(kernel("bandwidth.copy", device), source, target), 2),
        ("read", "sum", source.sum, 1),
        ("read", "amax", source.amax, 1),
        ("read", "Triton", partial(kernel("bandwidth.sums", device), source), 1),
        ("write", "fill_", lambda: target.fill_(1.5), 1),
        ("write", "zero_", target.zero_, 1),
    )
    for figure, how, call, times in ways:
        yield _Attempt(figure, f"{how} {of}", call, times * size, "B/s")


def _matmuls(unit: str, side: int, device: torch.device) -> Iterator[_Attempt]:
    a, b = (torch.randn(side, side, device=device).to(UNITS.get(unit, torch.bfloat16)) for _ in "ab")
    ways = {"fp8": {"TN": _fp8(a, b)}, "tf32": {"NN": partial(_tf32, a, b), "NT": partial(_tf32, a, b.t())}}
    plain = {"NN": partial(torch.mm, a, b), "NT": partial(torch.mm, a, b.t())}
    for layout, call in ways.get(unit, plain).items():
        yield _Attempt(unit, f"{side}³ {layout}", call, 2.0 * side**3, "FLOP/s")


def _fp8(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    one = torch.ones((), device=a.device)
    return partial(torch._scaled_mm, a.to(FP8), b.to(FP8).t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _tf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        return torch.mm(a, b)
    finally:
        matmul.fp32_precision = before


def _launches(device: torch.device) -> Iterator[_Attempt]:
    one = torch.zeros(1, device=device)
    yield _Attempt("launch", "fill_ of one element", lambda: one.fill_(1.5), 0, "s")
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        one.fill_(1.5)
        # One empty kernel, since torch warns about an empty graph.
        with torch.cuda.graph(graph):
            one.fill_(1.5)
        yield _Attempt("graph_replay", "of a graph of that", graph.replay, 0, "s")
