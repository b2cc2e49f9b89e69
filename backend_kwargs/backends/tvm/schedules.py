"""Schedules for TVM's functions: ours for a CPU, dlight's for a GPU, or those that tuning found."""

from collections.abc import Callable, Mapping
from functools import partial

import tvm
from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir import dlight as dl
from tvm.target import Target

from backend_kwargs.backends.tvm.cpu_schedule import schedule_cpu
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.errors import error_text, warn_once

SCHEDULED = "tirx.is_scheduled"
# In the order in which they are tried; the last one for GPUs accepts any function with loops.
DLIGHT: Mapping[str, tuple[dl.ScheduleRule, ...]] = {
    "llvm": (dl.cpu.GEMV(), dl.cpu.Reduction()),
    "gpu": (dl.gpu.Matmul(), dl.gpu.GEMV(), dl.gpu.Reduction(), dl.gpu.GeneralReduction(), dl.gpu.Fallback()),
}


class NoRuleFitsError(Exception):
    """None of dlight's rules applies to a function."""


def schedule(mod: tvm.IRModule, settings: TVMOptions, target: Target) -> tuple[tvm.IRModule, int, tuple[str, ...]]:
    """Return the module with its functions scheduled, the number of tuned ones, and notes for the report."""
    ours = partial(_dlight if settings.scheduler == "dlight" or _is_gpu(target) else schedule_cpu, target=target)
    notes: tuple[str, ...] = ()
    if settings.scheduler == "meta_schedule":
        from backend_kwargs.backends.tvm.tune import tuned  # imports slowly, and most compiles do not search

        mod, measured = tuned(mod, settings, target, ours)
        notes = (f"measured {measured} schedules",)
    found = sum(_is_scheduled(func) for _, func in mod.functions_items())
    rest = {
        var: _guarded(func, ours)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and not _is_scheduled(func)
    }
    mod.update(tvm.IRModule(rest))
    return mod, found, notes


def _is_gpu(target: Target) -> bool:
    return str(target.kind.name) != "llvm"


def _is_scheduled(func: object) -> bool:
    return isinstance(func, tirx.PrimFunc) and bool(func.attrs and func.attrs.get(SCHEDULED))


def _guarded(func: tirx.PrimFunc, rule: Callable[[tirx.PrimFunc], Schedule]) -> tirx.PrimFunc:
    """Return a scheduled function, or the function itself where its rule fails."""
    try:
        return rule(func).mod["main"].with_attr(SCHEDULED, True)
    except NoRuleFitsError:
        return func
    except Exception as error:  # noqa: BLE001 - whatever a rule fails at, plain loops are correct
        warn_once(f"TVM runs a function in plain loops, since its schedule failed: {error_text(error)}.")
        return func


def _dlight(func: tirx.PrimFunc, target: Target) -> Schedule:
    """Schedule a function by the first rule of dlight that fits. Raises NoRuleFitsError."""
    for rule in DLIGHT["gpu" if _is_gpu(target) else "llvm"]:
        if (found := _tried(rule, func, target)) is not None:
            return found
    raise NoRuleFitsError


def _tried(rule: dl.ScheduleRule, func: tirx.PrimFunc, target: Target) -> Schedule | None:
    """Return the schedule by one rule, None if the rule does not fit."""
    try:
        schedules = rule.apply(func, target, False)
        scheduled = schedules[0] if isinstance(schedules, list) else schedules
        if scheduled is not None and _is_gpu(target):
            # Fails here, so that the next rule is tried, instead of when the module is built.
            tvm.s_tir.transform.LowerCrossThreadReduction()(scheduled.mod)
    except Exception:  # noqa: BLE001 - dlight's rules assert on functions they were not written for
        return None
    return scheduled
