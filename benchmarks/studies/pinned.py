"""What `reproducible="pinned"` costs: beside the race's own winner, and beside Inductor's deterministic mode.

All run under torch's deterministic algorithms, in one process, timed in turn.
"""

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.auto.lock import read_lock
from backend_kwargs.compare import Candidate, compare
from backend_kwargs.compare.comparison import speedup_over
from backend_kwargs.facts.decision import DEFAULT
from backend_kwargs.files import write_whole
from backend_kwargs.interval import Interval
from backend_kwargs.trial import environment
from benchmarks.workloads.nets.convs import ResNet
from benchmarks.workloads.nets.encoders import Bert, ViT

LABELS = RACED, PINNED, DETERMINISTIC = "raced", "pinned", "deterministic"
ABOVE, BELOW = 1.02, 0.98  # bars: time over what was raced, speedup over deterministic
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
Problem = tuple[nn.Module, torch.Tensor]
Make = Callable[[bool], Problem]


class Products(nn.Module):
    """Two products of batches, of which a library and Inductor's template have kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(8, width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, self.weights), self.weights)


def _mlp(full: bool) -> Problem:
    width = 1024 if full else 128
    layers = nn.Linear(width, 4 * width), nn.GELU(), nn.LayerNorm(4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(*layers), torch.randn(512 if full else 64, width)


def _rows(full: bool) -> Problem:
    width = 8192 if full else 1024
    return nn.Sequential(nn.LayerNorm(width), nn.Softmax(-1), nn.Tanh()), torch.randn(4096 if full else 256, width)


def _bert(full: bool) -> Problem:
    sizes = (4, 768, 12, 1000, 128) if full else (1, 64, 4, 1000, 32)
    return Bert(*sizes), torch.randint(0, 1000, (8 if full else 2, sizes[-1]))


def _vit(full: bool) -> Problem:
    image = 224 if full else 64
    return ViT(4, 768, 12, image) if full else ViT(1, 64, 4, image, classes=10), torch.randn(8, 3, image, image)


def _resnet(full: bool) -> Problem:
    made = ResNet((2, 2, 2, 2), 64, 1000) if full else ResNet((1, 1), 16, 10)
    return made, torch.randn(8, 3, *([224] * 2 if full else [32] * 2))


def _products(full: bool) -> Problem:
    width = 512 if full else 64
    return Products(width), torch.randn(8, width, width)


MODELS: Mapping[str, tuple[Make, Literal["inference", "training"]]] = {
    "mlp": (_mlp, "inference"),
    "rows": (_rows, "inference"),
    "products": (_products, "inference"),
    "bert": (_bert, "inference"),
    "vit": (_vit, "inference"),
    "resnet": (_resnet, "inference"),
    "mlp, training": (_mlp, "training"),
}


@dataclass(frozen=True)
class Row:
    """One model: the seconds of a call, the time of pinned over raced, its speedup over deterministic.

    `noise` is raced against itself. `pinned` says what the lock has: decisions, kernels and configurations. `reason` is
    why there are no figures.
    """

    model: str
    seconds: Mapping[str, float]
    over_raced: Interval | None
    over_deterministic: Interval | None
    noise: Interval | None
    pinned: Mapping[str, int]
    winners: Sequence[str]
    reason: str = ""

    @property
    def tuned(self) -> bool:
        """Whether anything but default was chosen."""
        return any(winner != DEFAULT for winner in self.winners) or bool(
            self.pinned["kernels"] or self.pinned["configurations"]
        )


def measure_pinned(device: str, models: Sequence[str], rounds: int, race_s: float, out: Path | None) -> str:
    """Measure each model; return the page, which is also written after each of them."""
    if device == "cuda":
        os.environ.setdefault(WORKSPACE, ":4096:8")
    before, rows = torch.are_deterministic_algorithms_enabled(), list[Row]()
    torch.use_deterministic_algorithms(True)
    facts, page = environment(torch.device(device)), ""
    try:
        for name in models:
            rows.append(_measured(name, device, rounds, race_s))
            page = "\n".join(as_page(rows, facts)) + "\n"
            if out is not None:
                data = {"environment": facts, "rows": [asdict(row) for row in rows]}
                write_whole(out.with_suffix(".json"), json.dumps(data, indent=1) + "\n")
                write_whole(out, page)
    finally:
        torch.use_deterministic_algorithms(before)
    return page


def _measured(name: str, device: str, rounds: int, race_s: float) -> Row:
    make, mode = MODELS[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model, x = make(device == "cuda")
    model, x = model.to(device, dtype).train(mode == "training"), x.to(device)
    x = x.to(dtype) if x.is_floating_point() else x
    with tempfile.TemporaryDirectory() as folder:
        lock, store = Path(folder, "kernels.lock"), str(Path(folder, "decisions"))
        raced = bk.make_backend("tmpl-inductor:auto", budget_s=race_s, store=store)
        with torch.set_grad_enabled(mode == "training"):
            result = torch.compile(model, backend=raced)(x)  # what it decides is what is pinned, and timed below
            if mode == "training":
                result.sum().backward()
                model.zero_grad()
            torch._dynamo.reset()
            pinned = bk.pin(model, x, lock=lock, backend=raced)
        deterministic = bk.make_backend("tmpl-inductor", deterministic=True)
        candidates = [
            Candidate(RACED, bk.make_backend(raced, race="never")),
            Candidate(PINNED, bk.make_backend(pinned, strict=True)),
            Candidate(DETERMINISTIC, deterministic),
        ]
        found = compare(model, x, candidates, mode=mode, rounds=rounds, baseline=RACED)
        pins = read_lock(lock)
    rows: dict[str, Any] = {row.label: row for row in found.rows}
    return Row(
        name,
        {label: row.latency.median for label, row in rows.items() if row.latency},
        speedup_over(rows[RACED], rows[PINNED]),
        speedup_over(rows[PINNED], rows[DETERMINISTIC]),
        found.noise,
        {kind: len(getattr(pins, kind)) for kind in ("decisions", "kernels", "configurations")},
        sorted({each.winner for each in pins.decisions.values()}),
        "; ".join(f"{label}: {row.status} {row.reason}" for label, row in rows.items() if not row.passed),
    )


def as_page(rows: Sequence[Row], facts: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# Pinned"
    yield ""
    yield f"{facts['device_name']}, torch {facts['torch']}, {facts['threads']} threads, deterministic algorithms on."
    yield ""
    heads = ("model", "winner", "kernels, configurations", *LABELS, "pinned over raced", "speedup over deterministic")
    yield f"| {' | '.join((*heads, 'raced over itself'))} |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        times = (f"{row.seconds[label] * 1e6:.0f} µs" if label in row.seconds else "" for label in LABELS)
        figures = (each.as_ratio(3) if each else "" for each in (row.over_raced, row.over_deterministic, row.noise))
        choices = f"{row.pinned['kernels']}, {row.pinned['configurations']}"
        yield f"| {' | '.join((row.model, ', '.join(row.winners), choices, *times, *figures))} |"
    yield ""
    yield from (f"- {row.model}: {row.reason}" for row in rows if row.reason)
    yield from _bars(rows)


def _bars(rows: Sequence[Row]) -> Iterator[str]:
    above = [row.over_raced.median for row in rows if row.over_raced]
    faster = [row.over_deterministic.median for row in rows if row.over_deterministic]
    tuned = [row.over_deterministic.median for row in rows if row.over_deterministic and row.tuned]
    if above:
        yield f"- Time over what was raced: at most {max(above):.3f}, {_said(max(above) <= ABOVE)} ({ABOVE})."
    if faster:
        yield f"- Speedup over deterministic: at least {min(faster):.3f}, {_said(min(faster) >= BELOW)} ({BELOW})."
    if tuned:
        mean = statistics.geometric_mean(tuned)
        yield f"- Geometric mean of {len(tuned)} models where something is tuned: {mean:.3f}, {_said(mean > 1)} (1)."


def _said(met: object) -> str:
    return "**met**" if met else "**missed**"
