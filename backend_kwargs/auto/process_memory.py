"""What this process has decided, for how long it has raced, and the stores that it uses."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from backend_kwargs.auto.reporting import forget_reported
from backend_kwargs.auto.served import Served
from backend_kwargs.auto.store import name_of
from backend_kwargs.facts.decision import Decision
from backend_kwargs.stores.deadlines import Reached

CallOfGraphs: TypeAlias = tuple[Callable[[], object], int]  # a weak reference to the callable; which compile of it


LONGEST_S = 30.0  # in which the calls of a user choose between CUDA graphs and none


@dataclass
class Memory:
    """The decisions and race times of this process, also if the store cannot be written.

    `decisions` are keyed by scope and name; `race_seconds` has an entry per race, and `call_seconds` one per call,
    whose graphs share a budget. `store` replaces the user's store, and `stores` are those in use. `loaded` holds
    decisions by name that precede those of the store: they came with another process's cache artifacts. `served` has
    the graphs under `race="never"`. `alternations` are those of the calls of each callable, while they last.
    """

    decisions: dict[tuple[str, str], Decision] = field(default_factory=dict)
    loaded: dict[str, Decision] = field(default_factory=dict)
    race_seconds: list[float] = field(default_factory=list)
    call_seconds: defaultdict[CallOfGraphs, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    store: Path | None = None
    stores: dict[object, Reached] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    alternations: WeakValueDictionary[Callable[[], object] | None, Any] = field(default_factory=WeakValueDictionary)


_memories = [Memory()]  # the last one is in use


def memory() -> Memory:
    """Return the memory in use."""
    return _memories[-1]


def settled_decisions() -> list[Decision]:
    """Return the decisions that this process made or found, without those that are provisional."""
    return list({name_of(each): each for each in memory().decisions.values() if not each.provisional}.values())


def load_decisions(decisions: Iterable[Decision]) -> None:
    """Let this process use `decisions` as if they were in its store."""
    memory().loaded.update({name_of(each): each for each in decisions})


def call_until_chosen(call: Callable[[], object]) -> None:
    """Call until no code of this process alternates between CUDA graphs and none, at most as long as that may take."""
    ends = time.monotonic() + LONGEST_S
    while memory().alternations and time.monotonic() < ends:
        call()


def end_alternations() -> None:
    """Free the ways that do not serve, of code that a reset leaves behind: after a graph break dynamo frees none."""
    for each in [*memory().alternations.values()]:
        each.end()


def forget_process() -> None:
    """Forget this process's decisions, so that the store is read again."""
    _memories[-1] = Memory(store=memory().store)
    forget_reported()


@contextmanager
def nothing_decided() -> Iterator[None]:
    """Start races without any decision, and forget the new ones at exit; `race="never"` still reads its store."""
    depth = len(_memories)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _memories.append(Memory(store=Path(folder)))
            forget_reported()
            yield
        finally:
            del _memories[depth:]
            forget_reported()
