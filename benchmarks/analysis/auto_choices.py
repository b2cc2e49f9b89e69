"""The choice of auto for each case, compared with the modes of torch.compile that a user could name instead.

Times are wall times, as users see them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from backend_kwargs import trial
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.verdicts import LatestResult, Mark
from benchmarks.execution.records import Cell, middle

LEAST = 0.97  # of the best mode's speed, on every case


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice of one auto for one case.

    `winner` notes if the graph was not raced. `race_s` is the time to decide, `compile_s` the time to the first result.
    `over` are auto's speedups over each mode that passes, by name; `modes_s` is the compile time of these modes
    together. `fresh`: each compile had its own process.
    """

    peer: str
    case: str
    winner: str
    options: Mapping[str, Any]
    race_s: float | None
    compile_s: float | None
    over: Mapping[str, Interval]
    noise: Interval
    modes_s: float | None
    fresh: bool

    @property
    def best(self) -> str:
        """Return the fastest mode: the one over which the speedup is lowest."""
        return min(self.over, key=lambda mode: self.over[mode].median, default="")

    @property
    def mark(self) -> Mark | None:
        """Return the mark against the best mode, None if no mode passes."""
        return verdicts.mark(self.over[self.best], self.noise) if self.over else None

    @property
    def too_slow(self) -> bool:
        """Return whether it is slower than LEAST allows, beyond the noise."""
        return self.mark == "loss" and self.over[self.best].median < LEAST

    @property
    def too_late(self) -> bool:
        """Return whether deciding took longer than compiling all modes."""
        return self.modes_s is not None and self.race_s is not None and self.race_s > self.modes_s


def choices(cells: Sequence[Cell]) -> dict[str, list[Choice]]:
    """Return each auto's choices, by peer and case; older files have no winner."""
    found: dict[str, list[Choice]] = {}
    for peers in verdicts.latest_results(cells).values():
        for peer, runs in peers.items():
            passed = [one for one in runs if one.cell.passed and one.cell.kind == "auto"]
            if passed:
                found.setdefault(peer, []).append(_choice(passed))
    return found


def _choice(runs: list[LatestResult]) -> Choice:
    """Return one row: the first compile's decision, and the ratios over all compiles."""
    cells = [one.cell for one in runs]
    clock: verdicts.Clock = "wall" if any(cell.wall_s for cell in cells) else "dropped"  # older files have only that
    modes = [mode for one in runs for mode in _modes(one.group)]
    known = [mode.compile.cold_s for mode in modes if mode.compile.cold_s is not None]
    decided: list[dict[str, Any]] = [cell.decided or {"options": {}, "seconds": None} for cell in cells]
    return Choice(
        peer=cells[0].peer,
        case=verdicts.name(cells[0]),
        winner=" / ".join(dict.fromkeys(_winner(cell) for cell in cells)),
        options=decided[0]["options"],
        race_s=middle(each["seconds"] for each in decided),
        compile_s=middle(cell.compile.cold_s for cell in cells),
        over=_over_modes(runs, clock),
        noise=verdicts.widest(runs, clock),
        modes_s=sum(known) / len(runs) if known else None,
        fresh=all(cell.compile.fresh for cell in (*cells, *modes)),
    )


def _over_modes(runs: list[LatestResult], clock: verdicts.Clock) -> dict[str, Interval]:
    """Return the speedup over each mode that was timed in the same process."""
    ratios: dict[str, list[Interval]] = {}
    for one in runs:
        for mode in _modes(one.group):
            theirs, mine = (verdicts.samples(cell, clock) for cell in (mode, one.cell))
            if theirs and mine:
                ratios.setdefault(mode.peer, []).append(trial.ratio_interval(theirs, mine))
    return {mode: verdicts.over_compiles(found) for mode, found in ratios.items()}


def _winner(cell: Cell) -> str:
    if not cell.decided:
        return ""
    return f"{cell.decided['winner']}{'' if cell.decided['rows'] else ', not raced'}"


def _modes(group: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in group if cell.kind == "mode" and cell.passed]


def geomeans(found: Sequence[Choice]) -> dict[str, float]:
    """Return the mean speedup over each mode, by name, and over the best of each case, by ""."""
    timed = [choice for choice in found if choice.over]
    modes = dict.fromkeys(mode for choice in timed for mode in choice.over)
    means = {mode: geometric_mean(c.over[mode].median for c in timed if mode in c.over) for mode in modes}
    return means | ({"": geometric_mean(c.over[c.best].median for c in timed)} if timed else {})
