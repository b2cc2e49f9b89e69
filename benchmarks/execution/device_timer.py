"""Device time of many calls, interleaved, each with a cold L2: the time that the device works, without launches.

Wall time, with guards, launches and copies of inputs, is `backend_kwargs.trial.interleave`'s; the two never mix.
Neither marks steps of CUDA-graph trees: that would change a counter of the process, after which a loop that keeps
its results records again at each call. dynamo begins a generation at each call of a compiled function anyway.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from backend_kwargs import trial

L2 = Literal["cold", "warm"]
WARM_SAMPLE_S = 1e-3
MOST_REPEATS = 1000
MOST_COVERS = 128
CPU_CACHE_BYTES = 16 * 2**20


def device_times(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    l2: L2 = "cold",
    *,
    warmup: int = 3,
    budget_s: float | None = None,
    failed: Callable[[str, Exception], None] | None = None,
    repeated: Callable[[str, int], None] | None = None,
    exposed: Callable[[str], None] | None = None,
) -> dict[str, list[float]]:
    """Return seconds per call between two events on the device, one sample per call and round, none trimmed.

    A round queues one sample of every call, in the order of `trial.order`, then waits once. Before a sample the
    L2 is overwritten and read, without a wait before the start event: the launches of the call are queued behind
    it, and the events measure only the device. Calls with longer launches get a longer cover, up to some 15 ms.
    "cold" samples are one call; "warm" ones are repeated after an untimed call, with the L2 as it left it. Where a
    call puts its state back first, that lies before a sample of one call; of several calls it is measured beside
    each sample, and subtracted. `budget_s`, `failed` and `repeated` are as in `trial.interleave`. `exposed` is
    called with calls whose launches exceed the longest cover: their samples include host time. A CPU runs kernels
    as they are called: there a sample is read from the clock of the process.
    """
    bench = _Bench(dict(calls), failed, device, l2, exposed)
    return bench.in_turn(rounds, warmup, budget_s, repeated)


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2 in bytes; for a CPU, whose caches vary, an upper bound of its second level."""
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or CPU_CACHE_BYTES


class _Instant:
    """The counterpart of an event for the CPU: a reading of its clock."""

    def record(self, stream: None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return False  # on a CPU, nothing runs before its launch is complete

    def elapsed_time(self, end: "_Instant") -> float:
        return (end.at - self.at) * 1e3


class Scratch:
    """A buffer four times the size of the L2: passing through it evicts everything else."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.empty(l2_bytes(device), dtype=torch.float32, device=device)
        self.total = torch.empty((), device=device)

    def flush(self) -> None:
        """Overwrite the buffer, then read it, so that written lines return to memory outside of a sample."""
        self.buffer.zero_()
        torch.sum(self.buffer, dim=0, out=self.total)


@dataclass
class _Bench(trial.Calls):
    l2: L2
    exposed: Callable[[str], None] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.covers = dict.fromkeys(self.calls, 1)
        self.scratch = Scratch(self.device)
        self.accelerator = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self.stream = self.accelerator.current_stream(self.device) if self.accelerator else None

    def prepare(self, name: str, warmup: int) -> None:
        for _ in range(warmup):
            self.calls[name]()
        exposed, seconds = self.probe(name)
        if self.l2 == "warm":
            self.repeats[name] = min(max(int(WARM_SAMPLE_S / max(seconds, 1e-9)), 1), MOST_REPEATS)
        while exposed and self.covers[name] < MOST_COVERS:
            self.covers[name] *= 2
            exposed, _ = self.probe(name)
        if exposed and self.exposed:
            self.exposed(name)

    def probe(self, name: str) -> tuple[bool, float]:
        """Take a sample; return whether it began before everything was launched, and the time of a call."""
        trial.synchronize(self.device)
        start, end = self.sample(name)
        exposed = start.query()
        trial.synchronize(self.device)
        return exposed, seconds_of(start, end)

    def round(self, names: Sequence[str]) -> None:
        queued: dict[str, list[tuple[Any, Any]]] = {}

        def queue(name: str) -> None:
            restore = trial.restoring(self.calls[name])
            apart = restore and not self.restores_before(name)
            queued[name] = [self.sample(name), *([self.sample(name, restore)] if apart else [])]

        for name in names:
            self.guard(name, partial(queue, name))
        trial.synchronize(self.device)
        for name, events in queued.items():
            seconds, *restored = (seconds_of(*pair) for pair in events)
            self.add(name, seconds, sum(restored))

    def restores_before(self, name: str) -> bool:
        """Return whether a sample is one call, whose state can be put back before it."""
        return isinstance(self.calls[name], trial.RestoringCall) and self.repeats[name] == 1

    def sample(self, name: str, call: Callable[[], object] | None = None) -> tuple[Any, Any]:
        call, start, end = call or self.calls[name], self.event(), self.event()
        if self.restores_before(name) and isinstance(call, trial.RestoringCall):
            call.state.restore()  # before the L2 is overwritten, so that the state is no more there than the inputs
            call = call.call
        for _ in range(self.covers[name]):
            self.scratch.flush()
        if self.l2 == "warm":
            call()
        start.record(self.stream)
        for _ in range(self.repeats[name]):
            call()
        end.record(self.stream)
        return start, end

    def event(self) -> Any:
        return self.accelerator.Event(enable_timing=True) if self.accelerator else _Instant()


def seconds_of(start: Any, end: Any) -> float:
    """Return the seconds between two events."""
    return float(start.elapsed_time(end)) / 1e3
