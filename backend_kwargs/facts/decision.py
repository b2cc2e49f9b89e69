"""The decision of a race: which candidate was chosen for a graph, and why. Light: it is read before a graph exists."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from backend_kwargs.interval import Interval
from backend_kwargs.options.layers import Options

EAGER, DEFAULT = "eager", "default"  # the candidates of every race
# Statuses that depend on the process more than on the candidate.
PASSING = frozenset({"fail_to_run", "oom", "timeout", "unavailable"})


@dataclass(slots=True)
class RaceRow:
    """The result of one candidate: its speedup over the champion of that time, the seconds per call, compile seconds.

    `predicted_s` is the predicted compile time, None if there was nothing to predict it from. `rewritten` counts the
    replacements of each rewrite. `error` is the measured relative RMSE to float64 under a lower precision, `max_error`
    the bound that the user gave. `compiler` names another compiler than Inductor, whose `options` these are. `began_s`
    is when its compile began, in seconds since the race did, `timed_s` how long it was timed after that, and `led_s`
    when it took the lead; they are None in the rows of earlier releases, and where that did not happen.
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


def by_name(rows: Iterable[RaceRow]) -> dict[str, RaceRow]:
    """Return rows by name; of several, as where one of them was skipped, the winner's or one that was timed."""
    return {row.name: row for row in sorted(rows, key=lambda row: (row.won, row.seconds is not None))}


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` identifies the computation whatever its sizes; `options` are the winner's besides the user's own; `rows` is
    the table of the race; `machine` is where it ran; `facts` describes the graph; `cut_s` is the budget that ended the
    race early (0 if none did); `made` is in seconds since the epoch. `fixed` are the user's own options as returned by
    `plain`: they are exported, and nothing is compiled with them. `compiler` is the winner's, "" for Inductor.
    `inputs` are the dtypes and sizes, `model` names the class or function that was compiled, `budget_s` is what the
    race was given. `differs` says how this machine differs from the one of the race.
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

    @property
    def lasting(self) -> bool:
        """Whether other processes may use it.

        Not if nothing of Inductor's could be compared because default failed, if this machine lacks what default needs,
        or if default could not be checked.
        """
        lacking = any(row.name == DEFAULT and row.status in ("unavailable", "unchecked") for row in self.rows)
        failed = any(row.name == DEFAULT and row.status in PASSING for row in self.rows)
        compiled = any(row.status == "pass" and row.name != EAGER and not row.compiler for row in self.rows)
        return not lacking and (compiled or not failed)
