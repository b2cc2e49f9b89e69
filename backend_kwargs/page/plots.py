"""Where things are in the plots: positions for the templates, which write the SVG.

Plots in tables have the width of their column, so that positions along it are percentages. The plots of trade-offs
have a coordinate system of their own.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from backend_kwargs.interval import Interval
from backend_kwargs.page import figures
from backend_kwargs.page.document import Change, Kernel, Point, Race, Result, Row, Speedups, Tradeoffs

MARGIN = 3.0  # percent at both ends, in which a dot has room
WIDTH, HEIGHT = 340, 230  # of a plot of trade-offs
LEFT, RIGHT, TOP, BOTTOM = 52, 328, 12, 192
WIDE, HIGH = 58, 15  # of a label there
MOST_TICKS = 6
MOST_KERNELS = 12


class Axis(NamedTuple):
    """An axis from `low` to `high`, of logarithms if `log`."""

    low: float
    high: float
    log: bool = True

    def at(self, value: float) -> float:
        """Return the position of a value in percent, at an end for what is beyond it."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = (math.log(max(each, 1e-300)) for each in (low, high, value))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(MARGIN + share * (100 - 2 * MARGIN), 1)

    def ticks(self) -> list[tuple[float, float]]:
        """Return values that are easy to read, with their positions."""
        found = log_ticks(self.low, self.high) if self.log else even_ticks(self.low, self.high)
        return [(value, self.at(value)) for value in found]


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values of an axis of logarithms, of a narrow one too."""
    if high / low < 2.5:
        return even_ticks(low, high)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**decade for decade in decades for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) <= MOST_TICKS:
            return found
    return found[:: math.ceil(len(found) / MOST_TICKS)]


def even_ticks(low: float, high: float) -> list[float]:
    """Return round values at equal distances."""
    raw = (high - low) / (MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{n * step:.6g}") for n in range(first, math.floor(high / step + 1e-9) + 1)]


def speedup_axis(groups: Iterable[Speedups]) -> Axis | None:
    """Return the axis of all speedups, with 1 on it; None if nothing was timed."""
    groups = list(groups)
    return _axis_of([*(row.speedup for group in groups for row in group.rows), *(group.noise for group in groups)])


def change_axis(found: Iterable[Change]) -> Axis | None:
    """Return the axis of the speedups before and now; None if there are none."""
    return _axis_of(each for change in found for each in (change.before, change.after))


def _axis_of(ratios: Iterable[Interval | None]) -> Axis | None:
    values = [value for each in ratios if each for value in (each.low, each.high) if 0 < value < math.inf]
    return log_axis([*values, 1.0]) if values else None


def log_axis(values: Sequence[float]) -> Axis:
    """Return an axis of logarithms with room around the values."""
    low, high = min(values), max(values)
    room = max((high / low) ** 0.05, 1.02)
    return Axis(low / room, high * room)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest first, and what was not timed last."""
    return sorted(rows, key=lambda row: -row.speedup.median if row.speedup else math.inf)


def race_axis(race: Race) -> Axis:
    """Return the axis of a race: seconds since it began."""
    ends = [span.end for lane in race.lanes for span in lane.spans]
    return Axis(0.0, max([race.seconds, *ends]) or 1.0, log=False)


def led(race: Race, end: float) -> dict[str, list[tuple[float, float]]]:
    """Return from when to when each candidate led a race that ended at `end`, in seconds since it began."""
    found: dict[str, list[tuple[float, float]]] = {}
    leads = sorted(race.leads, key=lambda lead: lead.since)
    for lead, until in zip(leads, [*(each.since for each in leads[1:]), end], strict=False):
        found.setdefault(lead.name, []).append((lead.since, until))
    return found


class Mark(NamedTuple):
    """A point of a plot of trade-offs; `number` is its row in the table below."""

    x: float
    y: float
    point: Point
    number: int
    best: bool


class Scatter(NamedTuple):
    """A plot of time against something else: ticks, with their labels, are where points lie; `front` is a path."""

    title: str
    marks: list[Mark]
    front: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]


Cost: TypeAlias = tuple[str, str, str, Callable[[float | None], str]]
# What a candidate costs: the field that has it, the column of a table, the axis of a plot, and how it is written.
COSTS: tuple[Cost, ...] = (
    ("compile_s", "Compile", "time to compile", figures.duration),
    ("peak_bytes", "Memory", "memory", figures.size),
    ("error", "Error", "error", figures.error),
)


def costs_of(found: Sequence[Row | Point]) -> list[Cost]:
    """Return the costs that are known of any of these."""
    return [cost for cost in COSTS if any(getattr(each, cost[0]) is not None for each in found)]


def fastest_first(tradeoffs: Tradeoffs) -> list[Point]:
    """Return the points in the order of their numbers."""
    return sorted(tradeoffs.points, key=lambda point: point.time)


def on_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other is at least as good as in both values, and better in one: less is better."""
    found: list[tuple[float, float]] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def scatters(tradeoffs: Tradeoffs) -> Iterator[Scatter]:
    """Yield a plot for each cost that at least two candidates have."""
    for field, _, title, words in COSTS:
        numbered = [(n, point, getattr(point, field)) for n, point in enumerate(fastest_first(tradeoffs), 1)]
        known = [(n, point, value) for n, point, value in numbered if value is not None and value >= 0]
        if len({value for *_, value in known}) > 1:
            yield _scatter(title, known, words, figures.ratio if tradeoffs.relative else figures.duration)


def _scatter(
    title: str, known: list[tuple[int, Point, float]], words: Callable[[float], str], times: Callable[[float], str]
) -> Scatter:
    # What costs nothing (eager's compile time) has no logarithm: it stands at the start of the axis.
    costs = [value for *_, value in known if value > 0]
    across = log_axis([*costs, min(costs) / 2])
    up = log_axis([point.time for _, point, _ in known])

    def place(value: float, time: float) -> tuple[float, float]:
        x, y = across.at(max(value, across.low)), up.at(time)
        return round(LEFT + (RIGHT - LEFT) * x / 100, 1), round(BOTTOM - (BOTTOM - TOP) * y / 100, 1)

    front = on_front((value, point.time) for _, point, value in known)
    marks = [Mark(*place(value, point.time), point, n, (value, point.time) in front) for n, point, value in known]
    front_first = sorted(known, key=lambda each: (each[2], each[1].time) not in front)
    at = [(place(value, point.time), words(value), times(point.time)) for _, point, value in front_first]
    x_ticks = _apart(((x, label) for (x, _), label, _ in at), WIDE)
    y_ticks = _apart(((y, label) for (_, y), _, label in at), HIGH)
    corners = [place(*each) for each in front]
    path = f"M{corners[0][0]} {TOP}V{corners[0][1]}" + "".join(f"H{x}V{y}" for x, y in corners[1:]) + f"H{RIGHT}"
    return Scatter(title, sorted(marks, key=lambda mark: mark.best), path, x_ticks, y_ticks)


def _apart(ticks: Iterable[tuple[float, str]], least: float) -> list[tuple[float, str]]:
    """Return the ticks whose labels have room beside those before them."""
    kept: list[tuple[float, str]] = []
    for at, label in ticks:
        if all(abs(at - other) >= least for other, _ in kept):
            kept.append((at, label))
    return kept


def kernels_by_time(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels that take the most time, the longest first, and those without a time last."""
    return sorted(kernels, key=lambda kernel: -(kernel.seconds or 0.0))[:MOST_KERNELS]


def bound_axis(results: Iterable[Result]) -> Axis | None:
    """Return the axis of errors as multiples of their bounds, with 1 on it."""
    shares = [share for share in map(of_bound, results) if share]
    return log_axis([*(max(share, 1e-9) for share in shares), 1.0, 0.1]) if shares else None


def of_bound(result: Result) -> float | None:
    """Return the error as a multiple of its bound, None if either is unknown."""
    return result.error / result.bound if result.error is not None and result.bound else None
