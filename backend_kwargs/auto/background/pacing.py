"""When a slice of a race may begin, how long it may take, and that it is alone."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from backend_kwargs.auto.budget import Budget

PAUSE_S = 1.0  # a slice ends before its next step could make it longer


@dataclass
class Pacer:
    """The time that slices of this process have taken, out of all since the first race in the background began."""

    began: float = field(default_factory=time.perf_counter)
    spent_s: float = 0.0

    def begins(self, share: float) -> float:
        """Return when a pause may begin, as a time of `time.perf_counter`."""
        return self.began + (self.spent_s + PAUSE_S) / share


@cache
def pacer() -> Pacer:
    """Return the pacer of this process."""
    return Pacer()


@dataclass
class SliceBudget(Budget):
    """A budget of which only slices take: those of one race."""

    sliced_s: float = 0.0
    slice_began: float | None = None

    @property
    def spent_s(self) -> float:
        """The seconds of all slices up to now."""
        return self.sliced_s + (time.perf_counter() - self.slice_began if self.slice_began else 0.0)

    @property
    def ends(self) -> float:
        """The end of this slice, as a time of `time.perf_counter`."""
        return (self.slice_began or time.perf_counter()) + PAUSE_S

    @contextmanager
    def sliced(self) -> Iterator[None]:
        """Count the time of a slice."""
        self.slice_began = time.perf_counter()
        try:
            yield
        finally:
            self.sliced_s, self.slice_began = self.spent_s, None


class Gate:
    """Lets calls in together, and a slice of the race alone."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget who is inside: in a forked process these are threads of the parent."""
        self._changed, self._inside = threading.Condition(threading.Lock()), 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Serve a call; it waits for the end of a slice in another thread."""
        with self._changed:
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    self._changed.notify_all()

    @contextmanager
    def alone(self, *, wait: bool = False) -> Iterator[bool]:
        """Yield whether nothing else is inside, and let nothing in meanwhile; without `wait`, never wait for it."""
        if not self._changed.acquire(blocking=wait):
            yield False
            return
        try:
            if wait:
                self._changed.wait_for(lambda: not self._inside)
            yield self._inside == 0
        finally:
            self._changed.release()
