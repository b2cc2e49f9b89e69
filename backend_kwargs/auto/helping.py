"""What a rank does while it waits for the decision of another: it races candidates that the racing rank offers."""

import logging
from collections.abc import Iterator
from functools import partial

from backend_kwargs.auto.candidates import RaceCandidate, toggled
from backend_kwargs.auto.head_to_head import Runner
from backend_kwargs.auto.race import Race, begun, dynamo_seconds
from backend_kwargs.auto.request import Request
from backend_kwargs.auto.sandbox import sandboxed
from backend_kwargs.auto.shared_race import Exchange, Offer, Offered, Report
from backend_kwargs.facts.decision import EAGER

logger = logging.getLogger("backend_kwargs.auto")


def helping(request: Request, exchange: Exchange) -> Iterator[None]:
    """Race what is offered; yield wherever this rank is to look whether there is a decision."""
    offer = exchange.offered()
    if offer is not None and not _is_left(offer, exchange):  # this rank comes too late
        return
    dynamo_s = dynamo_seconds()
    with exchange.helping(), sandboxed(request.gm) as sandbox:
        running = begun(request, lambda name, fraction: None, sandbox, dynamo_s)
        yield from _first_round(running, exchange)


def _is_left(offer: Offer, exchange: Exchange) -> bool:
    return offer.left_s > 0 and not all(exchange.is_taken(at) for at in range(len(offer.candidates)))


def _first_round(running: Race, exchange: Exchange) -> Iterator[None]:
    eager = running.entered_eager()
    running.checks.compute_reference()
    options = running.selection.default.options
    default = running.prepared(running.selection.default, options, eager, partial(running.compiles.compile, options))
    while (offer := exchange.offered()) is None:
        yield
    base = _base_of(running, offer, eager, default)
    if base is None:
        logger.info("This rank races no candidate: it has no %s to time it beside.", offer.base)
        return
    # The end is the racing rank's; a clock of another host that is ahead may not prolong this rank's own.
    budget = running.budget
    budget.seconds = budget.spent_s + min(offer.left_s, budget.seconds)
    for at, offered in enumerate(offer.candidates):
        yield
        if _is_fit(running, offered) and not exchange.is_taken(at) and exchange.take(at) == exchange.rank:
            exchange.tell(at, _raced(running, base, offered, exchange.rank))


def _base_of(running: Race, offer: Offer, eager: Runner, default: Runner | None) -> Runner | None:
    """Return what candidates are timed beside: eager, default, or default's code with CUDA graphs."""
    if offer.base == EAGER:
        return eager
    if default is None or default.row.options == offer.base_options:
        return default
    made, options = default.made, toggled(default.row.options)
    if made is None or not made.has_other or options != offer.base_options:
        return None
    named = RaceCandidate(offer.base, options, over=False)
    return running.prepared(named, options, eager, partial(running.compiles.other, made))


def _is_fit(running: Race, offered: Offered) -> bool:
    if offered.predicted_s > running.budget.left_s:
        return False
    return "precision" not in offered.options or not isinstance(running.checks.precise, str)


def _raced(running: Race, base: Runner, offered: Offered, rank: int) -> Report:
    """Race one candidate against the base."""
    candidate = RaceCandidate(
        offered.name, offered.options, over=False, complexity=offered.complexity, compiler=offered.compiler
    )
    before = len(running.rows)
    best = running.meet(base, candidate)
    rows = [row for row in running.rows[before:] if row is not base.row]
    return Report(rank, best is not base, rows)
