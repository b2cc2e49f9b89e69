"""Options of ONNX Runtime."""

from dataclasses import dataclass
from typing import Annotated, Literal

from backend_kwargs.options.option import AtLeastOne, declared


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
