"""ONNX Runtime under checked options, through torch's ONNX exporter. Imported for the first graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from backend_kwargs.backends.declared import DeclaredCompiler
from backend_kwargs.backends.onnxruntime.settings import OPTIONS, ONNXRuntimeOptions
from backend_kwargs.errors import pip_install
from backend_kwargs.options import Need, Option, Options, Rule, importable

if TYPE_CHECKING:
    from backend_kwargs.backends.partitioned import PartCompiler

PACKAGES = ("onnxruntime", "onnx", "onnxscript")


@dataclass(frozen=True)
class ONNXRuntimeCompiler(DeclaredCompiler):
    """ONNX Runtime on a CPU, for inference, with parameters as constants."""

    library: ClassVar[str] = "ONNX Runtime"
    registered: ClassVar[str] = "tmpl-onnxruntime"
    line: ClassVar[str] = "ONNX Runtime under options: inference, parameters as constants, the rest in eager"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "inter_op_num_threads",
            unless=lambda value: (
                "" if value("execution_mode") == "parallel" else "it is read only if execution_mode='parallel'"
            ),
        ),
    )
    distributions: ClassVar[tuple[str, ...]] = PACKAGES
    needs: ClassVar[tuple[Need, ...]] = tuple(importable(name, pip_install("onnxruntime")) for name in PACKAGES)
    raced: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    def part_compiler(self, options: Options) -> "PartCompiler":
        from backend_kwargs.backends.onnxruntime.session import ONNXRuntime

        return ONNXRuntime(ONNXRuntimeOptions(**options))
