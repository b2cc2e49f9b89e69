"""Which options are data and which are code: a file may set only data, unless it is loaded with `trust=True`.

An option is *code* if its value can make this process run a program, import, call or load something, change a command
line, or read or write a file that the value names. It is *data* if it only chooses among what is already there.
Numbers and words from a fixed list are data; other options are data if a table here or the module that declares them
names them, and code otherwise. So a new option of a new torch is code until someone has reviewed it.
"""

from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from backend_kwargs.errors import BackendKwargsError, wrong_value
from backend_kwargs.options.option import Option


def consent(trust: object) -> bool:
    """Return `trust`; raise if it is no bool: "false", as a configuration may write it, would be consent."""
    if not isinstance(trust, bool):
        raise wrong_value("`trust`", "True or False", trust)
    return trust


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
# Names of what is registered in this process or installed.
OWN_DATA = frozenset({"rewrites"})
AUTO_DATA = frozenset({"candidates"})
# Takes an option, a value, and the option's name in an error; returns the value converted to the option's type.
Check = Callable[[Option, object, str], object]
INERT = (bool, int, float, None, NoneType)


def is_data(option: Option) -> bool:
    """Return whether a file may set `option`: by its type, or because a table lists it."""
    return option.data or chooses(option.type)


def chooses(wanted: object) -> bool:
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

    def refusing(option: Option, value: object, kind: str) -> object:
        if not is_data(option) and names_something(value):
            raise BackendKwargsError(
                f"{kind[:1].upper()}{kind[1:]} {option.name!r} is code, which a file may set only if it is trusted: "
                "pass trust=True if you trust its author."
            )
        return coerce(option, value, kind)

    return refusing


def names_something(value: object) -> bool:
    """Return whether `value` contains a text or an object; without either it cannot name anything."""
    if isinstance(value, Mapping):
        return any(map(names_something, value.values())) or any(map(names_something, value))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(names_something, value))
    return not isinstance(value, bool | int | float | NoneType)
