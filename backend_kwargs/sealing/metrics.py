"""The counters of sealed functions as OpenTelemetry metrics, where its API is installed."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

SCOPE = "backend_kwargs"
CALLS, MISSES = "backend_kwargs.sealed.calls", "backend_kwargs.sealed.misses"


def publish(function: str, calls: Counter[str], reasons: Counter[str]) -> None:
    """Let OpenTelemetry read these counters whenever it collects; a call costs nothing more."""
    for name, attribute, counts in ((CALLS, "outcome", calls), (MISSES, "reason", reasons)):
        if (published := _published(name, attribute)) is not None:
            published.append((function, counts))


@cache  # since OpenTelemetry has one instrument of a name in a process
def _published(name: str, attribute: str) -> list[tuple[str, Counter[str]]] | None:
    """Return the counters of an instrument, by function; None without OpenTelemetry."""
    try:
        from opentelemetry import metrics
    except ImportError:
        return None
    published: list[tuple[str, Counter[str]]] = []

    def observe(_: object) -> Iterable[Any]:
        totals: Counter[tuple[str, str]] = Counter()
        for function, counts in [*published]:
            totals.update({(function, key): count for key, count in counts.copy().items()})
        return [
            metrics.Observation(count, {"function": function, attribute: key})
            for (function, key), count in totals.items()
        ]

    meter = metrics.get_meter(SCOPE)
    meter.create_observable_counter(
        name, [observe], unit="{call}", description=f"Calls of sealed functions by {attribute}."
    )
    return published
