"""A deadline for a candidate's tuning, checked each time that Inductor is about to benchmark a kernel.

A coordinate descent, which improves one kernel step by step, can have an earlier one: it ends with what it has.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.autograd.graph import Node

TIMERS = ("benchmark_gpu", "benchmark_cpu")
COMPILED = "CompiledFunctionBackward"  # AOTAutograd's name for its autograd functions


def restored_by(stack: ExitStack, undo: Callable[[], object]) -> None:
    """Register `undo` with `stack`; it may run more than once, also when a Ctrl-C interrupts its first run."""
    stack.callback(undo)
    stack.callback(undo)


@dataclass(slots=True)
class Deadline:
    """When tuning ends, and when coordinate descents do, as times of `time.perf_counter`; `cut` if one was ended."""

    tuning: float
    descents: float = math.inf
    cut: bool = False


NEVER = Deadline(math.inf)
_deadlines: dict[int, Deadline] = {}  # by thread


class OutOfTime(BaseException):
    """The deadline for tuning has passed."""


@contextmanager
def capped(ends: float, descents: float = math.inf) -> Iterator[Deadline]:
    """Raise OutOfTime when this thread is about to time a kernel after `ends`, a time of `time.perf_counter`.

    After `descents`, a coordinate descent ends with the best configuration that it has found.
    """
    from torch._inductor.runtime.benchmarking import benchmarker

    thread, held = threading.get_ident(), vars(benchmarker)
    tuner, compare, compare_in_time = _descent()

    # No lock, which a Ctrl-C could leave locked: lift() checks again whether another thread has added a deadline.
    def install() -> None:
        for name in TIMERS:
            held.setdefault(name, _asking(partial(getattr(type(benchmarker), name), benchmarker)))
        tuner.compare_config = compare_in_time

    def lift() -> None:
        _deadlines.pop(thread, None)
        if not _deadlines:
            for name in TIMERS:
                held.pop(name, None)
            tuner.compare_config = compare
        if _deadlines:
            install()

    with ExitStack() as stack, stack:  # entered twice: the outer exit completes the undoing if a Ctrl-C stops the inner
        restored_by(stack, lift)
        deadline = _deadlines[thread] = Deadline(ends, descents)
        install()
        yield deadline


@contextmanager
def capped_backward(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Apply this thread's deadline to the backward pass of `outputs` too, which runs in a thread of autograd's.

    That thread also serves other models: it has the deadline only while it runs a graph that made `outputs`.
    """
    deadline, entered = _deadlines.get(threading.get_ident()), set[int]()
    if deadline is None:
        yield
        return

    def before(*_: Any) -> None:
        thread = threading.get_ident()
        if thread not in _deadlines:
            entered.add(thread)
            _deadlines[thread] = deadline

    def after(*_: Any) -> None:
        for thread in tuple(entered):
            _deadlines.pop(thread, None)
        entered.clear()

    with ExitStack() as stack, stack:
        restored_by(stack, after)  # if it failed, no hook was called
        for node in _compiled([out.grad_fn for out in outputs]):
            for handle in (node.register_prehook(before), node.register_hook(after)):
                stack.callback(handle.remove)
        yield


def _compiled(nodes: Sequence[Node | None]) -> list[Node]:
    """Return the nodes of compiled backward graphs among `nodes` or their inputs: outputs may be views."""
    left, seen = list(nodes), set[Node]()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name() != COMPILED:
                left += [following for following, _ in node.next_functions]
    return [node for node in seen if node.name() == COMPILED]


def _asking(timer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(timer)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if time.perf_counter() > _own().tuning:
            raise OutOfTime
        return timer(*args, **kwargs)

    return timed


def _own() -> Deadline:
    return _deadlines.get(threading.get_ident(), NEVER)


@cache
def _descent() -> tuple[Any, Callable[..., Any], Callable[..., Any]]:
    """Return Inductor's class for coordinate descents, its method for one step, and the same with the deadline."""
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner

    compare: Callable[..., Any] = CoordescTuner.compare_config

    @wraps(compare)
    def compare_in_time(*args: Any, **kwargs: Any) -> Any:
        deadline = _own()
        if time.perf_counter() > deadline.descents:
            deadline.cut = True
            return False, math.inf  # no improvement; with none in any direction, the descent ends
        return compare(*args, **kwargs)

    return CoordescTuner, compare, compare_in_time
