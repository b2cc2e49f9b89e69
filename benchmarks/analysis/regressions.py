"""Compare two result files, cell by cell: whose speedup over eager rose or fell beyond the noise of both."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from rich.table import Table

from backend_kwargs import trial
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.verdicts import CLOCKS, UNKNOWN, Clock, Key, LatestResult
from benchmarks.execution import records
from benchmarks.execution.controls import BASELINE
from benchmarks.execution.records import Results
from benchmarks.workloads.peers import chooses_by_times

SAME, REGRESSION, NOT_COMPARABLE = 0, 1, 2
COLOURS = {"FAST": "green", "SLOW": "red", "AMBIGUOUS": "yellow", "SAME": "dim"}
HARMLESS = ("pass", "unavailable")  # a peer that is unavailable here has not become worse
DEVICE = {"device": "device_name", "torch": "torch"}
HOST = {"number of CPUs": "cpus", "number of threads": "threads"}
PARTS = ("case", "mode", "dtype", "L2", "scale")  # of a key
LEAST_COMPILES = 3  # of a peer that times kernels while it compiles: its choices differ between compiles
NARROW = 1.1  # with a wider band, equal is no verdict
# In wall time, A/A says little about another process: on the host of an H200, of 93 pairs of one peer in two processes
# 57 are within 2 % of each other and 92 within 10 %.
TEN_PER_CENT = (Interval(1.0, 1 / 1.1, 1.1),)
APART: Mapping[Clock, Sequence[Interval]] = {"device": (), "wall": TEN_PER_CENT, "dropped": TEN_PER_CENT}
CLOCK_NAMES: Mapping[Clock, str] = {
    "device": "the device's clock",
    "wall": "the wall's clock",
    "dropped": "the wall's clock with results dropped at once",
}

Fact = tuple[str, set[str], set[str]]  # what, in the old file, in the new


@dataclass(frozen=True, slots=True)
class Line:
    """One peer of one case on one clock: its speedup over eager, the ratio of new to old, and its verdict.

    Eager's line has the ratio of its own times and no verdict, since it changes with the machine. If a peer was not
    timed with eager in both files, `verdict` and `clock` are "", and `note` has its old and new status.
    """

    case: str
    peer: str
    clock: Clock | str = ""
    speedup: Interval | None = None
    verdict: str = ""
    note: str = ""
    regression: bool = False


@dataclass(frozen=True, slots=True)
class Regressions:
    """The result of `compare`: `code` is its exit status (0 same or faster, 1 regression, 2 not comparable)."""

    code: int
    reason: str
    lines: Sequence[Line] = ()

    def table(self) -> Table:
        """Return the lines for a terminal."""
        table = Table("case", "peer", "clock", "new over old", "verdict", box=None)
        for line in self.lines:
            colour = COLOURS.get(line.verdict, "red" if line.regression else "dim")
            table.add_row(
                line.case, line.peer, line.clock, _ratio(line.speedup), line.note or line.verdict, style=colour
            )
        return table


def compare_files(old: Path, new: Path) -> Regressions:
    """Compare two files of one device, one torch and equal case versions, on each clock separately.

    Since clocks cannot be locked, a peer is compared with eager in its own process. Over several compiles the interval
    covers all; a peer that tunes needs at least three per side for FAST or SLOW. Raises BackendKwargsError if a file
    cannot be read.
    """
    before, after = records.read(old), records.read(new)
    was, now = _peers(before), _peers(after)
    hosts = next(_unequal(_facts(HOST, before, after)), "")
    judged = CLOCKS[:1] if hosts else CLOCKS
    lines = [line for what in was if what in now for line in _lines(was[what], now[what], judged)]
    judged_any = any(line.verdict or line.regression for line in lines)
    if reason := _differs(before, after) or ("" if judged_any else _apart(was, now)):
        return Regressions(NOT_COMPARABLE, f"Not comparable: {reason}.")
    worse = sum(line.regression for line in lines)
    counts = ", ".join(f"{sum(line.verdict == v for line in lines)} {v}" for v in COLOURS)
    alone = len(was.keys() ^ now.keys())
    sentences = [
        f"By speedup over eager {counts}; {worse} worse; {alone} peers of a case in one file only",
        *_eager(lines),
    ]
    sentences += [f"no verdict by the wall's clock, which is the host's: {hosts}"] if hosts else []
    return Regressions(REGRESSION if worse else SAME, "; ".join(sentences) + ".", lines)


def _eager(lines: list[Line]) -> Iterator[str]:
    for clock in CLOCKS:
        own = [line.speedup.median for line in lines if line.peer == BASELINE and line.clock == clock and line.speedup]
        if own:
            yield f"eager itself {median(own):.3f}x ({min(own):.3f}x to {max(own):.3f}x) by {CLOCK_NAMES[clock]}"


def _differs(old: Results, new: Results) -> str:
    """Return what prevents a comparison, "" if nothing does."""
    on_cpu = any(env.get("device") == "cpu" for env in old.environments)
    versions = [{c.case: c.case_version for c in results.cells} for results in (old, new)]
    facts = _facts(DEVICE | HOST if on_cpu else DEVICE, old, new) + [
        (f"version of case {case!r}", {str(versions[0][case])}, {str(versions[1][case])})
        for case in sorted(versions[0].keys() & versions[1].keys())
    ]
    return next(_unequal(facts), "")


def _apart(old: Iterable[tuple[Key, str]], new: Iterable[tuple[Key, str]]) -> str:
    """Return why there is nothing to compare."""
    facts = [(what, {key[i] for key, _ in old}, {key[i] for key, _ in new}) for i, what in enumerate(PARTS)]
    disjoint = (fact for fact in facts if fact[1].isdisjoint(fact[2]))
    return next(_unequal(disjoint), "no peer is timed with eager in both files in one case, mode, dtype, L2 and scale")


def _facts(fields: Mapping[str, str], old: Results, new: Results) -> list[Fact]:
    sides = [[{str(env.get(field)) for env in of.environments} for field in fields.values()] for of in (old, new)]
    return list(zip(fields, *sides, strict=True))


def _unequal(facts: Iterable[Fact]) -> Iterator[str]:
    return (f"{what} {_all(a)} in the old file, {_all(b)} in the new" for what, a, b in facts if a != b or len(a) > 1)


def _all(values: set[str]) -> str:
    return " and ".join(sorted(values)) or "unknown"


def _peers(results: Results) -> dict[tuple[Key, str], list[LatestResult]]:
    latest = verdicts.latest_results(results.cells)
    found = {(what, peer): runs for what, peers in latest.items() for peer, runs in peers.items()}
    return {which: runs for which, runs in found.items() if runs[0].cell.kind != "control"}


def _lines(old: list[LatestResult], new: list[LatestResult], judged: Sequence[Clock]) -> list[Line]:
    case, peer = verdicts.name(old[0].cell), old[0].cell.peer
    was, now = (next((o.cell for o in runs if not o.cell.passed), runs[0].cell).status for runs in (old, new))
    if was != "pass" or now != "pass":
        worse = was == "pass" and now not in HARMLESS
        return [Line(case, peer, note=f"{was} -> {now}", regression=worse)] if was != now else []
    lines = []
    for clock in CLOCKS:
        pairs = [_beside_eager(runs, clock) for runs in (old, new)]
        if all(pairs):
            noises = [verdicts.widest(runs, clock) if clock in judged else UNKNOWN for runs in (old, new)]
            speedup, eager = _moved(*pairs)
            verdict = _verdict(speedup, noises, [trial.noise_floor(eager), *APART[clock]])
            few = min(map(len, pairs)) < LEAST_COMPILES and chooses_by_times(old[0].cell.kind, old[0].cell.options)
            if verdict in ("FAST", "SLOW") and few:
                verdict = "AMBIGUOUS"
            lines.append(
                Line(case, peer, clock, eager, note="by its own time")
                if peer == BASELINE
                else Line(case, peer, clock, speedup, verdict, regression=verdict == "SLOW")
            )
    return lines or [Line(case, peer, note="not timed with eager")]


def _beside_eager(runs: list[LatestResult], clock: Clock) -> list[tuple[list[float], list[float]]]:
    """Return eager's and the peer's samples, for each process that timed both."""
    cells = [(eager, one.cell) for one in runs for eager in one.group if eager.peer == BASELINE]
    pairs = [(verdicts.comparable(eager, clock), verdicts.comparable(peer, clock)) for eager, peer in cells]
    return [pair for pair in pairs if all(pair)]


def _moved(*sides: list[tuple[list[float], list[float]]]) -> tuple[Interval, Interval]:
    """Return how much faster the peer became over eager, and eager in its own time."""
    was, now = (verdicts.over_compiles([trial.ratio_interval(*pair) for pair in side]) for side in sides)
    before, after = (verdicts.over_compiles([trial.median_interval(eager) for eager, _ in side]) for side in sides)
    return _over(now, was), _over(before, after)


def _over(a: Interval, b: Interval) -> Interval:
    """Return the ratio of two figures, with the widest possible interval."""
    return Interval(a.median / b.median, a.low / b.high, a.high / b.low)


def _verdict(speedup: Interval, noises: list[Interval], apart: list[Interval]) -> str:
    """Judge a speedup against both files' noise; FAST and SLOW also exceed the differences between two processes."""
    if verdicts.judge(speedup, noises) == "SAME" and prod(noise.high for noise in noises) <= NARROW:
        return "SAME"
    verdict = verdicts.judge(speedup, noises + apart)
    return "AMBIGUOUS" if verdict == "SAME" else verdict


def _ratio(speedup: Interval | None) -> str:
    return f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]" if speedup else ""
