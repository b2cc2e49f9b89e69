"""One peer in one process: compiled as a user would, counted, checked, and timed."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backend_kwargs import make_backend, report, trial
from backend_kwargs.harness.trial import WARM_CALLS, Counted, Trial, TrialError, UnavailableError, counted, isolated
from backend_kwargs.interval import Interval
from backend_kwargs.trial.trees import tensors_of
from benchmarks.execution.records import Compile
from benchmarks.execution.study import CaseStudy
from benchmarks.workloads import peers
from benchmarks.workloads.peers import Peer


@dataclass(eq=False)
class PeerTrial(Trial):
    """A peer of a case, which compiles with its cache in the folder `cache`; `decided` is auto's choice."""

    study: CaseStudy
    peer: Peer
    cache: Path
    compiled: Compile = field(default_factory=Compile)
    decided: dict[str, Any] | None = None

    def build(self) -> None:
        """Compile, and measure the time and memory."""
        if reason := peers.why_not(self.peer, self.study.case, self.study.mode, self.study.device.type):
            raise UnavailableError(reason)
        if self.peer.compiles:
            peers.resolved(self.peer)  # raises if this template has no effect here
        super().build()
        self.compiled = Compile(cold_s=self.compile_s, peak_bytes=self.peak_bytes)

    def compile(self, model: Callable[..., Any]) -> tuple[Callable[..., Any], Counted | None]:
        """Compile as a user would."""
        if self.peer.kind == "graph":
            return self._replayed(model), None
        if self.peer.kind == "ahead":
            return self._ahead(model), None
        if self.peer.hand:
            return self._hand(self.peer.hand), None
        if not self.peer.compiles:
            return model, None
        backend, given = peers.backend_of(self.peer)
        own, left = counted(backend, **given, dynamic=True if self.study.problem.sweep else None)
        compiled = isolated(model, backend=own, **left)
        return (_cloned(compiled) if self.peer.kind == "clone" else compiled), own

    @contextlib.contextmanager
    def first_call(self) -> Iterator[None]:
        """Set its cache, and require one graph."""
        with cache_at(self.cache) if self.counted else contextlib.nullcontext():
            yield
        if self.graphs > 1:
            raise TrialError(f"the graph broke: {self.graphs} graphs. {_break()}".strip())
        if self.peer.kind == "auto":
            self.decided = decided(self.subject.call)

    def start(self) -> None:
        """Compile and check; fail if it compiles again for inputs of the same shapes."""
        super().start()
        if self.passed and self.graphs > 1:
            raise TrialError(f"compiled {self.graphs} times, expected once: it recompiled")

    def check_what_ran(self) -> None:
        """Check it for peers that a user would pick: a control is supposed to be something else."""
        if self.peer.kind != "control":
            super().check_what_ran()
        if self.peer.kind == "engine" and self.status == "fell_back":  # a type that it has not, inputs that change
            self.end("unavailable", self.reason)

    def _replayed(self, model: Callable[..., Any]) -> Callable[..., Any]:
        graphs: dict[Any, Replayed] = {}  # one for each shape of a sweep

        def call(*args: Any) -> Any:
            shapes = tuple(tensor.shape for tensor in tensors_of(args))
            if shapes not in graphs:
                mutates = any(name.startswith("input ") for name in self.study.changed)
                graphs[shapes] = Replayed(model, self.study.changes.on((model, ((), {}))), mutates=mutates)
            return graphs[shapes](*args)

        return call

    def _ahead(self, model: Callable[..., Any]) -> Callable[..., Any]:
        if self.study.problem.sweep:
            raise UnavailableError("an ahead-of-time package has the sizes of its sample")
        module = model if isinstance(model, torch.nn.Module) else _Called(model)
        with torch.no_grad():
            exported = torch.export.export(module, tuple(self.study.problem.args))
        config = make_backend("tmpl-inductor").inductor_config(ahead_of_time=True)
        self.cache.mkdir(parents=True, exist_ok=True)
        file = str(self.cache / "ahead.pt2")
        return torch._inductor.aoti_load_package(  # type: ignore[no-any-return]
            torch._inductor.aoti_compile_and_package(exported, package_path=file, inductor_configs=config)
        )

    def _hand(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        if self.study.mode == "train":
            raise UnavailableError("a kernel alone has nothing to train")
        args = self.study.problem.args
        if self.study.mode == "fwd_bwd" and not any(t.requires_grad for t in tensors_of(kernel(*args))):
            raise UnavailableError(f"its results carry no gradients for {len(tensors_of(args))} arguments")
        return kernel

    def forget_seconds(self) -> None:
        """Drop the compile times: a peer that found a cache of others has none of its own."""
        self.compiled.cold_s = None
        if self.decided:
            rows = [[name, status, seconds, None, *rest] for name, status, seconds, _, *rest in self.decided["rows"]]
            self.decided = {**self.decided, "seconds": None, "rows": rows}


def decided(compiled: Callable[..., Any]) -> dict[str, Any] | None:
    """Return auto's choice for the one graph of `compiled`, and its race; None if unknown."""
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


class _Called(torch.nn.Module):
    """A function as a module, which torch.export requires."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)


class Replayed:
    """Eager, recorded in a CUDA graph at its first call.

    Arguments are copied in, as for compiled graphs, and those that calls change are copied back: for these it keeps a
    second set. `state` is the state of `fn`, which each call of the recording starts from.
    """

    def __init__(self, fn: Callable[..., Any], state: trial.State, *, mutates: bool) -> None:
        self._fn = fn
        self._state = state
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
                self._state.restore()
                for static, tensor in zip(self._static, tensors_of(args), strict=True):
                    static.copy_(tensor)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._output = self._fn(*copied)


def _cloned(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compiled` with its outputs cloned, as needed by a caller who keeps a CUDA graph's result."""

    def call(*args: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, torch.clone, compiled(*args))

    return call


def _break() -> str:
    from torch._dynamo.utils import counters

    return next((str(reason).split("\n")[0] for reason in counters["graph_break"]), "")


@contextlib.contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Let Inductor, Triton and `auto` store compiled code and decisions in `folder`, and clear their memory."""
    from torch._inductor.utils import clear_caches

    from backend_kwargs.auto.process_memory import forget_process

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
        # Only these variables: what torch sets meanwhile, such as the path of its ptxas, stays as for a user.
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        clear_caches()
        forget_process()


def restart_workers(folder: Path) -> None:
    """Restart Inductor's compile workers with the cache in `folder`: otherwise they keep using their first one."""
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    with cache_at(folder):
        shutdown_compile_workers()
        AsyncCompile.warm_pool()
        AsyncCompile.wait_pool_ready()


def kernels_per_call(step: Callable[[], object], device: torch.device) -> int | None:
    """Return the number of kernels that one call launches or replays; None if the device has none."""
    if device.type != "cuda":
        return None
    kernels = trial.kernel_times(step, device, least=0.0)
    return sum(each.calls for each in kernels if not each.name.startswith(("Memcpy", "Memset")))
