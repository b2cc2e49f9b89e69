"""One peer in one process: compiled as a user would, counted, checked, and the callable that is timed."""

import contextlib
import gc
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs import measure, report
from backend_kwargs.measure import Accuracy, Interval, Status
from benchmarks import peers
from benchmarks.peers import Peer, UnavailableError
from benchmarks.records import Compile
from benchmarks.study import Study, tensors_of

WARM_CALLS = 3


@dataclass
class Trial:
    """A peer on its way through compiling, checking and timing; `status` is the word of its cell."""

    peer: Peer
    study: Study
    cache: Path
    status: Status = "pass"
    reason: str = ""
    accuracy: Accuracy = field(default_factory=Accuracy)
    compiled: Compile = field(default_factory=Compile)
    call: Callable[..., Any] = field(init=False)
    step: Callable[[], object] = field(init=False)
    own: Callable[..., Any] | None = None
    decided: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Say whether it may be timed."""
        return self.status == "pass"

    def attempt(self, what: Callable[[], object]) -> None:
        """Do `what`; a failure becomes the status, and what the peer held is let go."""
        try:
            what()
        except Exception as error:  # noqa: BLE001 - the cell tells it
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Take the status from an error."""
        self.end(*(("unavailable", str(error)) if isinstance(error, UnavailableError) else measure.status_of(error)))

    def end(self, status: Status, reason: str) -> None:
        """Leave the race, and leave nothing behind."""
        self.status, self.reason = status, reason
        self.call = self.step = self.model = self.optimizer = self.own = None  # type: ignore[assignment]
        gc.collect()
        if self.study.device.type == "cuda":
            with contextlib.suppress(Exception):  # after a sticky error, which the next call tells
                torch.cuda.empty_cache()

    def start(self) -> None:
        """Compile, and check on inputs not seen before."""
        self.build()
        self.verify(0)

    def build(self) -> None:
        """Compile, and learn what that took."""
        if reason := peers.why_not(self.peer, self.study.case, self.study.mode, self.study.device.type):
            raise UnavailableError(reason)
        if self.peer.compiles:
            peers.resolved(self.peer)  # raises where this template cannot act here
        gc.collect()  # what an earlier peer left in cycles would be counted as held, and freed meanwhile
        held = torch.cuda.memory_allocated(self.study.device) if self.study.device.type == "cuda" else None
        self.model = self.study.model()
        self.optimizer = self.study.optimizer(self.model)
        self.call = self._callable()
        self.step = self.study.step(self.call, self.model, self.optimizer)
        self._first_call()
        # None above what was held: what the process let go meanwhile hides it.
        self.compiled.peak_bytes = measure.peak_memory(self._warm, self.study.device, held) or None

    def _warm(self) -> None:
        for _ in range(WARM_CALLS):
            if self.study.device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            self.step()  # dropped at once: results that are held would count

    def _callable(self) -> Callable[..., Any]:
        if self.peer.kind == "graph":
            return self._replayed()
        if self.peer.hand:
            return self._hand(self.peer.hand)
        if not self.peer.compiles:
            return self.model
        backend, given = peers.backend_of(self.peer)
        self.own = _own(self.model)
        dynamic = True if self.study.problem.sweep else None
        return torch.compile(self.own, backend=backend, dynamic=dynamic, **given)

    def _replayed(self) -> Callable[..., Any]:
        graphs: dict[Any, Replayed] = {}  # one for each shape of a sweep

        def call(*args: Any) -> Any:
            shapes = tuple(tensor.shape for tensor in tensors_of(args))
            if shapes not in graphs:
                graphs[shapes] = Replayed(self.model, mutates=self.study.problem.mutates)
            return graphs[shapes](*args)

        return call

    def _hand(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if self.study.mode == "train":
            raise UnavailableError("a kernel alone has nothing to train")
        args = tensors_of(self.study.problem.args)
        if self.study.mode == "fwd_bwd" and not any(
            t.requires_grad for t in tensors_of(kernel(*self.study.problem.args))
        ):
            raise UnavailableError(f"its results carry no gradients for {len(args)} arguments")
        return kernel

    def _first_call(self) -> None:
        graphs = _graphs()
        with cache_at(self.cache) if self.peer.compiles else contextlib.nullcontext():
            started = perf_counter()
            self.step()
            measure.synchronize(self.study.device)
            self.compiled.cold_s = perf_counter() - started if self.peer.compiles else None
        if self.own is not None:
            self._check_compiled(_graphs() - graphs)
        if self.peer.kind == "auto":
            self.decided = decided(self.call)

    def _check_compiled(self, graphs: int) -> None:
        if graphs == 0:
            raise RuntimeError("no graph was compiled: this would run in eager")
        if graphs > 1:
            raise RuntimeError(f"the graph broke: {graphs} graphs. {_break()}".strip())

    def forget_seconds(self) -> None:
        """Tell no compile time: what a peer found compiled by others is not its own."""
        self.compiled.cold_s = None
        if self.decided:
            rows = [[name, status, seconds, None, *rest] for name, status, seconds, _, *rest in self.decided["rows"]]
            self.decided = {**self.decided, "seconds": None, "rows": rows}

    def verify(self, at: int) -> None:
        """Check the very callable that is timed, on the fresh inputs `at`, and that it has compiled once."""
        self.accuracy = self.study.verify(self.call, self.model, at, self.optimizer)
        if not self.accuracy.passed:
            self.end(self.accuracy.status, self.accuracy.reason)
        elif self.own is not None and (variants := _variants(self.own)) != 1:
            raise RuntimeError(f"compiled {variants} times, wanted once: it recompiled, or runs in eager")

    def finish(self) -> None:
        """Check again after timing, on other inputs."""
        self.attempt(lambda: self.verify(1))


def decided(compiled: Callable[..., Any]) -> dict[str, Any] | None:
    """Return what auto chose for the one graph of `compiled`, and by what race; None where that is not known."""
    race = report(compiled).graphs[-1].race
    columns = ("name", "status", "seconds", "compile_s", "reason", "against")
    return race and {
        "winner": race.winner,
        "options": dict(race.options),
        "seconds": race.seconds,
        "rows": [[*(getattr(row, column) for column in columns), _figures(row.speedup)] for row in race.rows],
    }


def _figures(speedup: Interval | None) -> list[float] | None:
    return speedup and [speedup.low, speedup.median, speedup.high]


class Replayed:
    """Eager, recorded in a CUDA graph at its first call.

    Arguments are copied in, as for compiled graphs, and those that calls change are copied out again: of them it holds
    a second set.
    """

    def __init__(self, fn: Callable[..., Any], *, mutates: bool) -> None:
        self._fn = fn
        self._mutates = mutates
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *args: Any) -> Any:
        """Replay."""
        given = tensors_of(args)
        if self._graph is None:
            self._record(args)
        for static, tensor in zip(self._static, given, strict=True):
            static.copy_(tensor)
        self._graph.replay()
        if self._mutates:
            for static, tensor in zip(self._static, given, strict=True):
                tensor.copy_(static)
        return self._output

    def _record(self, args: tuple[Any, ...]) -> None:
        copied = pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, args)
        self._static = tensors_of(copied)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_CALLS):
                self._fn(*copied)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._fn(*copied)


def _own(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with code of its own: of one code object dynamo compiles eight variants, then none."""

    def forward(*args: Any) -> Any:
        return model(*args)

    code = forward.__code__.replace(co_name="forward")
    return types.FunctionType(code, globals(), "forward", None, forward.__closure__)


def _variants(own: Callable[..., Any]) -> int:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(own.__code__))


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def _break() -> str:
    from torch._dynamo.utils import counters

    return next((str(reason).split("\n")[0] for reason in counters["graph_break"]), "")


@contextlib.contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Have Inductor, Triton and `auto` keep what they compile and decide in `folder`, and forget what they hold."""
    from torch._inductor.utils import clear_caches

    from backend_kwargs.compilers.auto.deciding import forget_process

    there = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "BACKEND_KWARGS_STORE": str(folder / "decisions"),
    }
    folder.mkdir(parents=True, exist_ok=True)
    clear_caches()
    forget_process()
    before = {name: os.environ.get(name) for name in there}
    os.environ |= there
    try:
        yield
    finally:
        # These alone: what torch sets meanwhile, the path of its ptxas say, stays as it does for a user.
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        clear_caches()
        forget_process()


def kernels_per_call(step: Callable[[], object], device: torch.device) -> int | None:
    """Return how many kernels one call launches, or replays; None where the device has none."""
    if device.type != "cuda":
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize(device)
    kinds = (event for event in seen.events() if event.device_type == DeviceType.CUDA)
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kinds)
