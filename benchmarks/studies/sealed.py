"""Sealed functions: 10,000 declared calls against one compile per size and against dynamic=True, and 1,000 others."""

import contextlib
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.files.atomic_write import write_whole
from backend_kwargs.torch_internals.sealing import compile_events
from backend_kwargs.trial import environment, percentile, synchronize
from benchmarks.analysis.markdown import table

BATCHES, LENGTHS, LONGEST = (1, 2), (16, 64), 64
VOCABULARY, WIDTH = 1000, 64
BAR = 1.2
PER_SIZE, DYNAMIC, EAGER = "one compile per size", "dynamic=True", "eager"
DIMS = {"tokens": {0: "batch", 1: "sequence"}, "mask": {0: "batch", 1: "sequence"}}
THREADS = 4
Call = Callable[..., torch.Tensor]


class Encoder(nn.Module):
    """Two layers of a transformer, which ignores what its mask leaves out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(2))
        self.head = nn.Linear(width, width)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


@dataclass
class Row:
    """One way of serving: its time to be ready, percentiles of its calls in microseconds, and calls that raised."""

    name: str
    ready_s: float
    p50_us: float
    p99_us: float
    wrong: int = 0
    errors: Sequence[str] = ()


@dataclass
class Calls:
    """The calls of one way: seconds of each, how many results were not eager's, and what was raised."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)

    def row(self, name: str, ready_s: float) -> Row:
        """Return them as a row."""
        p50, p99 = (percentile(self.seconds, share) * 1e6 for share in (0.5, 0.99))
        return Row(name, ready_s, p50, p99, self.wrong, self.errors)


@dataclass
class Part:
    """One kind of declaration: its ways, and what happened during the calls."""

    name: str
    rows: list[Row]
    counters: Mapping[str, int]
    compiles: int
    new_files: Sequence[str]
    new_libraries: Sequence[str]
    outside: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """p99 of the sealed function over that of one compile per size."""
        p99 = {row.name: row.p99_us for row in self.rows}
        return p99["sealed"] / p99[PER_SIZE]


def measure_sealed(device: str, calls: int, others: int, out: Path | None) -> str:
    """Measure each kind of declaration; return the page."""
    torch.manual_seed(0)
    model = Encoder(WIDTH).to(device).eval()
    parts = [
        _part(f"{kind}, {mode}" if mode else kind, model, device, declared, mode, calls, others)
        for mode in (["", "reduce-overhead"] if device == "cuda" else [""])
        for kind, declared in _declared().items()
        if not (mode and kind == "range")  # each size would be recorded
    ]
    parts.append(_in_threads(model, device, calls, others))
    facts = environment(torch.device(device))
    page = as_page(parts, facts, calls, others)
    if out is not None:
        data = {"environment": facts, "parts": [asdict(part) for part in parts]}
        write_whole(out.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
        write_whole(out, page)
    return page


def _declared() -> dict[str, dict[str, Any]]:
    batches = [*BATCHES]
    return {
        "sizes": {"sizes": {"batch": batches, "sequence": [*LENGTHS]}},
        "buckets": {"sizes": {"batch": batches}, "buckets": {"sequence": [*LENGTHS]}, "fill": {"mask": 0}},
        "range": {"sizes": {"batch": batches, "sequence": range(1, LONGEST + 1)}},
    }


def _fresh(model: nn.Module) -> Call:
    """Return a function of the model with a code object of its own, in which dynamo keeps its code."""

    def call(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return model(tokens, mask)  # type: ignore[no-any-return]

    return FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


def _inputs(batch: int, length: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (batch, length), device=device)
    return tokens, torch.ones(batch, length, dtype=torch.bool, device=device)


def _lengths(kind: str) -> Sequence[int]:
    # Of buckets and ranges lengths that one compile per size would be asked for, too.
    return LENGTHS if kind == "sizes" else (7, 16, 40, 64)


@torch.no_grad()
def _part(
    name: str, model: nn.Module, device: str, declared: Mapping[str, Any], mode: str, calls: int, others: int
) -> Part:
    kind, modes = name.partition(",")[0], {"mode": mode} if mode else {}
    points = [*itertools.product(BATCHES, _lengths(kind))]
    ways, ready = {}, {}
    began = time.perf_counter()
    compiled = torch.compile(_fresh(model), **modes)
    sealed = bk.seal(compiled, _inputs(2, 16, device), dims=DIMS, **declared)
    ways["sealed"], ready["sealed"] = sealed, time.perf_counter() - began
    began = time.perf_counter()
    own = {point: torch.compile(_fresh(model), dynamic=False, **modes) for point in points}
    for point, call in own.items():
        _warmed(call, point, device)
    ways[PER_SIZE] = lambda tokens, mask: own[tuple(tokens.shape)](tokens, mask)
    ready[PER_SIZE] = time.perf_counter() - began
    began = time.perf_counter()
    dynamic = torch.compile(_fresh(model), dynamic=True, **modes)
    for point in points:
        _warmed(dynamic, point, device)
    ways[DYNAMIC], ready[DYNAMIC] = dynamic, time.perf_counter() - began
    ways[EAGER], ready[EAGER] = model, 0.0
    drawn = _drawn(points, calls, 0)
    with _watched() as seen:
        made = _called(ways, drawn, device)
        counters = sealed.counters
    outside = _outside(sealed, model, device, others)
    rows = [made[way].row(way, ready[way]) for way in ways]
    return Part(name, rows, counters, **seen, outside=outside)


def _drawn(points: Sequence[tuple[int, int]], count: int, seed: int) -> list[tuple[int, int]]:
    return random.Random(seed).choices(points, k=count)  # noqa: S311 - no secret


def _warmed(call: Call, point: tuple[int, int], device: str) -> None:
    for _ in range(4):
        call(*_inputs(*point, device))


def _called(ways: Mapping[str, Call], drawn: Sequence[tuple[int, int]], device: str) -> dict[str, Calls]:
    """Return the calls of each way, made in turn."""
    made = {way: Calls() for way in ways}
    where, names = torch.device(device), [*ways]
    for at, point in enumerate(drawn):
        inputs = _inputs(*point, device)
        results = {}
        for name in names[at % len(names) :] + names[: at % len(names)]:
            synchronize(where)
            began = time.perf_counter()
            try:
                result = ways[name](*inputs)
            except Exception as error:  # noqa: BLE001 - it is counted
                made[name].errors.append(repr(error))
                continue
            synchronize(where)
            made[name].seconds.append(time.perf_counter() - began)
            results[name] = result.clone()
            del result
        for name, result in results.items():
            made[name].wrong += not torch.allclose(result, results[EAGER], rtol=1e-2, atol=1e-3)
    return made


def _outside(sealed: Call, model: nn.Module, device: str, count: int) -> dict[str, int]:
    """Call with what was not declared: sizes, a dtype, gradients, a missing mode; return what happened."""
    drawn = random.Random(1)  # noqa: S311 - no secret
    found, before = {"calls": count, "failed": 0, "wrong": 0}, compile_events()
    for at in range(count):
        batch, length = drawn.choice([(3, 16), (5, drawn.randint(1, 200)), (2, LONGEST + drawn.randint(1, 99))])
        tokens, mask = _inputs(batch, length, device)
        tokens = tokens.int() if at % 3 == 0 else tokens
        try:
            with torch.enable_grad() if at % 4 == 0 else contextlib.nullcontext():
                result = sealed(tokens, mask)
        except Exception:  # noqa: BLE001 - it is counted
            found["failed"] += 1
            continue
        found["wrong"] += not torch.allclose(result, model(tokens, mask), rtol=1e-2, atol=1e-3)
    return {**found, "compiles": compile_events() - before}


@torch.no_grad()
def _in_threads(model: nn.Module, device: str, calls: int, others: int) -> Part:
    """Serve from several threads, each with a share of the calls; with CUDA graphs on a GPU, of each thread its own."""
    mode = {"mode": "reduce-overhead"} if device == "cuda" else {}
    points = [*itertools.product(BATCHES, LENGTHS)]
    began = time.perf_counter()
    sealed = bk.seal(torch.compile(_fresh(model), **mode), _inputs(2, 16, device), dims=DIMS, **_declared()["sizes"])
    ready = time.perf_counter() - began
    served, lock = Calls(), threading.Lock()
    barrier = threading.Barrier(THREADS + 1)

    @torch.no_grad()
    def serve(seed: int) -> None:
        sealed.warm()
        barrier.wait()
        barrier.wait()
        own = _called({"sealed": sealed, EAGER: model}, _drawn(points, calls // THREADS, seed), device)["sealed"]
        with lock:
            served.seconds += own.seconds
            served.errors += own.errors
            served.wrong += own.wrong

    def counted(seed: int) -> None:
        try:
            serve(seed)
        except Exception as error:  # noqa: BLE001 - it is counted, and nobody waits for this thread
            with lock:
                served.errors.append(repr(error))
            barrier.abort()

    threads = [threading.Thread(target=counted, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()
    with _watched() as seen:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()
        for thread in threads:
            thread.join()
        counters = sealed.counters
    outside = _outside(sealed, model, device, others)
    name = f"sizes, {THREADS} threads{', reduce-overhead' if mode else ''}"
    return Part(name, [served.row("sealed", ready)], counters, **seen, outside=outside)


@contextlib.contextmanager
def _watched() -> Iterator[dict[str, Any]]:
    """Yield what was compiled, written into Inductor's cache and loaded, once the context is left."""
    seen: dict[str, Any] = {}
    before = compile_events(), _files(), _libraries()
    yield seen
    seen["compiles"] = compile_events() - before[0]
    seen["new_files"] = sorted(_files() - before[1])
    seen["new_libraries"] = sorted(_libraries() - before[2])


def _files() -> set[str]:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return {str(path) for path in Path(cache_dir()).rglob("*")}


def _libraries() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if ".so" in line}


def as_page(parts: Sequence[Part], facts: Mapping[str, object], calls: int, others: int) -> str:
    """Return the parts as a Markdown page."""
    where = f"{facts['device_name']}, torch {facts['torch']}, {facts['threads']} threads"
    lines = ["# Sealed functions", "", f"{calls} declared calls, then {others} that were not declared. {where}."]
    heads = ("declared", "way", "ready, s", "p50, µs", "p99, µs", "wrong", "raised")
    lines += ["", *table(heads, [_cells(part.name, row) for part in parts for row in part.rows])]
    heads = ("declared", f"p99 over {PER_SIZE}", "compiled calls", "missed", "compiles", "new files", "new libraries")
    outside = ("calls outside", "their compiles", "failed", "wrong")
    lines += ["", *table((*heads, *outside), [_counted(part) for part in parts])]
    met = not any(part.compiles or part.new_files or part.new_libraries or part.outside["compiles"] for part in parts)
    within = all(part.ratio <= BAR for part in parts if part.name.startswith("sizes") and len(part.rows) > 1)
    right = not any(row.wrong or row.errors for part in parts for row in part.rows)
    lines += ["", f"Nothing compiled, written or loaded: {met}. p99 of declared sizes within {BAR}x: {within}."]
    lines[-1] += f" All results right, nothing raised: {right}."
    new = sorted({Path(name).name for part in parts for name in part.new_libraries})
    raised = sorted({error for part in parts for row in part.rows for error in row.errors})
    told = [f"- Loaded by one of the ways: {name}" for name in new] + [f"- Raised: {error}" for error in raised]
    return "\n".join([*lines, *([""] if told else []), *told]) + "\n"


def _cells(name: str, row: Row) -> Sequence[str]:
    times = f"{row.ready_s:.1f}", f"{row.p50_us:.0f}", f"{row.p99_us:.0f}"
    return (name, row.name, *times, str(row.wrong), str(len(row.errors)))


def _counted(part: Part) -> Sequence[str]:
    ratio = f"{part.ratio:.2f}" if len(part.rows) > 1 else ""
    served = part.counters["compiled"] + part.counters["padded"], part.counters["missed"]
    seen = part.compiles, len(part.new_files), len(part.new_libraries)
    outside = (part.outside[name] for name in ("calls", "compiles", "failed", "wrong"))
    return (part.name, ratio, *map(str, (*served, *seen, *outside)))
