"""Reporting of a race: progress, log, torch's trace, and reports."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TypeAlias

from backend_kwargs.auto import logger
from backend_kwargs.errors import printable
from backend_kwargs.facts.decision import DEFAULT, EAGER, UNCHECKED, Decision, Doubt, PlaceRow, RaceRow, by_name
from backend_kwargs.interval import Interval
from backend_kwargs.progress import progress as shown

OnProgress: TypeAlias = Callable[[str, float], None]


WIDEST = 60  # a longer name, such as one from a file, does not widen the table
ARTIFACT = {"name": "backend_kwargs_race", "encoding": "json"}  # of torch's structured trace
MOST_PLACES = 12  # of a table; a decision has all
WORDS = {
    Doubt.FAILED: "default could not run here",
    Doubt.UNCHECKED: "the numbers of {unchecked} were not checked",
    Doubt.UNCHECKABLE: "the numbers of default cannot be checked here",
    Doubt.UNTIMED: "{winner} was not timed",
    Doubt.NOISY: "the timings that chose it are noise",
}
MORE = 1.25  # times what was spent and predicted: the budget that is named


def progress(told: OnProgress | None = None) -> AbstractContextManager[OnProgress]:
    """Give the function to call with a candidate's name and the fraction of the race that is done, from 0 to 1.

    This is `told`, the option `on_progress`; without it, a progress line is shown if standard error is a terminal.
    """
    return shown("auto", "eager, default") if told is None else nullcontext(told)


def tell(decision: Decision, told: set[tuple[str, str]]) -> None:
    """Log the decision, with its table unless that was `told` under its key before; and add it to torch's trace."""
    if decision.winner == EAGER and decision.rows:
        logger.info("No candidate beats eager on this graph, which runs uncompiled.")
    shown = table(decision)
    again = (decision.key, shown) in told
    if decision.rows:
        told.add((decision.key, shown))
    logger.info("%s", f"{_head(decision)}, as decided before" if again else shown)
    from backend_kwargs.torch_internals.dynamo import trace_structured

    as_json = partial(json.dumps, asdict(decision), default=repr)
    trace_structured("artifact", metadata_fn=lambda: ARTIFACT, payload_fn=as_json)


def table(decision: Decision) -> str:
    """Return the decision as lines: each candidate with its time, and why it won or lost."""
    # Stores and exports may contain text from anyone.
    width = max([24, *(len(row.name) for row in decision.rows if len(row.name) <= WIDEST)])
    lines = [_line(row, decision, width) for row in decision.rows]
    if decision.rows and decision.provisional:
        lines.append(f"provisional: {what_is_open(decision)}")
    if decision.calls:
        lines.append(f"chosen by the calls that were made: {decision.calls}")
    if decision.places:
        lines += ["places, each by itself:", *(_place(row, decision) for row in decision.places[:MOST_PLACES])]
    return "\n".join([_head(decision), *(f"  {printable(line)}" for line in lines)])


def what_is_open(decision: Decision) -> str:
    """Return what a race has left open, and what would settle it; "" if its decision is not provisional."""
    doubts = decision.doubts
    parts = [_open(decision, doubt) for doubt in doubts]
    if Doubt.NOISY in doubts:
        parts.append("race it again with more time, or on an idle machine")
    if {Doubt.CUT, Doubt.UNTIMED, Doubt.UNCHECKED} & {*doubts}:
        parts.append(f"budget_s={settling_s(decision):g} would try all")
    return "; ".join(parts)


def _open(decision: Decision, doubt: Doubt) -> str:
    """Return what one doubt means for this decision."""
    if doubt in WORDS:
        unchecked = next((row.name for row in decision.rows if row.status == UNCHECKED), "")
        return WORDS[doubt].format(winner=decision.winner, unchecked=unchecked)
    rows = [row for row in decision.rows if row.name != EAGER]
    left = sum(row.left for row in rows)
    if not left:
        return f"its budget of {decision.cut_s:g} s ended it"
    return f"{left} of {left + sum(not row.left and row.status != 'skipped' for row in rows)} not tried"


def settling_s(decision: Decision) -> float:
    """Return a budget with which a race would probably try all candidates, to one significant digit."""
    left = sum(max(row.predicted_s or 0.0, row.compile_s) for row in decision.rows if row.left)
    needed = MORE * max(decision.seconds + left, decision.cut_s)
    if not 0 < needed < math.inf:
        return needed
    digit = 10.0 ** math.floor(math.log10(needed))
    return math.ceil(needed / digit) * digit


def _head(decision: Decision) -> str:
    """Return which candidate was chosen, and how much faster it is than eager and than default, if both were timed."""
    winner, gain = by_name(decision.rows).get(decision.winner), ""
    if winner and winner.name != EAGER and winner.speedup and (over_eager := decision.ratio_over(winner, EAGER)):
        over_default = decision.ratio_over(winner, DEFAULT) if winner.name != DEFAULT else None
        than_default = f", {over_default.median:.2f}x over default" if over_default else ""
        gain = f": {over_eager.median:.2f}x over eager{than_default}"
    return printable(f"auto: {decision.winner} for {decision.subject or 'this graph'} ({decision.seconds:.1f} s){gain}")


def over_itself(decision: Decision) -> Interval | None:
    """Return the speedup of what serves over the model itself, without dynamo's guards; None if that is not known."""
    rows = by_name(decision.rows)
    winner, eager = rows.get(decision.winner), rows.get(EAGER)
    ratio = decision.ratio_over(winner, EAGER) if winner else None
    if ratio is None or eager is None or not eager.seconds or not 0 < decision.guards_s < eager.seconds:
        return None
    without = 1 - decision.guards_s / eager.seconds
    return Interval(ratio.median * without, ratio.low * without, ratio.high * without)


def calls_itself(decision: Decision) -> str:
    """Return why to call the model itself in place of what was compiled, "" if compiling pays or that is not sure."""
    if decision.provisional or not decision.rows:
        return ""
    if decision.winner == EAGER:
        guards = f", about {decision.guards_s * 1e6:.0f} µs a call" if decision.guards_s else ""
        return f"nothing compiled is faster than eager, and dynamo's guards take time{guards}"
    ratio = over_itself(decision)
    if ratio is None or ratio.high >= 1:
        return ""
    return f"with dynamo's guards, {decision.winner} is {ratio.as_ratio()} as fast as the model itself"


def _line(row: RaceRow, decision: Decision, width: int) -> str:
    error = "" if row.error is None else f", error {row.error:.2g}"
    if row.status != "pass":
        timed = "" if row.seconds is None or row.error is None else f" ({row.seconds * 1e6:.1f} µs)"
        return f"{row.name:<{width}} {row.status}: {row.reason}{timed}"
    took = "not timed" if row.seconds is None else f"{row.seconds * 1e6:.1f} µs"
    total = decision.ratio_over(row, EAGER) if row.speedup else None
    ratio, baseline = (total, EAGER) if total else (row.speedup, row.against)
    why = f"{ratio.as_ratio()} over {baseline}" if ratio else row.reason
    peak = f", peak {row.peak_bytes / 2**20:.3f} MiB" if row.peak_bytes is not None else ""
    kept = "" if not row.won else "  <- kept, provisional" if decision.provisional else "  <- kept"
    if row.speedup and row.speedup.low <= 1 < row.speedup.median and not row.won:
        kept = f"  within noise of {row.against}"
    asked = f"; raced since {row.reason}" if ratio and row.reason else ""
    rewrote = f", rewrote {', '.join(f'{name} {n}x' for name, n in row.rewritten.items())}" if row.rewritten else ""
    compiled = f"compiled in {row.compile_s:.1f} s{peak}{rewrote}{error}{asked}"
    return f"{row.name:<{width}} {took:>12}  {why:<44} {compiled}{kept}"


def _place(row: PlaceRow, decision: Decision) -> str:
    if row.speedup is None:
        return f"  {row.name}: {row.why}"
    today = ", ".join(filter(None, (f"{row.default_s * 1e6:.1f} µs", row.from_limit)))
    used = f"{', used' if decision.uses(row) else ''}{', confirmed in a whole graph' if row.confirmed else ''}"
    return f"  {row.name}: {today}; rewritten {row.rewritten_s * 1e6:.1f} µs, {row.speedup.as_ratio()}{used}"
