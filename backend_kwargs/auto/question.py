"""A request to `auto` for one graph, and the question that `decide` answers: keys, budget, and what is decided already.

Also which candidate of a decision `aot_compile()` can save, and which a lock can fix.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.fx import GraphModule

from backend_kwargs.auto.candidates import (
    OptionsOf,
    RaceCandidate,
    allowed_candidates,
    others_for,
    step_names,
    trusted,
)
from backend_kwargs.auto.machine import device_of, machine
from backend_kwargs.auto.process_memory import CallOfGraphs, memory
from backend_kwargs.auto.ranks import may_differ, ranks
from backend_kwargs.auto.settings import RaceSettings
from backend_kwargs.auto.store import KIND, DecisionStore, name_on
from backend_kwargs.auto.verdicts import KIND as VERDICT
from backend_kwargs.auto.verdicts import Verdicts
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.backends.others import is_other, other_of, versions_of
from backend_kwargs.errors import BackendKwargsError, warn_once
from backend_kwargs.facts import DEFAULT, EAGER, Compiled, Decision, RaceRow, Unraced
from backend_kwargs.graphs.ddp_buckets import Bucket
from backend_kwargs.graphs.spelling import ambient, card_of, described, devices_of, kinds, signature, spelled, structure
from backend_kwargs.keys import key
from backend_kwargs.options import Limit, Options
from backend_kwargs.rewrites.table import in_keys, list_rewrites
from backend_kwargs.stores import Store
from backend_kwargs.stores.layered import Layered, Reached, reached
from backend_kwargs.torch_internals.dynamo import compile_id, compiling
from backend_kwargs.torch_internals.functorch import saves_strictly


@dataclass(frozen=True, slots=True)
class Request:
    """A graph to compile with its fastest candidate.

    `compile(graph, options, compiler)` compiles one: by Inductor together with the user's options, `fixed`, if
    `compiler` is "", otherwise by the compiler of that name. `options_of` returns a template's options, and `limits`
    what keeps options from acting here. `rewrites` may be raced. `keeps`: what a race has compiled may be what this
    compile returns. `of_several`: whether the user's call has other graphs too; None where calls do not choose between
    ways. `offered` is what other machines and releases of torch have decided for this graph, as it was chosen there,
    which is raced first. `verdicts` stores the verdicts of places, if these may be used.
    """

    graph: CapturedGraph
    settings: RaceSettings
    compile: Callable[[CapturedGraph, Options, str], Compiled]
    options_of: OptionsOf
    limits: Callable[[Options], Mapping[str, Limit]]
    fixed: Options
    rewrites: tuple[str, ...] = ()
    keeps: bool = False
    of_several: bool | None = None
    offered: tuple[RaceCandidate, ...] = ()
    verdicts: Verdicts | None = None

    @property
    def gm(self) -> GraphModule:
        """Dynamo's graph."""
        return self.graph.gm

    @property
    def example_inputs(self) -> Inputs:
        """The inputs of the call for which dynamo compiles it."""
        return self.graph.example_inputs

    @property
    def frozen(self) -> bool:
        """Whether the caller has parameters frozen, and the mode lets them be."""
        return bool(self.fixed.get("freezing")) and not torch.is_grad_enabled()


@dataclass(frozen=True)
class Question:
    """One graph and how it may be compiled. What it takes to answer is computed when a source asks for it."""

    request: Request
    bucket: Bucket | None = None

    # ---- what a race gets

    @cached_property
    def real_request(self) -> Request:
        """The request with real inputs, where dynamo passes fake ones."""
        if not self.bucket:
            return self.request
        return replace(self.request, graph=replace(self.request.graph, example_inputs=self.bucket.inputs()))

    @property
    def raced_request(self) -> Request:
        """The request with real inputs, the budget that its call has left, and what is known of this graph.

        That is decisions of other machines and releases of torch, and verdicts, which `race="always"` times again.
        What was raced may be the result if the inputs were dynamo's, for this rank alone, and not to be saved.
        """
        settings, fixed = replace(self.request.settings, budget_s=self.share_s), self.request.fixed
        keeps = self.bucket is None and ranks() == 1 and not saves_strictly()
        several = bool(self._spent_s) or self._is_broken_off if may_differ() and not self.request.graph.pins else None
        near = [each for each in self.store.near(self.key) if each.winner not in (EAGER, DEFAULT)]
        offered = tuple(
            RaceCandidate(each.winner, each.options, over=False, complexity=2, compiler=each.compiler)
            for each in near
            if self.trusts(each.winner, each)
        )
        layered = Layered(VERDICT, self.store.layered.layers)
        known = Verdicts(layered, self.here, fixed, again=settings.race == "always")
        return replace(
            self.real_request, settings=settings, keeps=keeps, of_several=several, offered=offered, verdicts=known
        )

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
        return left_s / 2 if self._is_broken_off else left_s

    @property
    def _is_broken_off(self) -> bool:
        reason = getattr(self.request.gm, "compile_subgraph_reason", None)
        return bool(getattr(reason, "graph_break", False))

    def note_spent(self, seconds: float) -> None:
        """Count the seconds of this graph's race."""
        number = compile_id()
        self._spent_s[number.frame_id or 0 if number else 0] = seconds
        memory().race_seconds.append(seconds)

    @cached_property
    def call(self) -> CallOfGraphs | None:
        """The call for which this graph is compiled, which other graphs may be of; None if it is not known."""
        owner, number, _ = compiling()
        return (weakref.ref(owner), number.frame_compile_id or 0) if owner is not None and number is not None else None

    @cached_property
    def _spent_s(self) -> dict[int, float]:
        """The seconds of races for each graph of the call that this one is compiled for, by the number of its frame.

        dynamo counts the compiles of each function between its breaks. A frame that is there already is of a later
        call, since `torch.compiler.reset()` begins to count anew.
        """
        number = compile_id()
        if self.call is None or number is None:
            return {}
        spent = memory().call_seconds[self.call]
        if (number.frame_id or 0) in spent:
            spent.clear()
        return spent

    # ---- its keys

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
            "options": sorted(self.request.fixed.items()),
            "rewrites": in_keys(self.request.rewrites),
            # Only if a precision is allowed, so that decisions stored without one keep their key.
            **({"precision": settings.precision, "max_error": settings.max_error} if settings.precision else {}),
        }

    def _meaning(self, name: str) -> object:
        """Return what a candidate that was named means: a compiler's or template's options, a rewrite's version."""
        if is_other(name):
            return sorted(other_of(name).options.items())
        if name in step_names():
            return []
        return in_keys([name]) if name in list_rewrites() else sorted(self.request.options_of(name).items())

    @cached_property
    def scope(self) -> str:
        """What two graphs must share for one's decision to serve the other: store, question, devices, torch's modes.

        Otherwise weights that one caller has frozen would be frozen for all.
        """
        stores = [layer.identity for layer in self.store.layered.layers]
        return spelled((stores, self.asked, devices_of(self.request.example_inputs), ambient()))

    @cached_property
    def _whatever_its_sizes(self) -> dict[str, object]:
        """The fields of its keys that recompiles for other sizes share."""
        return {"structure": structure(self.request.gm), "ambient": ambient(), "asked": spelled(self.asked)}

    @cached_property
    def graph(self) -> str:
        """The identity of the computation, whatever its sizes."""
        return key("computation", kinds=kinds(self.request.example_inputs), **self._whatever_its_sizes)

    @cached_property
    def key(self) -> str:
        """The key under which the decision for exactly this graph is stored.

        It begins with the identity of the computation, so that a store lists what it has for other sizes too.
        """
        inputs = signature(self.request.gm, self.request.example_inputs)
        exact = key("decision", signature=inputs, device=device_of(self.here), **self._whatever_its_sizes)
        return f"{self.graph}{exact}"[:64]

    @cached_property
    def pinned_key(self) -> str:
        """The key of the graph in a lock: not of `strict`, which says what is done about a choice that it lacks."""
        return self.without("lock", "strict").key

    @property
    def slot(self) -> tuple[str, str]:
        """The key under which this process remembers the decision: its threads may be set anew."""
        return self.scope, name_on(self.here, self.key)

    def without(self, *options: str) -> "Question":
        """Return the question without some of the user's options."""
        fixed = {name: value for name, value in self.request.fixed.items() if name not in options}
        return replace(self, request=replace(self.request, fixed=fixed))

    # ---- what is recorded with a decision, for people

    @cached_property
    def here(self) -> dict[str, str | int | None]:
        """What is recorded of this machine."""
        inputs = self.request.example_inputs
        return machine(devices_of(inputs), card_of(inputs))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """What is recorded of the inputs."""
        return described(self.real_request.example_inputs)

    @cached_property
    def model(self) -> str:
        """The name of the class or function that was given to torch.compile, "" if it is not known."""
        if (given := compiling().given) is None:
            return ""
        inner = inspect.unwrap(given)
        owner = getattr(inner, "__self__", inner)  # a module's forward
        return str(getattr(owner, "__qualname__", type(owner).__qualname__))

    # ---- what is decided already

    @cached_property
    def store(self) -> DecisionStore:
        """The store of decisions."""
        settings = self.request.settings
        instead = memory().store if settings.race != "never" else None
        return DecisionStore(Layered(KIND, _layers([Store(instead)] if instead else settings.stores)), self.here)

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

    def trusts(self, winner: str, of: Decision | RaceRow) -> bool:
        """Return whether a candidate of the request sets these options."""
        request = self.request
        allowed = allowed_candidates(request.settings, request.options_of, request.rewrites)
        return trusted(winner, of.options, of.compiler, allowed)

    def default(self, why: str, unraced: Unraced = Unraced.GRAPH) -> Decision:
        """Return default, with the reason why the graph is not raced."""
        return Decision(self.key, self.graph, DEFAULT, facts=why, unraced=unraced)


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


def savable(question: Question, decision: Decision) -> Decision:
    """Return the fastest candidate that `aot_compile()` can save; eager, which then fails to save, if none passed.

    It saves Inductor's code alone, without what copies the outputs of CUDA graphs.
    """
    copies = question.request.fixed.get("clone_outputs") is not False
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
