"""What ran a graph, if it may not be the backend that compiled it."""

from collections.abc import Iterable, Sequence

from backend_kwargs.compile_records import Record
from backend_kwargs.facts.parts import why_fell_back
from backend_kwargs.report.graphs import Code, EnginePart, EngineShare, Ran, Relax

TVM = "TVM"
RETURNED = Ran("fell_back", "ran in eager: the backend returned the graph unchanged")
UNKNOWN = Ran("unknown", "unknown what runs it: this backend does not report whether it fell back")


def relax_of(record: Record) -> Relax | None:
    """Return TVM's part of a graph, None if another compiler made it; its backward graph is added once compiled."""
    summary = record.facts.parts
    if summary is None or summary.compiler != TVM:
        return None
    return Relax(tuple(summary.partitions), dict(summary.fallbacks), summary.failed)


def engine_of(record: Record) -> EngineShare | None:
    """Return ONNX Runtime's or OpenVINO's part of a graph, None if another compiler made it."""
    summary = record.facts.parts
    if summary is None or summary.compiler == TVM:
        return None
    partitions = tuple(EnginePart(each.operators, each.seconds) for each in summary.partitions)
    return EngineShare(summary.compiler, partitions, dict(summary.fallbacks), summary.notes, summary.failed)


def ran_of(
    record: Record,
    codes: Sequence[Code],
    relax: Relax | None,
    engine: EngineShare | None = None,
) -> Ran | None:
    """Return what ran a graph, None if it was its own backend."""
    if engine:
        return _in_eager(engine.engine, engine)
    if relax:
        return _in_eager(TVM, relax)
    if record.backend.takes_inductor_options or record.spec == "dynamo:inductor":
        return None
    if codes:
        return Ran("unknown", "ran by Inductor, which this backend is built on or falls back to")
    return RETURNED if record.facts.unchanged else UNKNOWN


def _in_eager(compiler: str, share: EngineShare | Relax) -> Ran | None:
    why = why_fell_back(compiler, len(share.partitions), share.failed)
    return Ran("fell_back", f"ran in eager: {why}") if why else None


def worst(all_ran: Iterable[Ran | None]) -> Ran | None:
    """Return the first that fell back, else the first that is unknown, else None."""
    ranked = sorted(filter(None, all_ran), key=lambda ran: ran.status != "fell_back")
    return ranked[0] if ranked else None
