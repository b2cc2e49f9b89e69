"""What `tune` found for each size, and the page of it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from backend_kwargs.fleet.racing import Tuned
from backend_kwargs.interval import Interval, widest
from backend_kwargs.page import document as page
from backend_kwargs.page import figures, noise_of
from backend_kwargs.page.sentence import SLOWER, gained
from backend_kwargs.page.values import file_of, interval_of, measured_on
from backend_kwargs.report.decisions import parts_of, verdict_of
from backend_kwargs.report.graphs import number

if TYPE_CHECKING:
    from backend_kwargs.facts.decision import Decision

WHOLE = "the whole call"


def document_of(model: str, raced: Sequence[Tuned], paste: str) -> page.Document:
    """Return the page of a tuned model: the whole call at each size, and the race of each graph."""
    parts = parts_of([*_graphs(raced)])
    noise = interval_of(widest(tuned.same for tuned in raced))
    rows = tuple(_row(tuned, len(raced) == 1) for tuned in raced)
    counted = f"{number(len(parts.graphs), 'graph')} at {number(len(raced), 'size')}"
    return msgspec.structs.replace(
        parts,
        title=file_of(model),
        subtitle=f"{counted} {measured_on(parts.environment)}",
        by="backend-kwargs tune",
        verdict=_verdict(raced, rows, paste),
        warnings=(*noise_of("a compiled call", noise), *parts.warnings),
        speedups=(page.Speedups(title=WHOLE, over="eager", noise=noise, rows=rows), *parts.speedups),
    )


def _graphs(raced: Sequence[Tuned]) -> Iterator[tuple[str, "Decision"]]:
    """Yield each decision with a name: its size and its description."""
    for tuned in raced:
        for at, decision in enumerate(tuned.decisions, 1):
            which = f", graph {at}" if len(tuned.decisions) > 1 else ""
            yield f"{tuned.label}{which}: {decision.subject}", decision


def _verdict(raced: Sequence[Tuned], rows: Sequence[page.Row], paste: str) -> page.Verdict:
    """Return the verdict: of one size with its figures, of several in a sentence."""
    if len(raced) > 1 or len(raced[0].decisions) != 1:
        return page.Verdict(text=gained("sizes", rows), paste=paste)
    speedup = rows[0].speedup
    if raced[0].calls_itself and speedup:
        text = f"Call the model itself: the compiled call is {figures.ratio(speedup.median)} as fast"
        return page.Verdict(text=f"{text} ({figures.between(speedup)}).")
    verdict = verdict_of(raced[0].decisions[0])
    of_call = (page.Speedup(over="eager", ratio=speedup),) if speedup else ()
    kept = tuple(each for each in verdict.speedups if each.over != "eager" or not of_call)
    return msgspec.structs.replace(verdict, speedups=(*kept, *of_call), latency=_latency(raced[0]), paste=paste)


def _latency(tuned: Tuned) -> Interval | None:
    if not tuned.compiled_s:
        return None
    from backend_kwargs import trial

    return interval_of(trial.median_interval(tuned.compiled_s))


def _row(tuned: Tuned, alone: bool) -> page.Row:
    winners = ", ".join(dict.fromkeys(decision.winner for decision in tuned.decisions))
    return page.Row(
        name=tuned.label,
        status=SLOWER if tuned.calls_itself else "pass",
        note=f"{winners}: {sum(decision.seconds for decision in tuned.decisions):.0f} s",
        won=alone and not tuned.calls_itself,
        speedup=interval_of(tuned.speedup),
        latency=_latency(tuned),
        graphs=len(tuned.decisions),
    )
