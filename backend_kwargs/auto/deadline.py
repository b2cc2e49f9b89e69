"""A deadline for a candidate's tuning, checked each time that Inductor is about to benchmark a kernel."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps

import torch
from torch.autograd.graph import Node

from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone
from backend_kwargs.torch_internals.rng import leaves_to_dynamo

COMPILED = "CompiledFunctionBackward"  # AOTAutograd's name for its autograd functions
_ends: dict[int, float] = {}  # by thread


class OutOfTime(BaseException):
    """The deadline for tuning has passed.

    A BaseException, since Inductor drops kernels that fail with an Exception. It comes between two kernels, so nothing
    is left incomplete, and a running compilation is not interrupted.
    """


@contextmanager
def capped(ends: float) -> Iterator[None]:
    """Raise OutOfTime when this thread is about to time a kernel after `ends`, a time of `time.perf_counter`."""
    from backend_kwargs.torch_internals.choices import TIMERS, benchmarker

    with undone() as stack:
        stack.enter_context(replaced(_ends, threading.get_ident(), ends))
        for name in TIMERS:
            timer = partial(getattr(type(benchmarker), name), benchmarker)
            stack.enter_context(replaced(benchmarker, name, _asking(timer)))
        yield


@contextmanager
def capped_backward(outputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Apply this thread's deadline to the backward pass of `outputs` too, which runs in a thread of autograd's.

    And that this thread leaves random generators to dynamo. That thread also serves other models: it has both only
    while it runs a graph that made `outputs`.
    """
    own = threading.get_ident()
    ends, entered = _ends.get(own), dict[int, Callable[[], object]]()
    if ends is None:
        yield
        return

    def before(*_: object) -> None:
        thread = threading.get_ident()
        if thread not in _ends:
            entered[thread] = leaves_to_dynamo(thread, own)
            _ends[thread] = ends

    def after(*_: object) -> None:
        for thread, leave in tuple(entered.items()):
            _ends.pop(thread, None)
            leave()
        entered.clear()

    with undone() as stack:
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


def _asking(timer: Callable[..., object]) -> Callable[..., object]:
    """Return `timer` with a check of this thread's deadline before it."""

    @wraps(timer)
    def timed(*args: object, **kwargs: object) -> object:
        if time.perf_counter() > _ends.get(threading.get_ident(), math.inf):
            raise OutOfTime
        return timer(*args, **kwargs)

    return timed
