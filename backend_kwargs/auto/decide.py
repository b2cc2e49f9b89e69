"""Decide for each graph which candidate is fastest, and compile the graph with it.

A decision has several sources: functions that return an answer or None, asked in the order of the tables at the end.
No lock is taken: dynamo compiles under one lock for the process, so two races never run at once in it. Two processes
may both race a graph, and the store keeps the later decision.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from backend_kwargs.auto import logger
from backend_kwargs.auto.process_memory import Served, memory, note_served
from backend_kwargs.auto.question import Question, Request, pinnable, savable
from backend_kwargs.auto.ranks import agreed, ranks
from backend_kwargs.auto.reporting import progress, tell, what_is_open
from backend_kwargs.errors import BackendKwargsError, error_text, printable, warn_once
from backend_kwargs.facts import DEFAULT, EAGER, Compiled, CompileFacts, Decision, Pins, RaceRow, Unraced
from backend_kwargs.facts.decision import plain
from backend_kwargs.graphs.ddp_buckets import bucket_of
from backend_kwargs.graphs.determinism import check_libraries
from backend_kwargs.graphs.spelling import ambient, devices_of
from backend_kwargs.graphs.writes import (
    communicates,
    copy_of_graph,
    in_eager,
    is_tiny,
    may_communicate,
    why_not_repeatable,
)
from backend_kwargs.rewrites.table import are_outdated
from backend_kwargs.torch_internals.dynamo import RESTARTS, compile_id
from backend_kwargs.torch_internals.functorch import saves_strictly, shared_in_cache
from backend_kwargs.torch_internals.replacing import undone

if TYPE_CHECKING:
    from backend_kwargs.auto.alternating import Ways


GRADIENTS = {"grad": "with gradients", "no_grad": "without gradients", "inference": "in inference mode"}
ENDLESS_S = 1e9  # stands for an infinite budget in a decision, since JSON has no infinity


class Answer(NamedTuple):
    """A decision, and what was compiled as its winner, if that can serve."""

    decision: Decision
    compiled: Compiled | None = None


Source: TypeAlias = Callable[[Question], Answer | None]


def compile_fastest(request: Request) -> Compiled:
    """Return the graph compiled with the winner's options, or the graph itself if eager won.

    Of a race its decision is left, and what was raced as the winner. Where that depends on the race, as with sizes that
    a candidate may have guarded, the winner is compiled again.
    """
    with undone() as stack:
        # AOTAutograd's cache finds the winner among what was raced; only a race lowers backward graphs at once.
        stack.enter_context(shared_in_cache("force_non_lazy_backward_lowering"))
        question, pins = Question(request, bucket_of(request.gm, request.example_inputs)), request.graph.pins
        if pins and (not pins.deciding or question.pinned_key in pins.decisions):
            return _compiled_as_pinned(question, pins)
        if pins and (without_strict := question.without("strict")).remembered():
            question = without_strict  # which says what is done where a lock is read
        # Not where the backend is made: a value that is copied, pickled or never called has no threads and connections.
        question.store.begin()
        compiled, decision = _compiled(question, _answer(question))
        if request.settings.race == "never":
            why = decision.facts if decision.unraced else ""
            memory().served.append(Served(question.model, str(compile_id() or ""), why))
            note_served(memory().served, question.store.layered.label)
        if pins:
            pins.decisions[question.pinned_key] = pinnable(question, decision)
        return compiled.with_facts(decision=decision)


# ---- compiling by a decision


def _compiled_as_pinned(question: Question, pins: Pins) -> Compiled:
    """Return the graph compiled by the decision that a lock has for it, or under default if it has none."""
    request = question.request
    decision = pins.decisions.get(question.pinned_key)
    if decision is None and (pins.strict or request.fixed.get("strict")):
        _let_dynamo_restart(request)
        raise BackendKwargsError(
            f"Lock {pins.label!r} has no decision for a graph of {', '.join(question.inputs) or 'no inputs'} "
            f"{GRADIENTS[str(ambient()['grad'])]}: pin it too (add=True), or leave out 'strict'."
        )
    decision = decision or question.default(f"lock {pins.label!r} has no decision for it")
    if decision.compiler or not question.trusts(decision.winner, decision):
        chosen = printable(decision.compiler or decision.winner)
        raise BackendKwargsError(f"Lock {pins.label!r} names {chosen!r}, which this backend cannot compile: pin again.")
    if decision.winner == EAGER:
        if "cuda" in devices_of(request.example_inputs):
            check_libraries()
        return Compiled(in_eager(request.gm), CompileFacts(decision=decision))
    return request.compile(request.graph, decision.options, "").with_facts(decision=decision)


def _compiled(question: Question, answer: Answer) -> tuple[Compiled, Decision]:
    """Return the graph compiled by an answer, and the decision that holds.

    Where the winner fails, that is default; and where default fails, the graph itself, which gives results or an error
    of its own. Under race="never", and for a caller who saves what is compiled, default is what was asked for, and
    raises.
    """
    request, decision = question.request, answer.decision
    tell(decision, memory().told)
    _warn_where_default_fails(decision)
    if answer.compiled:
        return answer.compiled, decision
    if decision.winner == EAGER:
        return Compiled(in_eager(request.gm), CompileFacts()), decision
    spare, is_default = copy_of_graph(request.gm), not decision.options and not decision.compiler
    try:
        # In a lower precision the compiler measures the error again, of what it returns.
        return request.compile(request.graph, decision.options, decision.compiler), decision
    except RESTARTS:
        raise
    except Exception as error:
        asked_for = request.settings.race == "never" or request.graph.pins or request.graph.compile_fx
        if is_default and (isinstance(error, BackendKwargsError) or asked_for or saves_strictly()):
            raise
        # A winner from elsewhere or of another graph may fail in any way.
        why = f"{'default' if is_default else f'the chosen {decision.winner}'} failed: {error_text(error)}"
    warn_once(f"A graph {'runs in eager, because' if is_default else 'is compiled under default:'} {why}")
    if not is_default:
        memory().decisions.pop(question.slot, None)
    instead = replace(question.default(why), winner=EAGER if is_default else DEFAULT)
    return _compiled(
        replace(question, request=replace(request, graph=replace(request.graph, gm=spare))), Answer(instead)
    )


def _let_dynamo_restart(request: Request) -> None:
    """Compile under default: of numbers among a graph's inputs dynamo makes others once a compile has seen them."""
    try:
        request.compile(replace(request.graph, gm=copy_of_graph(request.gm)), {}, "")
    except RESTARTS:
        raise
    except Exception:  # noqa: BLE001 - the next error says what is wrong
        logger.info("Default does not compile", exc_info=True)


def _warn_where_default_fails(decision: Decision) -> None:
    """Warn where no candidate is right, or where this machine lacks what default needs."""
    compiled = [row for row in decision.rows if row.name != EAGER]
    lacking = [row.reason for row in compiled if row.name == DEFAULT and row.status == "unavailable"]
    if lacking:
        warn_once(f"A graph runs under {printable(decision.winner)}, because default failed: {printable(lacking[0])}")
    elif compiled and not any(row.status == "pass" for row in compiled):
        reasons = "; ".join(f"{row.name}: {printable(row.reason)}" for row in compiled if row.status != "skipped")
        warn_once(f"A graph runs in eager, because no candidate compiled and passed the accuracy check: {reasons}.")


# ---- the answer


def _answer(question: Question) -> Answer:
    """Return the answer with which all ranks compile this graph; under `aot_compile`, one that it can save."""
    gm, settings = question.request.gm, question.request.settings
    why = ""  # as every rank finds it from the graph alone
    if communicates(gm):  # these ranks wait for each other
        why = "it communicates with other ranks"
    elif ranks() > 1 and may_communicate(gm):
        why = "it has an operator that is not torch's, which may communicate with other ranks"
    if why:
        answer = Answer(question.default(why))
    else:
        # Agree before using anything that only this rank knows: a rank without it would wait for the others.
        shared = agreed(question.key, lambda: first_answer(question).decision, question.default, settings)
        answer = Answer(shared) if shared else first_answer(question)
    if answer.decision.rows:
        memory().decisions[question.slot] = answer.decision
    # aot_compile() sets strict_autograd_cache.
    return Answer(savable(question, answer.decision)) if saves_strictly() else answer


def first_answer(question: Question) -> Answer:
    """Return the answer of the first source that has one."""
    sources = UNDER_NEVER if question.request.settings.race == "never" else SOURCES
    return next(filter(None, (source(question) for source in sources)))


def settled(question: Question) -> Answer | None:
    """Answer from this process or a store, unless another race is asked for, or may improve it.

    Under `race="never"` it answers as far as a race has checked and timed the winner.
    """
    race = question.request.settings.race
    if race == "always" or (found := question.remembered()) is None:
        return None
    if race == "never":
        return None if found.is_unsure else Answer(found)
    # Not again what this process has raced itself: it would find the same with as much time.
    is_open = found.is_unsure and question.budget_s > 0 and question.slot not in memory().decisions
    outdated = any(are_outdated(row.options.get("rewrites")) for row in found.rows)
    return None if is_open or outdated or 0 < found.cut_s < question.budget_s else Answer(found)


def near(question: Question) -> Answer | None:
    """Answer as a machine with such a device did, under `match="device"`, if the numbers are right here."""
    settings, compiled = question.request.settings, None
    if settings.match != "device" or settings.race == "always" or unfit(question):
        return None
    found = next((each for each in question.store.near(question.key) if question.trusts(each.winner, each)), None)
    if found is None:
        return None
    if found.winner != EAGER:
        from backend_kwargs.auto import race

        try:
            why, compiled = race.checked(question.raced_request, found)
        except RESTARTS:
            raise
        except race.NotRaceableError:
            return None
        except Exception as error:  # noqa: BLE001 - a winner from elsewhere may fail in any way
            why = error_text(error)
        if why:
            warn_once(f"{printable(found.winner)}, stored by another machine, is not used: {printable(why)}.")
            return None
    memory().decisions[question.slot] = found
    return Answer(found, compiled)


def unfit(question: Question) -> Answer | None:
    """Answer default if the graph cannot be raced."""
    if not question.request.settings.budget_s:
        return Answer(question.default("its budget is 0 s"))
    real, custom_ops = question.real_request, question.request.settings.race_custom_ops
    why = why_not_repeatable(real.gm, real.example_inputs, custom_ops=custom_ops)
    return Answer(question.default(why)) if why else None


def inherited(question: Question) -> Answer | None:
    """Answer with the winner of earlier races if racing this graph is not worth its time."""
    settings, always = question.request.settings, question.request.settings.race == "always"
    raced = [each for (scope, _), each in memory().decisions.items() if scope == question.scope and each.rows]
    other_sizes = [each for each in raced if each.graph == question.graph]
    heirs = other_sizes
    if not always and raced and is_tiny(question.request.gm, question.request.example_inputs):
        heirs, why = other_sizes or [each for each in raced if each.winner != EAGER], "it is tiny"
    elif sum(memory().race_seconds) >= settings.process_budget_s:
        why = f"the process has spent its {settings.process_budget_s:g} s on races"
    elif question.share_s <= 0:
        why = "the graphs before it have spent its call's budget"
    elif not always and sum(each.key != question.key for each in other_sizes) >= settings.most_races:
        return Answer(_inheriting(question, other_sizes, f"it was raced for {settings.most_races} other sizes"))
    else:
        return None
    return Answer(question.remembered() or _inheriting(question, heirs, why))


def _inheriting(question: Question, others: Sequence[Decision], why: str) -> Decision:
    """Return the winner of the latest of `others`, or default."""
    default = question.default(why)
    last = others[-1] if others else default
    return replace(default, winner=last.winner, options=last.options, compiler=last.compiler)


def raced(question: Question) -> Answer:
    """Answer by a race; default if the race fails."""
    from backend_kwargs.auto.race import NotRaceableError, race

    began, budget_s, counted_s = time.perf_counter(), question.budget_s, None
    try:
        with progress(question.request.settings.on_progress) as tick:
            result = race(question.raced_request, tick)
        counted_s = result.counted_s
    except RESTARTS:
        raise
    except NotRaceableError as error:
        return Answer(question.default(str(error)))
    except Exception as error:  # noqa: BLE001 - out of memory, or any other failure that only a race causes
        why = f"its race failed: {error_text(error)}"
        warn_once(f"A graph is compiled under default: {why}")
        return Answer(question.default(why))
    finally:
        question.note_spent(time.perf_counter() - began if counted_s is None else counted_s)
    row = result.winner
    measured = "" if row.error is None else f", error {row.error:.2g} (max_error={row.max_error:g})"
    decision = Decision(
        key=question.key,
        graph=question.graph,
        winner=row.name,
        options=row.options,
        compiler=row.compiler,
        rows=result.rows,
        machine=question.here,
        facts=f"{result.stats}{measured}",
        seconds=result.seconds,
        cut_s=budget_s if result.cut and budget_s < ENDLESS_S else 0.0,
        fixed=plain(question.request.fixed),
        inputs=question.inputs,
        model=question.model,
        budget_s=min(budget_s, ENDLESS_S),
        guards_s=result.guards_s,
        places=result.places,
    )
    found = question.remembered() if decision.provisional and decision.is_judged else None
    if found and (not found.provisional or found.cut_s > budget_s):  # it had more time, or a quieter machine
        return Answer(found)
    memory().decisions[question.slot] = decision
    if decision.is_judged:
        question.store.put(decision)
    return Answer(decision, _alternating(question, decision, result.ways) if result.ways else result.compiled)


def _alternating(question: Question, decision: Decision, ways: "Ways") -> Compiled:
    """Return a graph that the calls which are made decide on, together with others of these calls."""
    from backend_kwargs.auto.alternating import Alternation

    alternations, store, decisions, slot = memory().alternations, question.store, memory().decisions, question.slot
    owner = question.call and (question.call[0], ways.passes is not None)
    alternation = alternations.get(owner)
    if owner is None or alternation is None or alternation.is_over:
        alternation = alternations[owner] = Alternation()
    later: list[Decision] = []

    def decided(won: RaceRow, why: str) -> None:
        if why:
            rows = tuple(replace(row, won=row.name == won.name) for row in decision.rows)
            found = replace(decision, winner=won.name, options=won.options, rows=rows, calls=why)
            decisions[slot] = found
            later.append(found)
            tell(found, memory().told)
            if found.is_judged:
                store.put(found)

    ways.decided = decided
    return Compiled(alternation.join(ways), replace(ways.facts, later=later))


def unraced(question: Question) -> Answer:
    """Answer default for a graph that may not be raced; raise if a lock is to have a decision that a race finds."""
    if question.request.graph.pins is None:
        return Answer(question.default(_what_is_stored(question), Unraced.NEVER))
    if found := unfit(question) or inherited(question):
        return found
    if is_tiny(question.request.gm, question.request.example_inputs):
        return Answer(question.default("it is tiny"))
    _let_dynamo_restart(question.request)
    raise BackendKwargsError(
        f"Nothing is pinned for a graph of {', '.join(question.inputs) or 'no inputs'}: race='never', and "
        f"{_what_is_stored(question)}. Leave out race='never', or budget_s=0 to pin default."
    )


def _what_is_stored(question: Question) -> str:
    """Return that no decision is stored, what is open in it, or how those for the same computation differ."""
    if found := question.remembered():
        return f"the stored decision is provisional: {what_is_open(found)}"
    near = question.store.near(question.key)
    if near and question.request.settings.match == "exact":
        return f"a decision is stored only for another machine: {near[0].differs}; match='device' uses it"
    if near:
        return f"the decision of another machine could not be used: {near[0].differs}"
    sizes = question.store.of_computation(question.graph)
    return "a decision is stored only for other sizes" if sizes else "no decision is stored"


SOURCES: tuple[Source, ...] = (settled, near, unfit, inherited, raced)
UNDER_NEVER: tuple[Source, ...] = (settled, near, unraced)
