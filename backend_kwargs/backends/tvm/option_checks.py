"""Checks of TVM options whose type does not say everything.

To import TVM takes seconds: only what is named by `pass_config`, or in a dict as `target`, is compared with its tables.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from backend_kwargs.backends.tvm.versions import require_tvm
from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.options.layers import Options
from backend_kwargs.options.option import Option, check
from backend_kwargs.options.trust import Check

KIND = "TVM option"
Type: TypeAlias = Any  # a class, or a type with arguments such as list[str]
TUNING = "scheduler='meta_schedule', trials=64"
REMOVED_SCHEDULERS = ("auto_scheduler", "autotvm", "ansor")
KINDS = ("llvm", "cuda")  # of targets whose devices torch supports
# What TVM calls the types of its options; any other is a record, which is written as a dict.
TYPES: Mapping[str, Type] = MappingProxyType(
    {
        "str": str,
        "int": int,
        "bool": bool,
        "ir.IntImm": int,
        "Array<str>": list[str],
        "ffi.Array": list,
        "target.Target": str | dict[str, Any],
    }
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


def checked(option: Option, value: object, read: Check) -> object:
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
    if check_value := CHECKS.get(option.name):
        check_value(option.name, fitted)
    return fitted


def _at_least(least: int) -> Callable[[str, int | None], None]:
    """Return a check of the least value."""

    def check_number(name: str, value: int | None) -> None:
        if value is not None and value < least:
            raise wrong_value(f"{KIND} {name!r}", f"a whole number of at least {least}", value)

    return check_number


def _check_target(name: str, target: Any) -> None:
    """Raise for an unknown kind of target or an attribute that the kind lacks."""
    if isinstance(target, str):
        _check_target_text(target)
    elif target is not None:
        kind = target.get("kind")
        if kind not in KINDS:
            raise unknown("TVM target kind", kind, KINDS, otherwise=_one_of(KINDS))
        _check_entries(target, _attributes(kind), f"attribute of target {kind!r}", "target attribute")


def _attributes(kind: str) -> Mapping[str, object]:
    """Return the attributes of a kind of target, with what TVM calls their types."""
    require_tvm()
    from tvm.target import TargetKind

    attributes: Mapping[str, object] = TargetKind.options_from_name(kind)
    return attributes


def _check_target_text(target: str) -> None:
    """Raise for a target of flags, with the dict to write instead, and for an unknown kind."""
    kind, *flags = target.split()[:1] + re.findall(r"(?<!\S)-+([\w-]+)[= ](\S+)", target)
    if flags:
        types = _attributes(kind) if kind in KINDS else {}
        written = {"kind": kind} | {key: _read_flag(str(types.get(key)), text) for key, text in flags}
        raise BackendKwargsError(f"TVM no longer reads flags in a target's text; write target={written!r}.")
    if target not in KINDS:
        raise unknown("TVM target", target, KINDS, otherwise=f"{_one_of(KINDS)[:-1]}, or a dict with 'kind'.")


def _read_flag(kind: str, text: str) -> str | int | list[str]:
    """Return the value of a flag in the type of its attribute."""
    if kind == "Array<str>":
        return text.split(",")
    return int(text) if kind in ("int", "bool") and text.isdigit() else text


def _check_pass_config(name: str, config: Options) -> None:
    """Raise for an entry that TVM does not know, or of another type."""
    entries = require_tvm().transform.PassContext.list_configs() if config else {}
    types = {key: each["type"] for key, each in entries.items()}
    _check_entries(config, types, "entry of TVM's pass_config", "pass_config entry")


def _check_entries(given: Options, types: Mapping[str, object], kind: str, what: str) -> None:
    """Raise for a name that is not among TVM's, and for a value of another type."""
    for name, value in given.items():
        if name not in types:
            raise unknown(kind, name, types)
        check(Option(name, TYPES.get(str(types[name]), dict)), value, what)


def _check_pipeline(names: Sequence[str], module: str) -> Callable[[str, object], None]:
    """Return a check that a pipeline is a known name or a Pass of TVM's."""

    def check_pipeline(name: str, value: object) -> None:
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
    import torch

    from backend_kwargs.torch_internals.operators import aten_names, is_composite, overloads_of, schema_of

    for op in names or ():
        if not op.isidentifier() or op.startswith("__") or not hasattr(torch.ops.aten, op):
            raise unknown("ATen operator", op, aten_names())
        overloads = overloads_of(getattr(torch.ops.aten, op))
        if not (functional := [each for each in overloads if not schema_of(each).is_mutable]):
            raise BackendKwargsError(f"ATen operator {op!r} writes in place, which no graph does that TVM sees.")
        if all(map(is_composite, functional)):
            step = (
                f"name {' and '.join(map(repr, BECOMES[op]))} instead"
                if op in BECOMES
                else 'TORCH_LOGS="aot_graphs" shows how'
            )
            raise BackendKwargsError(f"ATen operator {op!r} is taken apart before TVM sees a graph: {step}.")


def _one_of(names: Iterable[str]) -> str:
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
