"""Deploying: the callable with the least overhead for serving, and facts about it."""

from backend_kwargs.bundles.running import Built, Running, checked, in_eager, input_check, running
from backend_kwargs.facts import Call

SHARED_POOL = (
    "CUDA graphs: modules on one device share torch's memory pool, which is freed when the last of them is deactivated"
)


def deployed(built: Built) -> tuple[Running, Call]:
    """Return what runs, and what to call."""
    ready = running(built, built.module, keep=False, deployed=True)
    ready.check = input_check(built)
    return ready, checked(ready.call, ready.check, in_eager(built, built.module))


def facts(built: Built, running: Running | None) -> list[str]:
    """Return facts about a built module's code, one per line."""
    lines = [f"samples: {len(built.samples)}{', dynamic sizes' if built.dynamic else ''}"]
    graphs = built.graphs.values()
    with_code = sum(bool(graph.code) for graph in graphs)
    decisions = [graph.decision for graph in graphs if graph.decision]
    decided = sum(bool(graph.decision and not graph.code) for graph in graphs)
    besides = f", and auto's decision alone for {decided}" if decided else ""
    lines.append(f"graphs held: {with_code} of {len(graphs)}{besides}")
    if running:
        loaded, compiled = len(running.backend.loaded), len(running.backend.compiled)
        lines.append(f"graphs loaded in this process: {loaded}, compiled: {compiled}")
    options = [built.config.resolved.options, *(decision["options"] for decision in decisions)]
    if running and built.device.type == "cuda" and any(each.get("triton.cudagraphs") for each in options):
        lines.append(SHARED_POOL)
    return lines + [f"note: {note}" for note in built.notes]
