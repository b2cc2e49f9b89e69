"""Which options are data and which are code: a file may set only data, unless it is loaded with `trust=True`.

An option is *code* if its value can make this process run a program, import, call or load something, change a command
line, or read or write a file that the value names. It is *data* if it only chooses among what is already there.
Numbers and words from a fixed list are data; other options are data if a table names them, and code otherwise. So a
new option of a new torch is code until someone has reviewed it.
"""

from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.option import Option


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Inductor's options with str, list, callable or Any in their type, from torch 2.11 to 2.15.
INDUCTOR_DATA = _names(
    """
    _conv_default_backends add_pre_grad_passes aot_inductor.filtered_kernel_names autoheuristic_collect
    autoheuristic_use compile_worker_mode cpp.gemm_cache_blocking cpp.gemm_thread_factors
    cuda.cutlass_enabled_ops cuda.cutlass_instantiation_level cuda.cutlass_op_allowlist_regex
    cuda.cutlass_op_denylist_regex cudagraph_unsafe_unbacked_ops custom_should_partition_ops
    cutlass.cutlass_enabled_ops cutlass.cutlass_instantiation_level cutlass.cutlass_op_allowlist_regex
    cutlass.cutlass_op_denylist_regex disabled_passes estimate_op_runtime layout_opt_default
    max_autotune_conv_backends max_autotune_conv_bwd_input_backends max_autotune_conv_bwd_weight_backends
    max_autotune_gemm_backends nvgemm_pdl post_grad_fusion_options pre_grad_fusion_options
    profile_bandwidth_regex remove_pre_grad_passes test_configs.autotune_choice_desc_regex
    test_configs.autotune_choice_name_regex test_configs.distort_benchmarking_result trace.dot_graph_shape
    worker_start_method xpu.cutlass_enabled_ops xpu.cutlass_instantiation_level xpu.cutlass_op_allowlist_regex
    xpu.cutlass_op_denylist_regex
    """
)
# Names of what is registered in this process or installed, and of products.
OWN_DATA = frozenset({"rewrites", "tuned_products"})
AUTO_DATA = frozenset({"candidates"})
TVM_DATA = frozenset({"aten_ops"})
OPENVINO_DATA = frozenset({"device"})
ONNX_RUNTIME_DATA = frozenset({"aten_ops"})
OPENVINO_NATIVE_DATA = frozenset({"aten_ops"})
TENSORRT_DATA: frozenset[str] = frozenset()
# Listed only so that a test finds options that nobody has reviewed.
INDUCTOR_CODE: Mapping[str, str] = {
    "calls or imports": """
        _cache_config_factory_keys _fuse_ddp_communication_passes _post_fusion_custom_pass _pre_fusion_custom_pass
        aten_distributed_optimizations.custom_runtime_estimation bucket_all_gathers_fx_bucket_size_determinator
        bucket_all_reduces_fx_bucket_size_determinator bucket_reduce_scatters_fx_bucket_size_determinator
        cudagraph_policy custom_partitioner_fn external_matmul inductor_choices_class joint_custom_post_pass
        joint_custom_pre_pass post_grad_custom_post_pass post_grad_custom_pre_pass pre_grad_custom_pass
        reorder_for_compute_comm_overlap_passes trace.upload_tar
    """,
    "runs a program, loads a library, or is written into a command line or code": """
        aot_inductor.aoti_shim_library aot_inductor.aoti_shim_library_path aot_inductor.compile_wrapper_opt_level
        aot_inductor.cross_target_platform aot_inductor.custom_op_libs aot_inductor.custom_ops_to_c_shims
        aot_inductor.metadata aot_inductor.presets aot_inductor.serialized_in_spec aot_inductor.serialized_out_spec
        autotune_lookup_table cpp.cxx cpp.enable_floating_point_contract_flag cpp.inject_log1p_bug_TESTING_ONLY
        cpp.inject_relu_bug_TESTING_ONLY cpp.march cuda.arch cuda.cuda_cxx cuda.cutlass_dir cuda.version
        cutlass.cutlass_dir halide.cpu_target halide.gpu_target lookup_table.table rocm.arch rocm.ck_dir rocm.rocm_home
        trace.graph_diagram_format trace.orig_fx_graph_diagram_format triton.inject_relu_bug_TESTING_ONLY xpu.arch
        xpu.cutlass_dir xpu.oneapi_root xpu.version
    """,
    "names a file, a folder or an address": """
        aot_inductor.model_name_for_generated_files aot_inductor.output_path
        aot_inductor.package_constants_on_disk_format
        aten_distributed_optimizations.profile_guided_estimations_profile_path autoheuristic_log_path
        enabled_metric_tables fx_passes_numeric_check global_cache_dir profile_bandwidth_output
        torchinductor_worker_logpath trace.debug_dir trace.log_url_for_graph_xform triton.debug_dump_kernel_inputs
        triton.proton_output_dir worker_log_path
    """,
    "decides which cache entries count as equal": """
        _cache_config_ignore_prefix _partitioned_scatter_default _profile_var _save_config_ignore
        unsafe_marked_cacheable_functions
    """,
}
# Takes an option, a value, and the option's name in an error; returns the value converted to the option's type.
Check = Callable[[Option, Any, str], Any]
INERT = (bool, int, float, None, NoneType)


def is_data(option: Option) -> bool:
    """Return whether a file may set `option`: by its type, or because a table lists it."""
    return option.data or chooses(option.type)


def chooses(wanted: Any) -> bool:
    """Return whether a type contains only numbers and words from a fixed list."""
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted in INERT or origin is Literal:
        return True
    if origin is Annotated:
        return chooses(args[0])
    holds = origin in (Union, UnionType, list, tuple, set, frozenset, dict)
    return holds and bool(args) and all(arg is ... or chooses(arg) for arg in args)


def untrusted(coerce: Check) -> Check:
    """Return `coerce` for values from a file: it rejects options that are code before it looks at their values."""

    def refusing(option: Option, value: Any, kind: str) -> Any:
        if not is_data(option) and names_something(value):
            raise BackendKwargsError(
                f"{kind[:1].upper()}{kind[1:]} {option.name!r} is code, which a file may set only if it is trusted: "
                "pass trust=True if you trust its author."
            )
        return coerce(option, value, kind)

    return refusing


def names_something(value: Any) -> bool:
    """Return whether `value` contains a text or an object; without either it cannot name anything."""
    if isinstance(value, Mapping):
        return any(map(names_something, value.values())) or any(map(names_something, value))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(names_something, value))
    return not isinstance(value, bool | int | float | NoneType)
