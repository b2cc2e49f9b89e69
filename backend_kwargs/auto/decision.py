"""The decision of a race: a typed value, parsed once wherever it is read."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, TypeVar

import msgspec

from backend_kwargs.auto.candidates import DEFAULT, EAGER
from backend_kwargs.errors import error_text, shown
from backend_kwargs.interval import Interval

DEEPEST = 8  # levels of nesting in an option's value; deeper ones end in a RecursionError later
# Statuses that depend on the process more than on the candidate.
PASSING = frozenset({"fail_to_run", "oom", "timeout", "unavailable"})
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
T = TypeVar("T")


@dataclass(slots=True)
class RaceRow:
    """The result of one candidate: its speedup over the champion of that time, the seconds per call, compile seconds.

    `predicted_s` is the predicted compile time, None if there was nothing to predict it from. `rewritten` counts the
    replacements of each rewrite. `error` is the measured relative RMSE to float64 under a lower precision, `max_error`
    the bound that the user gave. `compiler` names another compiler than Inductor, whose `options` these are.
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
    compiler: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which candidate a race chose for one graph, and why.

    `graph` identifies the computation whatever its sizes; `options` are the winner's besides the user's own; `rows` is
    the table of the race; `machine` is where it ran; `facts` describes the graph; `cut_s` is the budget that ended the
    race early (0 if none did); `made` is in seconds since the epoch. `fixed` are the user's own options as returned by
    `plain`: they are exported, and nothing is compiled with them. `compiler` is the winner's, "" for Inductor.
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
    compiler: str = ""

    @property
    def lasting(self) -> bool:
        """Whether other processes may use it.

        Not if nothing of Inductor's could be compared because default failed, or if this machine lacks what default
        needs.
        """
        lacking = any(row.name == DEFAULT and row.status == "unavailable" for row in self.rows)
        failed = any(row.name == DEFAULT and row.status in PASSING for row in self.rows)
        compiled = any(row.status == "pass" and row.name != EAGER and not row.compiler for row in self.rows)
        return not lacking and (compiled or not failed)


COLUMNS = tuple(each.name for each in fields(Decision))
AS_JSON = ("options", "rows", "machine", "fixed")


def has_form(value: Any) -> bool:
    """Return whether a file can represent an option's value: a text, a number, or a list of these."""
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, list | tuple) else [value]))


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with None in place of each value that a file cannot represent."""
    return {name: value if has_form(value) else None for name, value in options.items()}


def parsed(values: Any) -> Decision:
    """Return the decision in plain data, or raise ValueError. Unknown keys are ignored."""
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
    """Return the decision as SQLite and JSON values; raise ValueError or TypeError if they cannot represent it."""
    values = asdict(decision)
    values["rows"] = msgspec.json.encode(values["rows"], enc_hook=repr).decode()  # only for people to read
    return [_packed(values[name]) for name in COLUMNS]


def _packed(value: Any) -> str | float:
    if isinstance(value, int | float):
        return float(value)
    return value if isinstance(value, str) else json.dumps(value, allow_nan=False)


def unpacked(held: Mapping[str, Any]) -> Decision:
    """Return the decision that `packed` gave, from its columns; raise ValueError for any other content."""
    try:
        values = {name: _text(value) if isinstance(value, bytes) else value for name, value in held.items()}
        return parsed(values | {name: msgspec.json.decode(values.get(name, "{}")) for name in AS_JSON})
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(error_text(error)) from None


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{shown(value)} is not UTF-8") from None
