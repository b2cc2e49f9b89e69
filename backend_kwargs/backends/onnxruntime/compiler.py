"""ONNX Runtime under checked options, through torch's ONNX exporter. Imported for the first graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from backend_kwargs.backends import DeclaredCompiler
from backend_kwargs.errors import pip_install
from backend_kwargs.options import Need, Option, Options, Rule, declared, importable
from backend_kwargs.options.option import AtLeastOne

if TYPE_CHECKING:
    from backend_kwargs.backends.partitioned import PartCompiler

PACKAGES = ("onnxruntime", "onnx", "onnxscript")


@dataclass(frozen=True, slots=True)
class ONNXRuntimeOptions:
    """Every option of ONNX Runtime, by its name, with its default."""

    graph_optimization_level: Annotated[
        Literal["disabled", "basic", "extended", "all"], "the graph optimizations of ONNX Runtime"
    ] = "all"
    intra_op_num_threads: Annotated[AtLeastOne | None, "threads within an operator; None: torch.get_num_threads()"] = (
        None
    )
    inter_op_num_threads: Annotated[AtLeastOne, "operators run at the same time, if execution_mode='parallel'"] = 1
    execution_mode: Annotated[Literal["sequential", "parallel"], "whether operators may run at the same time"] = (
        "sequential"
    )
    allow_spinning: Annotated[bool, "let idle threads spin, which keeps their cores busy"] = False
    enable_mem_pattern: Annotated[bool, "plan memory ahead, for inputs of the same sizes"] = True
    enable_cpu_mem_arena: Annotated[bool, "keep memory between calls"] = True
    min_block_size: Annotated[
        AtLeastOne, "the least number of operators in a part of little work; smaller ones run in eager"
    ] = 4
    aten_ops: Annotated[tuple[str, ...], "operators left to ATen, such as 'mm'"] = ()
    session_config: Annotated[dict[str, str] | None, "further entries of SessionOptions.add_session_config_entry"] = (
        None
    )


OPTIONS = declared(ONNXRuntimeOptions, data={"aten_ops"})


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
