"""Figures as a page writes them: few digits, the unit beside the number."""

from backend_kwargs.interval import Interval

TIMES = "\N{MULTIPLICATION SIGN}"
NONE = ""  # the style sheet draws a dash


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
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            break
    value = seconds * factor
    return f"{value:,.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def size(count: float | None) -> str:
    """Return "412 MiB"."""
    if count is None:
        return NONE
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


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


def share(value: float) -> str:
    """Return "72 %"."""
    return f"{value:.0%}".replace("%", " %") if value >= 0.01 or value == 0 else "below 1 %"


FILTERS = {each.__name__: each for each in (ratio, between, duration, size, error, count, plain, share)}
