"""Decisions as plain data: written to files and between ranks, and parsed once wherever they are read."""

import json
import math

import msgspec

from backend_kwargs.facts.decision import Decision
from backend_kwargs.options.option import Options

DEEPEST = 8  # levels of nesting in an option's value; deeper ones end in a RecursionError later


def has_form(value: object) -> bool:
    """Return whether a file can represent an option's value: a text, a number, or a list of these."""
    return all(isinstance(each, str | int | float) for each in (value if isinstance(value, list | tuple) else [value]))


def plain(options: Options) -> Options:
    """Return `options` with None in place of each value that a file cannot represent."""
    return {name: value if has_form(value) else None for name, value in options.items()}


def parsed(values: object) -> Decision:
    """Return the decision in plain data, or raise ValueError. Unknown keys are ignored."""
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
    json.dumps(decision.options, allow_nan=False)
    return msgspec.json.encode(decision, enc_hook=repr).decode()  # rows are only for people to read
