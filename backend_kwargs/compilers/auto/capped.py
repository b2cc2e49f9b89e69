"""An end to a candidate's tuning: before Inductor times a kernel, it is asked whether there is time left."""

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TIMERS = ("benchmark_gpu", "benchmark_cpu")
_ends: dict[int, float] = {}  # by thread
_lock = threading.Lock()


class OutOfTime(BaseException):
    """The time for tuning is over."""


@contextmanager
def capped(ends: float) -> Iterator[None]:
    """Raise OutOfTime where this thread is to time a kernel after `ends`, a time of `time.perf_counter`.

    Kernels of a backward pass are tuned by autograd's thread, which serves other models too, and are not stopped.
    """
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


def _asking(timer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(timer)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if time.perf_counter() > _ends.get(threading.get_ident(), math.inf):
            raise OutOfTime
        return timer(*args, **kwargs)

    return timed
