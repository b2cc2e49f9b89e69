"""Deploying: the callable with the least overhead for serving, and facts about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.compiled.ahead import compile_package
from backend_kwargs.compiled.running import Built, FirstCalls, Running, checked, running, seconds_of
from backend_kwargs.compiled.samples import InputCheck, Sample, made
from backend_kwargs.errors import BackendKwargsError

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)


def deployed(
    built: Built, swap: Callable[[Callable[..., Any]], None], *, guards: bool
) -> tuple[Running, Callable[..., Any], list[str]]:
    """Return what runs, what to call, and notes; `swap` is called with the replacement of the first callable."""
    if not guards and any(sample != built.samples[0] for sample in built.samples):
        raise BackendKwargsError("deploy(guards=False) must have samples that are all alike: build with one sample.")
    ahead = built.package is not None
    check = InputCheck(built.samples, built.device, dynamic=bool(built.dynamic) and guards, values=ahead or not guards)
    made_ready = running(built, built.module, keep=False, guards="local" if guards else "none")
    lean = checked(made_ready.call, check)
    structures = len({str(sample) for sample in built.samples})
    call = FirstCalls(lean, structures, swap) if made_ready.backend else lean
    return made_ready, call, [*made_ready.notes, f"input check: {seconds_of(check, built) * 1e6:.1f} µs per call"]


def compiled_anew(built: Built) -> Path:
    """Compile an ahead-of-time package for inputs like the samples, whose values are not in a bundle."""
    args, kwargs = made(built.samples[0], built.device)
    with torch.no_grad():
        return compile_package(built, built.module, Sample(tuple(args), dict(kwargs)))


def facts(built: Built, running: Running | None) -> list[str]:
    """Return facts about a built module's code, one per line."""
    lines = [f"samples: {len(built.samples)}{', dynamic sizes' if built.dynamic else ''}"]
    if built.config.kind == "aoti":
        lines.append("code: an ahead-of-time package" if built.package else "code: none, compiled when made ready")
    else:
        held = sum(bool(graph.code) for graph in built.graphs.values())
        decided = sum(bool(graph.decision and not graph.code) for graph in built.graphs.values())
        besides = f", and auto's decision for {decided} more" if decided else ""
        lines.append(f"graphs held: {held} of {len(built.graphs)}{besides}")
        if running and running.backend:
            loaded, compiled = len(running.backend.loaded), len(running.backend.compiled)
            lines.append(f"graphs loaded in this process: {loaded}, compiled: {compiled}")
        if running and built.device.type == "cuda" and _records(built):
            lines.append(SHARED_POOL)
    return lines + [f"note: {note}" for note in built.notes]


def _records(built: Built) -> bool:
    options = built.config.resolved.options
    decided = [graph.decision["options"] for graph in built.graphs.values() if graph.decision]
    return any(each.get("triton.cudagraphs") for each in (options, *decided))
