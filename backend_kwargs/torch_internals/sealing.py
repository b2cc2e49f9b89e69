"""Calls of compiled functions in which dynamo compiles nothing: for one function, in one thread, for one call.

dynamo asks the callback of the running thread at each frame for which no compiled code fits. torch's own callbacks
compile; those here run the frame in eager, or look. `torch.compiler.set_stance` would do so for the whole process.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._dynamo import eval_frame as frames
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._dynamo import config, trace_rules
from torch._dynamo.convert_frame import has_tensor_in_frame
from torch._dynamo.decorators import mark_static, maybe_mark_dynamic
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch._dynamo.mutation_guard import GenerationTracker
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.nn.modules.module import _global_forward_pre_hooks

from backend_kwargs.torch_internals.dynamo import AHEAD, WRAPPER, cache_entries, limits_lifted

if TYPE_CHECKING:
    from torch._C._dynamo.eval_frame import _CacheEntry
    from torch._C._dynamo.eval_frame import _PyInterpreterFrame as DynamoFrameType

set_callback: Callable[[Any], Any] = frames.set_eval_frame
# Compiled code apart for each torch.compile(..., isolate_recompiles=True), from torch 2.13 on.
_set_region: Callable[[int], int] = getattr(frames, "set_eval_frame_isolate_recompiles_id", lambda number: -1)
NO_REGION = -1


class Wrapped(NamedTuple):
    """What torch.compile made of a function: the function, dynamo's callback for it, and the number of its region."""

    function: Callable[..., Any]
    callback: Any
    region: int


def wrapped(call: object) -> Wrapped | None:
    """Return what a callable of torch.compile consists of, None if it is none."""
    if isinstance(call, OptimizedModule):
        call = vars(call).get("_forward", call.forward)  # of a lazy module
    elif isinstance(call, torch.nn.Module):
        call = call._compiled_call_impl
    if not isinstance(call, FunctionType) or call.__code__.co_name != WRAPPER or not call.__closure__:
        return None
    own = {name: cell.cell_contents for name, cell in zip(call.__code__.co_freevars, call.__closure__, strict=True)}
    region = getattr(own["self"], "_isolate_recompiles_id", NO_REGION)
    return Wrapped(own["fn"], own["callback"], region) if callable(own["callback"]) else None


def module_of(call: object) -> torch.nn.Module | None:
    """Return the module that is compiled, None for a function."""
    if isinstance(call, OptimizedModule):
        return call._orig_mod
    return call if isinstance(call, torch.nn.Module) else None


def compiled_parts(module: torch.nn.Module) -> Iterator[str]:
    """Yield the names of a module's parts that are compiled on their own."""
    for name, part in module.named_modules():
        if name and (isinstance(part, OptimizedModule) or part._compiled_call_impl is not None):
            yield name


def has_own_hooks(call: object) -> bool:
    """Return whether hooks are registered for the module that torch.compile returned, not for the user's."""
    return isinstance(call, OptimizedModule) and bool(call._forward_hooks or call._forward_pre_hooks)


def uncompiled(call: object, parts: Wrapped) -> Callable[..., Any]:
    """Return what runs the same in eager."""
    module = module_of(call)
    if module is None:
        return parts.function
    return module if module._compiled_call_impl is None else module._call_impl


def in_eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call`, during which dynamo looks at no frame of this thread."""

    def run(*args: object, **kwargs: object) -> Any:
        before = set_callback(None)
        try:
            return call(*args, **kwargs)
        finally:
            set_callback(before)

    return run


class _Again(Exception):  # noqa: N818 - nothing is wrong
    pass


class NoCompile:
    """dynamo's callback that compiles nothing: a frame without code that fits runs in eager, with all that it calls.

    `missed` is called with the reason. With `again`, a frame of the function itself raises if code does fit: torch goes
    through its list of code while other threads reorder it, and may pass one by.
    """

    def __init__(self, parts: Wrapped, missed: Callable[[str], None], *, again: bool) -> None:
        self._torchdynamo_orig_backend = parts.callback  # dynamo compares backends by it
        self._parts, self._missed, self._again = parts, missed, again
        self._owner = getattr(parts.function, "__self__", None)
        function = self._owner.forward if isinstance(self._owner, torch.nn.Module) else parts.function
        self._code = getattr(function, "__code__", None)

    def __call__(self, frame: "DynamoFrameType", entry: object, state: object) -> ConvertFrameReturn:
        """Return how dynamo runs a frame for which it found no code."""
        if _has_no_graph(frame):
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)
        entries = _entries(frame.f_code, self._parts)
        if _any_fits(entries, frame):
            if self._again and self._is_first(frame):
                raise _Again
            self._missed("other threads reordered dynamo's list of code")
        else:
            self._missed(_reason(frame, entries))
        return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP), apply_to_code=False)

    def _is_first(self, frame: "DynamoFrameType") -> bool:
        """Return whether a frame is that of the function itself, before which nothing has run."""
        code: Any = frame.f_code
        own = code.co_argcount and frame.f_locals.get(code.co_varnames[0])
        # Functions that run before a module's forward would run again.
        hooks = isinstance(self._owner, torch.nn.Module) and (
            self._owner._forward_pre_hooks or _global_forward_pre_hooks
        )
        return code is self._code and self._owner in (None, own) and not hooks


TRIES = 8


def without_compiling(parts: Wrapped, missed: Callable[[str], None]) -> Callable[..., Any]:
    """Return a callable that runs the compiled code of a function and compiles nothing; `missed` as in `NoCompile`."""
    function, region = parts.function, parts.region
    callbacks = (*[NoCompile(parts, missed, again=True)] * TRIES, NoCompile(parts, missed, again=False))

    def run(*args: object, **kwargs: object) -> Any:
        GenerationTracker.generation += 1  # CUDA-graph trees see a new call by it
        before, region_before = set_callback(None), _set_region(region)
        try:
            for callback in callbacks:
                set_callback(callback)
                try:
                    return function(*args, **kwargs)
                except _Again:
                    set_callback(None)
            raise AssertionError("the last callback runs the frame in eager")
        finally:
            set_callback(before)
            _set_region(region_before)

    return run


def _any_fits(entries: "list[_CacheEntry]", frame: "DynamoFrameType") -> bool:
    return any(entry.guard_manager.check(frame.f_locals) for entry in entries)


class _Stopped(Exception):  # noqa: N818 - it carries an answer
    pass


class _Look:
    """dynamo's callback that stops at the first frame that has compiled code, with whether any of it fits."""

    def __init__(self, parts: Wrapped) -> None:
        self._torchdynamo_orig_backend = object()  # no compiled code has this backend, so that none is run
        self._parts = parts

    def __call__(self, frame: "DynamoFrameType", entry: object, state: object) -> ConvertFrameReturn:
        if _has_no_graph(frame):
            return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)
        entries = _entries(frame.f_code, self._parts)
        raise _Stopped("" if _any_fits(entries, frame) else _reason(frame, entries))


def looking(parts: Wrapped) -> Callable[..., str | None]:
    """Return a callable that runs nothing and returns why no code fits its arguments, "" if some does.

    None if there was no frame to look at.
    """
    function, region, callback = parts.function, parts.region, _Look(parts)

    def look(*args: object, **kwargs: object) -> str | None:
        before, region_before = set_callback(None), _set_region(region)
        set_callback(callback)
        try:
            function(*args, **kwargs)
        except _Stopped as stopped:
            return str(stopped)
        finally:
            set_callback(before)
            _set_region(region_before)
        return None

    return look


def _has_no_graph(frame: "DynamoFrameType") -> bool:
    """Return whether dynamo would not look for a graph in a frame: one of torch's own, or without tensors."""
    return bool(trace_rules.check(frame.f_code)) or not has_tensor_in_frame(frame)


def _entries(code: Any, parts: Wrapped) -> "list[_CacheEntry]":
    """Return the compiled code of a code object that is of this torch.compile's backend and region."""
    backend = innermost_backend(parts.callback)
    return [
        entry
        for entry in cache_entries(code)
        if entry.backend == backend and getattr(entry, "isolate_recompiles_id", NO_REGION) == parts.region
    ]


MOST_ASKED = 8  # entries of compiled code, the last used first


def _reason(frame: "DynamoFrameType", entries: "list[_CacheEntry]") -> str:
    """Return the guard that failed: of several entries one that fails for another reason than a size."""
    if not entries:
        return f"no code was compiled for {frame.f_code.co_name!r}"
    reasons = []
    for entry in entries[:MOST_ASKED]:
        found: Any = entry.guard_manager.check_verbose(frame.f_locals)
        reasons += [str(part).strip() for part in found.verbose_code_parts[:1]]
    of_others = [reason for reason in reasons if "size" not in reason]
    return (of_others or reasons or ["a guard failed"])[0]


# ---- compiling ahead


def mark(tensor: torch.Tensor, dim: int, *, dynamic: bool) -> None:
    """Let dynamo compile code for any size of a dimension, if it can, or for this size alone."""
    (maybe_mark_dynamic if dynamic else mark_static)(tensor, dim)


@contextmanager
def compiling_ahead(*, dynamic: bool) -> Iterator[None]:
    """Compile any number of graphs of a function; without `dynamic`, only sizes that are marked are symbols.

    After a graph break nothing is marked: there a size is a symbol once it has varied.
    """
    with ExitStack() as stack:
        stack.callback(AHEAD.reset, AHEAD.set(True))
        stack.enter_context(limits_lifted())
        if not dynamic:
            stack.enter_context(config.patch(automatic_dynamic_shapes=False))
        yield


def compile_events() -> int:
    """Return a number that rises whenever torch compiles, tunes or lowers something."""
    timed = sum(map(len, compilation_time_metrics.values()))
    return timed + sum(counters["frames"].values()) + sum(counters["aot_autograd"].values())
