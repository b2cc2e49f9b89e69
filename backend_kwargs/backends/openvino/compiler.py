"""OpenVINO under checked options, through its frontend for torch graphs instead of its dynamo backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType
from typing import Any, ClassVar

from backend_kwargs.backends.declared import DeclaredCompiler
from backend_kwargs.backends.fell_back import summary_of
from backend_kwargs.backends.openvino.settings import OPTIONS, Hint, Settings
from backend_kwargs.errors import BackendKwargsError, unknown
from backend_kwargs.options.option import Option
from backend_kwargs.options.requirements import CannotWorkError, Limit, Need, Rule, importable, install
from backend_kwargs.options.trust import Check
from backend_kwargs.precision import table
from backend_kwargs.precision.bounds import UnfitPrecisionError

# The values of OpenVINO's INFERENCE_PRECISION_HINT, which it ignores where it lacks the capability.
HINTS: Mapping[str, Hint] = MappingProxyType({"bf16": "bf16", "fp16": "f16"})
REMEDY = "leave it out"
CAPABILITIES: Mapping[str, str] = MappingProxyType({"bf16": "BF16", "f16": "FP16"})


@dataclass(frozen=True)
class OpenVINONativeCompiler(DeclaredCompiler):
    """OpenVINO on a CPU, for inference, with parameters as constants."""

    library: ClassVar[str] = "OpenVINO"
    registered: ClassVar[str] = "tmpl-openvino-native"
    line: ClassVar[str] = "OpenVINO's own compiler under options: inference, parameters as constants, the rest in eager"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = tuple(rule for rule in table.RULES if rule.options == "max_error")
    precisions: ClassVar[tuple[str, ...]] = tuple(HINTS)
    distributions: ClassVar[tuple[str, ...]] = ("openvino",)
    needs: ClassVar[tuple[Need, ...]] = (importable("openvino", install("openvino")),)
    raced: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    def checked(self, option: Option, value: Any, coerce: Check) -> Any:
        return super().checked(option, table.named(value) if option.name == "precision" else value, coerce)

    def why_not_in(self, precision: str) -> str:
        return why_not_in(HINTS[precision])

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        super().verify(templates, options, tell)
        for name in options.get("config") or {}:
            if name not in _properties():
                raise unknown("property of OpenVINO's CPU", name, _properties())
        self._verify_precision(options)
        hint = options.get("inference_precision", "f32")
        if why := why_not_in(hint):
            tell(Limit(f"Option inference_precision={hint!r}", why, REMEDY, "OpenVINO computes in another precision"))

    def _verify_precision(self, options: Mapping[str, Any]) -> None:
        names: tuple[str, ...] = options.get("precision") or ()
        if not names:
            return
        if options.get("max_error") is None:
            raise BackendKwargsError(table.NEEDS_BOUND)
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

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.backends.openvino.model import OpenVINO
        from backend_kwargs.backends.partitioned import compile_graph

        def compile_in(hint: Hint, gm: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled = compile_graph(gm, inputs, OpenVINO(replace(settings, inference_precision=hint)))
            # OpenVINO may compute in another precision than its hint names, without an error.
            if settings.precision and hint != "f32" and (summary := summary_of(compiled)) and summary.notes:
                raise UnfitPrecisionError("; ".join(summary.notes))
            return compiled

        settings = Settings(**options)
        if not settings.precision:
            return compile_in(settings.inference_precision, gm, example_inputs)
        from backend_kwargs.precision.lowered import Asked, compile_lowered

        (precision,) = table.named(settings.precision)
        asked = Asked(precision, settings.max_error, by_compiler=True)
        return compile_lowered(
            gm, example_inputs, asked, partial(compile_in, HINTS[precision]), partial(compile_in, "f32")
        )


def why_not_in(hint: str) -> str:
    """Return why OpenVINO would ignore an INFERENCE_PRECISION_HINT on this CPU, "" if it would not."""
    if hint not in CAPABILITIES or CAPABILITIES[hint] in _capabilities():
        return ""
    has = ", ".join(sorted(_capabilities() & {"BF16", "FP16", "FP32", "INT8"}))
    return f"OpenVINO has no {CAPABILITIES[hint]} kernels for this CPU, only {has}"


@cache
def _capabilities() -> frozenset[str]:
    import openvino

    return frozenset(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


@cache
def _properties() -> tuple[str, ...]:
    import openvino

    return tuple(openvino.Core().get_property("CPU", "SUPPORTED_PROPERTIES"))
