"""Two result files, cell by cell: what became faster or slower beyond the noise of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from backend_kwargs.measure import Interval
from benchmarks import records, verdicts
from benchmarks.records import Results
from benchmarks.verdicts import CLOCKS, Clock, Key, Told

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
    lines = [line for what in was if what in now for line in _lines(was[what], now[what])]
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


def _peers(results: Results) -> dict[tuple[Key, str], list[Told]]:
    told = verdicts.told(results.cells)
    found = {(what, peer): runs for what, peers in told.items() for peer, runs in peers.items()}
    return {which: runs for which, runs in found.items() if runs[0].cell.kind != "control"}


def _lines(old: list[Told], new: list[Told]) -> list[Line]:
    first = old[0].cell
    was, now = (next((o.cell for o in runs if not o.cell.passed), runs[0].cell).status for runs in (old, new))
    case, peer = verdicts.name(first), first.peer
    if was != "pass" or now != "pass":
        worse = was == "pass" and now not in HARMLESS
        return [Line(case, peer, note=f"{was} -> {now}", regression=worse)] if was != now else []
    lines = []
    for clock in CLOCKS:
        sides = [[s for one in runs for s in verdicts.samples(one.cell, clock)] for runs in (old, new)]
        if all(sides):
            ratio = verdicts.speedup(*sides)
            verdict = verdicts.judge(ratio, [verdicts.widest(runs, clock) for runs in (old, new)])
            lines.append(Line(case, peer, clock, ratio, verdict, regression=verdict == "SLOW"))
    return lines


def _ratio(speedup: Interval | None) -> str:
    return f"{speedup.median:.3f}x [{speedup.low:.3f}, {speedup.high:.3f}]" if speedup else ""
