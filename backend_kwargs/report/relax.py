"""TVM's part of a graph, from the summary of the compiled callable."""

from backend_kwargs.compile_records import Record
from backend_kwargs.report.graphs import Relax

SUMMARY = "tvm_summary"


def relax_of(record: Record) -> Relax | None:
    """Return TVM's part of a graph, None if another compiler made it; its backward graph is added once compiled."""
    summary = getattr(record.compiled(), SUMMARY, None)
    if summary is None:
        return None
    return Relax(tuple(summary.partitions), dict(summary.fallbacks), summary.failed)
