"""What this process has decided, for how long it has raced, the stores that it uses, and what `race="never"` served.

The last is for those who run a service: a log line, and a span.
"""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from backend_kwargs.auto import logger
from backend_kwargs.auto.store import name_of
from backend_kwargs.errors import printable
from backend_kwargs.facts.decision import Decision
from backend_kwargs.stores.layered import Reached

SPAN = "opentelemetry.trace"
MOST = 100  # reasons of one attribute


class Served(NamedTuple):
    """A graph that was compiled without a race: of which model, and why it had no decision, "" if it had one."""

    model: str
    graph: str
    why: str


def note_served(served: Sequence[Served], stores: str) -> None:
    """Log one line for a model whose first graph, the last of `served`, has no decision.

    If this process has loaded OpenTelemetry, its current span gets the numbers of graphs.
    """
    *before, last = served
    if last.why and last.model not in {each.model for each in before}:
        logger.warning(
            "race='never': %s has no decision for the first graph of %s (%s), which is compiled under default. "
            "bk.report says which graphs have one; `backend-kwargs tune` makes them.",
            *map(printable, (stores, last.model or "a function", last.why)),
        )
    if trace := sys.modules.get(SPAN):
        lacking = [printable(f"graph {each.graph} of {each.model}: {each.why}") for each in served if each.why]
        numbers = {
            "backend_kwargs.graphs": len(served),
            "backend_kwargs.graphs_decided": len(served) - len(lacking),
            "backend_kwargs.graphs_without_decision": lacking[-MOST:],
        }
        with suppress(Exception):  # a service's tracing never fails a compile
            trace.get_current_span().set_attributes(numbers)


CallOfGraphs: TypeAlias = tuple[Callable[[], object], int]  # a weak reference to the callable; which compile of it


LONGEST_S = 30.0  # in which the calls of a user choose between CUDA graphs and none


@dataclass
class Memory:
    """The decisions and race times of this process, also if the store cannot be written.

    `decisions` are keyed by scope and name; `race_seconds` has an entry per race, and `call_seconds` one per call,
    whose graphs share a budget. `store` replaces the user's store, and `stores` are those in use. `loaded` holds
    decisions by name that precede those of the store: they came with another process's cache artifacts. `served` has
    the graphs under `race="never"`, and `told` the keys and tables that were logged. `alternations` are those of the
    calls of each callable, in training or not, while they last.
    """

    decisions: dict[tuple[str, str], Decision] = field(default_factory=dict)
    loaded: dict[str, Decision] = field(default_factory=dict)
    race_seconds: list[float] = field(default_factory=list)
    call_seconds: defaultdict[CallOfGraphs, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    store: Path | None = None
    stores: dict[object, Reached] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    told: set[tuple[str, str]] = field(default_factory=set)
    alternations: WeakValueDictionary[tuple[object, bool] | None, Any] = field(default_factory=WeakValueDictionary)


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


@contextmanager
def nothing_decided() -> Iterator[None]:
    """Start races without any decision, and forget the new ones at exit; `race="never"` still reads its store."""
    depth = len(_memories)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _memories.append(Memory(store=Path(folder)))
            yield
        finally:
            del _memories[depth:]
