"""Race a model where it runs, for `tune` and for a unit of a plan, and time it beside eager."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch.fx import GraphModule

from backend_kwargs import trial
from backend_kwargs.auto import store, verdicts
from backend_kwargs.auto.machine import machine, releases
from backend_kwargs.auto.process_memory import memory, nothing_decided
from backend_kwargs.auto.reporting import what_is_open
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.backend import Backend
from backend_kwargs.backends import CapturedGraph, Inputs
from backend_kwargs.bundles.samples import sample_of
from backend_kwargs.errors import BackendKwargsError, error_text
from backend_kwargs.facts import Call, Decision
from backend_kwargs.fleet.board import Result, Unit, backend_of, is_named, is_slower
from backend_kwargs.harness.models import model_of
from backend_kwargs.harness.study import device_of, move
from backend_kwargs.interval import Interval
from backend_kwargs.stores.documents import Document, encoded

ROUNDS, MOST_TIMING_S = 30, 20.0
HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Tuned:
    """The decisions for one size, with the seconds of eager's calls and of the compiled ones, in turn.

    `again_s` are those of the compiled call under another name: beside `compiled_s`, they show what is noise.
    """

    label: str
    decisions: list[Decision]
    eager_s: list[float] = field(default_factory=list)
    compiled_s: list[float] = field(default_factory=list)
    again_s: list[float] = field(default_factory=list)

    @property
    def speedup(self) -> Interval | None:
        """The whole call's speedup over eager, None if it was not timed."""
        return _ratio(self.eager_s, self.compiled_s)

    @property
    def same(self) -> Interval | None:
        """The compiled call's speedup over itself, None if it was not timed."""
        return _ratio(self.again_s, self.compiled_s)

    @property
    def calls_itself(self) -> bool:
        """Whether the compiled call is slower than the model itself, beyond the noise."""
        return is_slower(self.speedup, self.same)

    @property
    def kept(self) -> list[Decision]:
        """The decisions that other machines may use: those of races, without what is provisional."""
        return list({each.key: each for each in self.decisions if each.rows and not each.provisional}.values())


def _ratio(baseline: Sequence[float], candidate: Sequence[float]) -> Interval | None:
    return trial.ratio_interval(baseline, candidate) if baseline and candidate else None


@contextmanager
def racing(backend: Backend, budget_s: float) -> Iterator[Backend]:
    """Give the backend that races every graph anew, with a store of its own, and forgets it at exit."""
    with nothing_decided():
        limits = {"budget_s": budget_s, "process_budget_s": 100 * HOUR, "most_races": 1000}
        yield backend.bind("tune", {**limits, "race": "always"})


def tuned(label: str, model: Callable[..., object], inputs: object, backend: Backend) -> Tuned:
    """Return the decisions for the graphs of one call, and its times beside eager's."""
    decisions: list[Decision] = []

    def noting(gm: GraphModule, example_inputs: Inputs) -> Call:
        compiled = backend.compile(CapturedGraph(gm, example_inputs))
        if compiled.facts.decision:
            decisions.append(compiled.facts.decision)
        return compiled.call

    compiled = torch.compile(model, backend=noting, dynamic=False)
    positional, keywords = sample_of(inputs)
    if isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        try:
            state = trial.Changes.of_calls(model, positional, keywords)
        except trial.CopyError as error:
            raise BackendKwargsError(f"tune copies the model and its inputs, which failed: {error}.") from error
        except Exception as error:
            raise BackendKwargsError(f"The model fails on its example inputs in eager: {error_text(error)}.") from error
        calls = {
            name: trial.RestoringCall(partial(call, *positional, **keywords), state)
            for name, call in (("eager", model), ("compiled", compiled), ("again", compiled))
        }
        calls["compiled"]()
        if not any(decision.rows for decision in decisions):
            return Tuned(label, decisions)
        # All in each round: the race timed each candidate beside another one, eager long before the winner.
        device = device_of(model, (positional, keywords))
        samples = trial.interleave(calls, rounds=ROUNDS, device=device, budget_s=MOST_TIMING_S)
    return Tuned(label, decisions, samples["eager"], samples["compiled"], samples["again"])


def why_not_raced(decisions: Sequence[Decision]) -> str:
    """Return why no graph of a call was raced."""
    return decisions[0].facts if decisions else "torch.compile found no graph"


def _not_kept(tuned: Tuned) -> str:
    """Return what of a model is not kept, and why; "" if all that was raced is."""
    if not any(decision.rows for decision in tuned.decisions):
        return f"no graph was raced: {why_not_raced(tuned.decisions)}"
    return left_out(tuned.decisions)


def left_out(decisions: Sequence[Decision]) -> str:
    """Return what is not shipped, since it is provisional, and what would settle it; "" if nothing is."""
    reasons = dict.fromkeys(what_is_open(each) for each in decisions if each.rows and each.provisional)
    return f"provisional, so not one to ship: {' / '.join(reasons)}" if reasons else ""


def race_unit(text: bytes) -> bytes:
    """Race the unit in `text` in this process, once; return its result, with the reason if it failed, as JSON."""
    began = time.perf_counter()
    unit = msgspec.json.decode(text, type=Unit)
    try:
        result = _raced(unit)
        msgspec.json.decode(msgspec.json.encode(result), type=Result)  # its limits are checked only there
    except Exception as error:  # noqa: BLE001 - the model is the user's, and its errors end this unit alone
        why = str(error) if isinstance(error, BackendKwargsError) else error_text(error)
        result = Result(failed=why[:8000])
    seconds = time.perf_counter() - began
    return msgspec.json.encode(msgspec.structs.replace(result, seconds=seconds))


def _raced(unit: Unit) -> Result:
    if unit.threads:
        torch.set_num_threads(unit.threads)
    here = machine([unit.device_type])
    gpu = str(here["gpu"] or "")
    if unit.device_type == "cuda" and not (gpu and is_named(gpu, unit.device)):
        has = f"an {gpu}" if gpu else "no GPU"
        raise BackendKwargsError(f"The unit is for {unit.device!r}, and the worker that got it has {has}.")
    model, inputs = made(unit)
    with racing(backend_of(unit), unit.budget_s) as backend:
        found = tuned(unit.label, model, inputs, backend)
        # And what whole graphs have confirmed of places in this process.
        places = Catalogue(memory().store).places()
        confirmed = {
            name: encoded(verdicts.KIND, Document(name, each)) for name, each in places.items() if each.confirmed
        }
        documents = documents_of(found.kept) | confirmed
    return Result(
        failed=_not_kept(found),
        device_name=str(here["device"]),
        releases=releases(),
        winners=tuple(dict.fromkeys(decision.winner for decision in found.decisions if decision.rows)),
        gain=found.speedup,
        same=found.same,
        documents=documents,
    )


def made(unit: Unit) -> tuple[Any, Any]:
    """Return the model and its inputs on the unit's device, in its dtype."""
    device = torch.device(unit.device_type)
    model, inputs = model_of(unit.model, unit.sizes)
    move(model, device, training=False)
    dtype = getattr(torch, unit.dtype) if unit.dtype else None
    if dtype and isinstance(model, torch.nn.Module):
        model.to(dtype)
    return model, trial.map_tensors(torch.Tensor.detach, trial.moved(inputs, device, dtype))


def documents_of(decisions: Sequence[Decision]) -> dict[str, bytes]:
    """Return the documents of decisions, by name."""
    named = {store.name_of(each): each for each in decisions}
    return {name: encoded(store.KIND, Document(name, each)) for name, each in named.items()}
