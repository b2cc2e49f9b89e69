"""Planted peers with a known outcome: if one has another outcome, no other figure of the run can be trusted.

The `timed` controls run in every group: the baseline again, whose ratio is the noise floor, and the baseline with 5 %
more work, which must show at its size. The `FAULTY` ones are wrong in one way each, and a check must report it:
`expected` is the status.
"""

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs.trial import Interval, State, Status, interleave, percentile, ratio_interval
from backend_kwargs.trial.trees import tensors_of
from benchmarks.execution.device_timer import L2, device_times
from benchmarks.execution.records import AGAIN
from benchmarks.workloads.peers import Peer

BASELINE = "eager"
SLOWED = "+5 %"
INJECTED = 0.05
BELIEVED = (0.03, 0.12)  # the launch alone takes a tenth of the shortest calls
CALIBRATING_ROUNDS, CALIBRATING_S = 10, 2.0
SPIN_CYCLES = 1_000_000

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Timer:
    """The clock and the state of the L2 under which a group is timed."""

    device: torch.device
    events: bool
    l2: L2 = "cold"

    def samples(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Time calls in a few rounds."""
        given: dict[str, Any] = {"rounds": CALIBRATING_ROUNDS, "device": self.device, "budget_s": CALIBRATING_S}
        return device_times(calls, l2=self.l2, **given) if self.events else interleave(calls, **given)


def timed(call: Callable[[], object], timer: Timer) -> dict[str, Callable[[], object]]:
    """Return the controls timed with the baseline `call`, which they repeat; `timer` measures the injected work."""
    return {AGAIN: call, SLOWED: slowed(call, timer)}


@dataclass(frozen=True, slots=True)
class Slowed:
    """A call with more work after it; `injected` is the measured share of that work in the call's time."""

    call: Callable[[], object]
    spin: Callable[[], None]
    injected: float = INJECTED

    @property
    def state(self) -> State:
        """What the call puts back first."""
        return getattr(self.call, "state", State())

    def __call__(self) -> object:
        """Return what the call returns, later."""
        result = self.call()
        self.spin()
        return result


def slowed(call: Callable[[], object], timer: Timer, share: float = INJECTED) -> Slowed:
    """Return `call` with `share` more work.

    Its own launch takes some 2 µs, which are part of the share: the shortest calls get more than requested.
    """
    alone, launched = _beside(Slowed(call, spinning(0.0, timer.device)), timer)
    launch = max(min(launched) - min(alone), 0.0)  # disturbances only make a sample longer
    slower = Slowed(call, spinning(max(share * min(alone) - launch, 0.0), timer.device))
    alone, slow = _beside(slower, timer)
    return replace(slower, injected=ratio_interval(slow, alone).median - 1)


def _beside(slower: Slowed, timer: Timer) -> tuple[list[float], list[float]]:
    """Time the call, with and without the additional work."""
    samples = timer.samples({"call": slower.call, "slower": slower})
    return samples["call"], samples["slower"]


def is_seen(speedup: Interval, noise: Interval, injected: float) -> bool:
    """Return whether a speedup over the baseline shows the injected share, within the noise.

    An injected share far from the requested one means that the timer is wrong, or the machine too busy.
    """
    least, most = BELIEVED
    wanted = 1 / (1 + injected)
    return least <= injected <= most and speedup.low * noise.low <= wanted <= speedup.high * noise.high


def spinning(seconds: float, device: torch.device) -> Callable[[], None]:
    """Return a call that keeps the device busy for `seconds`."""
    if device.type == "cuda":
        return functools.partial(torch.cuda._sleep, int(seconds * _cycles_per_second(device)))

    def spin() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return spin


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    spins = device_times({"": lambda: torch.cuda._sleep(SPIN_CYCLES)}, 10, device)
    return SPIN_CYCLES / percentile(spins[""], 0.5)


# ---- backends, all but the first wrong


def sound(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Function:
    """Compile correctly."""
    return gm.forward


def wrong_result(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Function:
    """Return results that are five per cent too large."""
    return lambda *args: _mapped(lambda leaf: leaf * 1.05, gm(*args))


def cached_result(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Function:
    """Compute at the first call, and return that result at every later call."""
    results: list[Any] = []

    def run(*args: Any) -> Any:
        if not results:
            results.append(gm(*args))
        return results[0]

    return run


def no_op(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Function:
    """Record the outputs' shapes at the first call, and compute nothing."""
    remembered = cached_result(gm, example_inputs)
    return lambda *args: _mapped(torch.zeros_like, remembered(*args))


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    def leaf(value: Any) -> Any:
        return change(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return pytree.tree_map(leaf, tree)


def slow_while_held(fn: Function, spin: Callable[[], None]) -> Function:
    """Return `fn` with `spin` before it while its last result is alive: fast only in a loop that drops results."""
    last: list[weakref.ref[torch.Tensor]] = []

    def run(*args: Any) -> Any:
        if any(ref() is not None for ref in last):
            spin()
        result = fn(*args)
        last[:] = map(weakref.ref, tensors_of(result))
        return result

    return run


# ---- functions that do not stay one graph


def breaking(fn: Function) -> Function:
    """Return `fn` with a graph break after it, and an operation after that."""

    def broken(*args: Any) -> Any:
        result = fn(*args)
        torch._dynamo.graph_break()
        return _mapped(lambda leaf: leaf + 0, result)

    return broken


def recompiling(fn: Function) -> Function:
    """Return `fn` with a guard that fails at every call."""
    turn = [""]

    def changing(*args: Any) -> Any:
        turn[0] += "."
        return _mapped(lambda leaf: leaf + 0 * len(turn[0]), fn(*args))

    return changing


def _as_it_is(fn: Function) -> Function:
    return fn


@dataclass(frozen=True, slots=True)
class Control:
    """A faulty backend, or a function that does not stay one graph, and the expected status."""

    expected: Status
    backend: Backend = sound
    plant: Callable[[Function], Function] = _as_it_is

    def peer(self, name: str) -> Peer:
        """Return it as a peer, which compiles the case's function as changed by `plant`."""
        return Peer(name, "control", self.backend)


FAULTY: Mapping[str, Control] = MappingProxyType(
    {
        "wrong result": Control("fail_accuracy", wrong_result),
        "no-op": Control("fail_accuracy", no_op),
        "cached result": Control("fail_accuracy", cached_result),
        "graph break": Control("fail_to_run", plant=breaking),
        "recompile": Control("fail_to_run", plant=recompiling),
    }
)
