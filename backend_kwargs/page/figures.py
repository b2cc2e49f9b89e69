"""Figures: those of any origin as a document may have them, and as a page writes them, with few digits and the unit.

What is no figure is left out. Texts are cut on writing.
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime

from backend_kwargs.interval import Interval

MOST = 10**15  # of a count
DIGITS = 6  # that mean something; more make a page longer
DEVICES = ("device_name", "device", "gpu")  # what an environment calls its device, the best name first
Plain = str | int | float | bool | None


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


def now() -> str:
    """Return this second in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment_of(*machines: Mapping[str, object]) -> dict[str, Plain]:
    """Return what is known of an environment, as names and plain values; of several, all values that they have."""
    found: dict[str, dict[str, Plain]] = {}
    for name, value in (each for machine in machines for each in machine.items()):
        if value is not None:
            found.setdefault(name, {})[str(value)] = value if isinstance(value, bool | int | float) else str(value)
    return {name: next(iter(of.values())) if len(of) == 1 else ", ".join(of) for name, of in found.items()}


def file_of(place: str) -> str:
    """Return what may be told of a place: the last part of a path, the scheme of a URL."""
    scheme, is_url, _ = place.partition("://")
    return scheme if is_url else re.split(r"[\\/]", place.rstrip("\\/"))[-1]


def measured_on(environment: Mapping[str, object]) -> str:
    """Return the device and the release of torch in a few words, as far as they are known."""
    device, torch = (next(filter(None, map(environment.get, names)), None) for names in (DEVICES, ("torch",)))
    return ", ".join((*((f"on {device}",) if device else ()), *((f"torch {torch}",) if torch else ())))


TIMES = "\N{MULTIPLICATION SIGN}"
NONE = ""  # the style sheet draws a dash
UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def ratio(value: float | None) -> str:
    """Return a ratio as a speedup is written."""
    return NONE if value is None else f"{_digits(value)}{TIMES}"


def multiple(value: float) -> str:
    """Return the label of an axis of ratios."""
    return f"{value:g}{TIMES}"


def between(interval: Interval | None) -> str:
    """Return the ends of an interval of ratios: "1.38 to 1.46"."""
    return NONE if interval is None else f"{_digits(interval.low)} to {_digits(interval.high)}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Return "4.02 ms"."""
    if not seconds:
        return NONE if seconds is None else "0 s"
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    value = seconds * factor
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def size(count: float | None) -> str:
    """Return "412 MiB"."""
    if count is None:
        return NONE
    unit = min(max(int(count).bit_length() - 1, 0) // 10, len(UNITS) - 1)
    value = count / 1024**unit
    return f"{value:.3g} {UNITS[unit]}" if value < 1000 else f"{value:.0f} {UNITS[unit]}"


def error(value: float | None) -> str:
    """Return "2.1e-4"."""
    if value is None:
        return NONE
    number, _, exponent = f"{value:.1e}".partition("e")
    return "0" if value == 0 else f"{number}e{int(exponent)}" if exponent else number


def count(value: float | None) -> str:
    """Return "12,300"."""
    return NONE if value is None else f"{value:,}"


def plain(value: float) -> str:
    """Return a number that a script can sort by."""
    return f"{value:.6g}"


FILTERS = {each.__name__: each for each in (ratio, between, duration, size, error, count, plain)}
