"""For each graph the fastest candidate that is right: decided once by racing, remembered, and compiled as if alone."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config

from backend_kwargs.compilers.auto.cache_key import ambient, computation_of, key_of, machine, spelled
from backend_kwargs.compilers.auto.candidates import DEFAULT, EAGER, STEPS, step_names, trusted
from backend_kwargs.compilers.auto.decision import Decision, Row, plain
from backend_kwargs.compilers.auto.eligibility import communicates, has_side_effects, holds_state, may_communicate
from backend_kwargs.compilers.auto.ranks import agreed, ranks
from backend_kwargs.compilers.auto.reporting import forget_told, progress, tell
from backend_kwargs.compilers.auto.request import RESTARTS, Request
from backend_kwargs.compilers.auto.store import FILE, Store, forget_trouble, open_store
from backend_kwargs.compilers.graphs import copy_of_graph, has_memory
from backend_kwargs.errors import printable, said, warn_once

TINY_OPS, TINY_BYTES = 3, 1 << 20  # a graph below both costs less than its race, whoever wins

# What this process has decided, by circle and key: it holds where the store cannot be written, and tells what a
# graph's kin chose.
_decided: dict[tuple[str, str], Decision] = {}
_spent: list[float] = []
_instead: list[Path] = []


def compile_fastest(request: Request) -> Callable[..., Any]:
    """Return the graph compiled under the winner's options, or the graph itself where eager won.

    A race leaves nothing but its decision: the winner is compiled anew, mostly out of Inductor's cache, so that what
    comes back is what compiling it alone gives.
    """
    deciding = _Deciding(request)
    decision = deciding.decision()
    tell(decision)
    if decision.winner == EAGER:
        _warn_where_none_is_right(decision)
        return request.gm.forward
    if not decision.options:
        return request.compile_one(request.gm, request.example_inputs, {})
    return _compiled_else_under_default(deciding, decision)


def _compiled_else_under_default(deciding: "_Deciding", decision: Decision) -> Callable[..., Any]:
    request = deciding.request
    spare = copy_of_graph(request.gm)
    try:
        return request.compile_one(request.gm, request.example_inputs, decision.options)
    except RESTARTS:
        raise
    except Exception as error:  # noqa: BLE001 - what won elsewhere, or on another graph, may fail here in any way
        why = f"{decision.winner}, which was decided, fails: {said(error)}"
    warn_once(f"A graph is compiled under default: {why}")
    _decided.pop(deciding.place, None)
    tell(deciding.default(why))
    return request.compile_one(spare, request.example_inputs, {})


def forget_process() -> None:
    """Forget what this process has decided, so that the store is asked again."""
    _decided.clear()
    _spent.clear()
    forget_trouble()
    forget_told()


@contextmanager
def nothing_decided() -> Iterator[None]:
    """Let races begin with nothing decided, and forget what they decide; `race="never"` still reads its store."""
    kept = dict(_decided), list(_spent)
    forget_process()
    with tempfile.TemporaryDirectory() as folder:
        _instead.append(Path(folder) / FILE)
        try:
            yield
        finally:
            _instead.pop()
            forget_process()
            _decided.update(kept[0])
            _spent.extend(kept[1])


def _warn_where_none_is_right(decision: Decision) -> None:
    compiled = [row for row in decision.rows if row.name != EAGER]
    if compiled and not any(row.status == "pass" for row in compiled):
        reasons = "; ".join(f"{row.name}: {printable(row.reason)}" for row in compiled if row.status != "skipped")
        warn_once(f"A graph runs in eager, as no candidate is right: {reasons}.")


@dataclass(frozen=True)
class _Deciding:
    request: Request

    @cached_property
    def asked(self) -> dict[str, Any]:
        settings = self.request.settings
        return {
            "steps": STEPS,
            "candidates": settings.candidates and [(name, self.template(name)) for name in settings.candidates],
            "effort": settings.effort,
            "objective": settings.objective,
            "tolerance": settings.tolerance,
            "options": sorted(self.request.tools.fixed.items()),
        }

    def template(self, name: str) -> list[tuple[str, Any]]:
        """Return what a template of this name sets now; steps are in the table."""
        return [] if name in step_names() else sorted(self.request.tools.options_of(name).items())

    @cached_property
    def circle(self) -> str:
        """Return within what one decision may stand in for another: a store, a question, devices, a mode of torch."""
        devices = sorted({tensor.device.type for tensor in self.tensors})
        return spelled((str(self.store.path), self.asked, devices, ambient()))

    @property
    def place(self) -> tuple[str, str]:
        return self.circle, self.key

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.request.example_inputs if isinstance(value, torch.Tensor)]

    @cached_property
    def key(self) -> str:
        return key_of(self.request.gm, self.request.example_inputs, self.asked)

    @cached_property
    def graph(self) -> str:
        return computation_of(self.request.gm, self.request.example_inputs, self.asked)

    @cached_property
    def store(self) -> Store:
        settings = self.request.settings
        return Store(_instead[-1]) if _instead and settings.race != "never" else open_store(settings.store)

    def decision(self) -> Decision:
        """Return what all ranks compile this graph under; as `aot_compile` needs it, where that is at work."""
        decision = self.found()
        saving = functorch_config.strict_autograd_cache  # aot_compile() sets it, and can save no graph in eager
        return (
            self.compiled(decision) if saving and not self.can_be_saved(decision.winner, decision.options) else decision
        )

    def found(self) -> Decision:
        """Return the decision that is known, a race's, or what stands in where no race may be run."""
        if communicates(self.request.gm):
            return self.default("other ranks take part in it")
        if ranks() > 1 and may_communicate(self.request.gm):
            return self.default("other ranks may take part in an operator of it that is not torch's")
        if self.request.settings.race == "never":
            return self.known() or self.default("race='never', and no decision is stored")
        stand_in = self.default("the rank that races it was not heard of in time")
        # Before anything that one rank alone knows: another may know less, and would wait.
        decision = agreed(self.key, self.alone, stand_in, self.request.settings)
        if decision.rows:
            _decided[self.place] = decision
        return decision

    def alone(self) -> Decision:
        """Return what this process decides, by what it knows or by a race."""
        known = self.known() if self.request.settings.race != "always" else None
        return known or self.not_raced() or self.raced()

    def known(self) -> Decision | None:
        """Return what is decided, unless a larger budget may find more."""
        found, settings = self.remembered(), self.request.settings
        cut = found is not None and 0 < found.cut_s < settings.budget_s
        return None if cut and settings.race != "never" else found

    def remembered(self) -> Decision | None:
        """Return what is decided, unless no candidate of this request sets its options."""
        found = _decided.get(self.place)
        if found is None and (found := self.store.find(self.key)) and not found.lasting:
            return None
        if found is None or not self.trusts(found.winner, found.options):
            return None
        return _decided.setdefault(self.place, found)

    def trusts(self, winner: str, options: Mapping[str, Any]) -> bool:
        return trusted(winner, options, self.request.tools.options_of, self.request.settings.candidates or ())

    def raced(self) -> Decision:
        from backend_kwargs.compilers.auto.race import UnfitError, race

        began = time.perf_counter()
        settings = self.request.settings
        budget_s = min(settings.budget_s, settings.process_budget_s - sum(_spent))
        try:
            with progress() as tick:
                outcome = race(replace(self.request, settings=replace(settings, budget_s=budget_s)), tick)
        except RESTARTS:
            raise
        except UnfitError as error:
            return self.default(str(error))
        except Exception as error:  # noqa: BLE001 - out of memory, or what only a race does to a graph
            why = f"its race failed: {said(error)}"
            warn_once(f"A graph is compiled under default: {why}")
            return self.default(why)
        finally:
            _spent.append(time.perf_counter() - began)
        decision = Decision(
            self.key,
            self.graph,
            outcome.winner.name,
            outcome.winner.options,
            outcome.rows,
            machine(),
            str(outcome.facts),
            outcome.seconds,
            budget_s if outcome.cut else 0.0,
            fixed=plain(self.request.tools.fixed),
        )
        _decided[self.place] = decision
        if decision.lasting:
            self.store.put(decision)
        return decision

    def not_raced(self) -> Decision | None:
        """Return what stands in where the graph is not to be raced, None where it is."""
        settings = self.request.settings
        if why := self.why_never():
            return self.default(why)
        always = settings.race == "always"
        if not always and self.circles and self.is_tiny():
            return self.remembered() or self.like(self.kin or self.neighbours, "it is tiny")
        if sum(_spent) >= settings.process_budget_s:
            spent = f"the process has spent its {settings.process_budget_s:g} s on races"
            return self.remembered() or self.like(self.kin, spent)
        if not always and sum(each.key != self.key for each in self.kin) >= settings.most_races:
            return self.like(self.kin, f"it was raced for {settings.most_races} other sizes")
        return None

    def why_never(self) -> str:
        if not self.request.settings.budget_s:
            return "its budget is 0 s"
        if not self.tensors:
            return "no input is a tensor"
        if not all(map(has_memory, self.tensors)):
            return "an input is no plain tensor"
        if any(isinstance(value, torch.SymInt) and not value.node.has_hint() for value in self.request.example_inputs):
            return "a size is not known before it runs"
        if has_side_effects(self.request.gm):
            return "it has side effects, which a race would repeat"
        if not self.request.settings.race_custom_ops and may_communicate(self.request.gm):
            return "it holds operators that are not torch's, and race_custom_ops is False"
        if holds_state(self.request.gm):
            return "it holds tensors of its own, which a race would change"
        if torch.is_grad_enabled() and self.changes_what_trains():
            return "it changes in place an input that trains"
        return ""

    def changes_what_trains(self) -> bool:
        """Tell whether an input with gradient history is changed, as no copy of it, without that history, can be."""
        placeholders = self.request.gm.graph.find_nodes(op="placeholder")
        training = [
            node.meta.get("example_value")
            for node, value in zip(placeholders, self.request.example_inputs, strict=True)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        return any(isinstance(f, torch.Tensor) and not f.is_inference() and f._version > 0 for f in training)

    def is_tiny(self) -> bool:
        computing = [node for node in self.request.gm.graph.nodes if node.op.startswith("call")]
        return len(computing) < TINY_OPS and sum(tensor.nbytes for tensor in self.tensors) < TINY_BYTES

    @cached_property
    def kin(self) -> list[Decision]:
        """Races of the same computation for other sizes, the latest last."""
        return [each for each in self.circles if each.graph == self.graph]

    @property
    def neighbours(self) -> list[Decision]:
        """Races of other graphs that a compiled candidate won, the latest last."""
        return [each for each in self.circles if each.winner != EAGER]

    @property
    def circles(self) -> list[Decision]:
        return [each for (circle, _), each in _decided.items() if circle == self.circle and each.rows]

    def default(self, why: str) -> Decision:
        return self.like([], why)

    def like(self, others: list[Decision], why: str) -> Decision:
        """Return the winner of the last of `others`, else default."""
        like = others[-1] if others else Decision(self.key, self.graph, DEFAULT)
        return Decision(self.key, self.graph, like.winner, like.options, facts=f"a graph not raced: {why}")

    def can_be_saved(self, winner: str, options: Mapping[str, Any]) -> bool:
        """Tell whether aot_compile() can save it: neither eager nor the copies that CUDA graphs are given."""
        copies = self.request.tools.fixed.get("clone_outputs") is not False and options.get("triton.cudagraphs")
        return winner != EAGER and not copies

    def compiled(self, decision: Decision) -> Decision:
        """Return the fastest that can be saved; eager, which then fails, where all that was compiled is wrong."""
        rows = [row for row in decision.rows if row.name != EAGER]
        passed = [row for row in rows if row.status == "pass" and row.seconds]
        if rows and not passed:
            return decision
        savable = [row for row in passed if self.can_be_saved(row.name, row.options)]
        known = [row for row in savable if self.trusts(row.name, row.options)]
        best = min(known, key=lambda row: row.seconds or 0.0, default=Row(DEFAULT))
        return replace(decision, winner=best.name, options=best.options)
