"""Speedup and cost of each template on a GPU, over default, on a case where it should help and on one where not.

    BACKEND_KWARGS_EVIDENCE=seen.jsonl python -m pytest tests/gpu
    python -m benchmarks templates --evidence seen.jsonl --out benchmarks/results/h200

writes `templates.md` and the samples, `templates.json`. The text below "## Reading" in an earlier `templates.md` is
kept. All peers of a case run in one process, interleaved; a row that is wrong, or does not compile, has no time.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backend_kwargs.compare import Candidate, Comparison, Row, compare, to_json
from backend_kwargs.files import write_whole
from benchmarks.execution.session import smi

COMMANDS = """\
BACKEND_KWARGS_EVIDENCE=seen.jsonl python -m pytest tests/gpu
python -m benchmarks templates --evidence seen.jsonl --out benchmarks/results/h200"""
EVIDENCE = (
    "What `tests/gpu` found in generated code, traces and autotuning, on a case where the template has an effect and on"
    " one where it should not."
)
TIMES = (
    "Speedup over default with its bootstrap 95 % interval, paired round by round; wall time per call, launches"
    " included. Compile is the first call with an empty cache."
)
READING = "## Reading"
Made = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class TemplateCase:
    """A function with its inputs, the templates that should help it, and those that should not."""

    make: Callable[[], Made]
    good_for: tuple[str, ...]
    bad_for: tuple[str, ...]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal random data, since an H200 is faster on zeros."""
    return torch.randn(*shape, device="cuda", dtype=dtype)


def relu_of_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute a GEMM with an epilogue."""
    return torch.relu(x @ w)


def gate_and_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute pointwise operators and a reduction, bound by memory."""
    return nn.functional.layer_norm(nn.functional.gelu(x) * torch.sigmoid(x), x.shape[-1:])


def chain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Compute steps that eager rounds one by one."""
    return ((a * b + c) * a - b) / (c * c + 1)


def mlp(width: int, depth: int) -> nn.Module:
    """Linear layers and ReLUs."""
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*layers).to("cuda", torch.bfloat16).eval()


def conv_net() -> nn.Module:
    """Two convolutions, each with a batch norm to fold."""
    layers: Iterable[nn.Module] = (
        layer
        for inner, outer in ((64, 64), (64, 128))
        for layer in (nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU())
    )
    return nn.Sequential(*layers).cuda().eval().to(memory_format=torch.channels_last)


def images() -> torch.Tensor:
    """Return a batch in channels_last."""
    return random(32, 64, 56, 56, dtype=torch.float32).contiguous(memory_format=torch.channels_last)


CASES: dict[str, TemplateCase] = {
    "MLP of 8 layers of 256, 64 rows, bf16: bound by launches": TemplateCase(
        lambda: (mlp(256, 8), (random(64, 256),)),
        ("cudagraphs", "max_autotune", "cpp_wrapper", "aten"),
        ("triton", "debug"),
    ),
    "gelu, sigmoid, layer norm of 8192 x 8192, bf16: bound by memory": TemplateCase(
        lambda: (gate_and_norm, (random(8192, 8192),)),
        ("coordinate_descent", "max_autotune_no_cudagraphs"),
        ("cudagraphs", "max_autotune", "cpp_wrapper", "fast_compile"),
    ),
    "2 x (conv, batch norm, relu), 32 images of 56 x 56, float32": TemplateCase(
        lambda: (conv_net(), (images(),)), ("freezing", "fast_compile"), ()
    ),
    "MLP of 4 layers of 2048, 16 rows, bf16: nothing to fold": TemplateCase(
        lambda: (mlp(2048, 4), (random(16, 2048),)), (), ("freezing",)
    ),
    "a chain of five steps on 8192 x 8192, bf16": TemplateCase(
        lambda: (chain, tuple(random(8192, 8192) for _ in range(3))), ("eager_numerics", "debug"), ()
    ),
    "a chain of five steps on 8192 x 8192, float32": TemplateCase(
        lambda: (chain, tuple(random(8192, 8192, dtype=torch.float32) for _ in range(3))), (), ("eager_numerics",)
    ),
    "relu of a GEMM of 1021 x 2047 x 4093, bf16: unaligned": TemplateCase(
        lambda: (relu_of_mm, (random(1021, 2047), random(2047, 4093))),
        ("triton",),
        ("tma", "aten"),
    ),
    "relu of a GEMM of 4096 cubed, bf16: bound by arithmetic": TemplateCase(
        lambda: (relu_of_mm, (random(4096, 4096), random(4096, 4096))),
        ("tma", "cutlass"),
        ("coordinate_descent", "max_autotune_no_cudagraphs"),
    ),
}


def measure(rounds: int, wanted: str, budget_s: float) -> Iterator[tuple[str, Comparison]]:
    """Time default and each case's templates; cases beyond the budget are left out."""
    started = time.perf_counter()
    for name, case in CASES.items():
        if wanted not in name:
            continue
        if time.perf_counter() - started > budget_s:
            print(f"out of time before {name!r}", file=sys.stderr)
            break
        fn, inputs = case.make()
        peers = ("default", *case.good_for, *case.bad_for)
        candidates = [Candidate("eager"), *(Candidate(peer, f"tmpl-inductor:{peer}") for peer in peers)]
        comparison = compare(fn, inputs, candidates, rounds=rounds, baseline="default")
        print(name, *(f"  {row.label:28}{_figures(row)}" for row in comparison.rows), sep="\n", flush=True)
        yield name, comparison


def _figures(row: Row) -> str:
    if not row.latency or not row.speedup:
        return f"{row.status}: {row.reason}"
    speedup, noise = row.speedup, f" ({row.verdict})" if row.verdict else ""
    times = f"{row.latency.median * 1e6:.1f} µs, {speedup.as_ratio()}{noise}"
    return times if row.compile_s is None else f"{times}, compile {row.compile_s:.1f} s"


# ---- the page


def page(found: dict[str, Comparison], seen: list[dict[str, Any]], reading: str) -> str:
    """Return the Markdown of environment, evidence and times."""
    parts = [
        f"# Effect of each template on a GPU\n\nWritten by:\n\n```sh\n{COMMANDS}\n```",
        "\n".join(f"- {name}: {value}" for name, value in _environment(found).items()),
        f"## Evidence\n\n{EVIDENCE}",
        _table(("template", "case", "acts", "evidence"), map(_evidence, seen)),
        f"## Times\n\n{TIMES}",
        *(_times(name, CASES[name], comparison) for name, comparison in found.items()),
        f"{READING}\n{reading}",
    ]
    return "\n\n".join(parts).rstrip() + "\n"


def _environment(found: dict[str, Comparison]) -> dict[str, Any]:
    measured = next(iter(found.values())).environment
    wanted = ("device_name", "torch", "triton", "cuda", "python", "cpu", "cpus", "rounds")
    return {name: measured[name] for name in wanted} | {"driver": smi("driver_version") or "unknown"}


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _evidence(line: dict[str, Any]) -> tuple[object, ...]:
    line = dict(line)
    template, case, acts = line.pop("template"), line.pop("case"), line.pop("acts", "")
    details = (f"{name.replace('_', ' ')}: {_told(value)}" for name, value in line.items() if value not in ([], {}, ""))
    return f"`{template}`", case, {True: "yes", False: "no"}.get(acts, ""), "; ".join(details)


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_told(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_told, value))
    return f"{value:.4g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else str(value)


def _times(name: str, case: TemplateCase, comparison: Comparison) -> str:
    noise = comparison.noise
    band = f", default against itself {noise.low:.3f} to {noise.high:.3f}" if noise else ""
    rows = [(f"`{row.label}`", _stance(row.label, case), *_cells(row)) for row in comparison.rows]
    return f"### {name}{band}\n\n" + _table(("template", "case is", "µs", "speedup", "compile s", ""), rows)


def _stance(label: str, case: TemplateCase) -> str:
    return "for it" if label in case.good_for else "against it" if label in case.bad_for else ""


def _cells(row: Row) -> tuple[str, ...]:
    if not row.latency or not row.speedup:
        return "", "", "", f"{row.status}: {row.reason}"
    low, middle, high = row.speedup.low, row.speedup.median, row.speedup.high
    compiled = f"{row.compile_s:.1f}" if row.compile_s is not None else ""
    return f"{row.latency.median * 1e6:.1f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]", compiled, row.verdict


def write_page(out: Path, evidence: Path | None, rounds: int, wanted: str, budget_s: float) -> None:
    """Measure the cases whose name contains `wanted`, and rewrite the page and the samples after each."""
    seen = [json.loads(line) for line in evidence.read_text().splitlines()] if evidence else []
    out.mkdir(parents=True, exist_ok=True)
    written = out / "templates.md"
    reading = written.read_text().partition(READING)[2] if written.exists() else ""
    found = {}
    for name, comparison in measure(rounds, wanted, budget_s):
        found[name] = comparison
        raw = {name: to_json(comparison) for name, comparison in found.items()}
        write_whole(out / "templates.json", json.dumps(raw) + "\n")
        write_whole(written, page(found, seen, reading))
