"""Checks of TVM options whose type does not say everything. Imports no TVM: the tables are those of TVM 0.27.

To import TVM takes seconds; tests compare these tables with its own.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.options.option import Option, check

KIND = "TVM option"
TUNING = "scheduler='meta_schedule', trials=64"
REMOVED_SCHEDULERS = ("auto_scheduler", "autotvm", "ansor")
# Kinds of target whose devices torch supports, and their attributes.
COMMON: dict[str, Any] = {
    "kind": str,
    "keys": list[str],
    "tag": str,
    "device": str,
    "model": str,
    "libs": list[str],
    "mcpu": str,
}
COMMON |= {"host": str | dict[str, Any]}
TARGETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llvm": COMMON
        | dict.fromkeys(("mtriple", "mfloat-abi", "mabi", "jit"), str)
        | dict.fromkeys(("mattr", "cl-opt"), list[str])
        | dict.fromkeys(("num-cores", "opt-level", "vector-width"), int)
        | {f"fast-math{flag}": bool for flag in ("", "-nnan", "-ninf", "-nsz", "-arcp", "-contract", "-reassoc")},
        "cuda": COMMON
        | {"arch": str}
        | dict.fromkeys(("max_shared_memory_per_block", "max_threads_per_block", "max_num_threads"), int)
        | dict.fromkeys(("thread_warp_size", "registers_per_block", "l2_cache_size_bytes"), int),
    }
)
_PASS_CONFIG: Mapping[Any, str] = {
    bool: """
        relax.backend.use_cuda_graph relax.lift_transform_params.consume_params relax.transform.apply_legalize_ops
        s_tir.instr_siblings s_tir.lwp_disable_func_prof s_tir.reset_start_id testing.immutable_module
        tirx.debug_keep_trivial_loop tirx.disable_assert tirx.disable_cse_tir tirx.disable_storage_rewrite
        tirx.disable_vectorize tirx.enable_buffer_level_predication tirx.enable_debug tirx.enable_fast_math
        tirx.instrument_bound_checkers tirx.instrument_lwp tirx.is_entry_func tirx.merge_static_smem tirx.noalias
        tirx.s_tir.ldg32 tirx.use_async_copy
    """,
    int: """
        relax.FuseOps.max_depth relax.fallback_device_type s_tir.lwp_max_depth s_tir.lwp_min_height tirx.vtcm_capacity
    """,
    dict: """
        s_tir.HoistExpression s_tir.HoistIfThenElse s_tir.InjectDoubleBuffer s_tir.LoopPartition tirx.RemoveNoOp
        tirx.StmtSimplify tirx.UnrollLoop
    """,
    list: "tirx.add_lower_pass",
}
PASS_CONFIG: Mapping[str, Any] = MappingProxyType(
    {name: kind for kind, names in _PASS_CONFIG.items() for name in names.split()}
)
PIPELINES = ("default", "default_build", "zero")
TIR_PIPELINES = ("default", "s_tir", "tirx")
TUNING_PIPELINE = "static_shape_tuning"
# The decompositions of operators that users name first.
BECOMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "linear": ("addmm", "mm"),
        "matmul": ("mm", "bmm"),
        "softmax": ("_softmax",),
        "log_softmax": ("_log_softmax",),
        "layer_norm": ("native_layer_norm",),
        "group_norm": ("native_group_norm",),
        **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_transpose2d"), ("convolution",)),
    }
)


def checked(option: Option, value: Any, read: Callable[[Option, Any, str], Any]) -> Any:
    """Return `value` as the option's type by `read`, which knows whether it was text; else raise."""
    if option.name == "scheduler" and value in REMOVED_SCHEDULERS:
        raise BackendKwargsError(f"TVM's scheduler {value!r} was removed; write {TUNING}.")
    literals = [part for part in (option.type, *get_args(option.type)) if getattr(part, "__origin__", None) is Literal]
    if choices := [word for part in literals for word in get_args(part)]:
        words = {"none", "null"} if option.default is None else set()  # None written as text
        if isinstance(value, str) and value not in choices and value.lower() not in words:
            raise unknown(f"TVM {option.name}", value, choices, otherwise=f"It is {' or '.join(map(repr, choices))}.")
    if option.name == "aten_ops" and isinstance(value, list):
        value = tuple(value)
    fitted = read(option, value, KIND)
    CHECKS.get(option.name, _anything)(option.name, fitted)
    return fitted


def _anything(name: str, value: Any) -> None:
    """Accept any value."""


def _at_least(least: int) -> Callable[[str, Any], None]:
    """Return a check of the least value."""

    def check_number(name: str, value: Any) -> None:
        if value is not None and value < least:
            raise wrong_value(f"{KIND} {name!r}", f"a whole number of at least {least}", value)

    return check_number


def _check_target(name: str, target: Any) -> None:
    """Raise for an unknown kind of target or an attribute that the kind lacks."""
    if isinstance(target, str):
        _check_target_text(target)
    elif target is not None:
        kind = target.get("kind")
        if kind not in TARGETS:
            raise unknown("TVM target kind", kind, TARGETS, otherwise=_one_of(TARGETS))
        for key, value in target.items():
            check(_known(key, TARGETS[kind], f"attribute of target {kind!r}"), value, "target attribute")


def _check_target_text(target: str) -> None:
    """Raise for a target of flags, with the dict to write instead, and for an unknown kind."""
    kind, *flags = target.split()[:1] + re.findall(r"(?<!\S)-+([\w-]+)[= ](\S+)", target)
    if flags:
        written = {"kind": kind} | {key: _read_flag(TARGETS.get(kind, {}).get(key, str), text) for key, text in flags}
        raise BackendKwargsError(f"TVM no longer reads flags in a target's text; write target={written!r}.")
    if target not in TARGETS:
        raise unknown("TVM target", target, TARGETS, otherwise=f"{_one_of(TARGETS)[:-1]}, or a dict with 'kind'.")


def _read_flag(wanted: Any, text: str) -> Any:
    """Return the value of a flag in the type of its attribute."""
    if wanted == list[str]:
        return text.split(",")
    return int(text) if wanted in (int, bool) and text.isdigit() else text


def _check_pass_config(name: str, config: Mapping[str, Any]) -> None:
    """Raise for an entry that TVM does not know, or of another type."""
    for key, value in config.items():
        check(_known(key, PASS_CONFIG, "entry of TVM's pass_config"), value, "pass_config entry")


def _known(key: str, table: Mapping[str, Any], kind: str) -> Option:
    """Return a key as an option of the type in `table`. Raises for an unknown key."""
    if key not in table:
        raise unknown(kind, key, table)
    return Option(key, table[key])


def _check_pipeline(names: Sequence[str], module: str) -> Callable[[str, Any], None]:
    """Return a check that a pipeline is a known name or a Pass of TVM's."""

    def check_pipeline(name: str, value: Any) -> None:
        if isinstance(value, str):
            if value == TUNING_PIPELINE:
                raise BackendKwargsError(f"{KIND} {name!r}: {value!r} tunes with its own arguments; write {TUNING}.")
            registered = getattr(sys.modules.get(module), "PIPELINE_MAP", {})  # the user may have added some
            if value not in (*names, *registered):
                raise unknown(f"TVM {name}", value, names, otherwise=f"{_one_of(names)[:-1]}, or a tvm Pass.")
        elif value is not None and not any(
            kind.__name__ == "Pass" and kind.__module__.startswith("tvm.") for kind in type(value).__mro__
        ):
            raise wrong_value(f"{KIND} {name!r}", "a name or a tvm.transform.Pass", value)

    return check_pipeline


def _check_aten_ops(name: str, names: Sequence[str] | None) -> None:
    """Raise for operators that ATen lacks, or that no graph has when TVM sees it."""
    from backend_kwargs.torch_internals.operators import aten_names, is_composite, schema_of

    for op in names or ():
        if not _is_aten(op):
            raise unknown("ATen operator", op, aten_names())
        if not (functional := [each for each in _overloads(op) if not schema_of(each).is_mutable]):
            raise BackendKwargsError(f"ATen operator {op!r} writes in place, which no graph does that TVM sees.")
        if all(map(is_composite, functional)):
            step = (
                f"name {' and '.join(map(repr, BECOMES[op]))} instead"
                if op in BECOMES
                else 'TORCH_LOGS="aot_graphs" shows how'
            )
            raise BackendKwargsError(f"ATen operator {op!r} is taken apart before TVM sees a graph: {step}.")


def _overloads(op: str) -> list[Any]:
    """Return all overloads of an ATen operator."""
    import torch

    from backend_kwargs.torch_internals.operators import overloads_of

    return overloads_of(getattr(torch.ops.aten, op))


def _is_aten(op: str) -> bool:
    """Return whether ATen has an operator of this name."""
    import torch

    return op.isidentifier() and not op.startswith("__") and hasattr(torch.ops.aten, op)


def _one_of(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the sentence that lists the names."""
    return f"It is {' or '.join(map(repr, names))}."


CHECKS: Mapping[str, Callable[[str, Any], None]] = MappingProxyType(
    {
        "target": _check_target,
        "pipeline": _check_pipeline(PIPELINES, "tvm.relax.pipeline"),
        "tir_pipeline": _check_pipeline(TIR_PIPELINES, "tvm.tirx.compilation_pipeline"),
        "pass_config": _check_pass_config,
        "aten_ops": _check_aten_ops,
        "trials": _at_least(0),
        "seed": _at_least(0),
        "opt_level": _at_least(0),
        "max_trials_per_task": _at_least(1),
        "num_trials_per_iter": _at_least(1),
    }
)
