"""The speed of tmpl-tvm against eager and Inductor.

    python -m benchmarks tvm-speed [--device cuda] [--trials 64] [--out FILE]

`compare` checks and times them. It runs on one thread of the CPU. The last column names what ran in eager because TVM
could not compile it.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import nn

import backend_kwargs as bk
from backend_kwargs.compare import Candidate, Row, compare
from backend_kwargs.files.atomic_write import write_whole
from backend_kwargs.trial import environment
from benchmarks.workloads.nets.encoders import Layer

IN_ATEN = ("mm", "addmm", "bmm", "baddbmm", "convolution")
HEADER = ("model", "candidate", "speedup over eager (95 %)", "latency", "compile", "largest error", "in TVM")


@dataclass(frozen=True)
class Asked:
    """The arguments: the device, the number of schedules to measure for the tuned rows, and the timing."""

    device: str
    trials: int
    rounds: int
    threads: int
    work_dir: Path | None


class Chain(nn.Module):
    """Pointwise operators and a sum over rows."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a chain of them."""
        z = torch.sigmoid(x) * y + torch.tanh(y)
        return F.gelu(z) * (-x * x).exp() - (1 + z * z).sum(-1, keepdim=True).rsqrt()


def mlp() -> nn.Module:
    """Return 256-1024-1024-128."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 128))


def cnn() -> nn.Module:
    """Return three convolutions with their norms."""
    layers = [(3, 32, 1), (32, 64, 2), (64, 64, 1)]
    parts = [(nn.Conv2d(i, o, 3, s, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o, s in layers]
    return nn.Sequential(*sum(parts, ()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "mlp": (mlp, ((32, 256),)),
    "cnn": (cnn, ((4, 3, 32, 32),)),
    "block": (lambda: Layer(128, 4, 1e-5, norm_first=True), ((2, 64, 128),)),
    "pointwise": (Chain, ((256, 1024), (256, 1024))),
}


def candidates(asked: Asked, work_dir: str) -> list[Candidate]:
    """Return the candidates; tuning, if requested, is part of compiling."""
    found: dict[str, Mapping[str, Any]] = {"untuned": {}, "untuned, freeze": {"freeze": True}}
    found["untuned, products and convolutions in ATen"] = {"aten_ops": IN_ATEN}
    if asked.device == "cuda":
        found["untuned, cuda_graph"] = {"cuda_graph": True}
        found["untuned, products and convolutions in ATen, cuda_graph"] = {"aten_ops": IN_ATEN, "cuda_graph": True}
    if asked.trials:
        found["tuned"] = {"scheduler": "meta_schedule", "trials": asked.trials, "work_dir": work_dir, "seed": 0}
    peers = [Candidate("eager"), Candidate("inductor", "inductor")]
    if asked.device == "cuda":
        peers.append(Candidate("inductor, reduce-overhead", "inductor", mode="reduce-overhead"))
    return peers + [Candidate(f"tmpl-tvm ({label})", bk.make_backend("tvm", **each)) for label, each in found.items()]


def rows(name: str, asked: Asked, work_dir: str) -> Iterator[tuple[str, ...]]:
    """Compile, check and time every candidate on one model."""
    make, shapes = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().to(asked.device)
    inputs = [torch.randn(shape, device=asked.device) for shape in shapes]
    for row in compare(model, inputs, candidates(asked, work_dir), rounds=asked.rounds, baseline="eager").rows:
        if not (row.right and row.latency and row.speedup and row.accuracy):
            yield name, row.label, f"failed: {row.reason}", "", "", "", ""
            continue
        compiled = (f"{row.compile_s:.1f} s", f"{row.accuracy.max_error or 0.0:.1e}") if row.compile_s else ("", "")
        times = row.speedup.as_ratio(), f"{row.latency.median * 1e6:.0f} us"
        yield name, row.label, *times, *compiled, "; ".join(_in_tvm(row))


def _in_tvm(row: Row) -> Iterator[str]:
    """Yield how much of a model TVM ran, and the rest with the reasons."""
    for part in (graph.relax for graph in row.made if graph.relax):
        yield f"{sum(each.operators for each in part.partitions)} operators"
        yield from (f"{op}: {reason}" for op, reason in part.fallbacks.items())


def write_table(asked: Asked, models: Sequence[str], out: Path | None) -> None:
    """Print the table as Markdown, and where it was measured; write it to `out` too."""
    torch.set_num_threads(asked.threads)
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for name in models:
            for row in rows(name, asked, str(asked.work_dir or scratch)):
                lines.append(f"| {' | '.join(row)} |")
                print(lines[-1], file=sys.stderr, flush=True)
    where = ", ".join(f"{k} {v}" for k, v in environment(torch.device(asked.device)).items() if v is not None)
    table = "\n".join([f"`python -m benchmarks {' '.join(sys.argv[1:])}`", "", *lines, "", where, ""])
    print(table)
    if out:
        write_whole(out, table)
