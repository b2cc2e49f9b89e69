"""For each graph the fastest candidate that is right: decided once by racing, remembered, and compiled as if alone."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from backend_kwargs.compilers.auto.agreement import agreed
from backend_kwargs.compilers.auto.apart import has_memory
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, trusted
from backend_kwargs.compilers.auto.decisions import Decision, Store, store_path
from backend_kwargs.compilers.auto.facts import communicates
from backend_kwargs.compilers.auto.key import key_of, machine, structure_key
from backend_kwargs.compilers.auto.race import Request, race
from backend_kwargs.compilers.auto.telling import progress, tell
from backend_kwargs.errors import warn_once

TINY_OPS, TINY_BYTES = 3, 1 << 20  # a graph below both costs less than its race, whoever wins

# What this process has decided: it holds where the store cannot be written, and tells what a graph's kin chose.
_decided: dict[str, Decision] = {}
_spent: list[float] = []


def compile_fastest(request: Request) -> Callable[..., Any]:
    """Return the graph compiled under the winner's options, or the graph itself where eager won.

    A race leaves nothing but its decision: the winner is compiled anew, mostly out of Inductor's cache, so that what
    comes back is what compiling it alone gives.
    """
    decision = _Deciding(request).decision()
    tell(decision)
    if decision.winner == EAGER:
        _warn_where_none_is_right(decision)
        return request.gm.forward
    return request.compile_one(request.gm, request.example_inputs, decision.options)


def forget_process() -> None:
    """Forget what this process has decided, so that the store is asked again."""
    _decided.clear()
    _spent.clear()


def _warn_where_none_is_right(decision: Decision) -> None:
    compiled = [row for row in decision.rows if row["name"] != EAGER]
    if not any(row["status"] == "pass" for row in compiled):
        reasons = "; ".join(f"{row['name']}: {row['reason']}" for row in compiled if row["status"] != "skipped")
        warn_once(f"A graph runs in eager, as no candidate is right: {reasons}.")


@dataclass(frozen=True)
class _Deciding:
    request: Request

    @cached_property
    def key(self) -> str:
        settings = self.request.settings
        asked = {
            "candidates": settings.candidates,
            "effort": settings.effort,
            "objective": settings.objective,
            "tolerance": settings.tolerance,
            "options": sorted(self.request.tools.fixed.items()),
        }
        return key_of(self.request.gm, self.request.example_inputs, asked)

    @cached_property
    def graph(self) -> str:
        return structure_key(self.request.gm)

    @cached_property
    def store(self) -> Store:
        return Store(store_path(self.request.settings.store))

    def decision(self) -> Decision:
        """Return the decision that is known, a race's, or what stands in where no race may be run."""
        if self.request.settings.race != "always" and (known := self.known()):
            return known
        if why := self.why_not_raced():
            return self.inherited(why)
        decision = agreed(
            self.key,
            self.raced,
            lambda: self.inherited("the rank that races it was not heard of in time"),
            self.request.settings,
        )
        return _decided.setdefault(self.key, decision) if decision.rows else decision

    def known(self) -> Decision | None:
        found = _decided.get(self.key) or self.store.find(self.key)
        if found is None or not trusted(found.winner, found.options, self.request.tools.options_of):
            return None
        return _decided.setdefault(self.key, found)

    def raced(self) -> Decision:
        began = time.perf_counter()
        try:
            with progress() as tick:
                outcome = race(self.request, tick)
        finally:
            _spent.append(time.perf_counter() - began)
        winner, rows = outcome.winner, tuple(asdict(row) for row in outcome.rows)
        facts, seconds = str(outcome.facts), outcome.seconds
        decision = Decision(self.key, self.graph, winner.name, winner.options, rows, machine(), facts, seconds)
        _decided[self.key] = decision
        self.store.put(decision)
        return decision

    def why_not_raced(self) -> str:
        """Return why this graph is not raced, "" where it is to be."""
        settings, inputs = self.request.settings, self.request.example_inputs
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if settings.race == "never":
            return "race='never', and no decision is stored"
        if not tensors:
            return "no input is a tensor"
        if not all(map(has_memory, tensors)):
            return "an input is no plain tensor"
        if communicates(self.request.gm):
            return "other ranks take part in it"
        if sum(_spent) >= settings.process_budget_s:
            return f"the process has spent its {settings.process_budget_s:g} s on races"
        if len(self.kin) >= settings.most_races:
            return f"it was raced for {settings.most_races} other sizes"
        if _decided and self.is_tiny(tensors):
            return "it is tiny"
        return ""

    def is_tiny(self, tensors: list[torch.Tensor]) -> bool:
        computing = [node for node in self.request.gm.graph.nodes if node.op.startswith("call")]
        return len(computing) < TINY_OPS and sum(tensor.nbytes for tensor in tensors) < TINY_BYTES

    @cached_property
    def kin(self) -> list[Decision]:
        """Races of the same computation for other sizes, the latest last."""
        return [each for each in _decided.values() if each.graph == self.graph and each.rows]

    def inherited(self, why: str) -> Decision:
        """Return the last winner of the same computation, else of the last race in this process, else default."""
        neighbours = [each for each in _decided.values() if each.rows and each.winner != EAGER]
        like = self.kin or neighbours or [Decision(self.key, self.graph, DEFAULT)]
        return Decision(self.key, self.graph, like[-1].winner, like[-1].options, facts=f"a graph not raced: {why}")
