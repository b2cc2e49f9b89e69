"""An end to a candidate's tuning: before Inductor times a kernel, it is asked whether there is time left."""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import Node

TIMERS = ("benchmark_gpu", "benchmark_cpu")
COMPILED = "CompiledFunctionBackward"  # as AOTAutograd calls its autograd functions
_ends: dict[int, float] = {}  # by thread
_lock = threading.Lock()


class OutOfTime(BaseException):
    """The time for tuning is over."""


@contextmanager
def capped(ends: float) -> Iterator[None]:
    """Raise OutOfTime where this thread is to time a kernel after `ends`, a time of `time.perf_counter`."""
    from torch._inductor.runtime.benchmarking import benchmarker

    thread, held = threading.get_ident(), vars(benchmarker)
    with _lock:
        if not _ends:
            held.update({name: _asking(getattr(benchmarker, name)) for name in TIMERS})
        _ends[thread] = ends
    try:
        yield
    finally:
        with _lock:
            del _ends[thread]
            if not _ends:
                for name in TIMERS:
                    held.pop(name, None)


@contextmanager
def capped_backward(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Let this thread's end hold for the backward pass of `outputs` too, run meanwhile by a thread of autograd's.

    That thread serves other models as well: the end is its own only while it is in a graph that made `outputs`.
    """
    ends, entered = _ends.get(threading.get_ident()), set[int]()
    if ends is None:
        yield
        return

    def before(*_: Any) -> None:
        with _lock:
            thread = threading.get_ident()
            if thread not in _ends:
                _ends[thread] = ends
                entered.add(thread)

    def after(*_: Any) -> None:
        with _lock:
            for thread in entered:
                del _ends[thread]
            entered.clear()

    nodes = _compiled([out.grad_fn for out in outputs])
    handles = [handle for node in nodes for handle in (node.register_prehook(before), node.register_hook(after))]
    try:
        yield
    finally:
        after()  # where it failed, no hook was called
        for handle in handles:
            handle.remove()


def _compiled(nodes: Sequence[Node | None]) -> list[Node]:
    """Return the nodes of compiled backward graphs among `nodes`, or behind them: outputs may be views."""
    left, seen = list(nodes), set[Node]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name() != COMPILED:
                left += [following for following, _ in node.next_functions]
    return [node for node in seen if node.name() == COMPILED]


def _asking(timer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(timer)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if time.perf_counter() > _ends.get(threading.get_ident(), math.inf):
            raise OutOfTime
        return timer(*args, **kwargs)

    return timed
