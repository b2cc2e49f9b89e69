"""What a stored decision costs the first call: `python -m benchmarks.studies.fleet_first_call`.

A model is tuned on one thread into a folder, or the store that is named. Then processes with empty caches and another
number of threads make their first call, in pairs: under auto, which finds the winner in the store, and with the winner
alone.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import backend_kwargs
from backend_kwargs.auto.decide import memory
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.fleet.board import UnitClaims
from backend_kwargs.fleet.racing import race_unit, releases
from backend_kwargs.fleet.units import Result, Unit
from backend_kwargs.registry import decided
from backend_kwargs.stores.opening import open_store

PAIRS = 5
TUNED_ON, SERVED_ON = 1, max(os.cpu_count() or 1, 2)
HERE = "benchmarks.studies.fleet_first_call"


def model(batch: int = 64) -> tuple[nn.Module, torch.Tensor]:
    """Return a multilayer perceptron with norms, which Inductor fuses, and its input."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.SiLU()) for _ in range(6)]
    return nn.Sequential(*layers).eval(), torch.randn(batch, 256)


def tune(store: str) -> None:
    """Race the model on one thread, and keep the decision."""
    import msgspec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    unit = Unit(model=f"{HERE}:model", device=device, threads=TUNED_ON if device == "cpu" else None, budget_s=60.0)
    result = msgspec.json.decode(race_unit(msgspec.json.encode(unit)), type=Result)
    assert not result.failed, result.failed
    assert not UnitClaims(open_store(store), releases()).record(unit, result)


def first_call(store: str, way: str) -> dict[str, object]:
    """Return the seconds of the first call, from `torch.compile` on, and what ran."""
    torch.set_num_threads(SERVED_ON)
    layers, x = model()
    if torch.cuda.is_available():
        layers, x = layers.cuda(), x.cuda()
        torch.ones(1, device="cuda").sum().item()
    stored = Catalogue(store).all()[0]
    if way == "auto":
        backend = backend_kwargs.make_backend("tmpl-inductor:auto", race="never", match="device", store=store)
    else:
        backend = decided(stored.winner, stored.options, stored.fixed, stored.compiler)
    torch.compile(nn.Linear(2, 2), backend="inductor")(torch.ones(1, 2))  # what any first compile of a process loads
    torch.compiler.reset()
    began = time.perf_counter()
    with torch.no_grad():
        torch.compile(layers, backend=backend, dynamic=False)(x)
    seconds = time.perf_counter() - began
    raced = len(memory().race_seconds)
    ran = [each.winner for each in memory().decisions.values()] if way == "auto" else [stored.winner]
    return {"seconds": seconds, "raced": raced, "ran": ran}


def _apart(*arguments: str) -> str:
    """Run a part of the study in a process with empty caches; return what it prints."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        ran = subprocess.run(
            [sys.executable, "-m", HERE, *arguments], env=environment, capture_output=True, text=True, check=True
        )
    return ran.stdout


def main(store: str) -> None:
    """Tune, then print the pairs and the median of their ratios."""
    _apart("tune", store)
    ratios = []
    for pair in range(PAIRS):
        order = ("auto", "alone") if pair % 2 else ("alone", "auto")
        found = {way: json.loads(_apart(way, store)) for way in order}
        ratios.append(found["auto"]["seconds"] / found["alone"]["seconds"])
        shown = (f"{way} {each['seconds']:.2f} s {each['ran']}" for way, each in found.items())
        print(f"pair {pair + 1}: {', '.join(shown)}")
        assert not found["auto"]["raced"]
    print(f"first call over the winner alone: {statistics.median(ratios):.3f}x (median of {PAIRS} pairs)")


if __name__ == "__main__":
    parts: dict[str, Callable[[str], object]] = {
        "tune": tune,
        "auto": lambda store: print(json.dumps(first_call(store, "auto"))),
        "alone": lambda store: print(json.dumps(first_call(store, "alone"))),
    }
    if sys.argv[1:2] and sys.argv[1] in parts:
        parts[sys.argv[1]](sys.argv[2])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(sys.argv[1] if sys.argv[1:] else str(Path(folder) / "kept"))
