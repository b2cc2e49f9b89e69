"""What torch.compile compiled in a value: its own result, a module with compiled parts, a wrapper, a method.

And why no graph of it reached a backend, if dynamo still knows the reason.
"""

import functools
import inspect
import types
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from backend_kwargs.backend import Backend
from backend_kwargs.compile_records import Record, called_by, records
from backend_kwargs.errors import wrong_value
from backend_kwargs.report.advice import reason_and_hint

if TYPE_CHECKING:
    import torch

SHARED = (
    "Compiled for another torch.compile of the same code: these graphs serve this one too where their guards "
    "hold. Elsewhere it runs in eager, if the recompile limit is reached."
)


def found_in(value: object) -> tuple[list[Any], list[Record], tuple[str, ...]]:
    """Return what torch.compile was given, wherever `value` keeps its results; their graphs' records; notes on these.

    `value` is such a result, a module with any in it or below it, a method of one, a `functools.partial`, or an object
    that holds one of these, such as a Trainer or a pipeline.

    Raises:
        BackendKwargsError: if there is none, and no graph was compiled of a module in `value` either.

    """
    subject = getattr(_unwrapped(value), "__self__", _unwrapped(value))
    kept = [] if _is_module(subject) else filter(_is_module, _attributes(subject))
    holders = [part for each in (subject, *kept) for part in (each.modules() if _is_module(each) else [each])]
    results = [_result_of(value)]
    if results == [None]:
        results = [_result_of(kept) for holder in _distinct(holders) for kept in _attributes(holder)]
    compiled = _distinct(filter(None, results))
    owners = [inspect.getclosurevars(result).nonlocals["fn"] for result in compiled]
    everything, modules = records(), {id(each) for each in holders if _is_module(each)}
    of_owners = [record for record in everything if any(record.owner() is owner for owner in owners)]
    # Another value's torch.compile may have compiled its modules.
    of_modules = [record for record in everything if id(called_by(record.owner()).value) in modules]
    if not owners and not of_modules:
        wanted = "what torch.compile returned, or hold it, as a module or a Trainer does"
        raise wrong_value("report's argument", wanted, value)
    if own := of_owners or of_modules:
        return owners, own, ()
    shared = [record for record in everything if any(map(partial(_serves, record), owners, compiled))]
    return owners, shared, (SHARED,) if shared else ()


def _serves(record: Record, owner: object, result: types.FunctionType) -> bool:
    """Return whether dynamo takes the record's graph for another `owner` and its `result`, where its guards hold."""
    from backend_kwargs.torch_internals.dynamo import backend_of

    called, (backend, options) = called_by(owner), backend_of(result)
    if called.code is None or (called.code, called.inlined) != (record.code(), record.inlined):
        return False
    return isinstance(backend, Backend) and backend.called_with(**options) == record.backend


def _attributes(holder: object) -> list[Any]:
    kept = {} if isinstance(holder, type | types.ModuleType) else getattr(holder, "__dict__", {})
    return list(kept.values())


def _distinct(values: Any) -> list[Any]:
    return list({id(value): value for value in values}.values())


def _is_module(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _unwrapped(value: Any) -> Any:
    """Return the function in partials and in decorators that say what they wrap, up to torch.compile's own."""
    while isinstance(value, functools.partial):
        value = value.func
    return inspect.unwrap(value, stop=_is_result) if isinstance(value, types.FunctionType) else value


def _result_of(value: object) -> types.FunctionType | None:
    """Return the result of torch.compile that `value` is, None if it is none."""
    value = _unwrapped(value)
    return value if _is_result(value) else None


def _is_result(value: object) -> TypeGuard[types.FunctionType]:
    from backend_kwargs.torch_internals.dynamo import WRAPPER

    return isinstance(value, types.FunctionType) and value.__code__.co_name == WRAPPER


# ---- why there is no graph

COMPILE_IT = "torch.compile(module), or call it in a function or a module of your own"
CALLING = ("encode", "generate", "predict", "transform")  # methods that libraries give people to call instead
LOG = "TORCH_LOGS=graph_breaks shows more"


def why_no_graph(owner: object) -> str | None:
    """Return the cause and the remedy for `owner`, which torch.compile was given; None if the cause is unknown."""
    import torch

    module, code, inlined = called_by(owner)
    inside = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    # As long as dynamo keeps its metrics of the frames.
    from backend_kwargs.torch_internals.dynamo import recent_compiles

    codes = filter(None, (getattr(owner, "__code__", None), code))
    places = {(each.co_name, each.co_filename, each.co_firstlineno) for each in codes}
    attempts = [m for m in recent_compiles() if (m.co_name, m.co_filename, m.co_firstlineno) in places]
    if inlined:
        # torch calls all of its own modules through one function, so they share its frame.
        names = [type(each).__name__ for each in inside]
        attempts = [each for each in attempts if any(name in (each.fail_reason or "") for name in names)]
        inside = inside[1:] if isinstance(module, torch.nn.parallel.DistributedDataParallel) else []
    if any(attempt.graph_op_count for attempt in attempts):
        return None  # another backend compiled a graph
    if failed := _one(attempt.fail_reason for attempt in attempts):
        return "{} -> {}".format(*reason_and_hint(failed, LOG))
    if inside and all(map(_skipped, inside)):
        first = type(inside[0]).__name__
        return f"dynamo skips torch's own modules, such as {first}, unless torch.compile is given one -> {COMPILE_IT}"
    if broke := _one(reason for attempt in attempts for reason in attempt.restart_reasons or ()):
        return "a graph break comes before any operation: {} -> {}".format(*reason_and_hint(broke, LOG))
    return "dynamo found no operation on tensors in it -> nothing, as there is nothing to compile" if attempts else None


def methods_in_eager(module: object) -> str:
    """Return that the methods of a module's class run in eager, such as `encode`; "" if it has none of its own.

    torch.compile(module) compiles calls of the module alone; dynamo never sees the others, so they leave no trace.
    """
    import torch

    if not isinstance(module, torch.nn.Module) or type(module).__module__.partition(".")[0] == "torch":
        return ""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    given = next((name for name in CALLING for kind in kinds if name in vars(kind)), "")
    if not given:
        return ""
    kind = type(module).__name__
    return (
        f" {kind}.{given} runs in eager even then, since torch.compile(model) compiles calls of the model alone: "
        "compile in place what it calls, such as model[0].compile(...)."
    )


def _one(reasons: Iterable[str | None]) -> str:
    """Return the reason if there is only one, "" if there are several, since some may belong to other callables."""
    distinct = set(filter(None, reasons))
    return distinct.pop() if len(distinct) == 1 else ""


def _skipped(module: "torch.nn.Module") -> bool:
    """Return whether dynamo compiles no frame of the module's forward."""
    from backend_kwargs.torch_internals.dynamo import skips

    forward = getattr(module.forward, "__func__", module.forward)
    return hasattr(forward, "__code__") and skips(forward)
