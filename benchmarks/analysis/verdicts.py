"""What cells show beyond their noise: each peer of a case against the others, and each peer over all cases."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from statistics import geometric_mean, median
from typing import Any, Literal, NamedTuple

from backend_kwargs import trial
from backend_kwargs.trial import Interval
from benchmarks.execution.ceilings import Ceilings
from benchmarks.execution.controls import BASELINE
from benchmarks.execution.records import AGAIN, Cell, Compile, middle
from benchmarks.execution.roofline import PhysicalLimit, limit, over, per_cent
from benchmarks.workloads.case import Work

Verdict = Literal["SAME", "FAST", "SLOW", "AMBIGUOUS"]
Clock = Literal["device", "wall", "dropped"]
Against = Literal["eager", "default", "strongest"]
Mark = Literal["win", "tie", "loss"]
Key = tuple[str, str, str, str, str]

# "wall" keeps each result until the next call returns, as in a user's loop; "dropped" is wall time without that.
CLOCKS: tuple[Clock, ...] = ("device", "wall", "dropped")
AGAINST: tuple[Against, ...] = ("eager", "default", "strongest")
DEFAULT = "default"
RIVALS = ("eager", "graph", "mode", "hand", "tvm", "engine")  # what a user could pick without this package
BESIDE_MODES = ("eager", "graph", "mode", "control")
SAMPLED: Mapping[Clock, str] = {"device": "events", "wall": "wall", "dropped": "dropped"}
# A/A is of one compile and one memory address: on an H200 it goes down to 0.05 %, while of 52 pairs of equal code,
# compiled separately, 51 are within 1 % of each other in device time.
LEAST_REACH = 1.01
LEAST_PEAK = 2**20  # bytes: a smaller peak is a few pages on a CPU, or an allocator's smallest blocks
UNKNOWN = Interval(1.0, 0.0, math.inf)  # the noise of a group without its control


def samples(cell: Cell, clock: Clock) -> list[float]:
    """Return a cell's samples on one clock; clocks are never mixed."""
    return {"device": cell.device_s, "wall": cell.wall_s, "dropped": cell.dropped_s}[clock]


def comparable(cell: Cell, clock: Clock) -> list[float]:
    """Return the samples for ratios: none in device time if they include host time."""
    return [] if clock == "device" and cell.exposed else samples(cell, clock)


def clock_name(clock: Clock, tables: Iterable[Key]) -> str:
    """Return the name of a clock's times, for tables with one state of the L2."""
    if clock == "device":
        return f"Device time, {next(iter(tables))[3]} L2"
    return "Wall time" if clock == "wall" else "Wall time, results dropped at once"


def key(cell: Cell) -> Key:
    """Return the key of a table: cells with one key compute the same."""
    return cell.case, cell.mode, cell.dtype, cell.l2, cell.scale


# ---- two files


def judge(speedup: Interval, noises: Iterable[Interval]) -> Verdict:
    """Judge a speedup against the noise floors of the files behind it, which are multiplied.

    An interval entirely outside the band is FAST or SLOW, one entirely inside is SAME; any other is AMBIGUOUS, which is
    not a failure.
    """
    reach = prod(noise.high for noise in noises)
    if speedup.low > reach:
        return "FAST"
    if speedup.high < 1 / reach:
        return "SLOW"
    inside = math.isfinite(reach) and 1 / reach <= speedup.low and speedup.high <= reach
    return "SAME" if inside else "AMBIGUOUS"


# ---- one case


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer of one case on one clock, over all its compiles.

    With several compiles the figure is their median and the interval covers all: the compile is the unit. `speedups`
    has no baseline of another numerics class. `share` is per cent of the limit, None for wall time. `repeats` is the
    number of calls per sample, 0 if unknown; `exposed` means that a device time includes host time, so that it has
    neither speedup nor share. `dropped` is the time with results dropped, next to the wall time. `fresh`: each compile
    had its own process; if only some had, `cold_s` is theirs. `spread` is the 20th and 80th percentile of all samples,
    `memory` the peak over eager's.
    """

    cell: Cell
    compiles: int
    rounds: int
    time: Interval | None
    dropped: Interval | None
    spread: tuple[float, float] | None
    speedups: Mapping[Against, Interval]
    marks: Mapping[Against, Mark]
    noise: Interval
    limit: PhysicalLimit | None
    share: Interval | None
    cold_s: float | None
    warm_s: float | None
    peak_bytes: int | None
    memory: float | None
    kernels: int | None
    fresh: bool
    repeats: int
    exposed: bool

    @property
    def over(self) -> bool:
        """Return whether it is faster than the device can be, which is a bug of the suite."""
        return self.limit is not None and over(self.limit, self.share)


class LatestResult(NamedTuple):
    """A cell that is used, and the group that timed it; `whole`: the group has every rival that passes anywhere."""

    cell: Cell
    group: list[Cell]
    whole: bool


@dataclass(frozen=True, slots=True)
class _Timed:
    """One timing process's figures for one peer."""

    cell: Cell
    time: Interval | None
    speedups: Mapping[Against, Interval]
    noise: Interval
    memory: float | None


def noise(group: Sequence[Cell], clock: Clock) -> Interval:
    """Return the noise floor of one timing process: its baseline, timed twice, against itself."""
    found = {cell.peer: comparable(cell, clock) for cell in group if cell.peer in (BASELINE, AGAIN)}
    if len(found) < 2 or not all(found.values()):
        return UNKNOWN
    floor = trial.noise_floor(trial.ratio_interval(found[BASELINE], found[AGAIN]))
    return Interval(1.0, min(floor.low, 1 / LEAST_REACH), max(floor.high, LEAST_REACH))


def widest(runs: Iterable[LatestResult], clock: Clock) -> Interval:
    """Return the widest noise floor of several runs' groups."""
    return max((noise(one.group, clock) for one in runs), key=lambda noise: noise.high)


def latest_results(cells: Iterable[Cell]) -> dict[Key, dict[str, list[LatestResult]]]:
    """Return the cells that are used, by computation and by peer, one per run: of the latest group with the peer.

    A group is what one process has timed; ratios and noise floors are its own. The latest is the one read last, except
    that a group with the peer is preferred to one where it was unavailable. Eager, modes and controls are taken from
    the group with most modes, the latest of these: a run of only a template or two does not replace default.
    """
    runs: dict[Key, dict[int, dict[str, list[Cell]]]] = {}
    for cell in cells:
        runs.setdefault(key(cell), {}).setdefault(cell.run, {}).setdefault(cell.group_id, []).append(cell)
    found: dict[Key, dict[str, list[LatestResult]]] = {}
    for what, each in runs.items():
        for groups in each.values():
            for one in _latest(list(groups.values())):
                found.setdefault(what, {}).setdefault(one.cell.peer, []).append(one)
    return found


def _latest(groups: list[list[Cell]]) -> list[LatestResult]:
    latest: dict[str, tuple[tuple[bool, int], Cell, list[Cell]]] = {}
    for group in groups:
        modes = sum(cell.kind == "mode" and cell.status != "unavailable" for cell in group)
        for cell in group:
            rank = cell.status != "unavailable", modes if cell.kind in BESIDE_MODES else 0
            if cell.peer not in latest or rank >= latest[cell.peer][0]:
                latest[cell.peer] = rank, cell, group
    fit = {peer for peer, (_, cell, _) in latest.items() if cell.passed and cell.kind in RIVALS}
    return [LatestResult(cell, group, fit <= {c.peer for c in group if c.passed}) for _, cell, group in latest.values()]


def entries(cells: Sequence[Cell], clock: Clock, ceilings: Ceilings | None = None) -> dict[Key, list[Entry]]:
    """Return the table of each case: its peers, controls included, in the order in which they were run."""
    return {
        what: [_entry([_timed(one, clock) for one in runs], clock, ceilings) for runs in peers.values()]
        for what, peers in latest_results(cells).items()
    }


def _timed(of: LatestResult, clock: Clock) -> _Timed:
    time = trial.median_interval(found) if (found := samples(of.cell, clock)) else None
    return _Timed(of.cell, time, _speedups(of, clock), noise(of.group, clock), _memory(of))


def _memory(of: LatestResult) -> float | None:
    """Return the peak over eager's, if both or neither were measured in fresh processes, with libraries' workspaces."""
    own, eager = of.cell.compile, next((c.compile for c in of.group if c.peer == BASELINE), None)
    if eager is None or own.fresh != eager.fresh or min(own.peak_bytes or 0, eager.peak_bytes or 0) < LEAST_PEAK:
        return None
    return own.peak_bytes / eager.peak_bytes


def _speedups(of: LatestResult, clock: Clock) -> dict[Against, Interval]:
    cell, group, whole = of
    others = [c for c in group if c is not cell and c.numerics == cell.numerics and comparable(c, clock)]
    mine = comparable(cell, clock)
    if not mine:
        return {}
    rivals = [c for c in others if whole and c.kind in RIVALS]
    found: dict[Against, Cell | None] = {
        "eager": next((c for c in others if c.peer == BASELINE), None),
        "default": next((c for c in others if c.peer == DEFAULT), None),
        "strongest": min(rivals, key=lambda c: trial.percentile(samples(c, clock), 0.5), default=None),
    }
    return {against: trial.ratio_interval(samples(c, clock), mine) for against, c in found.items() if c}


def _entry(runs: list[_Timed], clock: Clock, ceilings: Ceilings | None) -> Entry:
    cell = next((run.cell for run in runs if run.cell.status != "pass"), runs[0].cell)
    ok = [run for run in runs if run.time] if cell.status == "pass" else []
    against = [what for what in AGAINST if ok and all(what in run.speedups for run in ok)]
    speedups = {what: over_compiles([run.speedups[what] for run in ok]) for what in against}
    floor = max((run.noise for run in runs), key=lambda noise: noise.high)
    bound = (limit(Work(**cell.work), ceilings) if cell.work and ceilings else None) if clock == "device" else None
    exposed = clock == "device" and any(run.cell.exposed for run in ok)
    time = over_compiles([run.time for run in ok if run.time]) if ok else None
    return Entry(
        cell=cell,
        compiles=len(ok),
        time=time,
        speedups=speedups,
        marks={what: mark(found, floor) for what, found in speedups.items()},
        noise=floor,
        limit=bound,
        share=per_cent(bound, time) if bound and time and not exposed else None,
        memory=middle(run.memory for run in ok),
        kernels=cell.compile.kernels,
        exposed=exposed,
        **_of_samples(ok, clock),
        **_of_compiles([run.cell.compile for run in runs]),
    )


def _of_samples(ok: list[_Timed], clock: Clock) -> dict[str, Any]:
    """Return an entry's fields from all samples of the runs that passed."""
    timed = [sample for run in ok for sample in samples(run.cell, clock)]
    dropped = [run.cell.dropped_s for run in ok if clock == "wall" and run.cell.dropped_s]
    return {
        "rounds": min((len(samples(run.cell, clock)) for run in ok), default=0),
        "dropped": over_compiles([trial.median_interval(found) for found in dropped]) if dropped else None,
        "spread": (trial.percentile(timed, 0.2), trial.percentile(timed, 0.8)) if timed else None,
        "repeats": max((run.cell.repeats.get(SAMPLED[clock], 0) for run in ok), default=0),
    }


def _of_compiles(made: list[Compile]) -> dict[str, Any]:
    """Return an entry's fields from the compiles: from those in fresh processes, if there are any."""
    compiles = [each for each in made if each.fresh] or made
    return {
        "cold_s": middle(c.cold_s for c in compiles),
        "warm_s": middle(c.warm_s for c in compiles),
        "peak_bytes": max((each.peak_bytes for each in made if each.peak_bytes), default=None),
        "fresh": all(c.fresh for c in compiles),
    }


def over_compiles(found: Sequence[Interval]) -> Interval:
    """Return the median of several compiles and an interval that covers all: the compile is the unit."""
    return Interval(median(i.median for i in found), min(i.low for i in found), max(i.high for i in found))


def mark(speedup: Interval, noise: Interval) -> Mark:
    """Judge a speedup against its group's noise floor."""
    if trial.within_noise(speedup, noise):
        return "tie"
    return "win" if speedup.median > 1 else "loss"


# ---- one peer over all cases


@dataclass(frozen=True, slots=True)
class PeerSummary:
    """One peer over the cases of one numerics class on one clock.

    `cases` is the number of cases where it is available; one that fails counts as slow in `fast`, as does one that is
    faster within noise; one that passes without a speedup does not count. Geometric means are over the cases that pass,
    as many as `counts` says, never clipped. `worst` is the lowest speedup over eager and its case. Compile seconds are
    medians over `compiled` cases: those in fresh processes, if these are the majority; `memory` is a mean over `peaks`
    cases.
    """

    peer: str
    kind: str
    cases: int
    passed: int
    unavailable: int
    geomeans: Mapping[Against, float]
    counts: Mapping[Against, int]
    fast: Mapping[float, float]
    marks: Mapping[Mark, int]
    worst: tuple[float, str] | None
    cold_s: float | None
    warm_s: float | None
    compiled: int
    memory: float | None
    peaks: int
    fresh: bool


FAST = (1.0, 1.1, 2.0)


def summaries(tables: Mapping[Key, Sequence[Entry]]) -> dict[str, list[PeerSummary]]:
    """Return the summaries of all peers but the controls, by numerics class."""
    found: dict[str, dict[str, list[Entry]]] = {}
    for table in tables.values():
        for entry in table:
            if entry.cell.kind != "control":
                found.setdefault(entry.cell.numerics, {}).setdefault(entry.cell.peer, []).append(entry)
    return {name: [_summary(each) for each in peers.values()] for name, peers in found.items()}


def _summary(entries: list[Entry]) -> PeerSummary:
    able = [entry for entry in entries if entry.cell.status != "unavailable"]
    passed = [entry for entry in able if entry.cell.status == "pass"]
    against_eager = [entry for entry in passed if "eager" in entry.speedups]
    medians = {what: [e.speedups[what].median for e in passed if what in e.speedups] for what in AGAINST}
    strongest = [entry.marks["strongest"] for entry in passed if "strongest" in entry.marks]
    ratios = [e.memory for e in passed if e.memory]
    compiled = _compiled_alike(passed)
    return PeerSummary(
        peer=entries[0].cell.peer,
        kind=entries[0].cell.kind,
        cases=len(able),
        passed=len(passed),
        unavailable=len(entries) - len(able),
        geomeans={what: geometric_mean(found) for what, found in medians.items() if found},
        counts={what: len(found) for what, found in medians.items()},
        fast=_fast(against_eager, len(able) - len(passed)),
        marks={mark: strongest.count(mark) for mark in ("win", "tie", "loss")},
        worst=min(((e.speedups["eager"].median, name(e.cell)) for e in against_eager), default=None),
        cold_s=middle(e.cold_s for e in compiled),
        warm_s=middle(e.warm_s for e in compiled),
        compiled=len(compiled),
        memory=geometric_mean(ratios) if ratios else None,
        peaks=len(ratios),
        fresh=all(e.fresh for e in compiled),
    )


def _compiled_alike(passed: list[Entry]) -> list[Entry]:
    """Return the entries whose compile seconds are comparable: those in fresh processes, if these are the majority."""
    known = [entry for entry in passed if entry.cold_s is not None]
    fresh = [entry for entry in known if entry.fresh]
    return fresh if len(fresh) > len(known) / 2 else known


def _fast(entries: list[Entry], failed: int) -> dict[float, float]:
    beyond = [e.speedups["eager"].low / e.noise.high for e in entries]
    return {p: sum(ratio > p for ratio in beyond) / (len(beyond) + failed) for p in FAST} if beyond else {}


def name(cell: Cell) -> str:
    """Return a case's name in a table, with its mode if it is not a plain forward."""
    return cell.case if cell.mode == "fwd" else f"{cell.case} {cell.mode}"
