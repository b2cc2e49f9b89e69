"""dynamo: its exceptions, limits, caches of code, counts, records of a compile, and its registry of backends."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch._dynamo
from torch._dynamo import config, convert_frame, eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis, TorchDynamoException
from torch._dynamo.metrics_context import MetricsContext
from torch._dynamo.utils import (
    _metrics_context_tls,
    counters,
    get_chromium_event_logger,
    get_compilation_metrics,
    get_metrics_context,
)

from backend_kwargs.torch_internals.replacing import replaced, restored_by, undone

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _CacheEntry
    from torch._dynamo.backends.registry import CompilerFn
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.utils import CompilationMetrics

RESTARTS = (TensorifyScalarRestartAnalysis, RestartAnalysis)  # dynamo traces again; raised through a backend
GRAPH = "__compiled_fn"  # how dynamo names the global through which its bytecode calls a graph
WRAPPER = "compile_wrapper"  # the name of torch.compile's result; its `fn` is the callable that it was given

AHEAD = ContextVar("ahead", default=False)  # whether graphs are compiled ahead of the calls that need them

reset: Callable[[], None] = torch._dynamo.reset


# ---- limits


def recompile_limit() -> int:
    """Return how many graphs dynamo compiles of one function for one module."""
    return config.recompile_limit


def accumulated_recompile_limit() -> int:
    """Return how many graphs dynamo compiles of one function, for all modules together."""
    return config.accumulated_recompile_limit


def limits_lifted() -> AbstractContextManager[None]:
    """Let dynamo compile any number of graphs of one function, until the context is left."""
    return config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000)  # type: ignore[no-any-return]


def skips(function: object) -> bool:
    """Return whether dynamo compiles no frame of a function, such as of one of torch's own."""
    from torch._dynamo import trace_rules

    return trace_rules.check(function)


# ---- cached code


def cache_entries(code: CodeType) -> "list[_CacheEntry]":
    """Return dynamo's cached code of a code object, each entry with its `code`, `guard_manager` and `backend`."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(code)


def traced_frame() -> "InstructionTranslator | None":
    """Return the frame that dynamo compiles now, with its `f_code` and `f_globals`, None if there is none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except (AttributeError, RuntimeError, AssertionError):
        return None


def without_disabling(call: Any) -> Any:
    """Return the function that dynamo's `disable` wraps."""
    return getattr(call, "_torchdynamo_orig_callable", call)


# ---- records


def compiling_callable() -> Callable[..., Any] | None:
    """Return the callable given to the torch.compile that this thread's compile serves, None if there is none.

    It is read from the frame of torch.compile's result: frames that dynamo could not inline, and code after a graph
    break, have no other link to it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == WRAPPER and frame.f_globals["__name__"] == eval_frame.__name__:
            return frame.f_locals.get("fn")
        frame = frame.f_back
    return None


def recompile_reason() -> str | None:
    """Return the guard for which a call made dynamo compile a function again, "" if none did; None if it is unknown."""
    metrics = {"recompile_reason": ""} if AHEAD.get() else getattr(get_metrics_context(), "_metrics", {})
    return metrics["recompile_reason"] or "" if "recompile_reason" in metrics else None


def recent_compiles() -> "list[CompilationMetrics]":
    """Return dynamo's metrics of the last compiles of this process, as many as it keeps."""
    return get_compilation_metrics()


def cache_counts(outcome: str) -> int:
    """Return how often Inductor's and AOTAutograd's caches had an `outcome` so far: "hit", "miss" or "bypass"."""
    fx_graphs, autograd = counters["inductor"], counters["aot_autograd"]
    return fx_graphs[f"fxgraph_cache_{outcome}"] + autograd[f"autograd_cache_{outcome}"]


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
    counts: Mapping[str, int] = counters["aot_autograd"]
    return replaced(counts, "total", counts["total"])


# ---- the registry of backends

lookup_backend = registry.lookup_backend  # raises InvalidBackend


def list_backends() -> list[str]:
    """Return the names in dynamo's registry, with entry points of installed packages and debug backends."""
    return torch._dynamo.list_backends(None)


def register_backend(name: str, backend: "CompilerFn") -> None:
    """Register a backend, for good; raise AssertionError if the name is taken.

    Up to torch 2.14 it sets the attribute `_tags` of the object.
    """
    torch._dynamo.register_backend(backend, name=name)


class _NamedAsRegistered:
    """An entry in dynamo's registry that is equal to every backend whose `compiler_name` is registered.

    After a compile dynamo drops its references to the caller's tensors, which would otherwise break
    `torch.utils.swap_tensors`, but only for compilers in its registry: up to torch 2.14 those with a registered
    `compiler_name`, since then those that equal a value of the registry. Its key cannot be looked up as a backend.
    """

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return getattr(other, "compiler_name", None) in registry._BACKENDS


_BY_NAME = _NamedAsRegistered()


def count_as_registered() -> None:
    """Make dynamo treat this package's backends like the registered ones that their `compiler_name` names."""
    registry._COMPILER_FNS.setdefault("backend_kwargs, by compiler_name", _BY_NAME)  # type: ignore[arg-type]


def is_torchs(compiler_fn: object) -> bool:
    """Return whether a backend is one of dynamo's own."""
    return str(getattr(compiler_fn, "__module__", "")).startswith("torch._dynamo")
