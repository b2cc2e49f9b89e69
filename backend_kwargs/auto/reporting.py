"""Reporting of a race: progress, log, torch's trace, and reports."""

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

from backend_kwargs.errors import printable
from backend_kwargs.facts.decision import EAGER, Decision, RaceRow

logger = logging.getLogger("backend_kwargs.auto")

WIDEST = 60  # a longer name, such as one from a file, does not widen the table
ARTIFACT = "backend_kwargs_race"
_reported: set[tuple[str, str]] = set()  # keys and tables


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress line on a terminal while a race runs; elsewhere do nothing."""
    if not sys.stderr.isatty():
        yield lambda name, fraction: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("auto: {task.description}"), BarColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("eager, default", total=1.0)
        yield lambda name, fraction: bar.update(task, description=escape(printable(name)), completed=fraction)


def tell(decision: Decision) -> None:
    """Log the decision, with its table the first time; and add it to torch's trace."""
    if decision.winner == EAGER and decision.rows:
        logger.info("No candidate beats eager on this graph, which runs uncompiled.")
    shown = table(decision)
    again = (decision.key, shown) in _reported
    if decision.rows:
        _reported.add((decision.key, shown))
    logger.info("%s", f"{_head(decision)}, as decided before" if again else shown)
    from backend_kwargs.torch_internals.logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=lambda: json.dumps(asdict(decision), default=repr),
    )


def table(decision: Decision) -> str:
    """Return the decision as lines: each candidate with its time, and why it won or lost."""
    # Stores and exports may contain text from anyone.
    width = max([24, *(len(row.name) for row in decision.rows if len(row.name) <= WIDEST)])
    return "\n".join([_head(decision), *(f"  {printable(_line(row, width))}" for row in decision.rows)])


def forget_reported() -> None:
    """Forget which decisions were logged with their tables."""
    _reported.clear()


def _head(decision: Decision) -> str:
    return printable(f"auto: {decision.winner} for {decision.facts or 'this graph'} ({decision.seconds:.1f} s)")


def _line(row: RaceRow, width: int) -> str:
    error = "" if row.error is None else f", error {row.error:.2g}"
    if row.status != "pass":
        timed = "" if row.seconds is None or row.error is None else f" ({row.seconds * 1e6:.1f} µs)"
        return f"{row.name:<{width}} {row.status}: {row.reason}{timed}"
    took = "not timed" if row.seconds is None else f"{row.seconds * 1e6:.1f} µs"
    ratio = row.speedup
    why = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] over {row.against}" if ratio else row.reason
    peak = f", peak {row.peak_bytes / 2**20:.3f} MiB" if row.peak_bytes is not None else ""
    kept = "  <- kept" if row.won else ""
    rewrote = f", rewrote {words_of(row.rewritten)}" if row.rewritten else ""
    return f"{row.name:<{width}} {took:>12}  {why:<44} compiled in {row.compile_s:.1f} s{peak}{rewrote}{error}{kept}"


def words_of(rewritten: Mapping[str, int]) -> str:
    """Return how often each rewrite replaced something, in words."""
    return ", ".join(f"{name} {count}x" for name, count in rewritten.items())
