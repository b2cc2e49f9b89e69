"""Why no graph of a callable reached a backend, if dynamo still knows the reason."""

from collections.abc import Iterable
from types import CodeType
from typing import TYPE_CHECKING, Any

from backend_kwargs.report.advice import reason_and_hint

if TYPE_CHECKING:
    import torch

COMPILE_IT = "torch.compile(module), or call it in a function or a module of your own"
CALLING = ("encode", "generate", "predict", "transform")  # methods that libraries give people to call instead
LOG = "TORCH_LOGS=graph_breaks shows more"


def why_no_graph(owner: object, module: object, code: CodeType | None) -> str | None:
    """Return the cause and the remedy for `owner`, which torch.compile was given; None if the cause is unknown.

    `module` is what it calls, and `code` is the code object that dynamo compiles for that.
    """
    import torch

    inside = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    attempts = _attempts(owner, code)
    if hasattr(owner, "__wrapped__"):
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


def _attempts(owner: object, code: CodeType | None) -> list[Any]:
    """Return dynamo's metrics of the frames of `owner` and `code`, as long as it keeps them."""
    from backend_kwargs.torch_internals.dynamo import recent_compiles

    codes = filter(None, (getattr(owner, "__code__", None), code))
    places = {(each.co_name, each.co_filename, each.co_firstlineno) for each in codes}
    return [m for m in recent_compiles() if (m.co_name, m.co_filename, m.co_firstlineno) in places]


def _one(reasons: Iterable[str | None]) -> str:
    """Return the reason if there is only one, "" if there are several, since some may belong to other callables."""
    distinct = set(filter(None, reasons))
    return distinct.pop() if len(distinct) == 1 else ""


def _skipped(module: "torch.nn.Module") -> bool:
    """Return whether dynamo compiles no frame of the module's forward."""
    from backend_kwargs.torch_internals.dynamo import skips

    forward = getattr(module.forward, "__func__", module.forward)
    return hasattr(forward, "__code__") and skips(forward)
