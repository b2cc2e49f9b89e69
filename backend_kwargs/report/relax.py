"""What TVM has of a graph: read off the summary that the compiled callable carries."""

from backend_kwargs.compile_records import Record
from backend_kwargs.report.graphs import Relax

SUMMARY = "tvm_summary"


def relax_of(record: Record) -> Relax | None:
    """Return what TVM has of a graph, None where another compiler did it; a backward graph adds to it when it comes."""
    summary = getattr(record.compiled(), SUMMARY, None)
    if summary is None:
        return None
    return Relax(tuple(summary.partitions), dict(summary.fallbacks))
