"""What a race decided: a typed value, parsed once from whatever holds it."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from backend_kwargs.compilers.auto.candidates import DEFAULT
from backend_kwargs.errors import error_text, shown
from backend_kwargs.interval import Interval

DEEPEST = 8  # levels of an option's value: what is deeper would end later steps, which recurse, in a RecursionError
# Statuses of a candidate that say more about the process than about the candidate.
PASSING = frozenset({"fail_to_run", "oom", "timeout", "unavailable"})
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
T = TypeVar("T")


@dataclass(slots=True)
class RaceRow:
    """What became of one candidate: its speedup over the champion it met, seconds per call by that, compile seconds.

    `predicted_s` is the predicted compile time, None if there was nothing to predict it from. `rewritten` counts the
    replacements of each rewrite. `error` is the measured relative RMSE to float64 under a lower precision, `max_error`
    the bound that the user gave.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` names the computation whatever its sizes, `options` are the winner's beside those that the user gave, `rows`
    the race's table, `machine` where it ran, `facts` what the graph held in words, `cut_s` the budget that cut the race
    short (0 where none did), `made` seconds since the epoch. `fixed` are the options that the user gave, as `plain`
    leaves them: an export holds them, and nothing is compiled under them.
    """

    key: str
    graph: str
    winner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[RaceRow, ...] = ()
    machine: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    facts: str = ""
    seconds: Finite = 0.0
    cut_s: Finite = 0.0
    made: Finite = field(default_factory=time.time)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lasting(self) -> bool:
        """Whether another process may rely on it: not where default could not run, so that eager won by default."""
        return not any(row.name == DEFAULT and row.status in PASSING for row in self.rows)


COLUMNS = ("key", "graph", "winner", "options", "rows", "machine", "facts", "seconds", "cut_s", "made", "fixed")
AS_JSON = ("options", "rows", "machine", "fixed")


def has_form(value: Any) -> bool:
    """Tell whether a file can hold an option's value: a text, a number, or a list of these."""
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, list | tuple) else [value]))


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with None for each value that a file cannot hold."""
    return {name: value if has_form(value) else None for name, value in options.items()}


def parsed(values: Any) -> Decision:
    """Return the decision that plain data holds, or raise ValueError. Unknown keys are ignored."""
    decision: Decision = msgspec.convert(values, Decision)
    for name in ("options", "fixed"):
        if _deeper(getattr(decision, name), DEEPEST):
            raise ValueError(f"{name} must be at most {DEEPEST} levels deep.")
    if any(_deeper(row.options, DEEPEST) for row in decision.rows):
        raise ValueError(f"options of a row must be at most {DEEPEST} levels deep.")
    return decision


def _deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return not levels or any(_deeper(item, levels - 1) for item in items)


def packed(decision: Decision) -> list[Any]:
    """Return the decision as SQLite and JSON hold it; raise ValueError or TypeError where an option has no form."""
    values = asdict(decision)
    values["rows"] = msgspec.json.encode(values["rows"], enc_hook=repr).decode()  # to be read by people alone
    return [_packed(values[name]) for name in COLUMNS]


def _packed(value: Any) -> str | float:
    if isinstance(value, int | float):
        return float(value)
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def unpacked(held: Mapping[str, Any]) -> Decision:
    """Return what `packed` packed, by column; raise ValueError where it is something else, of whatever kind."""
    try:
        values = {name: _text(value) if isinstance(value, bytes) else value for name, value in held.items()}
        return parsed(values | {name: msgspec.json.decode(values.get(name, "{}")) for name in AS_JSON})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(error_text(error)) from None


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{shown(value)} is no UTF-8") from None
