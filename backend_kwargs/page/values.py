"""Figures of any origin as a document may have them; what is no figure is left out. Texts are cut on writing."""

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from backend_kwargs.interval import Interval

MOST = 10**15  # of a count
DIGITS = 6  # that mean something; more make a page longer


def seconds_of(value: float | None) -> float | None:
    """Return seconds, or None for what is not a time."""
    return _rounded(value) if value is not None and 0 <= value < math.inf else None


def error_of(value: float | None) -> float | None:
    """Return an error, or None if it is not finite."""
    return _rounded(value) if value is not None and math.isfinite(value) else None


def count_of(value: float | None) -> int | None:
    """Return a count, or None for what is none."""
    return int(value) if value is not None and 0 <= value <= MOST else None


def interval_of(interval: Interval | None) -> Interval | None:
    """Return an interval of positive numbers, or None."""
    if interval is None or not all(0 < each < math.inf for each in (interval.low, interval.median, interval.high)):
        return None
    return Interval(_rounded(interval.median), _rounded(interval.low), _rounded(interval.high))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def day_of(seconds: float) -> str:
    """Return a time in seconds since the epoch in ISO 8601, "" if there is no such day."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return ""


def environment_of(found: Mapping[str, object]) -> dict[str, str | int | float | bool | None]:
    """Return what is known of an environment, as names and plain values."""
    known = ((name, value) for name, value in found.items() if value is not None)
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in known}
