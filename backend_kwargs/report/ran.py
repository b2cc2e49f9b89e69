"""What ran a graph, if it may not be the backend that compiled it."""

from collections.abc import Iterable, Sequence

from backend_kwargs.compile_records import Record
from backend_kwargs.facts import why_fell_back
from backend_kwargs.report.graphs import Code, EngineShare, Ran

RETURNED = Ran("fell_back", "ran in eager: the backend returned the graph unchanged")
UNKNOWN = Ran("unknown", "unknown what runs it: this backend does not report whether it fell back")


def share_of(record: Record) -> EngineShare | None:
    """Return what a compiler of parts has of a graph, with what it has of the backward graph once compiled."""
    if (summary := record.facts.parts) is None:
        return None
    partitions = tuple(summary.partitions)
    return EngineShare(summary.compiler, partitions, dict(summary.fallbacks), summary.notes, summary.failed)


def ran_of(record: Record, codes: Sequence[Code], share: EngineShare | None) -> Ran | None:
    """Return what ran a graph, None if it was its own backend."""
    if share:
        why = why_fell_back(share.engine, len(share.partitions), share.failed)
        return Ran("fell_back", f"ran in eager: {why}") if why else None
    if record.backend.takes_inductor_options or record.spec == "dynamo:inductor":
        return None
    if codes:
        return Ran("unknown", "ran by Inductor, which this backend is built on or falls back to")
    return RETURNED if record.facts.unchanged else UNKNOWN


def worst(all_ran: Iterable[Ran | None]) -> Ran | None:
    """Return the first that fell back, else the first that is unknown, else None."""
    ranked = sorted(filter(None, all_ran), key=lambda ran: ran.status != "fell_back")
    return ranked[0] if ranked else None
