"""The precisions that a caller may consent to, as data, and the checks of a request. Imports no torch.

A candidate of a race sets both `precision` and `max_error`. So a stored decision contains the bound, an export is a
template that works, and the error is measured wherever a decision is used.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from backend_kwargs.errors import BackendKwargsError, unknown
from backend_kwargs.options.machine import CannotWorkError, Limit, Machine, Rule, limits, unmet
from backend_kwargs.options.option import Options, Where

Kind = Literal["setting", "casts", "quantised"]
Names = tuple[Literal["tf32", "bf16", "fp16", "int8-dynamic", "int8-weight", "fp8-dynamic"], ...]
Bound = Annotated[float, Where("above 0 and below 1", lambda bound: 0 < bound < 1)]
EMULATED = "torch emulates it, which is slow"


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision: what is computed in it, how it is put into a graph, and what it needs.

    It does not work without the requirements `needs`, and is slow without `fast_with`. `trains` says whether graphs
    with a backward pass may use it; `dtype` is the dtype of its products.
    """

    name: str
    summary: str
    kind: Kind
    dtype: str
    needs: tuple[str, ...] = ()
    fast_with: str | None = None
    trains: bool = False


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        each.name: each
        for each in (
            Precision("tf32", "float32 products in TF32", "setting", "float32", ("gpu",), trains=True),
            Precision(
                "bf16", "products and convolutions in bfloat16", "casts", "bfloat16", fast_with="bf16_unit", trains=True
            ),
            Precision(
                "fp16", "products and convolutions in float16", "casts", "float16", fast_with="fp16_unit", trains=True
            ),
            Precision("int8-dynamic", "linear layers in int8, inputs scaled row by row", "quantised", "", ("torchao",)),
            Precision("int8-weight", "weights of linear layers kept in int8", "quantised", "", ("torchao",)),
            Precision(
                "fp8-dynamic", "linear layers in float8, inputs scaled row by row", "quantised", "", ("torchao", "fp8")
            ),
        )
    }
)
OPTIONS = ("precision", "max_error")
NEEDS_BOUND = (
    "Option 'precision' needs 'max_error', the largest relative error of an output that you accept: for example, pass "
    "max_error=1e-2."
)
TF32 = Limit(
    "Precision 'tf32'",
    "in torch it is a setting of the whole process, so products of other threads would use it too",
    "call torch.set_float32_matmul_precision('high') yourself, or consent to 'bf16'",
)


def named(value: Any) -> Any:
    """Return the precisions that `value` names, as a tuple; raise with the nearest name if one is unknown.

    A string may name several, separated by commas. A value of another type is returned for the option's type check.
    """
    if value is None:
        return ()
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return value
    found = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    for name in found:
        if name not in PRECISIONS:
            raise unknown("precision", name, PRECISIONS, otherwise=f"It is one of {', '.join(PRECISIONS)}.")
    return found


def verify(options: Options, here: Machine, tell: Callable[[Limit], None]) -> None:
    """Raise if the precisions in `options` cannot be used as requested; `tell` the limits of this machine."""
    names: tuple[str, ...] = named(options.get("precision"))
    if not names:
        return
    if "tf32" in names:
        raise BackendKwargsError(f"{TF32.subject} is refused: {TF32.reason}; {TF32.remedy}.")
    if options.get("max_error") is None:
        raise BackendKwargsError(NEEDS_BOUND)
    if len(names) > 1 and not options.get("auto"):
        raise BackendKwargsError(
            f"Option 'precision' names {len(names)} ({', '.join(names)}), but only `auto` can choose between them: "
            "name one, or pass auto=True."
        )
    for name in names:
        for limit in lacking(name, here):
            if not limit.otherwise and not options.get("auto"):
                raise CannotWorkError(limit)
            tell(limit if limit.otherwise else replace(limit, otherwise="`auto` does not try it"))


def lacking(name: str, here: Machine) -> list[Limit]:
    """Return what this machine lacks for the precision; limits with an `otherwise` only make it slow."""
    if name == "tf32":
        return [TF32]
    precision, subject = PRECISIONS[name], f"Precision {name!r}"
    slow = () if precision.fast_with is None else (precision.fast_with,)
    return limits(subject, precision.needs, here=here) or limits(subject, slow, EMULATED, here)


def _needs(names: Iterable[str]) -> list[tuple[str, ...]]:
    return [(*PRECISIONS[name].needs, *filter(None, (PRECISIONS[name].fast_with,))) for name in names]


RULES: tuple[Rule, ...] = (
    Rule("precision", either=lambda value: _needs(named(value("precision")))),
    Rule("max_error", unless=lambda value: "" if value("precision") else "it is read only with precision"),
)


def why_slow(name: str, device: str, here: Machine) -> str:
    """Return why a graph on `device` cannot be faster in the precision, or "".

    A machine may have both CPU and GPU.
    """
    lacks = unmet(_needs([name])[0], here if device == "cuda" else here.without_gpu())
    return lacks[0].reason if lacks else ""


class UnfitPrecisionError(BackendKwargsError):
    """A graph cannot be computed in a precision; the message says why."""


class UnmeasuredError(UnfitPrecisionError):
    """The error of a call cannot be measured, for example because all its results are nan; that of another may be."""
