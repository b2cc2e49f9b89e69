"""Options of OpenVINO's native compiler."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from backend_kwargs.options import precisions
from backend_kwargs.options.option import Where, declared
from backend_kwargs.options.trust import OPENVINO_NATIVE_DATA

Hint = Literal["f32", "bf16", "f16"]
Count = Annotated[int, Where("of at least 1", lambda count: count >= 1)]
Threads = Annotated[int, Where("of at least 1", lambda count: count >= 1)]


@dataclass(frozen=True, slots=True)
class Settings:
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
    inference_num_threads: Annotated[Threads | None, "threads; None: torch.get_num_threads()"] = None
    performance_hint: Annotated[Literal["LATENCY", "THROUGHPUT"], "the goal of OpenVINO's scheduling of threads"] = (
        "LATENCY"
    )
    min_block_size: Annotated[
        Count, "the least number of operators in a part of little work; smaller ones run in eager"
    ] = 8
    aten_ops: Annotated[tuple[str, ...], "operators left to ATen, such as 'mm'"] = ()
    config: Annotated[dict[str, Any] | None, "OpenVINO's own properties, such as {'ENABLE_CPU_PINNING': True}"] = None


OPTIONS = declared(Settings, OPENVINO_NATIVE_DATA)
