"""What copies of gradients cost a training step under CUDA graphs: `python -m benchmarks.studies.training_copies`.

Two models of about 200 parameters, whose gradients each step drops, and loops of calls that hold or drop their result.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import backend_kwargs

GRAPHS = "reduce-overhead"
CLONED = "reduce-overhead, gradients cloned"
OURS = "tmpl-inductor:cudagraphs, clone_outputs"
ROUNDS, CALLS, WARM = 30, 10, 8


class Block(nn.Module):
    """A residual block of a U-Net."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, into), nn.GroupNorm(8, out)
        self.into, self.out = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        y = self.out(functional.silu(self.second(self.into(functional.silu(self.first(x))))))
        return y + self.skip(x)


class UNet(nn.Module):
    """Blocks down and up again, with skip connections: 200 parameters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 4 * width]
        self.head, self.tail = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList()
        self.up = nn.ModuleList()
        last = width
        for each in widths:
            self.down.append(nn.Sequential(Block(last, each), Block(each, each)))
            last = each
        self.middle = nn.Sequential(Block(last, last), Block(last, last))
        for each in reversed(widths):
            self.up.append(nn.Sequential(Block(last + each, each), Block(each, each)))
            last = each

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x, kept = self.head(x), []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for stage in self.up:
            x = stage(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.tail(x)


class Layer(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.wide(self.second(x))))


MODELS: Mapping[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "U-Net": lambda: (UNet(), torch.randn(4, 3, 64, 64)),
    "decoder": lambda: (nn.Sequential(*(Layer(768, 12) for _ in range(16))), torch.randn(4, 128, 768)),
}


def _compiled(model: nn.Module, name: str) -> Any:
    if name == OURS:
        return torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor:cudagraphs", clone_outputs=True))
    return torch.compile(model, mode="reduce-overhead")


def _step(model: nn.Module, name: str, x: torch.Tensor, *, optimizer: bool) -> Callable[[], None]:
    model = copy.deepcopy(model)
    call, parameters = _compiled(model, name), [*model.parameters()]
    adam = torch.optim.AdamW(parameters, lr=1e-4, fused=True) if optimizer else None

    def step() -> None:
        for each in parameters:
            each.grad = None
        call(x).float().square().mean().backward()
        if name == CLONED:
            for each in parameters:
                each.grad = None if each.grad is None else each.grad.clone()
        if adam:
            adam.step()

    return step


def _loop(model: nn.Module, name: str, x: torch.Tensor, *, held: bool) -> Callable[[], None]:
    call, kept = _compiled(copy.deepcopy(model), name), [x]

    def step() -> None:
        with torch.no_grad():
            out = call(x)
            if name == CLONED:
                out = out.clone()
        if held:
            kept[0] = out

    return step


def _times_ms(steps: Mapping[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Return the median time of a step, and that in which the host returns from one, timed in turn."""
    for step in steps.values():
        for _ in range(WARM):
            step()
    wall: dict[str, list[float]] = {name: [] for name in steps}
    host: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            step()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                step()
            torch.cuda.synchronize()
            wall[name].append((time.perf_counter() - started) / CALLS * 1e3)
            started = time.perf_counter()
            step()
            host[name].append((time.perf_counter() - started) * 1e3)
            torch.cuda.synchronize()
    return {name: [statistics.median(wall[name]), statistics.median(host[name])] for name in steps}


def measure_copies() -> Iterator[dict[str, Any]]:
    """Yield one row for each model and kind of loop: for each peer the time of a step and of the host, in ms."""
    for title, make in MODELS.items():
        torch.manual_seed(0)
        model, x = (each.to("cuda", torch.bfloat16) for each in make())
        count = len([*model.parameters()])
        for optimizer in (False, True):
            torch._dynamo.reset()
            steps = {name: _step(model, name, x, optimizer=optimizer) for name in (GRAPHS, CLONED, OURS)}
            kind = "forward, backward, fused AdamW" if optimizer else "forward, backward"
            yield {"model": title, "parameters": count, "kind": kind, "ms": _times_ms(steps)}
        for held in (False, True):
            torch._dynamo.reset()
            loops = {name: _loop(model, name, x, held=held) for name in (GRAPHS, CLONED, OURS)}
            yield {"model": title, "kind": "result held" if held else "result dropped", "ms": _times_ms(loops)}


if __name__ == "__main__":
    for row in measure_copies():
        print(json.dumps(row), flush=True)
