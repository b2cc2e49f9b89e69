"""What compilers beside Inductor say of a graph in the callable that they return: whether any of it is theirs."""

from collections.abc import Callable
from typing import Any

ENGINE_SUMMARY = "engine_summary"
SUMMARIES = ("tvm_summary", ENGINE_SUMMARY)  # attributes, whose value has `partitions` and `fallbacks`
ATTEMPTS = "openvino_attempts"


def left_to_eager(compiled: Callable[..., Any]) -> str:
    """Return why no part of a graph runs on its compiler, "" if some part does or it is unknown."""
    for name in SUMMARIES:
        if (summary := getattr(compiled, name, None)) is not None and not summary.partitions:
            reasons = [f"{op}: {reason}" for op, reason in summary.fallbacks.items()]
            return f"it leaves all to eager: {'; '.join(reasons) or 'there is nothing to compile'}"
    for attempt in getattr(compiled, ATTEMPTS, ()):
        if attempt.by_inductor:
            return "Inductor compiled it instead: OpenVINO failed to"
        if attempt.failed or not attempt.partitions:
            return "it leaves all to eager" if not attempt.partitions else "a partition of OpenVINO's failed to run"
    return ""
