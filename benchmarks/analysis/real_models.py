"""The performance of auto on real models and with rewrites: loops that keep or drop results, and first calls."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from backend_kwargs import trial
from backend_kwargs.trial import Interval
from benchmarks.analysis import verdicts
from benchmarks.analysis.auto_choices import LEAST
from benchmarks.execution.records import Cell
from benchmarks.workloads.cases import CASES
from benchmarks.workloads.peers import MODELS, TEMPLATES, WITHOUT_REWRITES

AUTO = f"{TEMPLATES}auto"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
# Modes whose results are not overwritten: without CUDA graphs, or cloned by the caller.
KEPT = ("default", "max-autotune-no-cudagraphs", "reduce-overhead+clone", "max-autotune+clone")


@dataclass(frozen=True, slots=True)
class RealModel:
    """One model or case, its peers timed together: `cells` has those that passed, by peer, `failed` the others."""

    name: str
    cells: Mapping[str, Cell]
    failed: Mapping[str, Cell]
    noise: Interval

    def held(self, peer: str) -> float | None:
        """Return the median seconds of a call whose result is kept until the next call returns."""
        return trial.percentile(self.cells[peer].wall_s, 0.5) if self._timed(peer, "wall_s") else None

    def dropped(self, peer: str) -> float | None:
        """Return the median seconds of a call whose result is dropped at once."""
        return trial.percentile(self.cells[peer].dropped_s, 0.5) if self._timed(peer, "dropped_s") else None

    def _timed(self, peer: str, clock: str) -> bool:
        return peer in self.cells and bool(getattr(self.cells[peer], clock))

    def best(self, peers: Sequence[str]) -> str:
        """Return the fastest of some peers in the loop that keeps results, "" if none was timed."""
        timed = {peer: seconds for peer in peers if (seconds := self.held(peer)) is not None}
        return min(timed, key=lambda peer: timed[peer], default="")

    def over(self, peer: str) -> Interval | None:
        """Return auto's speedup over a peer in the loop that keeps results."""
        if not (self._timed(peer, "wall_s") and self._timed(AUTO, "wall_s")):
            return None
        return trial.ratio_interval(self.cells[peer].wall_s, self.cells[AUTO].wall_s)

    def first_s(self, peer: str) -> float | None:
        """Return the seconds of the first call with nothing compiled before."""
        return self.cells[peer].compile.cold_s if peer in self.cells else None

    @property
    def modes_s(self) -> float | None:
        """Return the total of the first calls of all four modes, None if one of them is unknown."""
        known = [seconds for mode in MODES if (seconds := self.first_s(mode)) is not None]
        return sum(known) if len(known) == len(MODES) else None

    @property
    def stored_over_alone(self) -> float | None:
        """Return auto's first call with a stored decision, relative to its winner's alone, both with stored kernels."""
        made = self.cells[AUTO].compile if AUTO in self.cells else None
        return made.warm_s / made.alone_s if made and made.warm_s and made.alone_s else None

    @property
    def winner(self) -> str:
        """Return auto's choice."""
        decided = self.cells[AUTO].decided if AUTO in self.cells else None
        return decided["winner"] if decided else ""

    @property
    def too_slow(self) -> bool:
        """Return whether auto is slower than LEAST allows against the best mode whose outputs the caller clones."""
        ratio = self.over(self.best(KEPT))
        return ratio is not None and ratio.median < LEAST


def real_models(cells: Sequence[Cell]) -> list[RealModel]:
    """Return the real models among the cases, each from the group used for its auto, or for eager."""
    return list(_groups(cells, lambda cell: cell.case in CASES and MODELS in CASES[cell.case].suites))


def raced_twice(cells: Sequence[Cell]) -> list[RealModel]:
    """Return the cases on which auto was timed with and without rewrites, together."""
    both = {AUTO, WITHOUT_REWRITES}
    return [of for of in _groups(cells, lambda _: True) if both <= of.cells.keys() and of.over(WITHOUT_REWRITES)]


def _groups(cells: Sequence[Cell], wanted: Callable[[Cell], bool]) -> Iterator[RealModel]:
    for of in verdicts.latest_results(cells).values():
        one = next((of[peer][0] for peer in (AUTO, "eager") if peer in of), None)
        if one is None or not wanted(one.cell):
            continue
        passed = {cell.peer: cell for cell in one.group if cell.passed}
        failed = {cell.peer: cell for cell in one.group if not cell.passed}
        yield RealModel(verdicts.name(one.cell), passed, failed, verdicts.noise(one.group, "wall"))


def mean_over(models: Sequence[RealModel], peers: Sequence[str]) -> float | None:
    """Return the geometric mean of auto's speedups over the best of `peers` on each model."""
    ratios = [ratio.median for model in models if (ratio := model.over(model.best(peers)))]
    return geometric_mean(ratios) if ratios else None


def middle_and_most(seconds: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the median and the maximum of the known values, None if there are none."""
    known = [each for each in seconds if each is not None]
    return (median(known), max(known)) if known else None
