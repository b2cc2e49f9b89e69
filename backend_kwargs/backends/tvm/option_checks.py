"""Checks of TVM options whose type does not say everything, without TVM, whose import takes seconds.

What TVM has tables of itself, targets, passes and their options, it checks when it compiles the first graph.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, get_args

from backend_kwargs.errors import BackendKwargsError, unknown, wrong_value
from backend_kwargs.options.option import Option
from backend_kwargs.options.trust import Check

KIND = "TVM option"
TUNING = "scheduler='meta_schedule', trials=64"
REMOVED_SCHEDULERS = ("auto_scheduler", "autotvm", "ansor")
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


CHECKS: Mapping[str, Callable[[str, Any], None]] = MappingProxyType(
    {
        "aten_ops": _check_aten_ops,
        "trials": _at_least(0),
        "seed": _at_least(0),
        "opt_level": _at_least(0),
        "max_trials_per_task": _at_least(1),
        "num_trials_per_iter": _at_least(1),
    }
)
