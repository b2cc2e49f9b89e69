"""What `tune` found for each size, and the page of it."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from backend_kwargs.fleet.racing import Tuned
from backend_kwargs.interval import Interval
from backend_kwargs.page import document as page
from backend_kwargs.page import figures, tradeoffs_of
from backend_kwargs.page.values import environment_of, interval_of
from backend_kwargs.report.decisions import CHAINED, graph_of, race_of, speedups_of, verdict_of, warnings_of

if TYPE_CHECKING:
    from backend_kwargs.facts.decision import Decision

WHOLE = "the whole call"


def document_of(model: str, raced: Sequence[Tuned], paste: str) -> page.Document:
    """Return the page of a tuned model: the whole call at each size, and the race of each graph."""
    graphs = [*_graphs(raced)]
    whole = page.Speedups(title=WHOLE, over="eager", rows=tuple(_row(tuned, len(raced) == 1) for tuned in raced))
    races = tuple(speedups_of(decision, name) for name, decision in graphs if decision.rows)
    return page.Document(
        title=model,
        subtitle=f"tuned at {len(raced)} {'size' if len(raced) == 1 else 'sizes'}: {len(graphs)} graphs",
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        by="backend-kwargs tune",
        environment=environment_of(graphs[0][1].machine) if graphs else {},
        verdict=_verdict(raced, paste),
        warnings=tuple(each for name, decision in graphs for each in warnings_of(decision, name)),
        speedups=(whole, *races),
        races=tuple(race_of(decision, name) for name, decision in graphs if decision.rows),
        tradeoffs=tradeoffs_of(races[0]) if len(races) == 1 else None,
        graphs=tuple(graph_of(decision, name) for name, decision in graphs),
        notes=tuple(CHAINED.format(over=over) for over in dict.fromkeys(of.over for of in races if of.over)),
    )


def _graphs(raced: Sequence[Tuned]) -> Iterator[tuple[str, "Decision"]]:
    """Yield each decision with a name: its size and its description."""
    for tuned in raced:
        for at, decision in enumerate(tuned.decisions, 1):
            which = f", graph {at}" if len(tuned.decisions) > 1 else ""
            yield f"{tuned.label}{which}: {decision.facts}", decision


def _verdict(raced: Sequence[Tuned], paste: str) -> page.Verdict:
    """Return the verdict: of one size with its figures, of several in a sentence."""
    import msgspec

    whole = [(tuned, speedup) for tuned in raced if (speedup := tuned.speedup)]
    if len(raced) > 1 or len(raced[0].decisions) != 1:
        at = ", ".join(f"{s.median:.2f}x [{s.low:.2f}, {s.high:.2f}] at {tuned.label}" for tuned, s in whole)
        return page.Verdict(text=f"Over eager {at}." if at else "No call was timed.", paste=paste)
    if raced[0].calls_itself:
        ((_, speedup),) = whole
        text = f"Call the model itself: the compiled call is {figures.ratio(speedup.median)} as fast"
        return page.Verdict(text=f"{text} ({figures.between(speedup)}).")
    verdict = verdict_of(raced[0].decisions[0])
    of_call = tuple(page.Speedup(over="eager", ratio=speedup) for _, speedup in whole)
    kept = tuple(each for each in verdict.speedups if each.over != "eager" or not of_call)
    return msgspec.structs.replace(verdict, speedups=(*kept, *of_call), latency=_latency(raced[0]), paste=paste)


def _latency(tuned: Tuned) -> Interval | None:
    if not tuned.compiled_s:
        return None
    from backend_kwargs import measure

    return interval_of(measure.median_interval(tuned.compiled_s))


def _row(tuned: Tuned, alone: bool) -> page.Row:
    winners = ", ".join(dict.fromkeys(decision.winner for decision in tuned.decisions))
    return page.Row(
        name=tuned.label,
        note=winners,
        won=alone,
        speedup=interval_of(tuned.speedup),
        latency=_latency(tuned),
        compile_s=sum(decision.seconds for decision in tuned.decisions),
        graphs=len(tuned.decisions),
    )
