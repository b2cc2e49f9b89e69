"""Races in the suite's results as a table by kind of graph, and whether it predicts better than constants.

    python -m benchmarks recorded-races benchmarks/results --write

Reads the compiles of `auto` in all files of JSON lines below a folder. A kind of graph is counted by running the case
on the meta device, without numbers; cases that need numbers are left out, and named.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import torch

from backend_kwargs.auto.candidates import CONSENTED_GAIN, ONCE, STEPS, RaceCandidate
from backend_kwargs.auto.graph_stats import GraphStats, observed_stats
from backend_kwargs.auto.predictions import FILE, Outcome, RecordedRace, encoded, predicted_for
from backend_kwargs.facts.decision import DEFAULT, EAGER
from backend_kwargs.files.atomic_write import write_whole
from backend_kwargs.tables import as_text
from benchmarks.workloads.cases import CASES
from benchmarks.workloads.held_out import BY_NAME

PACKAGED = Path(__file__).parents[2] / "backend_kwargs" / "auto" / FILE
GRAPHS = "cudagraphs"
LEAST_FIRST_S = 1.0  # a first compile that took less found its kernels in a cache


@dataclass(frozen=True, slots=True)
class Race:
    """One race of a file: where it ran, the case with its mode and scale, its rows, and its kind if that is noted."""

    machine: str
    torch: str
    device: str
    case: str
    mode: str
    scale: str
    rows: tuple[Mapping[str, Any], ...]
    kind: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str, str, str]:
        """What its outcomes are collected by."""
        return self.machine, self.torch, self.device, self.case, self.mode, self.scale


@dataclass
class Found:
    """The races of a folder, the launches of default by case, and the cases that could not be counted."""

    races: list[Race] = field(default_factory=list)
    launches: dict[tuple[str, str, str], int] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)


# ---- reading


def read(folder: Path) -> Found:
    """Return all races in the files of a folder; those of one compile are counted once."""
    found = Found()
    for path in sorted(folder.rglob("*.jsonl")):
        about: Mapping[str, Any] = {}
        held_out: list[Mapping[str, Any]] = []
        kinds: dict[str, tuple[int, ...]] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("record") == "environment":
                about = record
            elif record.get("record") == "compile" and "key" in record:
                _of_suite(record, about, found)
            elif record.get("record") == "compile" and record.get("races"):
                held_out.append(record)
            elif record.get("record") == "check" and "kind" in record:
                kinds[record["model"]] = tuple(record["kind"])
        found.races += [
            _of_held_out(each, about, kinds[each["model"]]) for each in held_out if _may_be_used(each, kinds)
        ]
    return found


def _of_suite(record: Mapping[str, Any], about: Mapping[str, Any], found: Found) -> None:
    case, _, rest = record["key"].partition("@")
    _, mode, _, scale, *_, peer = rest.split(" ")
    if peer == DEFAULT and (kernels := record["compile"]["kernels"]):
        found.launches[case, mode, scale] = kernels
    if not (decided := record.get("decided")) or not all(len(row) == 7 for row in decided["rows"]):
        return
    names = ("name", "status", "seconds", "compile_s", "reason", "against", "speedup")
    rows = [dict(zip(names, row, strict=True)) for row in decided["rows"]]
    for row in rows:
        row["speedup"] = row["speedup"] and row["speedup"][1]
    where = about["device_name"] if about["device"] != "cpu" else about["cpu"]
    found.races.append(Race(where, about["torch"], about["device"], case, mode, scale, tuple(rows)))


def _may_be_used(record: Mapping[str, Any], kinds: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a record's race had empty caches, of the only graph, which was counted."""
    return bool(record["cold"]) and record["model"] in kinds and len(record["races"]) == 1


def _of_held_out(record: Mapping[str, Any], about: Mapping[str, Any], kind: tuple[int, ...]) -> Race:
    rows = [{**row, "speedup": row["speedup"] and row["speedup"]["median"]} for row in record["races"][0]["rows"]]
    place = about["device_name"] or about["device"], about["torch"], about["device"]
    return Race(*place, record["model"], "", about["scale"], tuple(rows), kind)


# ---- outcomes


def outcomes(race: Race) -> dict[str, tuple[float | None, float | None]]:
    """Return gain and cost of each candidate of a race that was compiled."""
    compiled = [row for row in race.rows if row["name"] != EAGER and row["status"] in ("pass", "same code")]
    ran = [row for row in race.rows if row["name"] != EAGER and row["compile_s"]]
    first = ran[0] if ran else None
    seconds = {row["name"]: row["seconds"] for row in race.rows}
    found = {}
    for row in compiled:
        cost = row["compile_s"] / first["compile_s"] if first and first["compile_s"] >= LEAST_FIRST_S else None
        gain = _gain(row, seconds)
        if row is not first and (gain is not None or cost):
            found[row["name"]] = gain, cost
        elif row["name"] == GRAPHS and gain is not None:
            found[row["name"]] = gain, None
    return found


def _gain(row: Mapping[str, Any], seconds: Mapping[str, float | None]) -> float | None:
    if row["status"] == "same code":
        return 0.0
    if row["name"] == GRAPHS:  # which may have come before default
        mine, default = seconds[GRAPHS], seconds.get(DEFAULT)
        return 1 - mine / default if mine and default else None
    return 1 - 1 / row["speedup"] if row["speedup"] and row["against"] != EAGER else None


def table(found: Found) -> list[RecordedRace]:
    """Return the recorded races: for each case and machine the medians of its candidates."""
    by_key: dict[tuple[str, ...], list[Race]] = defaultdict(list)
    for race in found.races:
        by_key[race.key].append(race)
    recorded = []
    for (machine, version, device, case, mode, scale), races in sorted(by_key.items()):
        training = BY_NAME[case].training if case in BY_NAME else mode != "fwd"
        if not (kind := races[0].kind or _kind_of(stats_of(case, mode, scale, device))):
            found.uncounted.add(case)
            continue
        candidates = _medians([outcomes(race) for race in races])
        if candidates:
            name, launches = " ".join(filter(None, (case, mode))), found.launches.get((case, mode, scale))
            launches = launches if device == "cuda" else None
            recorded.append(RecordedRace(name, device, machine, version, training, kind, launches, candidates))
    return recorded


def _medians(found: Sequence[Mapping[str, tuple[float | None, float | None]]]) -> dict[str, Outcome]:
    names = sorted({name for each in found for name in each})
    medians = {}
    for name in names:
        mine = [each[name] for each in found if name in each]
        gain, cost = (_middle(each) for each in zip(*mine, strict=True))
        medians[name] = Outcome(len(mine), gain, cost)
    return medians


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


# ---- kinds of graphs


@cache
def stats_of(case: str, mode: str, scale: str, device: str) -> GraphStats | None:
    """Return the stats of a case, run on the meta device; None if it needs numbers, such as those of a mask."""
    try:
        call, training = _call(case, mode, scale, torch.device("meta"))
        with torch.device("meta"):
            _, stats = observed_stats(
                call,
                lambda _: 0.0,
                bytes_read=0.0,
                device=device,
                training=training,
                writes=False,
                dynamic=False,
                frozen=0,
            )
    except Exception:  # noqa: BLE001 - such as a branch on values, or a Triton kernel
        return None
    return stats


def _kind_of(stats: GraphStats | None) -> tuple[int, ...]:
    return (stats.ops, stats.gemms, stats.convolutions, stats.attentions) if stats else ()


def _call(case: str, mode: str, scale: str, where: torch.device) -> tuple[Callable[[], object], bool]:
    if case in BY_NAME:
        row = BY_NAME[case]
        model, args = row.build(where, torch.bfloat16, "tiny" if scale == "tiny" else "full")
        return lambda: _run(model, args, training=row.training), row.training
    torch.manual_seed(0)
    problem = CASES[case].build(where, CASES[case].dtype, scale)
    training = mode != "fwd"
    return lambda: _run(problem.fn, problem.args, training=training), training


def _run(fn: Callable[..., Any], args: Iterable[Any], *, training: bool) -> object:
    with torch.set_grad_enabled(training):
        out = fn(*args)
        if training:
            leaves = [leaf for leaf in (out if isinstance(out, tuple) else (out,)) if leaf.requires_grad]
            torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
    return out


# ---- leaving one case out


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predictions for one candidate, each case predicted from the others: how many times too high or too low.

    Those of costs by the nearest kinds, and by today's constants; those of the time that a call takes with the
    candidate, by the nearest kinds, and by the mean of all other cases.
    """

    candidate: str
    device: str
    cases: int
    cost_nearest: float | None
    cost_constants: float | None
    gain_nearest: float | None
    gain_mean: float | None


def leave_one_out(races: Sequence[RecordedRace], stats: Callable[[RecordedRace], GraphStats | None]) -> list[Errors]:
    """Return the errors for each candidate with at least three cases."""
    names = sorted({(race.device, name) for race in races for name in race.candidates})
    errors = (_errors_of(name, device, races, stats) for device, name in names)
    return [each for each in errors if each.cases >= 3]


def _errors_of(
    name: str, device: str, races: Sequence[RecordedRace], stats: Callable[[RecordedRace], GraphStats | None]
) -> Errors:
    mine = [race for race in races if race.device == device and name in race.candidates]
    costs: list[tuple[float, float]] = []
    gains: list[tuple[float, ...]] = []
    for race in mine:
        others = [each for each in mine if each.case.split()[0] != race.case.split()[0]]
        seen, guess = race.candidates[name], predicted_for(name, race.kind, device, others, training=race.training)
        constant = _constant_cost(name, stats(race))
        if seen.cost and guess.cost and constant:
            costs.append((abs(math.log(guess.cost / seen.cost)), abs(math.log(constant / seen.cost))))
        left = [1 - gain for each in others if (gain := each.candidates[name].gain) is not None]
        if seen.gain is not None and guess.gain is not None:
            off = (math.log((1 - each) / (1 - seen.gain)) for each in (guess.gain, 1 - geometric_mean(left)))
            gains.append(tuple(map(abs, off)))
    return Errors(name, device, len(mine), *_means(costs), *_means(gains))


def _means(errors: Sequence[tuple[float, ...]]) -> tuple[float | None, float | None]:
    """Return the mean factors of pairs of errors in logarithms."""
    if not errors:
        return None, None
    first, second = (math.exp(fmean(each)) for each in zip(*errors, strict=True))
    return first, second


def _constant_cost(name: str, stats: GraphStats | None) -> float | None:
    """Return today's prediction, as a multiple of default's compile of 10 s."""
    if stats is None:
        return None
    if name == DEFAULT:
        return 0.65
    steps = [step for step in STEPS if step.name == name and step.can_gain(stats)]
    candidate = steps[0] if steps else RaceCandidate(name, costs=ONCE, gain=CONSENTED_GAIN)
    return candidate.costs.seconds(10.0, stats) / 10.0


def report(found: Found, races: Sequence[RecordedRace]) -> str:
    """Return the figures of `leave_one_out` as a table, and their means."""
    scales = {(" ".join(filter(None, (r.case, r.mode))), r.device): r.scale for r in found.races}

    def stats(race: RecordedRace) -> GraphStats | None:
        case, _, mode = race.case.partition(" ")
        return stats_of(case, mode, scales[race.case, race.device], race.device)

    errors = leave_one_out(races, stats)
    rows = [(e.candidate, e.device, str(e.cases), *map(_times, _figures(e))) for e in errors]
    head = ("candidate", "device", "cases", "cost: nearest", "constants", "time: nearest", "mean")
    left = ", ".join(sorted(found.uncounted)) or "none"
    last = f"{len(races)} kinds of graph; cases that could not be counted: {left}."
    return "\n".join([as_text(head, rows), *_totals(errors), last])


def _figures(errors: Errors) -> tuple[float | None, ...]:
    return errors.cost_nearest, errors.cost_constants, errors.gain_nearest, errors.gain_mean


def _totals(errors: Sequence[Errors]) -> Iterator[str]:
    for device in sorted({each.device for each in errors}):
        mine = [each for each in errors if each.device == device]
        near, constant, nearest, mean = (_times(_weighted(mine, at)) for at in range(4))
        yield (
            f"{device}: costs are off by {near} (nearest kinds) and {constant} (constants), "
            f"times of a call by {nearest} (nearest kinds) and {mean} (mean of all others)."
        )


def _weighted(errors: Sequence[Errors], at: int) -> float | None:
    known = [(math.log(figure), each.cases) for each in errors if (figure := _figures(each)[at])]
    return math.exp(sum(log * n for log, n in known) / sum(n for _, n in known)) if known else None


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def run(folder: Path, *, write: bool) -> str:
    """Return the report on the races of a folder, and write the package's table if asked to."""
    found = read(folder)
    races = table(found)
    if write:
        write_whole(PACKAGED, encoded(races).decode())
    return report(found, races)
