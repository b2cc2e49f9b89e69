"""What recorded races say of a candidate: the share of a call that it saves, and its compile time, by kind of graph.

`recorded_races.json` ships with the package; `python -m benchmarks recorded-races FOLDER --write` regenerates it. It is
one object: `columns` names the numbers that describe a kind of graph, in their order, and `races` has one entry for
each case and machine, as `RecordedRace` says.

Races use the costs alone; their order is that of the slack, which they measure. By gains predicted from other cases it
would be, on 10 races of a GPU, worse: a call is 28 % slower than at the end, on average over the seconds of compiling,
in place of 16 %, and 12 % at best. On 41 of a CPU both are alike: 5.9 %, 6.5 %, and 5.5 % at best. The command above
prints these figures.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from backend_kwargs.errors import BackendKwargsError, error_text

if TYPE_CHECKING:
    from backend_kwargs.auto.graph_stats import GraphStats

FILE = "recorded_races.json"
COLUMNS = ("operators", "gemms", "convolutions", "attentions")
NEIGHBOURS = 5
TRAINING_APART = 2.0  # as far as four times as many of one kind of operator


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one candidate did in the `races` of a case, their median.

    `gain` is the share saved of the time of the candidate before it, whose options it extends (of CUDA graphs: of
    default's), None if it was not timed; `cost` is its compile and tuning time as a multiple of the race's first
    compile, None if that had warm caches.
    """

    races: int
    gain: float | None
    cost: float | None


class RecordedRace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The races of one case on one machine: its kind of graph, and the outcome of each candidate by its name.

    `kind` are counts in the order of `COLUMNS`; `launches` are those of default's kernels, None if not counted.
    """

    case: str
    device: str
    machine: str
    torch: str
    training: bool
    kind: tuple[int, ...]
    launches: int | None
    candidates: dict[str, Outcome]


class RecordedRaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file."""

    columns: tuple[str, ...]
    races: tuple[RecordedRace, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The expected gain and cost of a candidate, as `Outcome` has them, from so many kinds of graph; None: unknown."""

    gain: float | None
    cost: float | None
    kinds: int


def predicted(candidate: str, stats: "GraphStats", races: Sequence[RecordedRace] | None = None) -> Prediction:
    """Return what the nearest kinds of graph on the same type of device say of a candidate, by its name.

    `races` are those that ship with the package unless given. Nearer kinds weigh more.
    """
    kind = stats.ops, stats.gemms, stats.convolutions, stats.attentions
    return predicted_for(candidate, kind, stats.device, recorded() if races is None else races, training=stats.training)


def predicted_for(
    candidate: str, kind: tuple[int, ...], device: str, races: Iterable[RecordedRace], *, training: bool
) -> Prediction:
    """Return `predicted` for a kind of graph, given as counts in the order of `COLUMNS`."""
    known = [race for race in races if race.device == device and candidate in race.candidates]
    found = [
        (_distance(kind, race.kind) + TRAINING_APART * (race.training != training), race.candidates[candidate])
        for race in known
    ]
    left = _mean_of_nearest([(apart, 1 - outcome.gain) for apart, outcome in found if outcome.gain is not None])
    cost = _mean_of_nearest([(apart, outcome.cost) for apart, outcome in found if outcome.cost])
    return Prediction(None if left is None else 1 - left, cost, len(known))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return how far two kinds are apart: 1 for twice as many of one kind of operator."""
    return math.dist([math.log2(1 + count) for count in one], [math.log2(1 + count) for count in other])


def _mean_of_nearest(values: Sequence[tuple[float, float]]) -> float | None:
    """Return the geometric mean of the nearest values, which are factors; None if there are none."""
    nearest = sorted(values)[:NEIGHBOURS]
    weights = [1 / (1 + apart) ** 2 for apart, _ in nearest]
    logs = [weight * math.log(value) for weight, (_, value) in zip(weights, nearest, strict=True)]
    return math.exp(sum(logs) / sum(weights)) if nearest else None


@cache
def recorded() -> tuple[RecordedRace, ...]:
    """Return the recorded races that ship with the package."""
    return parsed((files("backend_kwargs.auto") / FILE).read_bytes()).races


def parsed(content: bytes) -> RecordedRaces:
    """Return the recorded races in the content of a file; raise BackendKwargsError if it has another form."""
    try:
        found = msgspec.json.decode(content, type=RecordedRaces)
    except msgspec.MsgspecError as error:
        raise _malformed(error_text(error)) from error
    if found.columns != COLUMNS:
        raise _malformed(f"got {', '.join(found.columns)}")
    if uneven := [race.case for race in found.races if len(race.kind) != len(COLUMNS)]:
        raise _malformed(f"{uneven[0]!r} has another number of counts")
    return found


def _malformed(why: str) -> BackendKwargsError:
    return BackendKwargsError(
        f"Recorded races must have the columns {', '.join(COLUMNS)}: {why}. Regenerate them: "
        "python -m benchmarks recorded-races FOLDER --write"
    )


def encoded(races: Iterable[RecordedRace]) -> bytes:
    """Return the content of a file of recorded races, a race a line."""
    lines = b",\n".join(msgspec.json.encode(race) for race in races)
    return b'{"columns":' + msgspec.json.encode(COLUMNS) + b',"races":[\n' + lines + b"\n]}\n"
