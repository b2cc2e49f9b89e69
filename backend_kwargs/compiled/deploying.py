"""Deploying: the callable with the least overhead for serving, and facts about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from backend_kwargs.compiled.ahead import compile_package
from backend_kwargs.compiled.frames import structure_of
from backend_kwargs.compiled.running import Built, Running, checked, input_check, running, seconds_of
from backend_kwargs.compiled.samples import InputCheck, Sample, leaves_of, made
from backend_kwargs.errors import BackendKwargsError, warn_once

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)
CHANGES = "the module changes its own attributes when it is called, so it is served with dynamo's guards"


def deployed(
    built: Built, swap: Callable[[Callable[..., Any]], None], *, guards: bool
) -> tuple[Running, Callable[..., Any], list[str]]:
    """Return what runs, what to call, and notes; `swap` is called with the replacement of the first callable."""
    if not guards and any(sample != built.samples[0] for sample in built.samples):
        raise BackendKwargsError("deploy(guards=False) must have samples that are all alike: build with one sample.")
    others = [value for sample in built.samples for kind, value in leaves_of(sample) if kind == "other"]
    if not guards and others:
        raise BackendKwargsError(
            f"deploy(guards=False) must have samples of tensors, numbers and texts, got one with a {others[0]}, which "
            "only dynamo's guards can check."
        )
    check = input_check(built, guards=guards)
    made_ready = running(built, built.module, keep=False, guards="local" if guards else "none")
    lean = made_ready.call if built.package is not None else checked(made_ready.call, check)
    call = lean if guards else _watched(built, made_ready, lean, check, swap)
    cost = [] if others else [f"input check: {seconds_of(check, built) * 1e6:.1f} µs per call"]
    return made_ready, call, [*made_ready.notes, *cost]


def _watched(
    built: Built,
    made_ready: Running,
    first: Callable[..., Any],
    check: InputCheck,
    swap: Callable[[Callable[..., Any]], None],
) -> Callable[..., Any]:
    """Return `first` for the first call; if that call changes attributes of the module, guards are used from then on.

    Without guards each later call would compute what the first one did.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        before = structure_of(built.module)
        result = first(*args, **kwargs)
        if structure_of(built.module) != before:
            warn_once(f"{CHANGES}.")
            built.notes.append(CHANGES)
            guarded = running(built, built.module, keep=False, guards="local")
            made_ready.backend = guarded.backend
            swap(checked(guarded.call, check))
        else:
            swap(first)
        return result

    return call


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
