"""dynamo: its limits, caches of code, counts, records, registry of backends, guards, graphs, context of a trace."""

import copy
import inspect
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch._dynamo
from torch._C._dynamo.eval_frame import _CacheEntry, _debug_get_cache_entry_list
from torch._dynamo import config, convert_frame, eval_frame, trace_rules, utils
from torch._dynamo.backends import registry
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, get_verbose_code_parts
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.source import (
    AttrSource,
    ConstantSource,
    DictGetItemSource,
    LocalSource,
    UnspecializedNNModuleSource,
    UnspecializedParamBufferSource,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import (
    CompilationMetrics,
    _metrics_context_tls,
    counters,
    get_chromium_event_logger,
    get_compilation_metrics,
    get_metrics_context,
)
from torch._guards import (
    CompileContext,
    CompileId,
    Guard,
    GuardsContext,
    Source,
    TracingContext,
    compile_context,
    tracing,
)
from torch._logging._internal import trace_structured
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen

from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone

RESTARTS = (TensorifyScalarRestartAnalysis, RestartAnalysis)  # dynamo traces again; raised through a backend
OUTCOMES = ("hit", "miss", "bypass")  # of a look into a cache
GRAPH = "__compiled_fn"  # how dynamo names the global through which its bytecode calls a graph
WRAPPER = "compile_wrapper"  # the name of torch.compile's result; its `fn` is the callable that it was given

AHEAD = ContextVar("ahead", default=False)  # whether graphs are compiled ahead of the calls that need them

reset: Callable[[], None] = torch._dynamo.reset


# ---- limits


# Lets dynamo compile any number of graphs of one function, until the context is left.
limits_lifted: Callable[[], AbstractContextManager[None]] = partial(
    config.patch, recompile_limit=10_000, accumulated_recompile_limit=10_000
)

# Whether dynamo compiles no frame of a function, such as of one of torch's own.
skips: Callable[[object], bool] = trace_rules.check


# ---- cached code


# dynamo's cached code of a code object, each entry with its `code`, `guard_manager` and `backend`.
cache_entries: Callable[[CodeType], list[_CacheEntry]] = _debug_get_cache_entry_list


def traced_frame() -> InstructionTranslator | None:
    """Return the frame that dynamo compiles now, with its `f_code` and `f_globals`, None if there is none."""
    try:
        return InstructionTranslator.current_tx()
    except (AttributeError, RuntimeError, AssertionError):
        return None


def without_disabling(call: Any) -> Any:
    """Return the function that dynamo's `disable` wraps."""
    return getattr(call, "_torchdynamo_orig_callable", call)


# ---- records


class Compiling(NamedTuple):
    """A compile: the callable given to torch.compile, dynamo's number, and the guard that made it compile again.

    The first two are None if there is none; the guard is "" if there is none, and None if it is unknown.
    """

    given: Callable[..., Any] | None
    number: CompileId | None
    guard: str | None


def compiling() -> Compiling:
    """Return the compile that this thread does.

    The callable is read from the frame of torch.compile's result: frames that dynamo could not inline, and code after a
    graph break, have no other link to it.
    """
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_name != WRAPPER or frame.f_globals["__name__"] != eval_frame.__name__):
        frame = frame.f_back
    metrics = {"recompile_reason": ""} if AHEAD.get() else getattr(get_metrics_context(), "_metrics", {})
    return Compiling(
        frame and frame.f_locals.get("fn"),
        CompileContext.current_compile_id(),
        metrics["recompile_reason"] or "" if "recompile_reason" in metrics else None,
    )


def backend_of(result: Callable[..., object]) -> tuple[object, Mapping[str, Any]]:
    """Return the backend that a result of torch.compile was given, and the keywords with which it is called."""
    given = inspect.getclosurevars(result).nonlocals["callback"]
    while hasattr(given, "_torchdynamo_orig_backend"):
        given = given._torchdynamo_orig_backend
    return getattr(given, "compiler_fn", given), getattr(given, "kwargs", {})


# dynamo's metrics of the last compiles of this process, as many as it keeps.
recent_compiles: Callable[[], list[CompilationMetrics]] = get_compilation_metrics


def cache_counts() -> dict[str, int]:
    """Return how often Inductor's and AOTAutograd's caches had each outcome so far."""
    fx_graphs, autograd = counters["inductor"], counters["aot_autograd"]
    return {each: fx_graphs[f"fxgraph_cache_{each}"] + autograd[f"autograd_cache_{each}"] for each in OUTCOMES}


def bypass_reason() -> str:
    """Return why the compile that runs bypasses a cache, "" if it does not say."""
    # During a compile it contains this thread's events that have not ended.
    event = get_chromium_event_logger().get_event_data().get("backend_compile", {})
    return event.get("cache_bypass_reason") or ""


def metrics_apart() -> AbstractContextManager[None]:
    """Record the metrics of compiles in this thread nowhere: dynamo records one compile at a time, and raises else."""
    get_metrics_context()  # makes it where there is none
    return replaced(_metrics_context_tls, "metrics_context", MetricsContext(on_exit=lambda *_: None))


def bucket_count_kept() -> AbstractContextManager[None]:
    """Restore the counter in which DDPOptimizer sees whether AOTAutograd compiled a bucket."""
    return replaced(counters["aot_autograd"], "total", counters["aot_autograd"]["total"])


# ---- the registry of backends

lookup_backend = registry.lookup_backend  # raises InvalidBackend


# The names in dynamo's registry, with entry points of installed packages and debug backends.
list_backends: Callable[[], list[str]] = partial(torch._dynamo.list_backends, None)


# Registers a backend, for good; raises AssertionError if the name is taken. Up to torch 2.14 it sets the attribute
# `_tags` of the object.
register_backend: Callable[..., object] = registry.register_backend


class _NamedAsRegistered:
    """An entry in dynamo's registry that is equal to every backend whose `compiler_name` is registered.

    After a compile dynamo drops its references to the caller's tensors, which would otherwise break
    `torch.utils.swap_tensors`, but only for compilers in its registry: up to torch 2.14 those with a registered
    `compiler_name`, since then those that equal a value of the registry. Its key cannot be looked up as a backend.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return getattr(other, "compiler_name", None) in registry._BACKENDS


# `REGISTERED.setdefault(*BY_NAME)` makes dynamo treat this package's backends like those that their names name.
REGISTERED: dict[str, object] = registry._COMPILER_FNS  # type: ignore[assignment]
BY_NAME = "backend_kwargs, by compiler_name", _NamedAsRegistered()


def is_torchs(compiler_fn: object) -> bool:
    """Return whether a backend is one of dynamo's own."""
    return str(getattr(compiler_fn, "__module__", "")).startswith("torch._dynamo")


# The number of dynamo's compile: of the function (`frame_id`), and for it (`frame_compile_id`).
compile_id: Callable[[], CompileId | None] = CompileContext.current_compile_id


def compiling_as(number: CompileId | None) -> AbstractContextManager[object]:
    """Let what is made meanwhile belong to that compile."""
    return compile_context(CompileContext(number))


def is_tracing() -> bool:
    """Return whether dynamo traces in this thread."""
    return TracingContext.try_get() is not None


# ---- sources


def is_parameter_source(source: Source | None) -> bool:
    """Return whether a source is a parameter or buffer of a module."""
    # `_dynamo_static_input_type` would also match tensors marked with mark_static_address() and plain tensor attributes
    # of modules; both may change in place between calls.
    return isinstance(source, DictGetItemSource) and isinstance(source.base, UnspecializedParamBufferSource)


# Of a parameter's source: that of the dictionary in which a module has the parameter, with its name there; and that of
# the module.
table_and_name: Callable[[Source], tuple[Source, str]] = attrgetter("base", "index")
module_of: Callable[[Source], Source] = attrgetter("base.base")


def root_of(source: Source) -> UnspecializedNNModuleSource | None:
    """Return the source of the module in a local variable from which `source` comes, None if there is no such."""
    while hasattr(source, "base"):
        if isinstance(source.base, LocalSource):
            return source if isinstance(source, UnspecializedNNModuleSource) else None
        source = source.base
    return None


# ---- guards


def add_guard(source: Source, add: Callable[[GuardBuilder, Guard], None]) -> None:
    """Have `add` called when dynamo makes the guards of the graph that it traces."""
    TracingContext.get().guards_context.dynamo_guards.add(source.make_guard(add))


def guard_identity(builder: GuardBuilder, guard: Guard, source: Source, identity: int) -> None:
    """Guard that a source has the object with this id, without keeping it alive."""
    words = get_verbose_code_parts(f"___check_obj_id({source.name}, {identity})", guard)
    builder.get_guard_manager_from_source(source).add_id_match_guard(identity, words, guard.user_stack)


def guard_last(builder: GuardBuilder, guard: Guard, holds: Callable[[object], bool], words: str) -> None:
    """Add a guard that is checked after all others, when the modules are the guarded ones."""
    root: Any = builder.guard_manager.root  # its annotation for a function is wrong
    root.add_epilogue_lambda_guard(holds, [words], guard.user_stack)


def count_for_one_module(builder: GuardBuilder, root: UnspecializedNNModuleSource) -> None:
    """Let dynamo count towards its limit only the code for the same module."""
    builder.id_matched_objs[root.base.local_name] = weakref.ref(builder.get(root))  # type: ignore[attr-defined]


def invalidate(entry: object, manager: Any, reason: str) -> DeletedGuardManagerWrapper:
    """Free the code of an entry of dynamo's cache, if there is one; return what stands in place of its guards.

    The entry stays in dynamo's list. It counts towards the limit, unless it is for another object.
    """
    dropped = DeletedGuardManagerWrapper(reason)
    dropped.id_matched_objs = {"": weakref.ref(Guard)}  # an object that no function is called on
    if entry is not None:
        manager.extra_state.invalidate(entry, dropped)
    return dropped


def dropping_guards() -> Callable[[], None]:
    """Return a function that drops the guards that are added from now on, for when nothing was frozen after all."""
    if (context := TracingContext.try_get()) is None:
        return lambda: None
    guards = context.guards_context.dynamo_guards
    before = copy.copy(guards.inner)

    def drop() -> None:
        guards.inner = before

    return drop


def guard_count() -> int:
    """Return the number of guards of the graph that dynamo traces, 0 outside dynamo."""
    context = TracingContext.try_get()
    return len(context.guards_context.dynamo_guards) if context else 0


# ---- the context of a trace


class TracingApart:
    """A context in which another version of the graph that dynamo traces is compiled.

    Guards and AOTAutograd's entries are its own; the same inputs have the same fake tensors. What is changed in the
    shape environment is restored. `adopt` makes it the context of dynamo's trace in the end.
    """

    def __init__(self) -> None:
        self.changed = False  # whether something in the shape environment was
        self._twin = copy.copy(TracingContext.try_get())
        if self._twin is not None:
            self._twin.guards_context = GuardsContext()
            self._twin.fakify_first_call = False  # as DDPOptimizer sets for a graph it compiles again

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compile in this context; it may be entered again, after it was left."""
        sizes: ShapeEnv | None = getattr(getattr(self._twin, "fake_mode", None), "shape_env", None)
        values = {} if sizes is None else vars(sizes)
        kept = {name: copy.copy(each) for name, each in values.items() if isinstance(each, dict | list | set | int)}

        def put_back() -> None:
            self.changed |= any(values[name] != kept[name] for name in OF_SIZES if name in kept)
            if sizes is not None:
                # Its caches belong to one version: a simplification under a loser's guards must not be found again.
                values.update({**kept, "_version_counter": sizes._version_counter + 1})

        with undone() as stack:
            restored_by(stack, put_back)
            if self._twin is not None:
                stack.enter_context(tracing(self._twin))
            yield

    def adopt(self) -> None:
        """Add to dynamo's context what was compiled in this one, once it is left."""
        context = TracingContext.try_get()
        if context is None or self._twin is None:
            return
        guards, found = context.guards_context, self._twin.guards_context
        guards.dynamo_guards.update(set(found.dynamo_guards))
        guards.aotautograd_guards += found.aotautograd_guards
        vars(context).update({name: vars(self._twin)[name] for name in vars(context) if name not in OF_THE_TRACE})


OF_THE_TRACE = ("guards_context", "fakify_first_call")  # what a context of another version has for itself
# What a shape environment knows of sizes: guards, and symbols with their values, ranges and replacements.
OF_SIZES = ("guards", "var_to_val", "backed_var_to_val", "unbacked_var_to_val", "var_to_range", "replacements")


# AOTAutograd recognizes a graph of dynamo's by the first two and `meta`; without them it fails, or forgets static
# inputs.
ATTACHED = ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason")


def source_of(placeholder: Node) -> Source | None:
    """Return the source of one of dynamo's inputs, None for a node that is no input of dynamo's."""
    return getattr(placeholder, "_dynamo_source", None)


# The sources of a graph's attributes by name, which AOTAutograd reads; a new attribute needs one.
sources_of_attributes: Callable[[GraphModule], dict[str, Source]] = attrgetter("_param_name_to_source")


def hand_on(gm: GraphModule, copied: GraphModule) -> None:
    """Give a copy of one of dynamo's graphs what dynamo attached to the graph and to its inputs."""
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ATTACHED:
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))


# Whether a node was erased from its graph.
is_erased: Callable[[Node], bool] = attrgetter("_erased")


def boxed_forward(gm: GraphModule) -> Callable[[list[object]], object]:
    """Return a graph's call on one list of its arguments, which it empties; the graph itself is changed to it."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm.forward


def mark_boxed(call: Callable[..., object]) -> None:
    """Tell AOTAutograd that a callable takes its arguments as one list, and empties it."""
    call._boxed_call = True  # type: ignore[attr-defined]
