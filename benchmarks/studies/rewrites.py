"""The speedup of rewrites: each pattern alone in a compiled graph, and whole cases raced with and without rewrites.

    python -m benchmarks rewrites --patterns --out benchmarks/results/h200/rewrites_alone.json
    bash benchmarks/gpu_rewrites.sh OUT_DIR

All peers of a case are timed interleaved in one process; the script runs each case in its own process. A peer that is
wrong, or does not compile, has no time.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from backend_kwargs import make_backend, measure
from backend_kwargs.compare import Candidate, Comparison, compare, to_json
from backend_kwargs.compare.rows import Mode
from backend_kwargs.errors import error_text
from benchmarks.workloads.cases.models import decode
from benchmarks.workloads.user_models import model_case

Made = tuple[Callable[..., Any], tuple[Any, ...]]
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class RewriteCase:
    """A function with its inputs, further options for `auto`, and the goal: a speedup over auto without rewrites."""

    make: Callable[[], Made]
    bar: float
    named: tuple[str, ...] | None = None
    mode: Mode = "inference"


def random(*shape: int) -> Tensor:
    """Return normal data: an H200 is faster on zeros."""
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def images(batch: int, channels: int, side: int) -> Tensor:
    """Return a batch in channels_last, which convolutions need."""
    return random(batch, channels, side, side).contiguous(memory_format=torch.channels_last)


def with_statistics(model: nn.Module) -> nn.Module:
    """Set the statistics of batch norms to values other than the initial ones, as training does."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model


def timm(name: str, batch: int) -> Made:
    """Return a timm model in eval mode, channels last."""
    problem = model_case(f"timm:{name}?batch={batch}").build(torch.device("cuda"), DTYPE, "full")
    model = with_statistics(problem.fn).to(memory_format=torch.channels_last)
    return model, tuple(value.contiguous(memory_format=torch.channels_last) for value in problem.args)


def transformer(spec: str) -> Made:
    """Return a transformers model in eval mode."""
    problem = model_case(f"transformers:{spec}").build(torch.device("cuda"), DTYPE, "full")
    return problem.fn, tuple(problem.args)


class Apart(nn.Module):
    """Several linear layers with the outputs of one, since most models have separate layers for q, k and v."""

    def __init__(self, whole: nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        weights = whole.weight.detach().split(list(sizes))
        self.parts = nn.ModuleList(nn.Linear(whole.in_features, size, bias=False) for size in sizes)
        for part, weight in zip(self.parts, weights, strict=True):
            part.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


def decoder(rows: int) -> Made:
    """Return one step of decoding with grouped queries and a cache; projections are separate layers."""
    problem = decode(torch.device("cuda"), DTYPE, "full", rows)
    for module in [*problem.fn.modules()]:
        for name, size in (("qkv", "heads"), ("gate_up", "inner")):
            whole = getattr(module, name, None)
            if isinstance(whole, nn.Linear):
                setattr(module, name, Apart(whole, _sizes(whole, size)))
    return problem.fn, tuple(problem.args)


def _sizes(whole: nn.Linear, kind: str) -> tuple[int, ...]:
    if kind == "inner":
        return (whole.out_features // 2,) * 2
    rest = (whole.out_features - whole.in_features) // 2
    return whole.in_features, rest, rest


class Feed(nn.Module):
    """A linear layer with tanh-GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x), approximate="tanh")


class Windows(nn.Module):
    """Attention in windows with a relative-position bias, as in Swin."""

    def __init__(self, heads: int, tokens: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1) + self.bias
        attended = weights.softmax(-1) @ v
        return attended.transpose(1, 2).flatten(2)


def on_gpu(module: nn.Module) -> nn.Module:
    """Return the module on the GPU, in bf16 and eval mode."""
    return module.to("cuda", DTYPE).eval()


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the mean cross-entropy."""
    return F.cross_entropy(logits, target)


def logits_and_targets(rows: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return logits and targets for a loss."""
    return random(rows, classes).requires_grad_(), torch.randint(classes, (rows,), device="cuda")


WINDOWS = "attention with relative-position bias, 1024 windows of 64, 8 heads of 32"
CASES: dict[str, RewriteCase] = {
    "linear 16384 x (768 -> 3072) + tanh-GELU": RewriteCase(
        lambda: (on_gpu(Feed(768, 3072)), (random(16384, 768),)), 1.2
    ),
    WINDOWS: RewriteCase(lambda: (on_gpu(Windows(8, 64)), tuple(random(1024, 8, 64, 32) for _ in range(3))), 1.15),
    "cross-entropy 8192 x 128256, forward and backward": RewriteCase(
        lambda: (loss_of, logits_and_targets(8192, 128256)), 1.25, mode="training"
    ),
    "ResNet-50, 128 images": RewriteCase(partial(timm, "resnet50", 128), 1.2),
    "Llama decode, 16 rows": RewriteCase(partial(decoder, 16), 1.05, ("packed",)),
    "RegNetY-032, 128 images": RewriteCase(partial(timm, "regnety_032", 128), 1.1),
    "GPT-2, 8 x 1024 tokens": RewriteCase(partial(transformer, "GPT2Model?batch=8&tokens=1024&n_layer=12"), 1.05),
}


def conv(channels: int, out: int, side: int, kernel: int, *, residual: bool) -> Made:
    """Return a convolution with bias, an optional residual, and ReLU."""
    layer = on_gpu(nn.Conv2d(channels, out, kernel, padding=kernel // 2)).to(memory_format=torch.channels_last)
    if residual:
        return (lambda x, z: F.relu(layer(x) + z)), (images(128, channels, side), images(128, out, side))
    return (lambda x: F.relu(layer(x))), (images(128, channels, side),)


def linear(rows: int, width: int, inner: int, activation: Callable[[Tensor], Tensor]) -> Made:
    """Return a linear layer with bias and an activation."""
    layer = on_gpu(nn.Linear(width, inner))
    return (lambda x: activation(layer(x))), (random(rows, width),)


def tanh_gelu(x: Tensor) -> Tensor:
    """Compute tanh-GELU."""
    return F.gelu(x, approximate="tanh")


def causal(batch: int, heads: int, tokens: int, width: int) -> Made:
    """Return causal attention as models call it, with [batch, length, heads, width] in memory."""
    q, k, v = (random(batch, tokens, heads, width).transpose(1, 2) for _ in range(3))
    return (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)), (q, k, v)


PATTERNS: dict[str, tuple[str, Callable[[], Made]]] = {
    f"{kernel}x{kernel} conv {channels} -> {out} @{side}{' + residual' if residual else ''}": (
        "convolution",
        partial(conv, channels, out, side, kernel, residual=residual),
    )
    for channels, out, side, kernel in ((64, 64, 56, 3), (64, 256, 56, 1), (256, 64, 56, 1), (256, 1024, 14, 1))
    for residual in (False, True)
} | {
    "linear 16384 x (768 -> 3072) + tanh-GELU": ("linear_activation", partial(linear, 16384, 768, 3072, tanh_gelu)),
    "linear 16384 x (768 -> 3072) + ReLU": ("linear_activation", partial(linear, 16384, 768, 3072, F.relu)),
    "linear 8192 x (1024 -> 4096) + tanh-GELU": ("linear_activation", partial(linear, 8192, 1024, 4096, tanh_gelu)),
    "linear 8192 x (1024 -> 4096) + GELU": ("approximate_gelu", partial(linear, 8192, 1024, 4096, F.gelu)),
    "windows of 64, 8 heads of 32": ("attention", CASES[WINDOWS].make),
    "windows of 49, 4 heads of 32": (
        "attention",
        lambda: (on_gpu(Windows(4, 49)), tuple(random(2048, 4, 49, 32) for _ in range(3))),
    ),
    "causal attention, 8 x 16 x 2048 x 128": ("cudnn_attention", partial(causal, 8, 16, 2048, 128)),
    "causal attention, 8 x 12 x 1024 x 64": ("cudnn_attention", partial(causal, 8, 12, 1024, 64)),
}  # fmt: skip


def alone(only: str) -> dict[str, dict[str, Any]]:
    """Return the device's microseconds for each pattern inside a compiled graph, without and with its rewrite."""
    found = {}
    device = torch.device("cuda")
    for name, (rewrite, make) in PATTERNS.items():
        if only not in name and only != rewrite:
            continue
        try:
            found[name] = {"rewrite": rewrite, **_timed(make, rewrite, device)}
        except Exception as error:  # noqa: BLE001 - the next pattern can still be timed
            found[name] = {"rewrite": rewrite, "error": error_text(error)}
        print(name, found[name], flush=True)
    return found


def _timed(make: Callable[[], Made], rewrite: str, device: torch.device) -> dict[str, float]:
    fn, args = make()
    calls = {}
    with torch.no_grad():
        for label, names in (("default", ()), ("rewritten", (rewrite,))):
            torch._dynamo.reset()
            compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", rewrites=names))
            compiled(*args)
            calls[label] = partial(compiled, *args)
        seconds = {label: measure.device_seconds(call, device) for label, call in calls.items()}
        gap = (calls["default"]().float() - calls["rewritten"]().float()).abs().max().item()
    return {label: each * 1e6 for label, each in seconds.items()} | {"largest_difference": gap}


def whole(only: str, rounds: int, race_s: float, budget_s: float, out: Path) -> dict[str, Any]:
    """Race each case without and with rewrites, and time both against default; write `out` after each case."""
    started, found = time.perf_counter(), {}
    for name, case in CASES.items():
        if only not in name:
            continue
        if time.perf_counter() - started > budget_s:
            print(f"out of time before {name!r}", file=sys.stderr)
            break
        try:
            found[name] = _raced(case, rounds, race_s)
        except Exception as error:  # noqa: BLE001 - the next case can still be timed
            print(name, error_text(error), flush=True)
            continue
        print(name, *_lines(found[name], case), sep="\n", flush=True)
        out.write_text(json.dumps({each: to_json(comparison) for each, comparison in found.items()}) + "\n")
    return found


def _raced(case: RewriteCase, rounds: int, race_s: float) -> Comparison:
    torch.manual_seed(0)
    fn, args = case.make()
    with tempfile.TemporaryDirectory() as folder:
        auto = {"budget_s": race_s, "process_budget_s": 1e4}
        candidates = [
            Candidate("default", "tmpl-inductor"),
            Candidate(
                "auto without", "tmpl-inductor:auto", options={**auto, "rewrites": (), "store": f"{folder}/a.sqlite"}
            ),
            Candidate(
                "auto with",
                "tmpl-inductor:auto",
                options={**auto, "rewrites": case.named, "store": f"{folder}/b.sqlite"},
            ),
        ]
        return compare(fn, args, candidates, mode=case.mode, rounds=rounds, baseline="auto without")


def _lines(comparison: Comparison, case: RewriteCase) -> list[str]:
    lines = []
    for row in comparison.rows:
        if row.latency and row.speedup:
            low, middle, high = row.speedup.low, row.speedup.median, row.speedup.high
            took = f"{row.latency.median * 1e6:.1f} µs, first call {row.compile_s:.1f} s"
            figures = f"{took}, {middle:.3f}x [{low:.3f}, {high:.3f}]"
        else:
            figures = f"{row.status}: {row.reason}"
        lines.append(f"  {row.label:14}{figures}")
        lines += [f"      {line}" for line in row.report.splitlines() if "<- kept" in line or "rewritten" in line]
    return [*lines, f"  goal: {case.bar}x"]


def run(out: Path, only: str, rounds: int, race_s: float, budget_s: float, *, patterns: bool) -> None:
    """Time patterns alone, or race whole cases."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if patterns:
        out.write_text(json.dumps(alone(only), indent=1) + "\n")
    else:
        whole(only, rounds, race_s, budget_s, out)
