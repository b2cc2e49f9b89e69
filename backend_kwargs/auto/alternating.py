"""With CUDA graphs or without, by the calls that a user makes: each call runs all of its graphs one way, and is timed.

A race repeats one graph by itself. A call may have several, which copy what CUDA graphs before them have made, and the
user's own code is between its calls. So blocks of calls run each way in random order, until one is clearly the fastest;
from then on nothing of this is in the path of a call. Nothing here depends on what the ways are.
"""

import gc
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from backend_kwargs.auto.candidates import SLACK
from backend_kwargs.auto.process_memory import LONGEST_S
from backend_kwargs.auto.ranks import may_differ
from backend_kwargs.backends.inductor.lowered import ForwardPasses
from backend_kwargs.facts import Call, CompileFacts, RaceRow
from backend_kwargs.torch_internals.functorch import ends_recomputation, keeps_saved
from backend_kwargs.trial import has_room, ratio_interval, synchronize

WITHOUT, AS_RACED, WITH = "without CUDA graphs", "as each graph was raced", "with CUDA graphs"
WARM_UPS = 4  # calls of each way, in which CUDA graphs run once and are recorded, one graph of a call after another
BLOCK_S, LEAST_CALLS, MOST_CALLS = 0.05, 2, 50  # of a block that is timed
LEAST_ROUNDS, MOST_ROUNDS = 5, 24


@dataclass(eq=False)
class Ways:
    """One graph and its call for each way. `keep` frees all but that of one, and returns what serves in its place.

    It has tensors on `devices`. `rows` are those of the race; `is_clear` is whether it leaves no doubt. `repeats` is
    whether a call that failed may be made again. `passes` has the autograd nodes of its forward passes; it is None
    in inference. `decided` is told what serves, and why.
    """

    calls: Mapping[str, Call]
    keep: Callable[[str], Call]
    rows: Mapping[str, RaceRow]
    devices: Collection[torch.device] = ()
    is_clear: bool = False
    repeats: bool = True
    passes: ForwardPasses | None = None
    decided: Callable[[RaceRow, str], object] = lambda row, why: None
    facts: CompileFacts = field(default_factory=CompileFacts)
    entry: Any = None


class Alternation:
    """The graphs of a function's calls, and the way in which these run.

    Where another thread calls, another way fails, or the time ends it early, what the races chose serves. In training
    each backward pass runs as its forward pass did: while one is pending the way stays, and serves if all ends then.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.graphs: list[Ways] = []
        self.samples: dict[str, list[float]] = {}
        self.way, self.is_over = AS_RACED, False
        self._clock, self._thread, self._lock = clock, threading.get_ident(), threading.RLock()
        self._called: set[Ways] = set()  # in the user's present call
        self._devices, self._disturbed, self._on_gpu = set[torch.device](), False, False

    def join(self, graph: Ways) -> Call:
        """Return what is called for a graph, now and afterwards. With each graph all is timed anew."""
        # A partial calls what it has without a frame of its own, and can be given something else to call.
        graph.entry = partial(self._call, graph, graph.calls[AS_RACED])
        self.graphs.append(graph)
        self._devices.update(graph.devices)
        self._on_gpu = any(each.type == "cuda" for each in self._devices)
        self._plan, self._ends = self._in_turn(), math.inf
        return graph.entry  # type: ignore[no-any-return]

    def end(self) -> None:
        """Stop: what the races chose serves from now on, or the present way if a backward pass is pending."""
        with self._lock:
            self._disturbed = True
            self._begin()

    def _call(self, graph: Ways, raced: Call, *inputs: object) -> object:
        with self._lock:
            self._disturbed |= threading.get_ident() != self._thread
            self._enter(graph)
            if self.is_over or not graph.calls:  # perhaps since this call waits for the lock
                if graph.calls:  # it joined as all ended, or an interrupt came before its turn
                    self._serve([graph], AS_RACED)
                del raced  # it may have lost
                gc.collect()  # compiled graphs are reference cycles
                if self._on_gpu and not torch.cuda.is_current_stream_capturing():
                    torch.cuda.empty_cache()
                return graph.entry(*inputs)
            self._called.add(graph)
            call = graph.calls[self.way]
            try:
                return call(*inputs)
            except Exception as error:
                if call is raced or ends_recomputation(error):
                    raise
                self._disturbed = True
                if not graph.repeats:
                    raise
                return raced(*inputs)

    def _enter(self, graph: Ways) -> None:
        """Begin a new call of the user's, if this call of a graph is one, or end where it took too long."""
        if any(each.has_failed for each in self._passes()):
            for each in self._passes():
                each.nodes.clear()  # of a step that failed
            self.end()
        if again := graph in self._called:
            self._ends = min(self._ends, self._clock() + LONGEST_S)
        late_s = self._clock() - self._ends
        if self._is_pending():
            if late_s > LONGEST_S:  # perhaps one always is
                self.end()
        # One that is called again after all others begins a new call of the user's.
        elif late_s > 0 or (again and len(self._called) == len(self.graphs)):
            if again and (gone := [each for each in self.graphs if each not in self._called]):
                self._serve(gone, AS_RACED)  # they are called no more, as where a function is compiled anew
                self._plan, self._ends = self._in_turn(), math.inf
            self._begin()

    def _begin(self) -> None:
        """Choose the way of a call, or in the end that of all further ones."""
        self._called.clear()
        # Nothing can be waited for while the user captures a CUDA graph.
        stopped = self._disturbed or not may_differ() or (self._on_gpu and torch.cuda.is_current_stream_capturing())
        way = None if stopped or self._clock() > self._ends else next(self._plan, None)
        if way:
            self.way = way
            return
        self.is_over, self._ends = True, math.inf
        way, why = self.way if self._is_pending() else AS_RACED, ""
        if not stopped and min(map(len, self.samples.values()), default=0) >= LEAST_ROUNDS:
            way = fastest(self.samples)[0]
            why = ", ".join(f"{way} {sorted(each)[len(each) // 2] * 1e3:.3g} ms" for way, each in self.samples.items())
        self._plan.close()  # which holds this
        self._serve(self.graphs, way, why)

    def _is_pending(self) -> bool:
        return any(keeps_saved(node) for each in self._passes() for node in [*each.nodes])

    def _passes(self) -> list[ForwardPasses]:
        return [each.passes for each in self.graphs if each.passes]

    def _serve(self, graphs: Sequence[Ways], way: str, why: str = "") -> None:
        """Let graphs be called one way, and free the others."""
        self.graphs = [each for each in self.graphs if each not in graphs]
        for graph in graphs:
            graph.entry.__setstate__((graph.keep(way), (), {}, None))
            graph.calls = {}
        for graph in graphs:  # all of them serve by now, since a store may fail, or be interrupted
            graph.decided(graph.rows[way], why)

    def _in_turn(self) -> Generator[str, None, None]:
        """Yield the way of each call; what is between two of them is timed."""
        self.samples, calls = {}, LEAST_CALLS
        agree = any(all(each.calls[AS_RACED] is each.calls[way] for each in self.graphs) for way in (WITHOUT, WITH))
        is_clear = all(each.is_clear for each in self.graphs) if agree else bool(self._passes())
        if is_clear or not all(map(has_room, self._devices)):
            return
        ways = [WITHOUT, WITH] if agree else [WITHOUT, AS_RACED, WITH]
        for way in ways:
            yield from [way] * WARM_UPS
            seconds = yield from self._timed(way, 1)
            calls = max(calls, min(round(BLOCK_S / seconds), MOST_CALLS))
        self.samples = {way: [] for way in ways}
        shuffled = random.Random(0)  # noqa: S311 - the state of no other generator changes
        while min(map(len, self.samples.values())) < MOST_ROUNDS:
            for way in shuffled.sample(ways, len(ways)):
                yield way  # the first call after another way's is not timed
                self.samples[way].append((yield from self._timed(way, calls)))
            if len(self.samples[way]) >= LEAST_ROUNDS and fastest(self.samples)[1]:
                return

    def _timed(self, way: str, calls: int) -> Generator[str, None, float]:
        began = self._now()
        yield from [way] * calls
        return max(self._now() - began, 1e-6) / calls  # the clock may stand still

    def _now(self) -> float:
        for device in self._devices:
            synchronize(device)
        return self._clock()


def fastest(samples: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """Return which of the ways serves, in the order of their memory, and whether more rounds could not change that.

    A way that takes more memory must be faster by the slack in the median. The interval decides only whether more
    rounds are timed: it differs between processes, which would not agree on a gain of 2 %.
    """
    rounds, is_clear = min(map(len, samples.values())), True
    best, *others = samples
    for way in others:
        with torch.device("cpu"):  # whatever default the user has set
            ratio = ratio_interval(samples[best][:rounds], samples[way][:rounds])
        is_clear &= not ratio.low <= 1 + SLACK <= ratio.high
        best = way if ratio.median > 1 + SLACK else best
    return best, is_clear
