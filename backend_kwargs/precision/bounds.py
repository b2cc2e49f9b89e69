"""The precision used for a graph, and its error bound. Imports no torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from backend_kwargs.errors import BackendKwargsError

_elsewhere: ContextVar[bool] = ContextVar("measured_elsewhere", default=False)


class UnfitPrecisionError(BackendKwargsError):
    """A graph cannot be computed in a precision; the message says why."""


class UnmeasuredError(UnfitPrecisionError):
    """The error of a call cannot be measured, for example because all its results are nan; that of another may be."""


@dataclass(slots=True)
class Used:
    """The use of a precision: its error, at most `max_error`, and the bytes of the weights converted for it.

    `reason` says why the precision is not used, or is "". A graph with dynamic sizes is measured again for new sizes:
    `error` is then the largest, and `refused` has the reason for sizes that run in eager instead.
    """

    precision: str
    error: float | None
    max_error: float | None
    nbytes: int = 0
    products: int = 0
    reason: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.reason:
            return f"precision {self.precision} is not used: {self.reason}"
        error = "" if self.error is None else f", error {self.error:.2g}, max_error={self.max_error:g}"
        held = f", {self.nbytes / 2**20:.1f} MiB of weights" if self.nbytes else ""
        products = f", {self.products} products" if self.products else ""  # an engine does not count them
        refused = "".join(f"; not used for {sizes}, in eager: {why}" for sizes, why in [*self.refused.items()])
        return f"precision {self.precision}: {f'{products}{error}{held}'.removeprefix(', ') or 'used'}{refused}"


_last: list[Used] = []  # for the graph that is being compiled: dynamo compiles one at a time


def last_used() -> Used | None:
    """Return the use of the precision requested last, None if none was."""
    return _last[0] if _last else None


def note_used(used: Used | None) -> None:
    """Keep the use of a precision for the graph's record."""
    _last[:] = [used] if used else []


@contextmanager
def measured_elsewhere() -> Iterator[None]:
    """Let the caller measure the error of the graphs that this thread compiles, instead of each compile."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def is_measured_elsewhere() -> bool:
    """Return whether the caller of this compile measures the error."""
    return _elsewhere.get()
