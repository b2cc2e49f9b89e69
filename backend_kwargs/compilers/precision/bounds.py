"""Who holds a graph in a lower precision to its bound: the compiler, or what compiles candidates to compare them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_elsewhere: ContextVar[bool] = ContextVar("measured_elsewhere", default=False)


@contextmanager
def measured_elsewhere() -> Iterator[None]:
    """Let compiles in this thread leave the error to the caller, who measures it."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def is_measured_elsewhere() -> bool:
    """Tell whether the caller of this compile measures the error."""
    return _elsewhere.get()
