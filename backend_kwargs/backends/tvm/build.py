"""Build an executable from a Relax module: target, pipeline, schedules, code.

Schedules are ours for a CPU, dlight's for a GPU, or those that tuning found.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import tvm
from tvm import relax, tirx
from tvm.relax.backend.cpu_generic.pipeline import legalize_passes, library_dispatch_passes
from tvm.relax.backend.cuda.pipeline import dataflow_lower_passes, finalize_passes
from tvm.s_tir import Schedule
from tvm.s_tir import dlight as dl
from tvm.target import Target

from backend_kwargs.backends.tvm.cpu_schedule import schedule_cpu
from backend_kwargs.backends.tvm.opaque import hide
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.backends.tvm.target import exact_math, target_of, why
from backend_kwargs.errors import BackendKwargsError, error_text, warn_once
from backend_kwargs.options.option import Options

CUDA_GRAPH = "relax.backend.use_cuda_graph"


def legalized(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Return the module with its operators as functions, fused: TVM's passes without those that schedule."""
    passes = *library_dispatch_passes(target), *legalize_passes(target)
    return tvm.transform.Sequential([*passes, relax.transform.DeadCodeElimination()])(mod)


def finished(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Return the module in the form that is built: TVM's passes, of which those for CUDA have all of a CPU's."""
    passes = *dataflow_lower_passes(target), *finalize_passes(target)
    return tvm.transform.Sequential([relax.transform.LegalizeOps(), *passes])(mod)


@dataclass(frozen=True)
class Built:
    """The arguments of `relax.VirtualMachine`, and facts about the build."""

    executable: relax.VMExecutable
    target: str
    tuned: int = 0
    notes: tuple[str, ...] = ()


def build(mod: tvm.IRModule, settings: TVMOptions, device: torch.device) -> Built:
    """Compile `mod` for the device with these settings. Raises BackendKwargsError if an option is the cause."""
    target = target_of(settings.target, device)
    with target, _context(settings, device):
        passes = _passes("pipeline", settings.pipeline, relax.get_pipeline) or partial(legalized, target=target)
        kernels = settings.tir_pipeline or "default"
        _passes("tir_pipeline", kernels, tvm.tirx.get_tir_pipeline)  # raises for a name that TVM does not know
        mod = passes(mod)
        mod, tuned, notes = schedule(mod, settings, target)
        if device.type == "cpu":  # GPU schedules recognize sums over threads by their operator until code is generated
            mod = hide(mod, totals=True)
        # Every pipeline that finishes a module removes its purity checks first.
        if "relax.force_pure" not in mod["main"].attrs:
            mod = finished(mod, target)
        with exact_math(target):
            code = relax.build(mod, target, relax_pipeline=None, tir_pipeline=kernels, exec_mode=settings.exec_mode)
    return Built(code, str(target.export()), tuned, notes)


def _passes(option: str, given: object, named: Callable[[str], Any]) -> Any:
    """Return the passes that TVM has under a name, or passes as they are. Raises BackendKwargsError."""
    if not isinstance(given, str):
        return given
    try:
        return named(given)
    except Exception as error:
        raise BackendKwargsError(f"Option {option!r}: {why(error)}.") from error


def _context(settings: TVMOptions, device: torch.device) -> tvm.transform.PassContext:
    """Return TVM's context with the options of passes. Raises BackendKwargsError for a wrong entry."""
    # Without a GPU there is nothing to record, and TVM would look up a function of its CUDA runtime.
    config: Options = {CUDA_GRAPH: True} if settings.cuda_graph and device.type == "cuda" else {}
    try:
        return tvm.transform.PassContext(
            opt_level=2 if settings.opt_level is None else settings.opt_level,
            config={**config, **settings.pass_config},
        )
    except AttributeError as error:
        raise BackendKwargsError(f"Option 'pass_config': {why(error)}.") from error


SCHEDULED = "tirx.is_scheduled"
# In the order in which they are tried; the last one for GPUs accepts any function with loops.
DLIGHT: Mapping[str, tuple[dl.ScheduleRule, ...]] = {
    "llvm": (dl.cpu.GEMV(), dl.cpu.Reduction()),
    "gpu": (dl.gpu.Matmul(), dl.gpu.GEMV(), dl.gpu.Reduction(), dl.gpu.GeneralReduction(), dl.gpu.Fallback()),
}


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
    except StopIteration:  # none of dlight's rules fits
        return func
    except Exception as error:  # noqa: BLE001 - whatever a rule fails at, plain loops are correct
        warn_once(f"TVM runs a function in plain loops, since its schedule failed: {error_text(error)}.")
        return func


def _dlight(func: tirx.PrimFunc, target: Target) -> Schedule:
    """Schedule a function by the first rule of dlight that fits. Raises StopIteration if none does."""
    tried = (_tried(rule, func, target) for rule in DLIGHT["gpu" if _is_gpu(target) else "llvm"])
    return next(found for found in tried if found is not None)


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
