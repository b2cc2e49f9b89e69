"""Decisions of `auto` as parts of a page: the race of each graph, its candidates' speedups, and the options chosen."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from backend_kwargs.auto.reporting import over_itself, what_is_open
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, Doubt, PlaceRow, RaceRow
from backend_kwargs.interval import Interval
from backend_kwargs.page import pays_back, tradeoffs_of
from backend_kwargs.page.document import (
    Document,
    Graph,
    Lane,
    Lead,
    Option,
    Race,
    Rewrite,
    Row,
    Span,
    Speedup,
    Speedups,
    Verdict,
    Warned,
)
from backend_kwargs.page.figures import (
    count_of,
    day_of,
    environment_of,
    error_of,
    interval_of,
    measured_on,
    now,
    seconds_of,
)
from backend_kwargs.page.sentence import ITSELF

MODES = (DEFAULT, "cudagraphs", "max_autotune", "max_autotune_no_cudagraphs")  # candidates that are modes of torch
CHAINED = (
    "A race times each candidate against the leader of that time; its speedup over {over} is the product of such "
    "ratios, and its interval combines theirs."
)
KINDS: Mapping[Doubt, Literal["failed", "noise"]] = {Doubt.FAILED: "failed", Doubt.NOISY: "noise"}
MOST = 1000  # decisions on a page


def document_of(decisions: Sequence[Decision], paste: str = "") -> Document:
    """Return the page of some decisions, latest first; of one, with its verdict and the code to `paste`."""
    shown = decisions[:MOST]
    one = shown[0] if len(shown) == 1 else None
    # A graph is called by its description, with the key's first digits where that is not its own.
    alike = Counter(each.facts for each in shown)
    digits = [f" ({each.key[:12]})" if alike[each.facts] > 1 else "" for each in shown]
    parts = parts_of([(f"{each.facts or 'graph'}{own}", each) for each, own in zip(shown, digits, strict=True)])
    left_out = (f"{len(decisions) - MOST} more decisions are not shown.",) if len(decisions) > MOST else ()
    about = f"key {one.key[:12]}" if one else f"{len(decisions)} graphs"
    counts = Counter(decision.winner for decision in decisions).most_common(20)
    won = ", ".join(f"{name} for {count}" for name, count in counts)
    return replace(
        parts,
        title=f"{one.winner} for {one.facts or 'a graph'}" if one else "Decisions of auto",
        subtitle=f"{about} {measured_on(parts.environment)}",
        made=day_of(max((each.made for each in shown), default=0.0)),
        by="auto",
        verdict=verdict_of(one, paste) if one else Verdict(text=f"{about} decided: {won}." if won else "No decisions."),
        notes=(*left_out, *parts.notes),
    )


def parts_of(named: Sequence[tuple[str, Decision]]) -> Document:
    """Return what every page of decisions has: their races, what was chosen and where; each has a name."""
    raced = [(decision, name) for name, decision in named if decision.rows]
    speedups = tuple(speedups_of(*each) for each in raced)
    return Document(
        title="",
        made=now(),
        environment=environment_of(*(decision.machine for _, decision in named)),
        warnings=tuple(each for name, decision in named for each in warnings_of(decision, name)),
        speedups=(*speedups, *places_of(raced)),
        races=tuple(race_of(*each) for each in raced),
        tradeoffs=tradeoffs_of(speedups[0]) if len(speedups) == 1 else None,
        graphs=tuple(graph_of(decision, name) for name, decision in named),
        notes=tuple(CHAINED.format(over=over) for over in dict.fromkeys(each.over for each in speedups if each.over)),
    )


# ---- one decision


def verdict_of(decision: Decision, paste: str = "") -> Verdict:
    """Return the winner of a race with its speedups and costs; without a race, what is known."""
    winner = next((row for row in decision.rows if row.won), None)
    if winner is None:
        text = f"{decision.winner} was chosen for {decision.facts or 'this graph'}; its race is not known."
        return Verdict(text=text, paste=paste)
    eager, mode = _row(decision, EAGER), best_mode(decision)
    others = [row.name for row in (mode, eager) if row and row is not winner]
    found = [(name, decision.ratio_over(winner, name)) for name in others]
    if winner.name != EAGER and (itself := over_itself(decision)) and itself.high < 1:
        found.append((ITSELF, itself))
    eager_s = seconds_of(eager.seconds) if eager else None
    calls = pays_back(seconds_of(winner.compile_s), seconds_of(winner.seconds), 0.0, eager_s)
    return Verdict(
        winner=winner.name,
        provisional=what_is_open(decision),
        clear=not decision.is_unsure and (winner.speedup is None or winner.speedup.low > 1 or winner.name == EAGER),
        speedups=tuple(Speedup(over=name, ratio=ratio) for name, each in found if (ratio := interval_of(each))),
        error=error_of(winner.error),
        error_bound=error_of(winner.max_error),
        compile_s=seconds_of(winner.compile_s) if winner.name != EAGER else None,
        peak_bytes=count_of(winner.peak_bytes),
        other_peak_bytes=count_of(mode.peak_bytes) if mode else None,
        other_peak_of=mode.name if mode and count_of(mode.peak_bytes) is not None else "",
        paste=paste if winner.name != EAGER else "",
        pays_back_calls=calls,
        pays_back_over=EAGER if calls is not None else "",
    )


def best_mode(decision: Decision) -> RaceRow | None:
    """Return the fastest candidate other than the winner that is a mode of torch."""
    rows = (row for row in decision.rows if row.name in MODES and row.status == "pass" and not row.won and row.seconds)
    return min(rows, key=lambda row: row.seconds or 0.0, default=None)


def _row(decision: Decision, name: str) -> RaceRow | None:
    return next((row for row in decision.rows if row.name == name and seconds_of(row.seconds)), None)


def speedups_of(decision: Decision, name: str) -> Speedups:
    """Return the candidates of a race with their speedups over eager, or over default where eager was not timed."""
    base = _row(decision, EAGER) or _row(decision, DEFAULT)
    return Speedups(
        title=name,
        over=base.name if base else "",
        rows=tuple(_speedup_row(decision, row, base) for row in decision.rows),
    )


def places_of(raced: Iterable[tuple[Decision, str]]) -> Iterator[Speedups]:
    """Yield the places of each graph that were raced by themselves: the dearest first, each over default."""
    for decision, name in raced:
        if rows := tuple(_place_row(each, used=decision.uses(each)) for each in decision.places):
            yield Speedups(title=f"{name}: places, each by itself", over=DEFAULT, rows=rows)


def _place_row(row: PlaceRow, *, used: bool) -> Row:
    if (speedup := interval_of(row.speedup)) is None:
        return Row(name=row.name, status="not timed", reason=row.why)
    name = ", ".join(filter(None, (row.name, row.from_limit)))
    latency = interval_of(Interval(row.rewritten_s, row.rewritten_s, row.rewritten_s))
    note = "confirmed in a whole graph" if row.confirmed else ""
    return Row(name=name, won=used, speedup=speedup, latency=latency, note=note)


def _speedup_row(decision: Decision, row: RaceRow, base: RaceRow | None) -> Row:
    own = seconds_of(row.seconds)
    return Row(
        name=row.name,
        status=row.status,
        reason=row.reason,
        note="baseline" if row is base else "",
        won=row.won,
        speedup=interval_of(decision.ratio_over(row, base.name)) if base else None,
        latency=interval_of(Interval(own, own, own)) if own else None,
        compile_s=seconds_of(row.compile_s) if row.compile_s else None,
        peak_bytes=count_of(row.peak_bytes),
        error=error_of(row.error),
        bound=error_of(row.max_error),
    )


def graph_of(decision: Decision, name: str) -> Graph:
    """Return the options that were chosen for a graph, and the user's own."""
    sources = [("auto", decision.options), ("user", decision.fixed)]
    options = [(name, value, source) for source, given in sources for name, value in given.items()]
    winner = next((row for row in decision.rows if row.won), None)
    rewritten = winner.rewritten if winner else {}
    return Graph(
        name=name,
        backend=decision.compiler or "inductor",
        winner=decision.winner,
        seconds=seconds_of(winner.compile_s) if winner and winner.compile_s else None,
        options=tuple(Option(name=n, value=repr(v), source=s) for n, v, s in options),
        rewrites=tuple(Rewrite(name=n, count=count_of(c) or 0) for n, c in rewritten.items()),
        notes=(f"key {decision.key[:12]}",),
    )


def warnings_of(decision: Decision, name: str) -> Iterator[Warned]:
    """Yield what limits the trust in a decision: what its race has left open."""
    if doubts := decision.doubts:
        yield Warned(
            text=f"The decision is provisional: {what_is_open(decision)}.", kind=KINDS.get(doubts[0], "cut"), where=name
        )


# ---- the race in time


def race_of(decision: Decision, name: str) -> Race:
    """Return a race as a timeline, as far as its rows say when they began and led."""
    leads = sorted((since, row.name) for row in decision.rows if (since := seconds_of(row.led_s)) is not None)
    return Race(
        graph=name,
        winner=decision.winner,
        seconds=seconds_of(decision.seconds) or 0.0,
        cut_s=seconds_of(decision.cut_s) or 0.0,
        provisional=what_is_open(decision),
        lanes=tuple(map(_lane, decision.rows)),
        leads=tuple(Lead(name=name, since=since) for since, name in ([(0.0, EAGER)] if leads else []) + leads),
    )


def _lane(row: RaceRow) -> Lane:
    compiled = seconds_of(row.compile_s) or 0.0
    spans = []
    if (began := seconds_of(row.began_s)) is not None:
        spans.append(Span(kind="compile", start=began, end=began + compiled))
        if timed := seconds_of(row.timed_s):
            spans.append(Span(kind="time", start=began + compiled, end=began + compiled + timed))
    return Lane(
        name=row.name,
        status=row.status,
        reason=row.reason,
        won=row.won,
        spans=tuple(spans),
        seconds=seconds_of(row.seconds),
        speedup=interval_of(row.speedup),
        against=row.against,
        compile_s=compiled or None,
        predicted_s=seconds_of(row.predicted_s),
        error=error_of(row.error),
        peak_bytes=count_of(row.peak_bytes),
    )
