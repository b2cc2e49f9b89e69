"""Deploying: the callable with the least overhead for serving, and facts about it."""

import threading
from collections.abc import Callable, Sequence
from timeit import timeit

from backend_kwargs.bundles.disk.weights import checked_size
from backend_kwargs.bundles.identity.walk import state_of
from backend_kwargs.bundles.input_check import InputCheck
from backend_kwargs.bundles.running import Built, Running, checked, in_eager, input_check, running
from backend_kwargs.bundles.samples import Metadata, leaves_of, zeros_of
from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.facts import Call

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)
MOST_TIMED = 64 << 20  # bytes of samples
TIMED_CHECKS = 200
CHANGES = "the module changes what it reads when it is called, so it is served with dynamo's guards"


def deployed(built: Built, swap: Callable[[Call], None], *, guards: bool) -> tuple[Running, Call, list[str]]:
    """Return what runs, what to call, and notes; `swap` is called with the replacement of the first callable."""
    if not guards:
        require_comparable(built.samples)
    check = input_check(built, guards=guards)
    ready = running(built, built.module, keep=False, guards="local" if guards else "none")
    ready.check = check
    lean = checked(ready.call, check, in_eager(built, built.module))
    call = lean if guards else _watched(built, ready, lean, check, swap)
    return ready, call, [*ready.notes, *_cost(built, check)]


def _cost(built: Built, check: Call) -> list[str]:
    """Return a note with the time of the input check, unless inputs cannot be made, or only of much memory."""
    leaves = [leaf for sample in built.samples for leaf in leaves_of(sample)]
    size = sum(checked_size(*value[:5]) for kind, value in leaves if kind == "tensor")
    if size > MOST_TIMED or any(kind == "other" for kind, _ in leaves):
        return []
    try:
        arguments = zeros_of(built.samples[0], built.device)
        check(*arguments)
        took = timeit(lambda: check(*arguments), number=TIMED_CHECKS) / TIMED_CHECKS
        return [f"input check: {took * 1e6:.1f} µs per call"]
    except Exception:  # noqa: BLE001 - the samples may be of a bundle that anybody wrote
        return []


def require_comparable(samples: Sequence[Metadata]) -> None:
    """Raise unless the check of inputs alone can tell whether inputs are like the samples."""
    if any(str(sample) != str(samples[0]) for sample in samples):
        raise BackendKwargsError("deploy(guards=False) must have samples that are all alike: build with one sample.")
    others = [value for kind, value in leaves_of(samples[0]) if kind == "other"]
    if others:
        raise BackendKwargsError(
            f"deploy(guards=False) must have samples of dense tensors, numbers and texts, got one with a {others[0]}, "
            "which only dynamo's guards can check."
        )


def _watched(
    built: Built,
    ready: Running,
    first: Call,
    check: InputCheck,
    swap: Callable[[Call], None],
) -> Call:
    """Return `first` for the first call; if that call changes what later ones may read, guards are used from then on.

    Without guards each later call would compute what the first one did. Calls of other threads wait for the first one.
    """
    lock = threading.RLock()
    later: list[Call] = []

    def call(*args: object, **kwargs: object) -> object:
        with lock:
            if not later:
                before = state_of(built.module)
                result = first(*args, **kwargs)
                chosen = first
                if state_of(built.module) != before:
                    warn_once(f"{CHANGES[0].upper()}{CHANGES[1:]}.")
                    built.notes.append(CHANGES)
                    guarded = running(built, built.module, keep=False, guards="local")
                    ready.backend, ready.call = guarded.backend, guarded.call
                    chosen = checked(guarded.call, check, in_eager(built, built.module))
                later.append(chosen)
                swap(chosen)
                return result
        return later[0](*args, **kwargs)

    return call


def facts(built: Built, running: Running | None) -> list[str]:
    """Return facts about a built module's code, one per line."""
    lines = [f"samples: {len(built.samples)}{', dynamic sizes' if built.dynamic else ''}"]
    graphs = built.graphs.values()
    with_code = sum(bool(graph.code) for graph in graphs)
    decisions = [graph.decision for graph in graphs if graph.decision]
    decided = sum(bool(graph.decision and not graph.code) for graph in graphs)
    besides = f", and auto's decision for {decided} more" if decided else ""
    lines.append(f"graphs held: {with_code} of {len(graphs)}{besides}")
    if running and running.backend:
        loaded, compiled = len(running.backend.loaded), len(running.backend.compiled)
        lines.append(f"graphs loaded in this process: {loaded}, compiled: {compiled}")
    options = [built.config.resolved.options, *(decision["options"] for decision in decisions)]
    if running and built.device.type == "cuda" and any(each.get("triton.cudagraphs") for each in options):
        lines.append(SHARED_POOL)
    return lines + [f"note: {note}" for note in built.notes]
