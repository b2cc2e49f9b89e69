"""Three plots: speedups by case, closeness to the limit, and compile time against speedup."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from textwrap import fill
from typing import Any

from backend_kwargs.errors import BackendKwargsError, pip_install
from backend_kwargs.files import write_whole
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.verdicts import DEFAULT, RIVALS, Clock, Entry, Key, PeerSummary, clock_name
from benchmarks.execution.controls import BASELINE

Box = tuple[float, float, float, float]
Tables = Mapping[Clock, Mapping[Key, Sequence[Entry]]]
Label = tuple[float, float, str, str]  # of the point at x and y: text, colour

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers repeat the distinction.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.72"
WIDTH, DPI = 10.0, 130
SLOWEST = 0.4  # slower points are drawn at the edge: templates that are slow on purpose would squeeze the others
EDGE = 1e-3
STEP = 10**0.15  # between cases beyond that edge
NEAR = 16  # pixels
PREFIX = "tmpl-inductor:"
CALLED = {DEFAULT: "torch.compile default"}  # beside the template of that name
ROLES: Mapping[str, tuple[str, str]] = {
    "torch.compile default": (BLUE, "o"),
    "best template": (ORANGE, "D"),
    "best other peer": (GREEN, "s"),
}
MARKS: Mapping[str, tuple[str, str]] = {"eager": (GREY, "x"), **ROLES}
KINDS: Mapping[str, tuple[str, str]] = {
    "template": (ORANGE, "D"),
    "mode of torch.compile": (BLUE, "o"),
    "other peer": (GREEN, "s"),
}


def draw(tables: Tables, out: Path) -> dict[str, Path]:
    """Write the plots next to `out`, as PNG, and return them by title; raise BackendKwargsError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot a figure uses the Agg renderer
    except ImportError as error:
        raise BackendKwargsError(f"report draws with matplotlib: {pip_install('plot')}.") from error
    makers: dict[str, tuple[str, Callable[[Tables], Any]]] = {
        "speedup": ("Speedup over eager, by case", lambda found: speedups(Figure, found)),
        "roofline": ("Per cent of the physical limit, by case", lambda found: roofline(Figure, found)),
        "compile": ("What a speedup costs to compile, by peer", lambda found: compile_time(Figure, found)),
    }
    drawn = {}
    for suffix, (title, make) in makers.items():
        figure = make(tables)
        path = out.with_name(f"{out.stem}_{suffix}.png")
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier report
        else:
            image = BytesIO()
            figure.savefig(image, format="png")
            write_whole(path, image.getvalue())
            drawn[title] = path
    return drawn


# ---- speedups


def speedups(make: Any, tables: Tables) -> Any | None:
    """Return a figure with a row per case and a panel per clock: a dot for every peer, three of them named."""
    tables = {
        clock: rows
        for clock, found in tables.items()
        if (rows := {key: table for key, table in found.items() if any(e.speedups.get("eager") for e in table)})
    }
    cases = list(dict.fromkeys(key for found in tables.values() for key in found))
    if not cases:
        return None
    figure = make(dpi=DPI, figsize=(WIDTH, 1.9 + 0.36 * len(cases)), layout="constrained")
    panels = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (clock, found) in zip(panels, tables.items(), strict=True):
        for at, case in enumerate(cases):
            _case_row(axes, at, found.get(case, ()))
        _ratio_axis(axes, "x")
        axes.set_xlabel(f"{clock_name(clock, found)}: speedup over eager")
    panels[0].set_yticks(range(len(cases)), [_called(case) for case in cases], fontsize=8)
    panels[0].set_ylim(len(cases) - 0.4, -0.6)
    more = (
        f"Bars: 95 % intervals. Grey: other peers. Slower than {SLOWEST:g}x: at the edge, with its value if coloured.\n"
        "At the right: the best template, if it is faster than default beyond noise."
    )
    _frame(figure, "Speedup over eager: further right is faster", more, ROLES)
    return figure


def _case_row(axes: Any, at: int, table: Sequence[Entry]) -> None:
    timed = [e for e in table if "eager" in e.speedups and e.cell.kind != "control"]
    axes.axhline(at, color="0.93", linewidth=0.8, zorder=0)
    grey = [_clipped(e.speedups["eager"]).median for e in timed]
    axes.scatter(grey, [at] * len(timed), s=14, color=GREY, linewidths=0, zorder=1)
    for lift, (role, entry) in zip((-0.2, 0.0, 0.2), roles(timed).items(), strict=True):
        if entry:
            colour, marker = ROLES[role]
            _dot(axes, entry.speedups["eager"], at + lift, colour, marker)
        if entry and role == "best template" and entry.marks.get("default") == "win":
            name = entry.cell.peer.removeprefix(PREFIX)
            axes.annotate(name, (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=7, color=ORANGE)


def _clipped(of: Interval) -> Interval:
    return Interval(*(max(bound, SLOWEST) for bound in (of.median, of.low, of.high)))


def roles(timed: Sequence[Entry]) -> dict[str, Entry | None]:
    """Return the named entries: torch.compile's default, the fastest template, the fastest of the other peers.

    Fastest means over eager in the same process: times of two processes are not comparable.
    """

    def fastest(kinds: Iterable[str]) -> Entry | None:
        found = (e for e in timed if e.cell.kind in kinds and e.cell.peer != DEFAULT and "eager" in e.speedups)
        return max(found, key=lambda e: e.speedups["eager"].median, default=None)

    default = next((e for e in timed if e.cell.peer == DEFAULT), None)
    return {
        "torch.compile default": default,
        "best template": fastest(("template", "auto")),
        "best other peer": fastest(RIVALS),
    }


def _dot(axes: Any, found: Interval, y: float, colour: str, marker: str) -> None:
    of = _clipped(found)
    if found.median < SLOWEST:
        beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{found.median:.2g}x", (SLOWEST, y), fontsize=5.5, color=colour, **beside)
    reach = [[max(of.median - of.low, 0)], [max(of.high - of.median, 0)]]
    axes.errorbar(of.median, y, xerr=reach, fmt=marker, color=colour, markersize=5, linewidth=1.2, capsize=2, zorder=3)


# ---- roofline


def roofline(make: Any, tables: Tables) -> Any | None:
    """Return a plot of each case at its arithmetic intensity, as a share of the roof; None if no case is scored."""
    cases = tables.get("device", {})
    found = {key: shares for key, table in cases.items() if (shares := _shares(table))}
    if not found:
        return None
    figure = make(dpi=DPI, figsize=(WIDTH, max(5.2, 2.2 + 0.2 * len(found))), layout="constrained")
    axes = figure.add_subplot()
    labels: list[Label] = []
    marks: list[tuple[float, float]] = []
    for key, x in _intensities({key: cases[key] for key in found}).items():
        heights = found[key].values()
        axes.plot([x, x], [min(heights), max(heights)], color="0.85", linewidth=1, zorder=1)
        for role, height in found[key].items():
            colour, marker = MARKS[role]
            axes.plot(x, height, color=colour, marker=marker, markersize=5, linestyle="", zorder=3)
        marks += [(x, height) for height in heights]
        labels.append((x, max(heights), _called(key), "0.25"))
    axes.set_xscale("log")
    axes.axhline(100, color="0.2", linewidth=1.2)
    left, right = axes.get_xlim()
    axes.set_xlim(left, max(right, 2.0))
    axes.axvspan(left, 1, color="0.97", zorder=0)
    axes.set_xticks([10.0**power for power in range(-3, 4) if 10.0**power <= max(right, 2.0)], minor=False)
    axes.set_xticks([], minor=True)
    if left < EDGE / STEP:
        axes.annotate(f"below {EDGE:g}: side by side", (EDGE / STEP, 1), fontsize=7.5, color="0.4", ha="right")
    axes.set_ylim(0, max(112, *(1.05 * height for _, height in marks)))
    axes.set_xlabel("arithmetic intensity over that of the ridge: left of 1 bound by memory, right by arithmetic")
    axes.set_ylabel(f"{clock_name('device', found)}: per cent of the limit")
    more = (
        "Limits: of the best ceilings over all runs. Each peer stands above eager by its speedup over the eager\n"
        "of its own process: clocks differ between processes."
    )
    if left_out := ", ".join(_called(key) for key in cases if key not in found):
        more += "\n" + fill(f"Without a scored limit or a time: {left_out}.", 110)
    _frame(figure, "How near to the physical limit: higher is better, 100 % is the roof", more, MARKS)
    _label(figure, axes, labels, marks)
    return figure


def _shares(table: Sequence[Entry]) -> dict[str, float]:
    """Return eager's and the named peers' per cent of the limit, by role, if it is scored."""
    eager = next((e.share.median for e in table if e.cell.peer == BASELINE and e.share), None)
    if eager is None:
        return {}
    named = roles([e for e in table if e.share and "eager" in e.speedups])
    return {"eager": eager} | {role: eager * e.speedups["eager"].median for role, e in named.items() if e}


def _intensities(found: Mapping[Key, Sequence[Entry]]) -> dict[Key, float]:
    """Return each case's distance to the ridge; cases with hardly any arithmetic are side by side at the left."""
    balances = {key: table[0].limit.balance if table[0].limit else 0.0 for key, table in found.items()}
    idle = [key for key in found if balances[key] < EDGE]
    return {key: min(of, 1 / EDGE) for key, of in balances.items()} | {
        key: EDGE / STEP**at for at, key in enumerate(idle, 1)
    }


# ---- compile time


def compile_time(make: Any, tables: Tables) -> Any | None:
    """Return a plot of each compiled peer's median compile time and mean speedup, with a panel per clock."""
    found = {clock: points for clock, of in tables.items() if (points := _costs(of))}
    if not found:
        return None
    figure = make(dpi=DPI, figsize=(WIDTH, 1.2 + 4.0 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for axes, (clock, points) in zip(panels, found.items(), strict=True):
        for of in points:
            colour, marker = KINDS[_kind(of)]
            height = max(of.geomeans["eager"], SLOWEST)
            face = colour if of.fresh else "white"
            axes.scatter(of.cold_s, height, s=28, facecolors=face, edgecolors=colour, marker=marker, zorder=3)
        _seconds_axis(axes)
        _ratio_axis(axes, "y")
        axes.set_ylabel(f"{clock_name(clock, tables[clock])}: speedup over eager")
    panels[-1].set_xlabel("compile, seconds: median of the cases")
    title = "What a speedup costs to compile: up is faster, left compiles sooner"
    kinds = {_kind(of): None for points in found.values() for of in points}
    more = "Geometric mean of the cases that have a speedup, without peers known of fewer than half of the cases."
    if not all(of.fresh for points in found.values() for of in points):
        more += "\nHollow: compiled in one process with other peers, where earlier compiles make later ones cheaper."
    _frame(figure, title, more, {name: KINDS[name] for name in KINDS if name in kinds})
    for axes, points in zip(panels, found.values(), strict=True):
        _label(figure, axes, [_cost_label(of) for of in points])
    return figure


def _cost_label(of: PeerSummary) -> Label:
    name, speedup = CALLED.get(of.peer, of.peer.removeprefix(PREFIX)), of.geomeans["eager"]
    label = name if speedup >= SLOWEST else f"{name}: {speedup:.2g}x"
    return of.cold_s or 0.0, max(speedup, SLOWEST), label, KINDS[_kind(of)][0]


def _costs(tables: Mapping[Key, Sequence[Entry]]) -> list[PeerSummary]:
    classes = verdicts.summaries(tables).values()
    largest = max(classes, key=lambda found: sum(of.passed for of in found), default=[])
    most = max((of.counts["eager"] for of in largest), default=0)
    return [of for of in largest if of.cold_s and min(of.counts["eager"], of.compiled) >= most / 2]


def _kind(of: PeerSummary) -> str:
    return {"template": "template", "auto": "template", "mode": "mode of torch.compile"}.get(of.kind, "other peer")


# ---- shared


def _called(key: Key) -> str:
    case, mode, *_ = key
    return case if mode == "fwd" else f"{case} {mode}"


def _ratio_axis(axes: Any, which: str) -> None:
    """Make a logarithmic axis of ratios, with 1 marked."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log", base=2)
    low, high = getattr(axes, f"get_{which}lim")()
    low, high = min(low, 0.9), max(high, 1.12)
    getattr(axes, f"set_{which}lim")(low, high)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(2, subs=(1.0,) if high / low > 6 else (1.0, 1.25, 1.5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    (axes.axvline if which == "x" else axes.axhline)(1.0, color="0.4", linewidth=1, zorder=1)


def _seconds_axis(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.12)


def _frame(figure: Any, title: str, more: str, marks: Mapping[str, tuple[str, str]]) -> None:
    """Give a figure its title, which says which direction is better, and its legend."""
    from matplotlib.lines import Line2D

    figure.suptitle(f"{title}\n{more}", fontsize=11, x=0.01, ha="left")
    lines = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (c, m) in marks.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9, frameon=False)


def _label(figure: Any, axes: Any, labels: Sequence[Label], marks: Sequence[tuple[float, float]] = ()) -> None:
    """Write each point's name without overlap with names, points or marks, with a line to it if it is far away."""
    figure.draw_without_rendering()  # fixes the layout, which names do not change
    to_pixels = axes.transData.transform
    points = [to_pixels((x, y)) for x, y, _, _ in labels]
    taken = [(x - 7, y - 7, x + 7, y + 7) for x, y in [*points, *map(to_pixels, marks)]]
    frame = axes.get_window_extent()
    for (x, y), (_, _, text, colour) in sorted(zip(points, labels, strict=True), key=lambda of: -of[0][1]):
        name = axes.text(0, 0, text, fontsize=7.5, color=colour, transform=None, va="center", in_layout=False)
        size = name.get_window_extent()
        box = next(_boxes(x, y, (size.width, size.height), frame, taken))
        taken.append(box)
        name.remove()
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        far = math.dist((x, y), (min(max(x, box[0]), box[2]), middle[1])) > NEAR
        line = {"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkB": 3} if far else None
        to_data = axes.transData.inverted().transform
        axes.annotate(
            text,
            to_data((x, y)),
            to_data(middle),
            fontsize=7.5,
            color=colour,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.3},
            arrowprops=line,
            in_layout=False,
        )


def _boxes(x: float, y: float, size: tuple[float, float], frame: Any, taken: Sequence[Box]) -> Iterator[Box]:
    """Yield positions for a name around its point, in the frame and free, nearest first; the last may overlap."""
    width, height = size
    places = [
        (x + (radius + width / 2) * math.cos(turn), y + (radius + height / 2) * math.sin(turn))
        for radius in range(11, 300, 6)
        for turn in (math.pi * eighth / 8 for eighth in (0, 8, 4, 12, 1, 15, 7, 9, 2, 14, 6, 10, 3, 13, 5, 11))
    ]
    boxes = [(a - width / 2, b - height / 2, a + width / 2, b + height / 2) for a, b in places]
    inside = [b for b in boxes if frame.x0 < b[0] and b[2] < frame.x1 and frame.y0 < b[1] and b[3] < frame.y1]
    yield from (box for box in inside if not any(overlap(box, other) for other in taken))
    yield (inside or boxes)[0]


def overlap(one: Box, other: Box) -> bool:
    """Return whether two boxes of x0, y0, x1, y1 overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
