"""Which graphs had a stored decision under `race="never"`, for those who run a service: a log line, and a span."""

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from backend_kwargs.errors import printable

SPAN = "opentelemetry.trace"
MOST = 100  # reasons of one attribute

logger = logging.getLogger("backend_kwargs.auto")


class Served(NamedTuple):
    """A graph that was compiled without a race: of which model, and why it had no decision, "" if it had one."""

    model: str
    graph: str
    why: str


def note_served(served: Sequence[Served], stores: str) -> None:
    """Log one line for a model whose first graph, the last of `served`, has no decision; write all to the span."""
    *before, last = served
    if last.why and last.model not in {each.model for each in before}:
        logger.warning(
            "race='never': %s has no decision for the first graph of %s (%s), which is compiled under default. "
            "bk.report says which graphs have one; `backend-kwargs tune` makes them.",
            *map(printable, (stores, last.model or "a function", last.why)),
        )
    with suppress(Exception):  # a service's tracing never fails a compile
        _write_to_span(served)


def _write_to_span(served: Sequence[Served]) -> None:
    """Write the numbers of graphs to OpenTelemetry's current span, if this process has loaded OpenTelemetry."""
    if (trace := sys.modules.get(SPAN)) is None:
        return
    lacking = [printable(f"graph {each.graph} of {each.model}: {each.why}") for each in served if each.why]
    trace.get_current_span().set_attributes(
        {
            "backend_kwargs.graphs": len(served),
            "backend_kwargs.graphs_decided": len(served) - len(lacking),
            "backend_kwargs.graphs_without_decision": lacking[-MOST:],
        }
    )
