"""Schedules for TVM's functions: ours for a CPU, dlight's for a GPU, or those that tuning found."""

from collections.abc import Callable, Mapping
from functools import partial

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir import dlight as dl
from tvm.target import Target
from tvm_ffi.structural import StructuralMutator

from backend_kwargs.backends.tvm.cpu_schedule import schedule_cpu
from backend_kwargs.backends.tvm.lowering.node import is_one
from backend_kwargs.backends.tvm.opaque import NAMES, is_opaque, opaque
from backend_kwargs.backends.tvm.settings import TVMOptions
from backend_kwargs.errors import error_text, warn_once

SCHEDULED = "tirx.is_scheduled"
EXTREMES = {NAMES[tirx.Max], NAMES[tirx.Min]}
# In the order in which they are tried; the last one for GPUs accepts any function with loops.
DLIGHT: Mapping[str, tuple[dl.ScheduleRule, ...]] = {
    "llvm": (dl.cpu.GEMV(), dl.cpu.Reduction()),
    "gpu": (dl.gpu.Matmul(), dl.gpu.GEMV(), dl.gpu.Reduction(), dl.gpu.GeneralReduction(), dl.gpu.Fallback()),
}


class NoRuleFitsError(Exception):
    """None of dlight's rules applies to a function."""


def schedule(mod: tvm.IRModule, settings: TVMOptions, target: Target) -> tuple[tvm.IRModule, int, tuple[str, ...]]:
    """Return the module with its functions scheduled, the number of tuned ones, and notes for the report."""
    if _is_gpu(target):
        mod = _without_single_reductions(mod)
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


def _without_single_reductions(mod: tvm.IRModule) -> tvm.IRModule:
    """Turn reductions over one element into plain statements.

    dlight takes such a reduction for elementwise code, since it drops loops of one iteration. It then merges what
    follows the reduction into it, and into its initial value: `sum(x) + b` becomes `(0 + b) + x + b`.
    """
    plain = {
        var: func.with_body(tvm_ffi.structural_mutate(func.body, (SBlock, _as_plain)))
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    mod.update(tvm.IRModule(plain))
    return mod


def _as_plain(block: SBlock, mutator: StructuralMutator) -> SBlock | tirx.BufferStore:
    """Return a reduction over one element as a plain statement; other blocks as they are."""
    block = mutator.default_mutate(block)
    reduced = [each for each in block.iter_vars if each.iter_type == tirx.IterVar.CommReduce]
    if not isinstance(block.init, tirx.BufferStore) or not all(is_one(each.dom.extent) for each in reduced):
        return block
    initial, store = block.init, block.body

    def is_initial(node: tirx.Expr) -> bool:
        return isinstance(node, TensorLoad) and bool(node.source.same_as(initial.buffer))

    def load(node: TensorLoad, _: object) -> tirx.Expr:
        return initial.value if is_initial(node) else node

    def call(node: Call, mutator: StructuralMutator) -> tirx.Expr:
        # The larger or smaller one of an integer and the initial value, whose literal CUDA reads as a wider type.
        if is_opaque(node) and node.op.name in EXTREMES and is_initial(node.args[0]):
            return mutator.mutate(node.args[1])
        return mutator.default_mutate(node)

    value = opaque(tvm_ffi.structural_mutate(store.value, [(TensorLoad, load), (Call, call)]))
    variables = [tirx.IterVar(each.dom, each.var, tirx.IterVar.DataPar) for each in block.iter_vars]
    body = tirx.BufferStore(store.buffer, value, store.indices)
    return SBlock(
        variables,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        None,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
    )


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
