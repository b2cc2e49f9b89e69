"""Decide for each graph which candidate is fastest, by a race or a stored decision, and compile the graph with it.

It takes no lock: dynamo compiles under one lock for the process, so two races never run at once in it. Two processes
may both race a graph, and the store keeps the later decision.
"""

import inspect
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from backend_kwargs.auto.cache_key import ambient, card_of, computation_of, described, devices_of, key_of
from backend_kwargs.auto.candidates import others_for, permits, step_names
from backend_kwargs.auto.ddp_buckets import Bucket, bucket_of
from backend_kwargs.auto.decision import plain
from backend_kwargs.auto.machine import device_of, machine
from backend_kwargs.auto.process_memory import memory
from backend_kwargs.auto.ranks import agreed, ranks
from backend_kwargs.auto.reporting import NEVER, NOT_RACED, progress, tell, what_is_open, why_undecided
from backend_kwargs.auto.request import Request
from backend_kwargs.auto.served import Served, note_served
from backend_kwargs.auto.store import KIND, DecisionStore, name_on
from backend_kwargs.backends.others import is_other, other_of, versions_of
from backend_kwargs.errors import BackendKwargsError, error_text, printable, warn_once
from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.facts.decision import DEFAULT, EAGER, Decision, RaceRow
from backend_kwargs.facts.pins import Pins
from backend_kwargs.graphs.determinism import check_libraries
from backend_kwargs.graphs.eligibility import communicates, is_tiny, may_communicate, why_not_repeatable
from backend_kwargs.graphs.spelling import spelled
from backend_kwargs.graphs.writes import copy_of_graph
from backend_kwargs.rewrites.table import are_outdated, in_keys, list_rewrites
from backend_kwargs.stores import Store
from backend_kwargs.stores.deadlines import Reached
from backend_kwargs.stores.layered import Layered, reached
from backend_kwargs.torch_internals.dynamo import RESTARTS, compiling_callable
from backend_kwargs.torch_internals.functorch import saves_strictly, shared_in_cache
from backend_kwargs.torch_internals.guards import compile_id
from backend_kwargs.torch_internals.replacing import undone

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from backend_kwargs.auto.race import RaceResult
    from backend_kwargs.auto.verdicts import Verdicts

logger = logging.getLogger("backend_kwargs.auto")

GRADIENTS = {"grad": "with gradients", "no_grad": "without gradients", "inference": "in inference mode"}
ENDLESS_S = 1e9  # stands for an infinite budget in a decision, since JSON has no infinity


@contextmanager
def _one_key() -> Iterator[None]:
    """Let AOTAutograd's cache find the winner among what was raced; only a race lowers backward graphs at once."""
    with undone() as stack:
        stack.enter_context(shared_in_cache("force_non_lazy_backward_lowering"))
        yield


@_one_key()
def compile_fastest(request: Request) -> Compiled:
    """Return the graph compiled with the winner's options, or the graph itself if eager won.

    Of a race its decision is left, and what was raced as the winner. Where that depends on the race, as with sizes that
    a candidate may have guarded, the winner is compiled again.
    """
    if (pins := request.graph.pins) and (not pins.deciding or _DecisionResolver(request).pinned_key in pins.decisions):
        return _compiled_as_pinned(request, pins)
    if pins:
        request = _without_strict(request)
    raced: list[Compiled] = []
    question = _DecisionResolver(request, bucket_of(request.gm, request.example_inputs), raced.append)
    # Not where the backend is made: a value that is copied, pickled or never called has no threads and connections.
    question.store.begin()
    compiled = _compiled(question, raced)
    if request.settings.race == "never" and compiled.facts.decision:
        why = why_undecided(compiled.facts.decision)
        memory().served.append(Served(question.model, str(compile_id() or ""), why))
        note_served(memory().served, question.store.layered.label)
    if pins and compiled.facts.decision:
        pins.decisions[question.pinned_key] = question.pinnable(compiled.facts.decision)
    time_outs = "; ".join(f"store {label!r}: {count}" for label, count in question.store.time_outs().items())
    return compiled.with_facts(store=f"answers that did not come in time: {time_outs}") if time_outs else compiled


def _without_strict(request: Request) -> Request:
    """Return the request without `strict`, if its decision was made so: it says what is done where a lock is read."""
    fixed = {name: value for name, value in request.context.fixed.items() if name != "strict"}
    plain = replace(request, context=replace(request.context, fixed=fixed))
    return plain if _DecisionResolver(plain).remembered() else request


def _compiled_as_pinned(request: Request, pins: Pins) -> Compiled:
    """Return the graph compiled by the decision that a lock has for it, or under default if it has none."""
    question, strict = _DecisionResolver(request), pins.strict or request.context.fixed.get("strict")
    decision = pins.decisions.get(question.pinned_key)
    if decision is None and strict:
        question.let_dynamo_restart()
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
        return Compiled(_in_eager(request.gm), CompileFacts(decision=decision))
    return request.compile(request.graph, decision.options, "").with_facts(decision=decision)


def _compiled(question: "_DecisionResolver", raced: list[Compiled]) -> Compiled:
    request, decision = question.request, question.decision()
    tell(decision)
    _warn_where_default_fails(decision)
    if raced and raced[-1].facts.decision is decision:
        return raced[-1]
    if decision.winner == EAGER:
        return Compiled(_in_eager(request.gm), CompileFacts(decision=decision))
    if not decision.options and not decision.compiler:
        return _under_default(question, decision)
    spare = copy_of_graph(request.gm)
    try:
        # In a lower precision the compiler measures the error again, of what it returns.
        return request.compile(request.graph, decision.options, decision.compiler).with_facts(decision=decision)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 - a winner from elsewhere or of another graph may fail in any way
        why = f"the chosen {decision.winner} failed: {error_text(error)}"
    warn_once(f"A graph is compiled under default: {why}")
    memory().decisions.pop(question.slot, None)
    decision = question.default(why)
    tell(decision)
    request = replace(request, graph=replace(request.graph, gm=spare))
    return _under_default(replace(question, request=request), decision)


def _under_default(question: "_DecisionResolver", decision: Decision) -> Compiled:
    """Return the graph compiled under default, or the graph itself if default does not compile.

    Eager then gives what it would: results, or an error of its own. Under race="never", and for a caller who saves what
    is compiled, default is what was asked for, and raises.
    """
    request = question.request
    spare = copy_of_graph(request.gm)
    try:
        return request.compile(request.graph, {}, "").with_facts(decision=decision)
    except (*RESTARTS, BackendKwargsError):
        raise
    except Exception as error:
        if request.settings.race == "never" or request.graph.pins or request.graph.compile_fx or saves_strictly():
            raise
        why = f"default failed: {error_text(error)}"
    warn_once(f"A graph runs in eager, because {why}")
    decision = replace(question.default(why), winner=EAGER)
    tell(decision)
    return Compiled(spare.forward, CompileFacts(decision=decision))


def _in_eager(gm: "GraphModule") -> Call:
    """Return the graph's own call: one of dynamo's has it once its code is generated, and is slower until then."""
    assert gm.code
    return gm.forward


@dataclass(frozen=True, slots=True)
class Asked:
    """What identifies a request: its key, its computation at any sizes, this machine; `trusts` what it may choose."""

    key: str
    graph: str
    here: dict[str, str | int | None]
    trusts: Callable[[str, Decision | RaceRow], bool]


def asked_by(request: Request) -> Asked:
    """Return what identifies a request, without deciding it, or a look into a store."""
    question = _DecisionResolver(request)
    return Asked(question.key, question.graph, question.here, question.trusts)


def _warn_where_default_fails(decision: Decision) -> None:
    """Warn where no candidate is right, or where this machine lacks what default needs."""
    compiled = [row for row in decision.rows if row.name != EAGER]
    lacking = [row.reason for row in compiled if row.name == DEFAULT and row.status == "unavailable"]
    if lacking:
        warn_once(f"A graph runs under {printable(decision.winner)}, because default failed: {printable(lacking[0])}")
    elif compiled and not any(row.status == "pass" for row in compiled):
        reasons = "; ".join(f"{row.name}: {printable(row.reason)}" for row in compiled if row.status != "skipped")
        warn_once(f"A graph runs in eager, because no candidate compiled and passed the accuracy check: {reasons}.")


def _layers(given: Sequence[Store]) -> dict[Reached, Store]:
    """Return the stores that a user names, as this process has reached them before; one that is none is left out."""
    layers = {}
    for each in given:
        try:
            found = reached(each)
        except BackendKwargsError as error:
            warn_once(f"{error} It is left out.")
        else:
            layers[memory().stores.setdefault(found.identity, found)] = each
    return layers


def _name_of_compiled() -> str:
    """Return the name of the class or function that was given to torch.compile, "" if it is not known."""
    if (given := compiling_callable()) is None:
        return ""
    inner = inspect.unwrap(given)
    owner = getattr(inner, "__self__", inner)  # a module's forward
    return str(getattr(owner, "__qualname__", type(owner).__qualname__))


def _facts(result: "RaceResult") -> str:
    """Return the description of the graph, and the winner's error in a lower precision."""
    row = result.winner
    error = "" if row.error is None else f", error {row.error:.2g} (max_error={row.max_error:g})"
    return f"{result.stats}{error}"


@dataclass(frozen=True)
class _DecisionResolver:
    """The choice of a candidate for one graph. `decision` uses the first of these that has an answer.

    1. `settled`: this process has a decision that a larger budget could not improve, or a store one that is not
       provisional.
    2. `near`: under `match="device"` a machine with such a device has one, and its numbers are right here.
    3. `ineligible`: the graph cannot be raced, so default is used.
    4. `inherited`: a race is not worth its time, so the winner of earlier races is used.
    5. `raced`: the graph is raced.

    Under `race="never"` it uses the stored decision as far as it was checked, or default. With several ranks, one rank
    decides for all, and graphs with collectives use default.
    """

    request: Request
    bucket: Bucket | None = None
    keep: Callable[[Compiled], None] = lambda compiled: None  # called with what was raced as the winner

    def decision(self) -> Decision:
        """Return the decision that all ranks compile this graph with; under `aot_compile`, one that it can save."""
        decision = self._of_all_ranks()
        # aot_compile() sets strict_autograd_cache; it can save neither an eager graph nor outputs that are copied.
        if saves_strictly() and not self._can_be_saved(decision):
            return self._savable(decision)
        return decision

    def _of_all_ranks(self) -> Decision:
        gm, settings = self.request.gm, self.request.settings
        if communicates(gm):  # which the graph alone says, so that all of its ranks take default
            return self.default("it communicates with other ranks")
        if ranks() > 1 and may_communicate(gm):
            return self.default("it has an operator that is not torch's, which may communicate with other ranks")
        # Agree before using anything that only this rank knows: a rank without it would wait for the others.
        decision = agreed(self.key, self._of_this_rank, self.default, settings)
        if decision.rows:
            memory().decisions[self.slot] = decision
        return decision

    def _of_this_rank(self) -> Decision:
        if self.request.settings.race == "never":
            found = self.remembered()
            return found if found and not found.is_unsure else self.near() or self._unraced()
        return self.settled() or self.near() or self.ineligible() or self.inherited() or self.raced()

    def _unraced(self) -> Decision:
        """Return default for a graph that may not be raced; raise if a lock is to have a decision that a race finds."""
        if self.request.graph.pins is not None:
            if found := self.ineligible() or self.inherited():
                return found
            if is_tiny(self.request.gm, self.request.example_inputs):
                return self.default("it is tiny")
            self.let_dynamo_restart()
            raise BackendKwargsError(
                f"Nothing is pinned for a graph of {', '.join(self.inputs) or 'no inputs'}: race='never', and "
                f"{self._what_is_stored()}. Leave out race='never', or budget_s=0 to pin default."
            )
        return self.default(f"{NEVER}{self._what_is_stored()}")

    def let_dynamo_restart(self) -> None:
        """Compile under default: of numbers among a graph's inputs dynamo makes others once a compile has seen them."""
        graph = replace(self.request.graph, gm=copy_of_graph(self.request.gm))
        try:
            self.request.compile(graph, {}, "")
        except RESTARTS:
            raise
        except Exception:
            logger.info("Default does not compile", exc_info=True)

    # ---- the five ways to a decision

    def settled(self) -> Decision | None:
        """Return the remembered decision, unless `race="always"` or another race may improve it."""
        if self.request.settings.race == "always" or (found := self.remembered()) is None:
            return None
        # Not again what this process has raced itself: it would find the same with as much time.
        is_open = found.is_unsure and self.budget_s > 0 and self.slot not in memory().decisions
        outdated = any(are_outdated(row.options.get("rewrites")) for row in found.rows)
        return None if is_open or outdated or 0 < found.cut_s < self.budget_s else found

    def near(self) -> Decision | None:
        """Return what a machine with such a device decided, under `match="device"`, if its numbers are right here."""
        settings = self.request.settings
        if settings.match != "device" or settings.race == "always" or self.ineligible():
            return None
        found = next((each for each in self.store.near(self.key) if self.trusts(each.winner, each)), None)
        if found is None or (found.winner != EAGER and not self._is_right(found)):
            return None
        memory().decisions[self.slot] = found
        return found

    def _is_right(self, decision: Decision) -> bool:
        """Return whether the winner's numbers are right on this machine; keep what was compiled to see it."""
        from backend_kwargs.auto.race import NotRaceableError, checked

        try:
            why, compiled = checked(replace(self._raced_request, keeps=self._keeps), decision)
        except RESTARTS:
            raise
        except NotRaceableError:
            return False
        except Exception as error:  # noqa: BLE001 - a winner from elsewhere may fail in any way
            why, compiled = error_text(error), None
        if why:
            warn_once(f"{printable(decision.winner)}, stored by another machine, is not used: {printable(why)}.")
            return False
        if compiled:
            self.keep(compiled.with_facts(decision=decision))
        return True

    def ineligible(self) -> Decision | None:
        """Return default if the graph cannot be raced."""
        if not self.request.settings.budget_s:
            return self.default("its budget is 0 s")
        real, custom_ops = self.real_request, self.request.settings.race_custom_ops
        why = why_not_repeatable(real.gm, real.example_inputs, custom_ops=custom_ops)
        return self.default(why) if why else None

    def inherited(self) -> Decision | None:
        """Return the winner of earlier races if racing this graph is not worth its time."""
        settings, always = self.request.settings, self.request.settings.race == "always"
        raced = [each for (scope, _), each in memory().decisions.items() if scope == self.scope and each.rows]
        other_sizes = [each for each in raced if each.graph == self.graph]
        if not always and raced and is_tiny(self.request.gm, self.request.example_inputs):
            compiled = [each for each in raced if each.winner != EAGER]
            return self.remembered() or self.winner_of(other_sizes or compiled, "it is tiny")
        if sum(memory().race_seconds) >= settings.process_budget_s:
            spent = f"the process has spent its {settings.process_budget_s:g} s on races"
            return self.remembered() or self.winner_of(other_sizes, spent)
        if self.share_s <= 0:
            return self.remembered() or self.winner_of(other_sizes, "the graphs before it have spent its call's budget")
        if not always and sum(each.key != self.key for each in other_sizes) >= settings.most_races:
            return self.winner_of(other_sizes, f"it was raced for {settings.most_races} other sizes")
        return None

    def raced(self) -> Decision:
        """Race the graph; return default if the race fails."""
        from backend_kwargs.auto.race import NotRaceableError, race

        began, budget_s, counted_s = time.perf_counter(), self.budget_s, None
        try:
            with progress(self.request.settings.on_progress) as tick:
                result = race(replace(self._told(self._raced_request), keeps=self._keeps), tick)
            counted_s = result.counted_s
        except RESTARTS:
            raise
        except NotRaceableError as error:
            return self.default(str(error))
        except Exception as error:  # noqa: BLE001 - out of memory, or any other failure that only a race causes
            why = f"its race failed: {error_text(error)}"
            warn_once(f"A graph is compiled under default: {why}")
            return self.default(why)
        finally:
            self._spent_s[self._frame] = time.perf_counter() - began if counted_s is None else counted_s
            memory().race_seconds.append(self._spent_s[self._frame])
        cut_s = budget_s if result.cut and budget_s < ENDLESS_S else 0.0  # JSON has no infinity
        decision = self._of_result(result, cut_s, budget_s)
        found = self.remembered() if decision.provisional and decision.is_judged else None
        if found and (not found.provisional or found.cut_s > budget_s):  # it had more time, or a quieter machine
            return found
        memory().decisions[self.slot] = decision
        if decision.is_judged:
            self.store.put(decision)
        if result.compiled:
            self.keep(result.compiled.with_facts(decision=decision))
        return decision

    @property
    def _raced_request(self) -> Request:
        """The request with real inputs and what its call has left of the budget."""
        return replace(self.real_request, settings=replace(self.request.settings, budget_s=self.share_s))

    def _of_result(self, result: "RaceResult", cut_s: float, budget_s: float) -> Decision:
        return Decision(
            key=self.key,
            graph=self.graph,
            winner=result.winner.name,
            options=result.winner.options,
            compiler=result.winner.compiler,
            rows=result.rows,
            machine=self.here,
            facts=_facts(result),
            seconds=result.seconds,
            cut_s=cut_s,
            fixed=plain(self.request.context.fixed),
            inputs=self.inputs,
            model=self.model,
            budget_s=min(budget_s, ENDLESS_S),
            guards_s=result.guards_s,
        )

    def _told(self, request: Request) -> Request:
        """Return the request with what was decided for the same computation on a device of this type.

        That is at other sizes, and for this graph by other machines and under other releases of torch.
        """
        winners = frozenset(each.winner for each in self.store.of_computation(self.graph))
        offered = tuple(
            each
            for each in self.store.near(self.key)
            if each.winner not in (EAGER, DEFAULT) and self.trusts(each.winner, each)
        )
        return replace(request, winners=winners, offered=offered, verdicts=self._verdicts)

    @property
    def _verdicts(self) -> "Verdicts | None":
        """The verdicts of places, which `race="always"` times again; other machines' stores have none."""
        from backend_kwargs.auto import verdicts

        if self.request.settings.race == "always":
            return None
        local = {layer: given for layer, given in self.store.layered.layers.items() if layer.is_local}
        return verdicts.Verdicts(Layered(verdicts.KIND, local), self.here, self.request.context.fixed)

    @property
    def _keeps(self) -> bool:
        """Whether what was raced may be the result: the inputs were dynamo's, for this rank alone, not to be saved."""
        return self.bucket is None and ranks() == 1 and not saves_strictly()

    def remembered(self) -> Decision | None:
        """Return the decision of this process or the store, unless no candidate of this request sets its options."""
        found = memory().decisions.get(self.slot)
        if found is None:
            found = memory().loaded.get(name_on(self.here, self.key)) or self.store.find(self.key)
            if found and not found.is_judged:
                return None
        if found is None or not self.trusts(found.winner, found):
            return None
        return found if found.is_unsure else memory().decisions.setdefault(self.slot, found)

    def _what_is_stored(self) -> str:
        """Return that no decision is stored, what is open in it, or how those for the same computation differ."""
        if found := self.remembered():
            return f"the stored decision is provisional: {what_is_open(found)}"
        near = self.store.near(self.key)
        if near and self.request.settings.match == "exact":
            return f"a decision is stored only for another machine: {near[0].differs}; match='device' uses it"
        if near:
            return f"the decision of another machine could not be used: {near[0].differs}"
        sizes = self.store.of_computation(self.graph)
        return "a decision is stored only for other sizes" if sizes else "no decision is stored"

    def winner_of(self, others: list[Decision], why: str) -> Decision:
        """Return the winner of the latest of `others`, or default."""
        last = others[-1] if others else Decision(self.key, self.graph, DEFAULT)
        return replace(
            Decision(self.key, self.graph, last.winner, last.options, facts=f"{NOT_RACED}{why}"),
            compiler=last.compiler,
        )

    def default(self, why: str) -> Decision:
        """Return default, with the reason why the graph is not raced."""
        return self.winner_of([], why)

    # ---- what aot_compile() can save

    def _can_be_saved(self, of: Decision | RaceRow) -> bool:
        """Return whether aot_compile() can save it: not eager, no other compiler, no copies of CUDA-graph outputs."""
        copies = self.request.context.fixed.get("clone_outputs") is not False and of.options.get("triton.cudagraphs")
        return (of.winner if isinstance(of, Decision) else of.name) != EAGER and not copies and not of.compiler

    def _savable(self, decision: Decision) -> Decision:
        """Return the fastest candidate that can be saved; eager, which then fails to save, if no candidate passed."""
        rows = [row for row in decision.rows if row.name != EAGER]
        if rows and not any(row.status == "pass" and row.seconds for row in rows):
            return decision
        return self._fastest(decision, self._can_be_saved)

    def pinnable(self, decision: Decision) -> Decision:
        """Return the fastest candidate whose bits a lock fixes.

        That is no other compiler's, and eager only under deterministic algorithms, since nobody checks its gradients.
        """
        deterministic = bool(ambient()["deterministic"])

        def fits(row: RaceRow) -> bool:
            sure = not decision.is_unsure or row.name in (EAGER, DEFAULT)
            return sure and not row.compiler and (deterministic or row.name != EAGER)

        chosen = RaceRow(decision.winner, decision.options, compiler=decision.compiler)
        return decision if fits(chosen) else self._fastest(decision, fits)

    def _fastest(self, decision: Decision, fits: Callable[[RaceRow], bool]) -> Decision:
        """Return the fastest candidate that fits, or default."""
        passed = [row for row in decision.rows if row.status == "pass" and row.seconds and fits(row)]
        known = [row for row in passed if self.trusts(row.name, row)]
        best = min(known, key=lambda row: row.seconds or 0.0, default=RaceRow(DEFAULT))
        return replace(decision, winner=best.name, options=best.options, compiler="")

    # ---- the question

    @property
    def budget_s(self) -> float:
        """The seconds for this graph's race: its budget, or what is left of the process's."""
        settings = self.request.settings
        return min(settings.budget_s, settings.process_budget_s - sum(memory().race_seconds))

    @property
    def share_s(self) -> float:
        """The seconds for this graph, of what its call has left: half of it if a graph break follows it.

        How many graphs there will be is not known. Each has inputs in ordinary memory, as the graph before it leaves
        them whatever its candidate is, since results in CUDA graphs' memory are copied: so each is raced alone.
        """
        left_s = self.budget_s - sum(self._spent_s.values())
        reason = getattr(self.request.gm, "compile_subgraph_reason", None)
        return left_s / 2 if getattr(reason, "graph_break", False) else left_s

    @cached_property
    def _spent_s(self) -> dict[int, float]:
        """The seconds of races for each graph of the call that this one is compiled for, by the number of its frame.

        dynamo counts the compiles of each function between its breaks. A frame that is there already is of a later
        call, since `torch.compiler.reset()` begins to count anew.
        """
        owner, number = compiling_callable(), compile_id()
        if owner is None or number is None:
            return {}
        spent = memory().call_seconds[weakref.ref(owner), number.frame_compile_id or 0]
        if self._frame in spent:
            spent.clear()
        return spent

    @property
    def _frame(self) -> int:
        number = compile_id()
        return number.frame_id or 0 if number else 0

    @cached_property
    def real_request(self) -> Request:
        """The request with real inputs for the race, where dynamo passes fake ones."""
        if not self.bucket:
            return self.request
        return replace(self.request, graph=replace(self.request.graph, example_inputs=self.bucket.inputs()))

    @cached_property
    def asked(self) -> dict[str, object]:
        """What a decision depends on besides the graph; part of its key.

        Neither costs and gains that are only estimates, nor the table of steps: a stored winner is used as long as a
        candidate sets its options, and what came since is raced where the user asks for another race.
        """
        settings = self.request.settings
        return {
            "candidates": settings.candidates and [(name, self._meaning(name)) for name in settings.candidates],
            "compilers": versions_of(others_for(settings)),
            "effort": settings.effort,
            "objective": settings.objective,
            "tolerance": settings.tolerance,
            "options": sorted(self.request.context.fixed.items()),
            "rewrites": in_keys(self.request.context.rewrites),
            # Only if a precision is allowed, so that decisions stored without one keep their key.
            **({"precision": settings.precision, "max_error": settings.max_error} if settings.precision else {}),
        }

    def _meaning(self, name: str) -> object:
        """Return what a candidate that was named means: a compiler's or template's options, a rewrite's version."""
        if is_other(name):
            return sorted(other_of(name).options.items())
        if name in step_names():
            return []
        return in_keys([name]) if name in list_rewrites() else sorted(self.request.context.options_of(name).items())

    @cached_property
    def scope(self) -> str:
        """What two graphs must share for one's decision to serve the other: store, question, devices, torch's modes.

        Otherwise weights that one caller has frozen would be frozen for all.
        """
        stores = [layer.identity for layer in self.store.layered.layers]
        return spelled((stores, self.asked, devices_of(self.request.example_inputs), ambient()))

    @cached_property
    def key(self) -> str:
        """The key under which the decision for exactly this graph is stored."""
        return key_of(self.request.gm, self.request.example_inputs, self.asked, device_of(self.here))

    @cached_property
    def pinned_key(self) -> str:
        """The key of the graph in a lock: not of `strict`, which says what is done about a choice that it lacks."""
        options = [each for each in self.request.context.fixed.items() if each[0] not in ("lock", "strict")]
        asked = {**self.asked, "options": sorted(options)}
        return key_of(self.request.gm, self.request.example_inputs, asked, device_of(self.here))

    @property
    def slot(self) -> tuple[str, str]:
        """The key under which this process remembers the decision: its threads may be set anew."""
        return self.scope, name_on(self.here, self.key)

    @cached_property
    def graph(self) -> str:
        """The identity of the computation, whatever its sizes."""
        return computation_of(self.request.gm, self.request.example_inputs, self.asked)

    @cached_property
    def inputs(self) -> Any:
        """What is recorded of the inputs."""
        return described(self.real_request.example_inputs)

    @cached_property
    def model(self) -> str:
        """The name of what torch.compile was given."""
        return _name_of_compiled()

    @cached_property
    def here(self) -> dict[str, str | int | None]:
        """What is recorded of this machine."""
        inputs = self.request.example_inputs
        return machine(devices_of(inputs), card_of(inputs))

    @cached_property
    def store(self) -> DecisionStore:
        """The store of decisions."""
        settings = self.request.settings
        instead = memory().store if settings.race != "never" else None
        layers = _layers([Store(instead)] if instead else settings.stores)
        return DecisionStore(Layered(KIND, layers), self.here)

    def trusts(self, winner: str, of: Decision | RaceRow) -> bool:
        """Return whether a candidate of the request sets these options."""
        context = self.request.context
        return permits(self.request.settings, context.options_of, context.rewrites, (winner, of.options, of.compiler))
