"""Whether another compiler compiled any part of a graph, read from attributes of the callable that it returned."""

from collections.abc import Callable
from typing import Any

ENGINE_SUMMARY = "engine_summary"
SUMMARIES = ("tvm_summary", ENGINE_SUMMARY)  # attributes; their values have `partitions` and `fallbacks`
ATTEMPTS = "openvino_attempts"


def left_to_eager(compiled: Callable[..., Any]) -> str:
    """Return why no part of a graph runs on its compiler, "" if some part does or it is unknown."""
    for name in SUMMARIES:
        if (summary := getattr(compiled, name, None)) is not None and not summary.partitions:
            reasons = [f"{op}: {reason}" for op, reason in summary.fallbacks.items()]
            return f"all of it runs in eager: {'; '.join(reasons) or 'there is nothing to compile'}"
    for attempt in getattr(compiled, ATTEMPTS, ()):
        if attempt.by_inductor:
            return "OpenVINO failed to compile it, so Inductor did"
        if attempt.failed or not attempt.partitions:
            return "all of it runs in eager" if not attempt.partitions else "a partition of OpenVINO's failed to run"
    return ""
