"""A small record of each compiled graph, which lives as long as the graph does.

Everything is read where torch keeps it briefly, in the thread that compiles; no hook and no wrapper remains.
"""

import json
import time
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from backend_kwargs.facts import Call, Compiled, CompileFacts
from backend_kwargs.options.option import Options

if TYPE_CHECKING:
    from torch.fx import GraphModule

ARTIFACT = "backend_kwargs_options"
RACED = "raced"  # in place of an outcome: the race compiled the winner, and the cache then had it


@dataclass(frozen=True, slots=True)
class Record:
    """One compiled graph. A text is "" if there is nothing to report, and None if this torch release does not say.

    `owner` is the callable that torch.compile was given, `code` what that calls, which outlives it, and `compiled` what
    the compiler returned; all are weak references. `inlined` is whether torch calls it through one function for all of
    its own modules. `at` is when the compile began, in microseconds since the epoch.
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
    code: Callable[[], types.CodeType | None]
    inlined: bool
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
    return _records.get(id(kept_of(compiled)))


def kept_of(compiled: Call) -> Any:
    """Return the object that dynamo keeps alive with the graph: it unwraps `compiled` first."""
    from backend_kwargs.torch_internals.dynamo import innermost_fn

    innermost = innermost_fn(compiled)
    return innermost.__self__ if isinstance(innermost, types.MethodType) else innermost


def recorded(backend: Any, gm: "GraphModule", compile_graph: Callable[[], Compiled]) -> Compiled:
    """Return the result of `compile_graph` with more facts, and keep a record of it.

    What cannot be read of torch's internals is unknown: it never fails a compile.
    """
    from backend_kwargs.torch_internals import dynamo
    from backend_kwargs.torch_internals.dynamo import trace_structured

    reason: Any = getattr(gm, "compile_subgraph_reason", None)  # read first: the compiler may change `gm`
    before, code, cache, unchanged = {}, None, "unknown", False
    with suppress(Exception):
        # tlparse shows the effective options with the graph.
        named = {"name": ARTIFACT, "encoding": "json"}
        trace_structured("artifact", metadata_fn=lambda: named, payload_fn=partial(_as_json, backend))
    with suppress(Exception):
        code, before = gm.code, dynamo.cache_counts()
    at, started = time.time_ns() // 1000, time.perf_counter()
    compiled = compile_graph()
    seconds, kept = time.perf_counter() - started, kept_of(compiled.call)
    with suppress(Exception):
        unchanged = kept is gm and gm.code == code
        # Of both caches; dynamo compiles one graph at a time, so a difference belongs to this one.
        cache = next((outcome for outcome, count in dynamo.cache_counts().items() if count > before[outcome]), "off")
        cache = f"bypass: {dynamo.bypass_reason() or 'reason unknown'}" if cache == "bypass" else cache
    decision = compiled.facts.decision
    raced = decision and decision.rows and decision.made * 1e6 >= at  # in this compile, rather than found
    facts = replace(compiled.facts, seconds=seconds, cache=RACED if raced else cache, unchanged=unchanged)
    with suppress(Exception):
        stack, key, compiling = getattr(reason, "user_stack", None) or [], id(kept), dynamo.compiling()
        called = called_by(compiling.given)
        links = {"owner": compiling.given, "code": called.code}
        weak: dict[str, Any] = {n: (lambda: None) if each is None else weakref.ref(each) for n, each in links.items()}
        record = Record(
            backend=backend,
            facts=facts,
            compile_id=str(compiling.number),
            function=stack[0].name if stack else "",
            place=f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "",
            break_reason=reason.reason if getattr(reason, "graph_break", False) else "",
            # Compiled by another backend before, and not by this one.
            recompiled="" if "BACKEND_MATCH" in (compiling.guard or "") else compiling.guard,
            at=at,
            inlined=called.inlined,
            compiled=weakref.ref(kept, lambda _: _records.pop(key, None)),
            **weak,
        )
        _records.pop(key, None)  # the graph of an earlier compile that returned the same object
        _records[key] = record
    return Compiled(compiled.call, facts)


# ---- what an owner calls


class Called(NamedTuple):
    """The module or function that a callable calls, and the code that dynamo compiles or inlines for it, if any.

    `inlined` is whether torch calls it through one function for all of its own modules.
    """

    value: Any
    code: types.CodeType | None
    inlined: bool


def called_by(owner: object) -> Called:
    """Return what the callable that torch.compile was given calls."""
    import torch

    original = getattr(owner, "__wrapped__", owner)
    value = getattr(original, "__self__", original)
    function = value.forward if isinstance(value, torch.nn.Module) else original
    return Called(value, getattr(function, "__code__", None), hasattr(owner, "__wrapped__"))


def _as_json(backend: Any) -> str:
    return json.dumps({"backend": backend.spec, "options": {name: _told(v) for name, v in backend.options.items()}})


def _told(value: object) -> object:
    """Return `value`, or its repr if JSON cannot represent it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):  # keys too, of which `default` is not asked
        return repr(value)
    return value
