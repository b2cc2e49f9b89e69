"""The fastest candidate of a decision that `aot_compile()` can save, or that a lock can fix."""

from collections.abc import Callable
from dataclasses import replace

from backend_kwargs.auto.cache_key import ambient
from backend_kwargs.auto.question import Question
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, RaceRow


def savable(question: Question, decision: Decision) -> Decision:
    """Return the fastest candidate that `aot_compile()` can save; eager, which then fails to save, if none passed.

    It saves Inductor's code alone, without what copies the outputs of CUDA graphs.
    """
    copies = question.request.context.fixed.get("clone_outputs") is not False
    compiled = [row for row in decision.rows if row.name != EAGER]

    def fits(row: RaceRow) -> bool:
        return row.name != EAGER and not (copies and row.options.get("triton.cudagraphs")) and not row.compiler

    if compiled and not any(row.status == "pass" and row.seconds for row in compiled):
        return decision
    return _fastest(question, decision, fits)


def pinnable(question: Question, decision: Decision) -> Decision:
    """Return the fastest candidate whose bits a lock fixes.

    That is no other compiler's, and eager only under deterministic algorithms, since nobody checks its gradients.
    """
    deterministic = bool(ambient()["deterministic"])

    def fits(row: RaceRow) -> bool:
        sure = not decision.is_unsure or row.name in (EAGER, DEFAULT)
        return sure and not row.compiler and (deterministic or row.name != EAGER)

    return _fastest(question, decision, fits)


def _fastest(question: Question, decision: Decision, fits: Callable[[RaceRow], bool]) -> Decision:
    """Return the decision if its winner fits, else with the fastest candidate that does, or default."""
    if fits(RaceRow(decision.winner, decision.options, compiler=decision.compiler)):
        return decision
    passed = [row for row in decision.rows if row.status == "pass" and row.seconds and fits(row)]
    known = [row for row in passed if question.trusts(row.name, row)]
    best = min(known, key=lambda row: row.seconds or 0.0, default=RaceRow(DEFAULT))
    return replace(decision, winner=best.name, options=best.options, compiler="")
