"""OpenVINO under checked options, through its frontend for torch graphs instead of its dynamo backend."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from backend_kwargs.backends import DeclaredCompiler
from backend_kwargs.errors import BackendKwargsError, pip_install, unknown
from backend_kwargs.options import (
    CannotWorkError,
    Check,
    Limit,
    Need,
    Option,
    Options,
    Rule,
    declared,
    importable,
    precisions,
)
from backend_kwargs.options.machine import WITHOUT_HALF
from backend_kwargs.options.option import AtLeastOne

if TYPE_CHECKING:
    from backend_kwargs.backends.partitioned import PartCompiler

Hint = Literal["f32", "bf16", "f16"]
# The values of OpenVINO's INFERENCE_PRECISION_HINT, which it ignores where it lacks the capability.
HINTS: Mapping[str, Hint] = MappingProxyType({"bf16": "bf16", "fp16": "f16"})
REMEDY = "leave it out"
CAPABILITIES: Mapping[str, str] = MappingProxyType({"bf16": "BF16", "f16": "FP16"})


@dataclass(frozen=True, slots=True)
class OpenVINOOptions:
    """Every option of OpenVINO's native compiler, by its name, with its default."""

    inference_precision: Annotated[
        Hint, "the precision of OpenVINO's kernels; below f32 results differ from eager's"
    ] = "f32"
    precision: Annotated[
        tuple[Literal["bf16", "fp16"], ...], "a lower precision within max_error, as on tmpl-inductor; needs max_error"
    ] = ()
    max_error: Annotated[
        precisions.Bound | None, "largest relative RMSE of an output to a float64 reference under precision"
    ] = None
    inference_num_threads: Annotated[AtLeastOne | None, "threads; None: torch.get_num_threads()"] = None
    performance_hint: Annotated[Literal["LATENCY", "THROUGHPUT"], "the goal of OpenVINO's scheduling of threads"] = (
        "LATENCY"
    )
    min_block_size: Annotated[
        AtLeastOne, "the least number of operators in a part of little work; smaller ones run in eager"
    ] = 8
    aten_ops: Annotated[tuple[str, ...], "operators left to ATen, such as 'mm'"] = ()
    config: Annotated[dict[str, Any] | None, "OpenVINO's own properties, such as {'ENABLE_CPU_PINNING': True}"] = None


OPTIONS = declared(OpenVINOOptions, data={"aten_ops"})


@dataclass(frozen=True)
class OpenVINONativeCompiler(DeclaredCompiler):
    """OpenVINO on a CPU, for inference, with parameters as constants."""

    library: ClassVar[str] = "OpenVINO"
    registered: ClassVar[str] = "tmpl-openvino-native"
    line: ClassVar[str] = "OpenVINO's own compiler under options: inference, parameters as constants, the rest in eager"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = tuple(rule for rule in precisions.RULES if rule.options == "max_error")
    precisions: ClassVar[tuple[str, ...]] = tuple(HINTS)
    distributions: ClassVar[tuple[str, ...]] = ("openvino",)
    needs: ClassVar[tuple[Need, ...]] = (importable("openvino", pip_install("openvino")),)
    raced: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    def checked(self, option: Option, value: object, coerce: Check) -> object:
        return super().checked(option, precisions.named(value) if option.name == "precision" else value, coerce)

    def why_not_in(self, precision: str) -> str:
        return why_not_in(HINTS[precision])

    def verify(self, templates: Sequence[str], options: Options, tell: Callable[[Limit], None]) -> None:
        super().verify(templates, options, tell)
        for name in options.get("config") or {}:
            if name not in (known := _of_cpu("SUPPORTED_PROPERTIES")):
                raise unknown("property of OpenVINO's CPU", name, known)
        self._verify_precision(options)
        hint = options.get("inference_precision", "f32")
        if why := why_not_in(hint):
            tell(Limit(f"Option inference_precision={hint!r}", why, REMEDY, "OpenVINO computes in another precision"))

    def _verify_precision(self, options: Options) -> None:
        """Raise if `precision` has no bound, names several, or cannot be computed in here."""
        names: tuple[str, ...] = options.get("precision") or ()
        if not names:
            return
        if options.get("max_error") is None:
            raise BackendKwargsError(precisions.NEEDS_BOUND)
        if len(names) > 1:
            raise BackendKwargsError(
                f"Option 'precision' names {len(names)} ({', '.join(names)}), but {self.name!r} computes in one: name "
                "one, or race it under tmpl-inductor:auto."
            )
        if options.get("inference_precision", "f32") != "f32":
            raise BackendKwargsError(
                "Options 'inference_precision' and 'precision' cannot be combined: the second one has a bound; leave "
                "one out."
            )
        if why := self.why_not_in(names[0]):
            raise CannotWorkError(Limit(f"Precision {names[0]!r} of {self.name!r}", why, REMEDY))

    def computing_in(self, precision: str) -> Options:
        return {"inference_precision": HINTS[precision]}

    def part_compiler(self, options: Options) -> "PartCompiler":
        from backend_kwargs.backends.openvino.model import OpenVINO

        return OpenVINO(OpenVINOOptions(**options))


def why_not_in(hint: str) -> str:
    """Return why OpenVINO would ignore an INFERENCE_PRECISION_HINT on this CPU, "" if it would not."""
    if hint not in CAPABILITIES or CAPABILITIES[hint] in _of_cpu("OPTIMIZATION_CAPABILITIES"):
        return ""
    has = ", ".join(sorted({*_of_cpu("OPTIMIZATION_CAPABILITIES")} & {"BF16", "FP16", "FP32", "INT8"}))
    return f"OpenVINO has no {CAPABILITIES[hint]} kernels for this CPU, only {has}"


@cache
def _of_cpu(names: str) -> tuple[str, ...]:
    """Return what OpenVINO lists of its CPU device: the precisions that have kernels, or the properties it takes."""
    import openvino

    found = tuple(openvino.Core().get_property("CPU", names))
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() not in WITHOUT_HALF:
        return found
    # OpenVINO asks the processor, and then finds no kernel where oneDNN may not use what it has.
    return tuple(each for each in found if each not in CAPABILITIES.values())
