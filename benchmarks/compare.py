"""Two result files, cell by cell: what became faster or slower beyond the noise of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from backend_kwargs.measure import Interval
from benchmarks import records, verdicts
from benchmarks.records import Cell, Results
from benchmarks.verdicts import CLOCKS, Clock, Key

SAME, REGRESSION, NOT_COMPARABLE = 0, 1, 2
COLOURS = {"FAST": "green", "SLOW": "red", "AMBIGUOUS": "yellow", "SAME": "dim"}
HARMLESS = ("pass", "unavailable")  # a peer that cannot be had here did not become worse


@dataclass(frozen=True, slots=True)
class Line:
    """One peer of one case on one clock: the new file's speedup over the old one, and its verdict.

    Where it does not pass in both, `verdict` is "", `clock` too, and `note` says what it was and what it is.
    """

    case: str
    peer: str
    clock: Clock | str = ""
    speedup: Interval | None = None
    verdict: str = ""
    note: str = ""
    regression: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What `compare` found: `code` is its exit status (0 same or faster, 1 regression, 2 not comparable)."""

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


def compare_files(old: Path, new: Path) -> Outcome:
    """Compare two files of one device, one torch and equal versions of their cases; each clock for itself.

    Several compiles of a peer are taken together. Raises BackendKwargsError where a file cannot be read.
    """
    before, after = records.read(old), records.read(new)
    if reason := _differs(before, after):
        return Outcome(NOT_COMPARABLE, f"Not comparable: {reason}.")
    was, now = _peers(before), _peers(after)
    noises = {clock: [_noise(results, clock) for results in (before, after)] for clock in CLOCKS}
    lines = [line for what in was if what in now for line in _lines(was[what], now[what], noises)]
    if not lines:
        return Outcome(NOT_COMPARABLE, "Not comparable: no peer of a case passes in both files.")
    worse = sum(line.regression for line in lines)
    alone = len(was.keys() ^ now.keys())
    counts = ", ".join(f"{sum(line.verdict == v for line in lines)} {v}" for v in COLOURS)
    reason = f"{counts}; {worse} worse; {alone} peers of a case in one file only."
    return Outcome(REGRESSION if worse else SAME, reason, lines)


def _differs(old: Results, new: Results) -> str:
    """Return what forbids a comparison, "" for nothing."""
    facts = [
        (what, *({str(env.get(field)) for env in results.environments} for results in (old, new)))
        for what, field in (("device", "device_name"), ("torch", "torch"))
    ]
    versions = [{c.case: c.case_version for c in results.cells} for results in (old, new)]
    facts += [
        (f"version of case {case!r}", {str(versions[0][case])}, {str(versions[1][case])})
        for case in sorted(versions[0].keys() & versions[1].keys())
    ]
    differing = (
        f"{what} {_all(a)} in the old file, {_all(b)} in the new" for what, a, b in facts if a != b or len(a) > 1
    )
    return next(differing, "")


def _all(values: set[str]) -> str:
    return " and ".join(sorted(values)) or "unknown"


def _peers(results: Results) -> dict[tuple[Key, str], list[Cell]]:
    found: dict[tuple[Key, str], list[Cell]] = {}
    for what, runs in verdicts.groups(results.cells).items():
        for cell in (cell for group in runs.values() for cell in group if cell.kind != "control"):
            found.setdefault((what, cell.peer), []).append(cell)
    return found


def _noise(results: Results, clock: Clock) -> dict[Key, Interval]:
    found = verdicts.groups(results.cells)
    floors = {what: [verdicts.noise(group, clock) for group in runs.values()] for what, runs in found.items()}
    return {what: max(each, key=lambda noise: noise.high) for what, each in floors.items()}


def _lines(old: list[Cell], new: list[Cell], noises: dict[Clock, list[dict[Key, Interval]]]) -> list[Line]:
    was, now = (next((c for c in cells if not c.passed), cells[0]).status for cells in (old, new))
    case, peer = verdicts.name(old[0]), old[0].peer
    if was != "pass" or now != "pass":
        worse = was == "pass" and now not in HARMLESS
        return [Line(case, peer, note=f"{was} -> {now}", regression=worse)] if was != now else []
    lines = []
    for clock in CLOCKS:
        sides = [[s for cell in cells for s in verdicts.samples(cell, clock)] for cells in (old, new)]
        if all(sides):
            ratio = verdicts.speedup(*sides)
            verdict = verdicts.judge(ratio, [floors[verdicts.key(old[0])] for floors in noises[clock]])
            lines.append(Line(case, peer, clock, ratio, verdict, regression=verdict == "SLOW"))
    return lines


def _ratio(speedup: Interval | None) -> str:
    return f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]" if speedup else ""
