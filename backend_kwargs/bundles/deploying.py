"""Deploying: the callable with the least overhead for serving, and facts about it."""

from timeit import timeit

from backend_kwargs.bundles.disk.weights import checked_size
from backend_kwargs.bundles.running import Built, Running, checked, in_eager, input_check, running
from backend_kwargs.bundles.samples import leaves_of, zeros_of
from backend_kwargs.facts import Call

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)
MOST_TIMED = 64 << 20  # bytes of samples
TIMED_CHECKS = 200


def deployed(built: Built) -> tuple[Running, Call, list[str]]:
    """Return what runs, what to call, and notes."""
    ready = running(built, built.module, keep=False, deployed=True)
    ready.check = input_check(built)
    call = checked(ready.call, ready.check, in_eager(built, built.module))
    return ready, call, _cost(built, ready.check)


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


def facts(built: Built, running: Running | None) -> list[str]:
    """Return facts about a built module's code, one per line."""
    lines = [f"samples: {len(built.samples)}{', dynamic sizes' if built.dynamic else ''}"]
    graphs = built.graphs.values()
    with_code = sum(bool(graph.code) for graph in graphs)
    decisions = [graph.decision for graph in graphs if graph.decision]
    decided = sum(bool(graph.decision and not graph.code) for graph in graphs)
    besides = f", and auto's decision for {decided} more" if decided else ""
    lines.append(f"graphs held: {with_code} of {len(graphs)}{besides}")
    if running:
        loaded, compiled = len(running.backend.loaded), len(running.backend.compiled)
        lines.append(f"graphs loaded in this process: {loaded}, compiled: {compiled}")
    options = [built.config.resolved.options, *(decision["options"] for decision in decisions)]
    if running and built.device.type == "cuda" and any(each.get("triton.cudagraphs") for each in options):
        lines.append(SHARED_POOL)
    return lines + [f"note: {note}" for note in built.notes]
