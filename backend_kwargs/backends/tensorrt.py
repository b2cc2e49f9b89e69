"""Torch-TensorRT's own dynamo backend under checked options. Untested: it is not installed on our machines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from backend_kwargs.backends.declared import DeclaredCompiler
from backend_kwargs.options.option import Option, Where, declared
from backend_kwargs.options.requirements import Rule
from backend_kwargs.options.trust import TENSORRT_DATA

Count = Annotated[int, Where("of at least 0", lambda count: count >= 0)]


@dataclass(frozen=True, slots=True)
class Settings:
    """Options that Torch-TensorRT 2.x documents for torch.compile, with their defaults."""

    enabled_precisions: Annotated[
        set[Any], "dtypes that kernels may compute in, such as {torch.float32, torch.half}"
    ] = field(default_factory=set)
    min_block_size: Annotated[Count, "the least number of operators in a part for TensorRT"] = 5
    torch_executed_ops: Annotated[set[Any], "operators left to eager, such as 'torch.ops.aten.add.Tensor'"] = field(
        default_factory=set
    )
    require_full_compilation: Annotated[bool, "raise if TensorRT cannot compile all of a graph"] = False
    pass_through_build_failures: Annotated[bool, "raise if TensorRT fails; False: run that graph in eager"] = False
    workspace_size: Annotated[Count, "bytes of TensorRT's workspace; 0: all that are available"] = 0
    optimization_level: Annotated[Literal[0, 1, 2, 3, 4, 5] | None, "how long TensorRT searches; None: its default"] = (
        None
    )
    num_avg_timing_iters: Annotated[Count, "timings to average for each kernel"] = 1
    max_aux_streams: Annotated[Count | None, "streams besides the main one; None: TensorRT chooses"] = None
    disable_tf32: Annotated[bool, "compute float32 products in float32, not in TF32"] = False
    truncate_double: Annotated[bool, "compute float64 in float32"] = False
    sparse_weights: Annotated[bool, "allow kernels for sparse weights"] = False
    use_python_runtime: Annotated[
        bool | None, "call TensorRT from Python instead of C++; None: whichever is available"
    ] = False
    use_fast_partitioner: Annotated[bool, "split graphs with the fast partitioner"] = True
    hardware_compatible: Annotated[bool, "build engines that also run on other NVIDIA GPUs"] = False
    version_compatible: Annotated[bool, "build engines that also run with other releases of TensorRT"] = False
    assume_dynamic_shape_support: Annotated[bool, "assume that all converters support dynamic shapes"] = False
    cache_built_engines: Annotated[bool, "save engines to files"] = False
    reuse_cached_engines: Annotated[bool, "read engines from files"] = False
    timing_cache_path: Annotated[str | None, "the file of kernel timings; None: Torch-TensorRT's default"] = None
    dryrun: Annotated[bool, "only log what would be compiled"] = False


OPTIONS = declared(Settings, TENSORRT_DATA)


@dataclass(frozen=True)
class TensorRTCompiler(DeclaredCompiler):
    """The dynamo backend of Torch-TensorRT."""

    library: ClassVar[str] = "Torch-TensorRT"
    registered: ClassVar[str] = "tmpl-tensorrt"
    line: ClassVar[str] = "Torch-TensorRT under checked options; untested"
    declared: ClassVar[Mapping[str, Option]] = OPTIONS
    rules: ClassVar[tuple[Rule, ...]] = ()
    distributions: ClassVar[tuple[str, ...]] = ("torch-tensorrt", "tensorrt")
    needs: ClassVar[tuple[str, ...]] = ("gpu", "torch_tensorrt")
    trains: ClassVar[bool] = False

    def compile(
        self, gm: Any, example_inputs: Sequence[Any], options: Mapping[str, Any], name: str | None
    ) -> Callable[..., Any]:
        from backend_kwargs.torch_internals.registry import lookup_backend

        compiler_fn: Callable[..., Any] = lookup_backend("torch_tensorrt")
        compiled: Callable[..., Any] = compiler_fn(gm, list(example_inputs), options=dict(options))
        return compiled
