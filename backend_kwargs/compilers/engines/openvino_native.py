"""OpenVINO under checked options, through its frontend for torch graphs instead of its dynamo backend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from backend_kwargs.compilers.declared import DeclaredCompiler
from backend_kwargs.compilers.engines.openvino_settings import OPTIONS, Settings
from backend_kwargs.errors import unknown
from backend_kwargs.options import Option, lookup
from backend_kwargs.requirements import CannotWorkError, Limit, Rule, limits
from backend_kwargs.trust import Check

KIND = "OpenVINO option"


@dataclass(frozen=True)
class OpenVINONativeCompiler(DeclaredCompiler):
    """OpenVINO on a CPU, for inference, with parameters as constants."""

    registered: ClassVar[str] = "tmpl-openvino-native"
    line: ClassVar[str] = "OpenVINO's own compiler under options: inference, parameters as constants, the rest in eager"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = ()
    distributions: ClassVar[tuple[str, ...]] = ("openvino",)
    freezes: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    def option(self, name: str) -> Option:
        return lookup(name, OPTIONS, KIND, "`backend-kwargs options --backend openvino-native` shows all.")

    def checked(self, option: Option, value: Any, coerce: Check) -> Any:
        return coerce(option, value, KIND)

    def verify(self, templates: Sequence[str], options: Mapping[str, Any], tell: Callable[[Limit], None]) -> None:
        if lacking := limits(f"Backend {self.name!r}", ("openvino",)):
            raise CannotWorkError(*lacking)
        for name in options.get("config") or {}:
            if name not in _properties():
                raise unknown("property of OpenVINO's CPU", name, _properties())

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.compilers.engines.compile_graph import compile_graph
        from backend_kwargs.compilers.engines.openvino_model import OpenVINO

        settings = Settings(**options)
        return compile_graph(gm, example_inputs, OpenVINO(settings), settings.aten_ops)


@cache
def _properties() -> tuple[str, ...]:
    import openvino

    return tuple(openvino.Core().get_property("CPU", "SUPPORTED_PROPERTIES"))
