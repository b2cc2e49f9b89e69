"""ONNX Runtime under checked options, through torch's ONNX exporter. Imported for the first graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from backend_kwargs.backends import CapturedGraph
from backend_kwargs.backends.declared import DeclaredCompiler
from backend_kwargs.backends.onnxruntime.settings import OPTIONS, Settings
from backend_kwargs.facts import Compiled
from backend_kwargs.options.option import Option
from backend_kwargs.options.requirements import Rule

PACKAGES = ("onnxruntime", "onnx", "onnxscript")


def _sequential(value: Callable[[str], Any]) -> str:
    return "" if value("execution_mode") == "parallel" else "it is read only if execution_mode='parallel'"


@dataclass(frozen=True)
class ONNXRuntimeCompiler(DeclaredCompiler):
    """ONNX Runtime on a CPU, for inference, with parameters as constants."""

    library: ClassVar[str] = "ONNX Runtime"
    registered: ClassVar[str] = "tmpl-onnxruntime"
    line: ClassVar[str] = "ONNX Runtime under options: inference, parameters as constants, the rest in eager"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = (Rule("inter_op_num_threads", unless=_sequential),)
    distributions: ClassVar[tuple[str, ...]] = PACKAGES
    needs: ClassVar[tuple[str, ...]] = PACKAGES
    raced: ClassVar[bool] = True
    freezes: ClassVar[bool] = True
    trains: ClassVar[bool] = False

    def compile(self, graph: CapturedGraph, options: Mapping[str, Any]) -> Compiled:
        from backend_kwargs.backends.onnxruntime.session import ONNXRuntime
        from backend_kwargs.backends.partitioned import compile_by_parts

        return compile_by_parts(graph, options, ONNXRuntime(Settings(**options)))
