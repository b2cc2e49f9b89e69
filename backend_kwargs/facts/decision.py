"""The decision of a race: which candidate was chosen for a graph, and why. Light: it is read before a graph exists."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from backend_kwargs.interval import Interval
from backend_kwargs.options.option import Options

EAGER, DEFAULT = "eager", "default"  # the candidates of every race
# Statuses that depend on the process more than on the candidate.
PASSING = frozenset({"fail_to_run", "oom", "timeout", "unavailable"})
UNCHECKED, UNCHECKABLE = "unchecked", "uncheckable"  # there was no time to check a candidate's numbers, or is no way
DEEPEST = 8  # levels of nesting in an option's value; deeper ones end in a RecursionError later
WIDEST = 100.0  # natural logarithm of a ratio over the ends of its interval, which no measurement has
UNCLEAR = 1.25  # high over low of a speedup's interval that contains 1 and says nothing


class Doubt(StrEnum):
    """Why a decision is provisional."""

    FAILED = "failed"  # default could not run here, so nothing of Inductor's was compared
    UNCHECKED = "unchecked"  # the numbers of the winner, or of default, in whose place another candidate serves
    UNCHECKABLE = "uncheckable"  # the same where they cannot be checked, which more time does not change
    UNTIMED = "untimed"  # the winner, beside others that could have been it
    NOISY = "noisy"  # a comparison that made the winner says nothing
    CUT = "cut"  # the time ended before all candidates were tried


class Unraced(StrEnum):
    """Why a graph was not raced, as far as it matters to other code; the words are the decision's `facts`."""

    RACED = ""
    GRAPH = "graph"  # what the graph or its budget says
    NEVER = "never"  # under race="never" no store has a decision
    LEFT = "left"  # the racing rank gave none, so that all ranks compile default
    ALONE = "alone"  # the other ranks cannot be reached, and may compile something else


@dataclass(slots=True)
class RaceRow:
    """The result of one candidate: its speedup over the champion of that time, the seconds per call, compile seconds.

    `predicted_s` is the predicted compile time, None if there was nothing to predict it from. `rewritten` counts the
    replacements of each rewrite. `error` is the measured relative RMSE to float64 under a lower precision, `max_error`
    the bound that the user gave. `compiler` names another compiler than Inductor, whose `options` these are. `began_s`
    is when its compile began, in seconds since the race did, `timed_s` how long it was timed after that, and `led_s`
    when it took the lead; they are None in the rows of earlier releases, and where that did not happen. `untried` is
    whether nothing but time kept it from being raced.
    """

    name: str
    options: Options = field(default_factory=dict)
    status: str = "pass"
    reason: str = ""
    seconds: float | None = None
    speedup: Interval | None = None
    against: str = ""
    compile_s: float = 0.0
    predicted_s: float | None = None
    peak_bytes: int | None = None
    won: bool = False
    rewritten: dict[str, int] = field(default_factory=dict)
    error: float | None = None
    max_error: float | None = None
    compiler: str = ""
    began_s: float | None = None
    timed_s: float | None = None
    led_s: float | None = None
    untried: bool = False

    @property
    def left(self) -> bool:
        """Whether more time could show that it is faster."""
        return self.untried or self.status in ("timeout", UNCHECKED)


def by_name(rows: Iterable[RaceRow]) -> dict[str, RaceRow]:
    """Return rows by name; of several, as where one of them was skipped, the winner's or one that was timed."""
    return {row.name: row for row in sorted(rows, key=lambda row: (row.won, row.seconds is not None))}


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """A place of a graph, raced by itself: its seconds by default and rewritten, each fused with what is around it.

    `place` is its name among rewrites, `what` its operators and what they read, `count` how often it is in the graph.
    `limit_s` is the least that the device could take, 0 if that is not known. `why` says why there are no figures.
    `confirmed` is whether a whole graph was faster with it rewritten than without.
    """

    place: str
    what: str
    count: int = 1
    default_s: float = 0.0
    rewritten_s: float = 0.0
    speedup: Interval | None = None
    limit_s: float = 0.0
    why: str = ""
    confirmed: bool = False

    @property
    def name(self) -> str:
        """What people call it: the rewrite, how often, and where."""
        return f"{self.place.partition('@')[0]} {self.count}x, {self.what}"

    @property
    def from_limit(self) -> str:
        """How far default is from the least that the device could take, "" if that is not known."""
        return f"{self.default_s / self.limit_s:.1f}x its limit" if self.limit_s > 0 else ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` identifies the computation whatever its sizes; `options` are the winner's besides the user's own; `rows` is
    the table of the race; `machine` is where it ran; `facts` describes the graph, or says why it was not raced if it is
    `unraced`; `cut_s` is the budget that ended the race early (0 if none did); `made` is in seconds since the epoch.
    `fixed` are the user's own options as returned by `plain`: they are exported, and nothing is compiled with them.
    `compiler` is the winner's, "" for Inductor. `inputs` are the dtypes and sizes, `model` names the class or function
    that was compiled, `budget_s` is what the race was given. `differs` says how this machine differs from the one of
    the race. `guards_s` is what dynamo adds to each call, which the rows include, and which a call of the model itself
    does not have; 0 if it is not known. `places` are those that were raced by themselves, the dearest first.
    `calls` says what the calls that were made have shown, with CUDA graphs and without, if they chose the winner.
    """

    key: str
    graph: str
    winner: str
    options: Options = field(default_factory=dict)
    rows: tuple[RaceRow, ...] = ()
    machine: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    facts: str = ""
    seconds: float = 0.0
    cut_s: float = 0.0
    made: float = field(default_factory=time.time)
    fixed: Options = field(default_factory=dict)
    compiler: str = ""
    inputs: tuple[str, ...] = ()
    model: str = ""
    budget_s: float = 0.0
    differs: str = ""
    guards_s: float = 0.0
    unraced: Unraced = Unraced.RACED
    places: tuple[PlaceRow, ...] = ()
    calls: str = ""

    @property
    def subject(self) -> str:
        """What was decided on, for people: the graph, or why it was not raced."""
        never = "race='never', and " if self.unraced is Unraced.NEVER else ""
        return f"a graph not raced: {never}{self.facts}" if self.unraced else self.facts

    def uses(self, row: PlaceRow) -> bool:
        """Return whether the winner has this place rewritten."""
        chosen = self.options.get("rewrites")  # of any type in a file from elsewhere
        return isinstance(chosen, list | tuple) and (row.place in chosen or row.place.partition("@")[0] in chosen)

    def ratio_over(self, row: RaceRow, over: str) -> Interval | None:
        """Return a candidate's speedup over another of this race; None where one was not timed, or a file has no ratio.

        Each was timed against the fastest so far: the intervals of the comparisons between them are combined as those
        of independent measurements.
        """
        other = row if row.name == over else by_name(self.rows).get(over)
        if other is row:
            return Interval(1.0, 1.0, 1.0)
        own_s, other_s = row.seconds or 0.0, (other and other.seconds) or 0.0
        if other is None or not (0 < own_s < math.inf and 0 < other_s < math.inf):
            return None
        mine, theirs = ([*takewhile(_has_ratio, links(self.rows, each))] for each in (row, other))
        shared = {*map(id, mine)} & {*map(id, theirs)}
        up = [each.speedup for each in mine if id(each) not in shared and each.speedup]
        down = [each.speedup for each in theirs if id(each) not in shared and each.speedup]
        reaches = [_reach(of) for of in up] + [_reach(of)[::-1] for of in down]
        low, high = (math.hypot(*(reach[end] for reach in reaches)) for end in (0, 1))
        if max(low, high) > WIDEST:
            return None
        ratio = other_s / own_s
        return Interval(ratio, ratio * math.exp(-low), ratio * math.exp(high))

    @property
    def provisional(self) -> bool:
        """Whether it is raced again by a process that has time, and stays on this machine."""
        return bool(self.doubts)

    @property
    def is_judged(self) -> bool:
        """Whether default was compared with the winner, so that a process without time to race may use it."""
        return {Doubt.FAILED, Doubt.UNCHECKED}.isdisjoint(self.doubts)

    @property
    def is_unsure(self) -> bool:
        """Whether the winner itself is in doubt, and not only whether another candidate would be faster still."""
        return not {*self.doubts} <= {Doubt.CUT, Doubt.UNCHECKABLE}

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """What a race has left open, as its rows show."""
        return tuple(doubt for doubt, holds in self._open() if holds)

    def _open(self) -> Iterator[tuple[Doubt, bool]]:
        default = by_name(self.rows).get(DEFAULT, RaceRow(DEFAULT))
        winner = next((row for row in self.rows if row.won), RaceRow(self.winner, seconds=0.0))
        judged = [winner, default] if winner.name == EAGER else [winner]
        passed = [row for row in self.rows if row.status == "pass"]
        compiled = any(row.name != EAGER and not row.compiler for row in passed)
        yield Doubt.FAILED, default.status == "unavailable" or (default.status in PASSING and not compiled)
        yield Doubt.UNCHECKED, UNCHECKED in (winner.status, default.status)
        yield Doubt.UNCHECKABLE, UNCHECKABLE in (winner.status, default.status)
        yield Doubt.UNTIMED, winner.seconds is None and len(passed) > 1
        yield Doubt.NOISY, any(_is_noise(links(self.rows, row)) for row in judged)
        yield Doubt.CUT, self.cut_s > 0 or any(row.left for row in self.rows)


def links(rows: Sequence[RaceRow], row: RaceRow) -> list[RaceRow]:
    """Return the rows whose comparisons lead from a candidate to the first one of a race."""
    named, found, at = by_name(rows), list[RaceRow](), row
    while at.speedup and not any(at is each for each in found):
        found.append(at)
        if (following := named.get(at.against)) is None:
            break
        at = following
    return found


def _has_ratio(row: RaceRow) -> bool:
    """Return whether a row's speedup is one of positive numbers."""
    ratio = row.speedup
    return ratio is not None and all(0 < each < math.inf for each in (ratio.low, ratio.median, ratio.high))


def _reach(ratio: Interval) -> tuple[float, float]:
    """Return how far the lower and the upper end of an interval are from its median, as natural logarithms."""
    median = math.log(ratio.median)  # not that of a quotient, which may be 0 for numbers of a file
    return median - math.log(ratio.low), math.log(ratio.high) - median


def _is_noise(comparisons: Iterable[RaceRow]) -> bool:
    """Return whether one of the comparisons that lead to the first candidate leaves open whether that was faster."""
    least = 1.0
    for row in comparisons:
        assert row.speedup is not None
        least *= row.speedup.low
        if least <= 1 and is_unclear(row.speedup):
            return True
    return False


def is_unclear(ratio: Interval) -> bool:
    """Return whether a speedup's interval is so wide about 1 that either may be the faster."""
    return ratio.low < 1 < ratio.high and ratio.high > UNCLEAR * ratio.low


# ---- as plain data: written to files and between ranks, and parsed once wherever it is read


def has_form(value: object) -> bool:
    """Return whether a file can represent an option's value: a text, a number, or a list of these."""
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, list | tuple) else [value]))


def plain(options: Options) -> Options:
    """Return `options` with None in place of each value that a file cannot represent."""
    return {name: value if has_form(value) else None for name, value in options.items()}


def parsed(values: object) -> Decision:
    """Return the decision in plain data, or raise ValueError. Unknown keys are ignored."""
    import msgspec  # not by `import backend_kwargs`

    decision: Decision = msgspec.convert(values, Decision)
    check(decision)
    return decision


def check(decision: Decision) -> None:
    """Raise ValueError if a decision has a number or a depth that later steps do not expect."""
    for name in ("seconds", "cut_s", "made", "budget_s", "guards_s"):
        if not math.isfinite(number := getattr(decision, name)):
            raise ValueError(f"Expected `float`, got {number} - at `$.{name}`")
    for name in ("options", "fixed"):
        if _deeper(getattr(decision, name), DEEPEST):
            raise ValueError(f"{name} must be at most {DEEPEST} levels deep.")
    if any(_deeper(row.options, DEEPEST) for row in decision.rows):
        raise ValueError(f"options of a row must be at most {DEEPEST} levels deep.")


def _deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(_deeper(item, levels - 1) for item in items)


def as_json(decision: Decision) -> str:
    """Return the decision as JSON; raise ValueError or TypeError if that cannot represent its options."""
    import msgspec

    json.dumps(decision.options, allow_nan=False)
    return msgspec.json.encode(decision, enc_hook=repr).decode()  # rows are only for people to read
