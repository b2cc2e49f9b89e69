"""Inductor's options on the installed torch: names, types, defaults; docs and environment variables on demand.

Relies on the layout of the config module's source. An alias refers to an entry with another name, often in another
module, which has the value and the variables.
"""

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.options.option import INDUCTOR_DATA, Option, Options, Where, lookup

KIND = "Inductor option"

# Options that torch renamed between releases: old -> new. Besides these, each `cuda.X` that has a `cutlass.X` is a copy
# that torch inherits and never reads.
RENAMED = MappingProxyType(
    {
        "benchmark_epilogue_fusion": "benchmark_template_fusion",
        "cuda.nvgemm_max_profiling_configs": "nvgemm_max_profiling_configs",
        "max_epilogue_benchmarked_choices": "max_template_fusion_benchmarked_choices",
    }
)

MOST_THREADS = 1024  # a file with 100,000 would exhaust the machine
Threads = Annotated[int, Where(f"of 1 to {MOST_THREADS}", lambda count: 1 <= count <= MOST_THREADS)]

# Types that torch does not declare, or declares wrongly; taken from its sources of 2.11 to 2.15.
CORRECTED_TYPES: Mapping[str, object] = MappingProxyType(
    {
        "compile_threads": Threads | None,
        "cpp.threads": Threads | Literal[-1],
        "aot_inductor.filtered_kernel_names": str | None,
        "autoheuristic_use.pad_mm": bool | None,
        "cpp.cxx": str | tuple[str | None, ...],
        "cpp.gemm_cache_blocking": str | None,
        "cpp.gemm_thread_factors": str | None,
        "rocm.ck_dir": str | None,
        "trace.dot_graph_shape": str | None,
        "trace.log_url_for_graph_xform": str | None,
        "triton.cudagraph_capture_sizes": tuple[int | tuple[int, ...], ...] | None,
        "worker_log_path": str | None,
    }
)

Entries = Options  # of torch's config module
Release = tuple[int, int]


def inductor_option(name: str, besides: Mapping[str, Option] = MappingProxyType({})) -> Option:
    """Return the option `name`, of Inductor or in `besides`.

    Raise if there is none, with the torch release that has it or the closest name.
    """
    plain = str(name).replace("-", "_")
    if found := besides.get(plain) or usual_options().get(plain):
        return found
    options = {**inductor_options(), **besides}
    if elsewhere := _renamed(plain, options) or _in_another_release(plain, options):
        raise BackendKwargsError(f"{KIND} {plain!r} {elsewhere}")
    kind = "option" if get_close_matches(plain, besides) else KIND
    return lookup(name, options, kind, "Search them with: backend-kwargs explain inductor PATTERN")


@cache
def inductor_options() -> Mapping[str, Option]:
    """Return every option of Inductor by name, without docs and environment variables: see `documented`."""
    # Imported late: torch is imported by then, and this module must not be the one that imports it.
    from backend_kwargs.torch_internals.inductor_config import entries

    options = entries()
    # torch's own collector of options includes typing's TYPE_CHECKING.
    return MappingProxyType({name: _option(name, options) for name in options if name != "TYPE_CHECKING"})


@cache
def usual_options() -> Mapping[str, Option]:
    """Return the options of Inductor that no release has under another name."""
    every = inductor_options().items()
    return {name: option for name, option in every if name not in RENAMED and not name.startswith("cuda.")}


def documented(option: Option) -> Option:
    """Return an option of Inductor with its doc and environment variables, read from torch's config source."""
    note = source_notes().get(option.name)
    return replace(option, doc=note.doc, env=note.env, env_force=note.env_force) if note else option


def _option(name: str, entries: Entries) -> Option:
    from backend_kwargs.torch_internals.inductor_config import UNSET, target_of

    entry, target = entries[name], target_of(entries[name])
    values = (target.env_value_force, target.env_value_default, target.default)
    forced = values[0] is not UNSET
    # `cuda` and `xpu` inherit the values of `cutlass`, but not its annotations.
    declared = CORRECTED_TYPES.get(name, entries.get(_cutlass_name(name), entry).value_type)
    return Option(
        name,
        Any if declared is NoneType else declared,
        deepcopy(next(value for value in values if value is not UNSET)),  # unpatched, with the environment's
        forced=forced,
        forced_value=target.env_value_force if forced else None,
        alias=entry.alias,
        # torch 2.11 has no such mark.
        deprecated=(entry.deprecation_message or "deprecated") if getattr(entry, "deprecated", False) else None,
        data=name in INDUCTOR_DATA,
    )


def _cutlass_name(name: str) -> str:
    group, _, field = name.partition(".")
    return f"cutlass.{field}" if group in ("cuda", "xpu") else ""


# --- notes in the config source -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Note:
    """The comment and the environment variables of one option in torch's config source."""

    doc: str = ""
    env: tuple[str, ...] = ()
    env_force: tuple[str, ...] = ()


@cache
def source_notes() -> Mapping[str, Note]:
    """Return the notes of the installed torch's config source, by option; those of an alias's target come last."""
    from backend_kwargs.torch_internals.inductor_config import INDUCTOR

    own = _notes_of(INDUCTOR)
    aliases = {name: option.alias for name, option in inductor_options().items() if name in own}
    return MappingProxyType({name: _merged(own[name], _alias_note(alias)) for name, alias in aliases.items()})


def _alias_note(alias: str | None) -> Note:
    from backend_kwargs.torch_internals.inductor_config import entries

    if alias is None:
        return Note()
    module, _, name = alias.rpartition(".")
    return _merged(_notes_of(module).get(name, Note()), _alias_note(entries(module)[name].alias))


@cache
def _notes_of(module: str) -> Mapping[str, Note]:
    from backend_kwargs.torch_internals.inductor_config import source

    return read_notes(source(module))


def read_notes(source: str) -> dict[str, Note]:
    """Return the notes in a config module's source, by option.

    A note is the comment above or beside the assignment, and the environment variables that its expression reads,
    directly or through a helper function in the same file.
    """
    tree, lines, found = ast.parse(source), source.splitlines(), dict[str, Note]()
    helpers = {node.name: _variables(_READ, node) for node in tree.body if isinstance(node, ast.FunctionDef)}

    def read(body: Iterable[ast.AST], group: str = "") -> None:
        """Note the assignments in all branches; the fields of a `group` have its name, and those that it inherits."""
        for node in body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (f"{group}{target.id}" for target in targets if isinstance(target, ast.Name)):
                    found[name] = _merged(found.get(name, Note()), _note(node, lines, helpers))
            elif isinstance(node, ast.ClassDef):
                own = f"{group}{node.name}."
                read(node.body, own)
                for parent in (f"{ast.unparse(base)}." for base in node.bases):
                    inherited = {name: note for name, note in found.items() if name.startswith(parent)}
                    found.update({own + name.removeprefix(parent): note for name, note in inherited.items()} | found)
            elif not isinstance(node, ast.FunctionDef):
                read(ast.iter_child_nodes(node), group)

    read(tree.body)
    return found


_BESIDE = re.compile(r"(?<=\s)#.*$")
# Comments for tools.
_NOISE = re.compile(r"(type|pyrefly|pyre-\w+|mypy|ruff): |noqa|@compile_ignored")
# In code as `ast.unparse` writes it: variables that are read, those of a Config, and what a helper is called with.
_READ = re.compile(r"(?:os\.environ\.get|os\.getenv|get_tristate_env)\('\w+'|os\.environ\['\w+'\]|'\w+' in os\.environ")
_DEFAULT, _FORCE = (re.compile(rf"env_name_{what}=(?:\[[^\]]*\]|'\w+')") for what in ("default", "force"))
_CALLED = re.compile(r"\b(\w+)\(([^()]*)\)")


def _variables(pattern: re.Pattern[str], node: ast.AST) -> list[str]:
    """Return the variables in what a pattern finds in code."""
    return re.findall(r"'(\w+)'", " ".join(match[0] for match in pattern.finditer(ast.unparse(node))))


def _note(statement: ast.Assign | ast.AnnAssign, lines: Sequence[str], helpers: Mapping[str, list[str]]) -> Note:
    """Return the note of an assignment; `helpers` has the variables that each function reads."""
    called = ((given, helpers.get(name)) for name, given in _CALLED.findall(ast.unparse(statement)))
    # The variable may be an argument of a helper that reads the environment.
    helped = (name for given, read in called if read for name in (*re.findall(r"'([A-Z][A-Z0-9_]+)'", given), *read))
    env = dict.fromkeys((*helped, *_variables(_READ, statement), *_variables(_DEFAULT, statement)))
    above = [*takewhile(lambda line: line.startswith("#"), map(str.strip, reversed(lines[: statement.lineno - 1])))]
    beside = [line for at in (statement.lineno, statement.end_lineno or 0) for line in _BESIDE.findall(lines[at - 1])]
    doc = _without_marks(reversed(above)) or _without_marks(beside)[:1]
    return Note("\n".join(doc).strip(), tuple(env), tuple(dict.fromkeys(_variables(_FORCE, statement))))


def _without_marks(comments: Iterable[str]) -> list[str]:
    texts = (re.sub(r"^#+ ?", "", comment) for comment in comments)
    return [text for text in texts if not _NOISE.match(text)]


def _merged(first: Note, second: Note) -> Note:
    env, force = first.env + second.env, first.env_force + second.env_force
    return Note(first.doc or second.doc, tuple(dict.fromkeys(env)), tuple(dict.fromkeys(force)))


# --- names in other releases ----------------------------------------------------------------------------------------


def _renamed(name: str, options: Mapping[str, Option]) -> str:
    """Return the new name of `name` as text, if the option is absent here or an unread copy."""
    of_cuda = _cutlass_name(name) if name.startswith("cuda.") else ""
    others = (RENAMED.get(name, ""), of_cuda, *(old for old, new in RENAMED.items() if new == name))
    other = next((other for other in others if other in options), None)
    here = options.get(name)
    working = here is not None and (here.alias is not None or name in RENAMED.values())
    return f"is called {other!r} on torch {_shown(_installed())}." if other and not working else ""


def _in_another_release(name: str, options: Mapping[str, Option]) -> str:
    if name in options:
        return ""
    here = _installed()
    since = next((release for release, names in ADDED.items() if name in names and release > here), None)
    gone = next((release for release, names in REMOVED.items() if name in names and release <= here), None)
    if since:
        return f"exists from torch {_shown(since)}; this is torch {_shown(here)}."
    return f"exists up to torch {_shown((gone[0], gone[1] - 1))}; this is torch {_shown(here)}." if gone else ""


def _installed() -> Release:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _shown(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def _by_release(table: Mapping[Release, str]) -> Mapping[Release, frozenset[str]]:
    return MappingProxyType({release: frozenset(names.split()) for release, names in table.items()})


# Names added to and removed from torch's config between 2.11 and 2.15, without private and testing ones.
ADDED = _by_release(
    {
        (2, 12): """
            align_random_eager aot_inductor.enable_frame_pointer aten_distributed_optimizations.bucket_mode
            aten_distributed_optimizations.bucket_only_internode_comms aten_distributed_optimizations.compute_estimator
            aten_distributed_optimizations.overlap_scheduling_autofix_cycles aten_distributed_optimizations.spmd_check
            aten_distributed_optimizations.spmd_mismatch autoheuristic_collect.mixed_mm autoheuristic_collect.pad_mm
            autoheuristic_use.mixed_mm autoheuristic_use.pad_mm bucket_all_gathers_bucket_mode
            bucket_reduce_scatters_bucket_mode cache_sdpa_constraint cpp.use_two_step_variance_threshold
            cudagraph_policy delay_realize_cheap_outputs do_not_emit_runtime_assertions
            eager_numerics.use_pytorch_libdevice epilogue_fusion_user_defined_triton_kernel
            keep_addmm_fused_for_half_dtypes min_overlap_ratio
            mtia.disable_welford_reduction pre_grad_pass_timing triton.cudagraph_min_partition_size
            triton.decompose_sort_ops xpu.oneapi_root
        """,
        (2, 13): """
            aot_inductor.autotune_per_kernel_alloc aot_inductor.enable_line_tables
            aten_distributed_optimizations.allow_comms_decompositions
            aten_distributed_optimizations.enable_low_contention_collectives
            aten_distributed_optimizations.low_contention_min_bytes_per_rank
            aten_distributed_optimizations.low_contention_skip_overlap_check
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives_bucket_cap_mb
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives_max_bucket_cap_mb
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives_min_bucket_cap_mb
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives_saturation_calibration_multiplier
            aten_distributed_optimizations.pre_bucketing_fsdp_collectives_verbose
            aten_distributed_optimizations.profile_guided_estimations_profile_path batch_invariant
            combo_kernel_autotune_grouping combo_kernel_max_distance combo_kernel_max_num_nodes
            combo_kernel_peak_memory_increase_gb combo_kernel_peak_memory_pct_threshold compile_worker_wait_timeout
            cpp.march dedup_reduce_scatters emulate_precision_casts_on_saved_tensors epilogue_fusion_with_atomic_add
            incremental_autotune keep_static_cubin_raw loop_reindexing_after_fusion max_autotune_conv_bwd_input_backends
            max_autotune_conv_bwd_weight_backends max_complex_pointwise_cat_inputs nvgemm_supplement_configs
            realize_cpu_acc_reads_threshold realize_cpu_opcount_threshold rocm.origami rocm.origami_topk
            trace.graph_diagram_format trace.orig_fx_graph_diagram_format triton.cudagraph_partition_memory_budget
            triton.dynamic_disable_pipelining triton.emit_pointer_range_32 triton.enable_tma_load_for_template_epilogue
            triton.mix_order_reduction_max_reads triton.nested_reduction triton.use_two_step_variance_min_numel
            triton.use_two_step_variance_threshold use_fast_triton_launcher use_launch_metadata_schema
            use_torch_profiler_benchmarker
        """,
        (2, 14): """
            aten_distributed_optimizations.enable_simple_overlap
            aten_distributed_optimizations.low_contention_all_gather_ce_multicast autotune_cudagraph_benchmarking
            combo_kernel_compile_time_autotune compile_worker_watchdog_interval_seconds cpp.enable_kernel_context_guard
            decompose_shard_dim_alltoall numerics nvgemm_swap_ab partitioned_scatter_force
            partitioned_scatter_min_contention_ratio partitioned_scatter_min_index_size
            partitioned_scatter_non_model_floor_bytes realize_opusers_threshold reorder_for_locality_in_training
            strict_output_strides strict_signed_zero trace.provenance_tracking_max_events
            trace.provenance_tracking_to_timeline triton.cudagraph_trees_generation_cloning triton.enable_host_side_tma
            triton.enable_template_autows triton.tlx_mode
        """,
        (2, 15): """
            alignment_asserts_inputs aot_inductor.autotune_offload_constants_min_device_fraction
            aot_inductor.check_upperbound autotune_cudagraph_benchmarking_iters benchmark_template_fusion bmm_shared_a
            compile_worker_mode cuda.autotune_tunableop_dynamic_dims_wildcard flydsl_enable_autotuning
            fusion_memory_timeline_peak_memory_increase_gb fusion_memory_timeline_peak_memory_pct_threshold
            max_template_fusion_benchmarked_choices nvgemm_pdl triton.cudagraph_dynamic_shape_rerecord_limit
            triton.cudagraph_initial_mempool_allocation_gb triton.cudagraph_managed_input_rerecord_action
            triton.cudagraph_managed_input_rerecord_limit triton.enable_flex_tdm triton.scalar_accumulators
            unsafe_skip_scalar_range_asserts use_rand4x var_std_reduction_dedup
        """,
    }
)

REMOVED = _by_release(
    {
        (2, 12): """
            autoheuristic_collect autoheuristic_use triton.enable_tlx_templates
        """,
        (2, 13): """
            force_same_precision
        """,
        (2, 14): """
            cuda.nvgemm_max_profiling_configs partitioned_scatter_memory_budget
        """,
        (2, 15): """
            autoheuristic_collect.mixed_mm autoheuristic_use.mixed_mm
        """,
    }
)
