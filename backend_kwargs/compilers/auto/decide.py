"""For each graph the fastest candidate that is right: decided once by racing, remembered, and compiled as if alone."""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from backend_kwargs.compilers.auto.cache_key import ambient, computation_of, key_of, machine, spelled
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, STEPS, step_names, trusted
from backend_kwargs.compilers.auto.ddp_buckets import Bucket, bucket_of
from backend_kwargs.compilers.auto.decision import Decision, RaceRow, plain
from backend_kwargs.compilers.auto.eligibility import communicates, is_tiny, may_communicate, why_never
from backend_kwargs.compilers.auto.ranks import agreed, ranks
from backend_kwargs.compilers.auto.reporting import forget_reported, progress, tell
from backend_kwargs.compilers.auto.request import RESTARTS, Request
from backend_kwargs.compilers.auto.store import FILE, Store, forget_trouble, open_store
from backend_kwargs.compilers.graphs import copy_of_graph
from backend_kwargs.compilers.others import installed, is_other, other_of, versions_of
from backend_kwargs.errors import error_text, printable, warn_once


@dataclass
class Memory:
    """What this process has decided and spent: it holds where the store cannot be written.

    `decisions` are by scope and key, `race_seconds` one for each race. `store` takes the place of the user's, and
    `loaded` decisions, by key, precede those of a store: they came with the cache artifacts of another process.
    """

    decisions: dict[tuple[str, str], Decision] = field(default_factory=dict)
    loaded: dict[str, Decision] = field(default_factory=dict)
    race_seconds: list[float] = field(default_factory=list)
    store: Path | None = None


_memories = [Memory()]  # the last is in use


def memory() -> Memory:
    """Return what this process remembers now."""
    return _memories[-1]


def lasting_decisions() -> list[Decision]:
    """Return what this process has decided, or found decided, and others may rely on."""
    return list({each.key: each for each in memory().decisions.values() if each.lasting}.values())


def load_decisions(decisions: Iterable[Decision]) -> None:
    """Let this process follow `decisions` as if they were in its store."""
    memory().loaded.update({each.key: each for each in decisions})


def forget_process() -> None:
    """Forget what this process has decided, so that the store is asked again."""
    _memories[-1] = Memory(store=memory().store)
    _forget_reports()


def _forget_reports() -> None:
    forget_trouble()
    forget_reported()


@contextmanager
def nothing_decided() -> Iterator[None]:
    """Let races begin with nothing decided, and forget what they decide; `race="never"` still reads its store."""
    depth = len(_memories)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _memories.append(Memory(store=Path(folder) / FILE))
            _forget_reports()
            yield
        finally:
            del _memories[depth:]
            _forget_reports()


def compile_fastest(request: Request) -> Callable[..., Any]:
    """Return the graph compiled under the winner's options, or the graph itself where eager won.

    A race leaves nothing but its decision: the winner is compiled anew, mostly out of Inductor's cache, so that what
    comes back is what compiling it alone gives.
    """
    question = _Question(request, bucket_of(request.gm, request.example_inputs))
    decision = question.decision()
    tell(decision)
    if decision.winner == EAGER:
        _warn_where_none_is_right(decision)
        return request.gm.forward
    if not decision.options and not decision.compiler:
        return request.compile_one(request.gm, request.example_inputs, {})
    spare = copy_of_graph(request.gm)
    try:
        return request.compiled(request.gm, request.example_inputs, decision.options, decision.compiler)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 - what won elsewhere, or on another graph, may fail here in any way
        why = f"{decision.winner}, which was decided, fails: {error_text(error)}"
    warn_once(f"A graph is compiled under default: {why}")
    memory().decisions.pop(question.slot, None)
    tell(question.default(why))
    return request.compile_one(spare, request.example_inputs, {})


def _warn_where_none_is_right(decision: Decision) -> None:
    compiled = [row for row in decision.rows if row.name != EAGER]
    if compiled and not any(row.status == "pass" for row in compiled):
        reasons = "; ".join(f"{row.name}: {printable(row.reason)}" for row in compiled if row.status != "skipped")
        warn_once(f"A graph runs in eager, because no candidate passed the accuracy check: {reasons}.")


@dataclass(frozen=True)
class _Question:
    """Which candidate one graph is compiled under: `decision` answers, by the first of four ways that gives one.

    1. `settled`: this process or the store holds a decision, and no larger budget may find more.
    2. `ineligible`: the graph may not be raced at all, and takes default.
    3. `inherited`: a race is not worth its time, and the graph takes the winner of other races.
    4. `raced`.

    With several ranks, one of them decides so for all. Graphs with collectives take default; under `race="never"` each
    rank takes what is stored, else default.
    """

    request: Request
    bucket: Bucket | None = None

    def decision(self) -> Decision:
        """Return what all ranks compile this graph under; as `aot_compile` needs it, where that is at work."""
        decision = self._of_all_ranks()
        # aot_compile() sets strict_autograd_cache, and can save neither a graph in eager nor copies of outputs.
        if functorch_config.strict_autograd_cache and not self._can_be_saved(decision):
            return self._savable(decision)
        return decision

    def _of_all_ranks(self) -> Decision:
        gm, settings = self.request.gm, self.request.settings
        if communicates(gm):
            return self.default("other ranks take part in it")
        if ranks() > 1 and may_communicate(gm):
            return self.default("other ranks may take part in an operator of it that is not torch's")
        if settings.race == "never":
            return self.remembered() or self.default("race='never', and no decision is stored")
        stand_in = self.default("timed out waiting for the racing rank")
        # Before anything that one rank alone knows: another may know less, and would wait.
        decision = agreed(self.key, self._of_this_rank, stand_in, settings)
        if decision.rows:
            memory().decisions[self.slot] = decision
        return decision

    def _of_this_rank(self) -> Decision:
        return self.settled() or self.ineligible() or self.inherited() or self.raced()

    # ---- the ways

    def settled(self) -> Decision | None:
        """Return the remembered decision, unless a race is wanted anyway or a larger budget may find more."""
        settings = self.request.settings
        if settings.race == "always" or (found := self.remembered()) is None:
            return None
        return None if 0 < found.cut_s < settings.budget_s else found

    def ineligible(self) -> Decision | None:
        """Return default where the graph may not be raced."""
        why = why_never(self.real_request)
        return self.default(why) if why else None

    def inherited(self) -> Decision | None:
        """Return the winner of other races where a race of this graph is not worth its time."""
        settings, always = self.request.settings, self.request.settings.race == "always"
        raced = [each for (scope, _), each in memory().decisions.items() if scope == self.scope and each.rows]
        other_sizes = [each for each in raced if each.graph == self.graph]
        if not always and raced and is_tiny(self.request):
            compiled = [each for each in raced if each.winner != EAGER]
            return self.remembered() or self.winner_of(other_sizes or compiled, "it is tiny")
        if sum(memory().race_seconds) >= settings.process_budget_s:
            spent = f"the process has spent its {settings.process_budget_s:g} s on races"
            return self.remembered() or self.winner_of(other_sizes, spent)
        if not always and sum(each.key != self.key for each in other_sizes) >= settings.most_races:
            return self.winner_of(other_sizes, f"it was raced for {settings.most_races} other sizes")
        return None

    def raced(self) -> Decision:
        """Race the graph; default stands in where that fails."""
        from backend_kwargs.compilers.auto.race import UnfitError, race

        began, spent = time.perf_counter(), memory().race_seconds
        settings = self.request.settings
        budget_s = min(settings.budget_s, settings.process_budget_s - sum(spent))
        try:
            with progress() as tick:
                result = race(replace(self.real_request, settings=replace(settings, budget_s=budget_s)), tick)
        except RESTARTS:
            raise
        except UnfitError as error:
            return self.default(str(error))
        except Exception as error:  # noqa: BLE001 - out of memory, or what only a race does to a graph
            why = f"its race failed: {error_text(error)}"
            warn_once(f"A graph is compiled under default: {why}")
            return self.default(why)
        finally:
            spent.append(time.perf_counter() - began)
        decision = Decision(
            key=self.key,
            graph=self.graph,
            winner=result.winner.name,
            options=result.winner.options,
            compiler=result.winner.compiler,
            rows=result.rows,
            machine=machine(),
            facts=str(result.stats),
            seconds=result.seconds,
            cut_s=budget_s if result.cut else 0.0,
            fixed=plain(self.request.tools.fixed),
        )
        memory().decisions[self.slot] = decision
        if decision.lasting:
            self.store.put(decision)
        return decision

    def remembered(self) -> Decision | None:
        """Return what this process or the store holds, unless no candidate of this request sets its options."""
        found = memory().decisions.get(self.slot)
        if found is None:
            found = memory().loaded.get(self.key) or self.store.find(self.key)
            if found and not found.lasting:
                return None
        if found is None or not self._trusts(found.winner, found):
            return None
        return memory().decisions.setdefault(self.slot, found)

    def winner_of(self, others: list[Decision], why: str) -> Decision:
        """Return the winner of the last of `others`, else default."""
        last = others[-1] if others else Decision(self.key, self.graph, DEFAULT)
        return replace(
            Decision(self.key, self.graph, last.winner, last.options, facts=f"a graph not raced: {why}"),
            compiler=last.compiler,
        )

    def default(self, why: str) -> Decision:
        """Return default, as a graph that is not raced takes it."""
        return self.winner_of([], why)

    # ---- what aot_compile() can save

    def _can_be_saved(self, of: Decision | RaceRow) -> bool:
        """Tell whether aot_compile() can save it: no other compiler, no eager, no copies that CUDA graphs are given."""
        copies = self.request.tools.fixed.get("clone_outputs") is not False and of.options.get("triton.cudagraphs")
        return (of.winner if isinstance(of, Decision) else of.name) != EAGER and not copies and not of.compiler

    def _savable(self, decision: Decision) -> Decision:
        """Return the fastest that can be saved; eager, which then fails, where all that was compiled is wrong."""
        rows = [row for row in decision.rows if row.name != EAGER]
        passed = [row for row in rows if row.status == "pass" and row.seconds]
        if rows and not passed:
            return decision
        savable = [row for row in passed if self._can_be_saved(row)]
        known = [row for row in savable if self._trusts(row.name, row)]
        best = min(known, key=lambda row: row.seconds or 0.0, default=RaceRow(DEFAULT))
        return replace(decision, winner=best.name, options=best.options, compiler="")

    # ---- what the question is

    @cached_property
    def real_request(self) -> Request:
        """The request with the inputs that a race runs on, where dynamo has fake ones."""
        return replace(self.request, example_inputs=self.bucket.inputs()) if self.bucket else self.request

    @cached_property
    def asked(self) -> dict[str, Any]:
        """What is asked of a race beside the graph, as decisions are keyed by it."""
        settings = self.request.settings
        return {
            "steps": STEPS,
            "candidates": settings.candidates and [(name, self._template(name)) for name in settings.candidates],
            "compilers": versions_of(self._compilers),
            "effort": settings.effort,
            "objective": settings.objective,
            "tolerance": settings.tolerance,
            "options": sorted(self.request.tools.fixed.items()),
        }

    def _template(self, name: str) -> list[tuple[str, Any]]:
        """Return what a template of this name sets now; steps are in the table."""
        if is_other(name):
            return sorted(other_of(name).options.items())
        return [] if name in step_names() else sorted(self.request.tools.options_of(name).items())

    @property
    def _compilers(self) -> list[str]:
        """The compilers beside Inductor that may be raced."""
        settings = self.request.settings
        if settings.candidates is not None:
            return [*filter(is_other, settings.candidates)]
        return [*installed()] if settings.effort == "full" else []

    @cached_property
    def scope(self) -> str:
        """Within what one decision may stand in for another: a store, a question, devices, a mode of torch."""
        tensors = [value for value in self.request.example_inputs if isinstance(value, torch.Tensor)]
        devices = sorted({tensor.device.type for tensor in tensors})
        return spelled((str(self.store.path), self.asked, devices, ambient()))

    @cached_property
    def key(self) -> str:
        """What a decision for this very graph is stored under."""
        return key_of(self.request.gm, self.request.example_inputs, self.asked)

    @property
    def slot(self) -> tuple[str, str]:
        """Where this process remembers its decision."""
        return self.scope, self.key

    @cached_property
    def graph(self) -> str:
        """What names the computation, whatever its sizes."""
        return computation_of(self.request.gm, self.request.example_inputs, self.asked)

    @cached_property
    def store(self) -> Store:
        """The file of decisions."""
        settings = self.request.settings
        instead = memory().store if settings.race != "never" else None
        return Store(instead) if instead else open_store(settings.store)

    def _trusts(self, winner: str, of: Decision | RaceRow) -> bool:
        listed = (*(self.request.settings.candidates or ()), *self._compilers)
        return trusted(winner, of.options, self.request.tools.options_of, listed, of.compiler)
