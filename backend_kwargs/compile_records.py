"""A small record of each compiled graph, which lives as long as the graph does.

Everything is read where torch keeps it briefly, in the thread that compiles; no hook and no wrapper remains.
"""

import json
import logging
import time
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.options.layers import Options

if TYPE_CHECKING:
    from torch.fx import GraphModule

ARTIFACT = "backend_kwargs_options"
OUTCOMES = ("hit", "miss", "bypass")
RACED = "raced"  # in place of an outcome: the race compiled the winner, and the cache then had it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """One compiled graph. A text is "" if there is nothing to report, and None if this torch release does not say.

    `owner` is the callable that torch.compile was given, `compiled` what the compiler returned; both are weak
    references. `at` is when the compile began, in microseconds since the epoch.
    """

    backend: Any
    facts: CompileFacts
    compile_id: str
    function: str
    place: str
    break_reason: str
    recompiled: str | None
    at: int
    owner: Callable[[], object]
    compiled: Callable[[], Any]

    @property
    def spec(self) -> str:
        """The name and the templates of the backend."""
        return self.backend.spec  # type: ignore[no-any-return]

    @property
    def options(self) -> Options:
        """The options of the backend; those that its compiler got in the end are in `facts`."""
        return dict(self.backend.options)


_records: dict[int, Record] = {}


def records() -> list[Record]:
    """Return the records of the compiled graphs that are alive, in the order of compiling."""
    return list(_records.copy().values())


def record_of(compiled: Call) -> Record | None:
    """Return the record of what a backend of this package returned, None if there is none."""
    return _records.get(id(_kept(compiled)))


def recorded(backend: Any, gm: "GraphModule", compile_graph: Callable[[], Compiled]) -> Compiled:
    """Return the result of `compile_graph` with more facts, and keep a record of it."""
    reason = getattr(gm, "compile_subgraph_reason", None)  # read first: the compiler may change `gm`
    _attempt(lambda: trace_options(backend))
    before, at, started = _attempt(_cache_counts), time.time_ns() // 1000, time.perf_counter()
    code = _attempt(lambda: gm.code)
    compiled = compile_graph()
    decision = compiled.facts.decision
    raced = decision and decision.rows and decision.made * 1e6 >= at  # in this compile, rather than found
    compiled = compiled.with_facts(
        seconds=time.perf_counter() - started,
        cache=RACED if raced else _attempt(lambda: _cache(before)) or "unknown",
        unchanged=bool(_attempt(lambda: returned_as_it_was(compiled.call, gm, code))),
    )
    _attempt(lambda: _keep(compiled, backend, reason, at))
    return compiled


def returned_as_it_was(compiled: Call, gm: "GraphModule", code: str) -> bool:
    """Return whether the compiler returned the graph it was given, whose code was `code`, so that it runs in eager."""
    return _kept(compiled) is gm and gm.code == code


def _attempt(step: Callable[[], object]) -> Any:
    """Return the result of `step`, None if it fails: reading torch's internals must not fail a compile."""
    try:
        return step()
    except Exception:
        logger.debug("Not recorded", exc_info=True)
        return None


def trace_options(backend: Any) -> None:
    """Write the effective options to torch's structured trace, if it is on; tlparse shows them with the graph."""
    from backend_kwargs.torch_internals.logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=lambda: json.dumps(
            {"backend": backend.spec, "options": {name: _told(value) for name, value in backend.options.items()}}
        ),
    )


def _told(value: object) -> object:
    """Return `value`, or its repr if JSON cannot represent it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _keep(compiled: Compiled, backend: Any, reason: Any, at: int) -> None:
    from backend_kwargs.torch_internals.dynamo import compiling_callable, recompile_reason
    from backend_kwargs.torch_internals.guards import compile_id

    stack = getattr(reason, "user_stack", None) or []
    kept, owner = _kept(compiled.call), compiling_callable()
    key, guard = id(kept), recompile_reason()
    record = Record(
        backend=backend,
        facts=compiled.facts,
        compile_id=str(compile_id()),
        function=stack[0].name if stack else "",
        place=f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "",
        break_reason=reason.reason if getattr(reason, "graph_break", False) else "",
        # Compiled by another backend before, and not by this one.
        recompiled="" if guard and "BACKEND_MATCH" in guard else guard,
        at=at,
        owner=(lambda: None) if owner is None else weakref.ref(owner),
        compiled=weakref.ref(kept, lambda _: _records.pop(key, None)),
    )
    _records.pop(key, None)  # the graph of an earlier compile that returned the same object
    _records[key] = record


def _kept(compiled: Call) -> Any:
    """Return the object that dynamo keeps alive with the graph: it unwraps `compiled` first."""
    from backend_kwargs.torch_internals.dynamo import innermost_fn

    innermost = innermost_fn(compiled)
    return innermost.__self__ if isinstance(innermost, types.MethodType) else innermost


def _cache_counts() -> dict[str, int]:
    """Return the counts of both caches; dynamo compiles one graph at a time, so a difference belongs to one graph."""
    from backend_kwargs.torch_internals.dynamo import cache_counts

    return {outcome: cache_counts(outcome) for outcome in OUTCOMES}


def _cache(before: Mapping[str, int]) -> str:
    """Return what the caches did for the graph just compiled: a hit of either counts as a hit."""
    from backend_kwargs.torch_internals.dynamo import bypass_reason

    after = _cache_counts()
    outcome = next((outcome for outcome in OUTCOMES if after[outcome] > before[outcome]), "off")
    return f"{outcome}: {bypass_reason() or 'reason unknown'}" if outcome == "bypass" else outcome
