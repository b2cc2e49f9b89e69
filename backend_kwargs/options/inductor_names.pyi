"""The names of Inductor's options on torch 2.11 to 2.15, and of this package's, for editors. Generated.

`python -m tests.option_names --write` rewrites it. Values are checked when a backend is made, by the installed torch.
"""

from typing import Literal, TypedDict

InductorOptions = TypedDict(
    "InductorOptions",
    {
        "add_pre_grad_passes": str | None,
        "aggressive_fusion": bool,
        "align_random_eager": bool,
        "alignment_asserts": bool,
        "alignment_asserts_inputs": object,
        "allow_buffer_reuse": bool,
        "always_complex_memory_overlap_TESTING_ONLY": object,
        "always_keep_tensor_constants": bool,
        "annotate_training": bool,
        "aot_inductor.allow_stack_allocation": bool,
        "aot_inductor.aoti_shim_library": object,
        "aot_inductor.aoti_shim_library_path": str | None,
        "aot_inductor.autotune_offload_constants_min_device_fraction": object,
        "aot_inductor.autotune_per_kernel_alloc": bool,
        "aot_inductor.check_lowerbound": bool,
        "aot_inductor.check_upperbound": object,
        "aot_inductor.compile_wrapper_opt_level": str,
        "aot_inductor.cross_target_platform": str | None,
        "aot_inductor.custom_op_libs": object,
        "aot_inductor.custom_ops_to_c_shims": object,
        "aot_inductor.debug_compile": bool,
        "aot_inductor.debug_intermediate_value_printer": Literal["0", "1", "2", "3"],
        "aot_inductor.debug_symbols": bool,
        "aot_inductor.dump_aoti_minifier": bool,
        "aot_inductor.dynamic_linkage": bool,
        "aot_inductor.embed_kernel_binary": bool | None,
        "aot_inductor.emit_multi_arch_kernel": bool | None,
        "aot_inductor.enable_frame_pointer": bool,
        "aot_inductor.enable_line_tables": bool,
        "aot_inductor.enable_lto": bool,
        "aot_inductor.filtered_kernel_names": str | None,
        "aot_inductor.force_mmap_weights": bool,
        "aot_inductor.link_libtorch": bool,
        "aot_inductor.metadata": object,
        "aot_inductor.model_name_for_generated_files": str | None,
        "aot_inductor.output_path": str,
        "aot_inductor.package": bool,
        "aot_inductor.package_constants_in_so": bool,
        "aot_inductor.package_constants_on_disk_format": str | None,
        "aot_inductor.package_cpp_only": bool | None,
        "aot_inductor.precompile_headers": bool,
        "aot_inductor.presets": object,
        "aot_inductor.raise_error_on_ignored_optimization": bool,
        "aot_inductor.repro_level": int,
        "aot_inductor.serialized_in_spec": str,
        "aot_inductor.serialized_out_spec": str,
        "aot_inductor.use_consts_asm_build": bool,
        "aot_inductor.use_minimal_arrayref_interface": bool,
        "aot_inductor.use_runtime_constant_folding": bool,
        "aot_inductor.weight_use_caching_allocator": bool,
        "aot_inductor_mode.compile_standalone": bool,
        "apply_gumbel_max_trick": bool,
        "assert_indirect_indexing": bool,
        "assume_32bit_indexing": bool,
        "assume_aligned_inputs": bool,
        "assume_unaligned_fallback_output": bool,
        "aten_distributed_optimizations.allow_comms_decompositions": bool,
        "aten_distributed_optimizations.bucket_exposed_first": bool | None,
        "aten_distributed_optimizations.bucket_mode": str | None,
        "aten_distributed_optimizations.bucket_only_internode_comms": bool,
        "aten_distributed_optimizations.collective_bucketing": bool | None,
        "aten_distributed_optimizations.collective_estimator": Literal["analytical", "benchmark"],
        "aten_distributed_optimizations.compute_estimator": Literal["analytical", "benchmark"],
        "aten_distributed_optimizations.compute_overlap_multipler": float | None,
        "aten_distributed_optimizations.custom_runtime_estimation": object,
        "aten_distributed_optimizations.enable_fusion_regions": bool,
        "aten_distributed_optimizations.enable_low_contention_collectives": bool,
        "aten_distributed_optimizations.enable_overlap_scheduling": bool,
        "aten_distributed_optimizations.enable_simple_overlap": object,
        "aten_distributed_optimizations.insert_overlap_deps": bool | None,
        "aten_distributed_optimizations.log_final_collectives_estimations": bool,
        "aten_distributed_optimizations.low_contention_all_gather_ce_multicast": object,
        "aten_distributed_optimizations.low_contention_min_bytes_per_rank": int,
        "aten_distributed_optimizations.low_contention_skip_overlap_check": bool,
        "aten_distributed_optimizations.max_coll_distance": int | None,
        "aten_distributed_optimizations.max_compute_pre_fetch": int | None,
        "aten_distributed_optimizations.max_in_flight_gb": float | None,
        "aten_distributed_optimizations.max_memory_increase_gb": float | None,
        "aten_distributed_optimizations.max_memory_increase_ratio": float | None,
        "aten_distributed_optimizations.overlap_scheduling_autofix_cycles": bool,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives": bool,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_bucket_cap_mb": float | None,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_max_bucket_cap_mb": float,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_min_bucket_cap_mb": float,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_saturation_calibration_multiplier": float,
        "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_verbose": bool,
        "aten_distributed_optimizations.prioritize_bucketing_during_scheduling": bool,
        "aten_distributed_optimizations.profile_guided_estimations_profile_path": str | None,
        "aten_distributed_optimizations.spmd_check": bool,
        "aten_distributed_optimizations.spmd_mismatch": Literal["warn", "error"],
        "auto": bool,
        "auto_chunker.amplify_ratio_threshold": int,
        "auto_chunker.enable": bool,
        "auto_chunker.num_chunk": int | None,
        "auto_chunker.output_size_threshold": int,
        "autoheuristic_collect": object,
        "autoheuristic_collect.mixed_mm": bool,
        "autoheuristic_collect.pad_mm": bool,
        "autoheuristic_log_path": str,
        "autoheuristic_use": object,
        "autoheuristic_use.mixed_mm": bool,
        "autoheuristic_use.pad_mm": bool | None,
        "autotune_cudagraph_benchmarking": object,
        "autotune_cudagraph_benchmarking_iters": object,
        "autotune_fallback_to_aten": bool,
        "autotune_in_subproc": bool,
        "autotune_local_cache": bool,
        "autotune_lookup_table": object,
        "autotune_multi_device": bool,
        "autotune_num_choices_displayed": int | None,
        "autotune_remote_cache": bool | None,
        "b2b_gemm_pass": bool,
        "batch_fusion": bool,
        "batch_invariant": bool,
        "benchmark_combo_kernel": bool,
        "benchmark_epilogue_fusion": bool,
        "benchmark_fusion": bool,
        "benchmark_harness": bool,
        "benchmark_kernel": bool,
        "benchmark_template_fusion": object,
        "bmm_shared_a": object,
        "bucket_all_gathers_bucket_mode": Literal["default", "custom_ops", "custom_ops_multidtype"],
        "bucket_all_gathers_fx": Literal["none", "all", "only_fsdp"],
        "bucket_all_gathers_fx_bucket_size_determinator": object,
        "bucket_all_reduces_fx": Literal["none", "all"],
        "bucket_all_reduces_fx_bucket_size_determinator": object,
        "bucket_reduce_scatters_bucket_mode": Literal["default", "custom_ops", "custom_ops_multidtype"],
        "bucket_reduce_scatters_fx": Literal["none", "all"],
        "bucket_reduce_scatters_fx_bucket_size_determinator": object,
        "budget_s": float,
        "bundle_triton_into_fx_graph_cache": bool | None,
        "bundled_autotune_remote_cache": bool | None,
        "bw_outputs_user_visible": bool,
        "cache_sdpa_constraint": bool,
        "can_inplace_pad_graph_input": bool,
        "candidates": object,
        "check_stack_no_cycles_TESTING_ONLY": bool,
        "clone_outputs": bool | None,
        "collective_benchmark_nruns": int,
        "collective_benchmark_timeout": float,
        "combo_kernel_allow_mixed_sizes": int,
        "combo_kernel_autotune_grouping": bool,
        "combo_kernel_compile_time_autotune": object,
        "combo_kernel_foreach_dynamic_shapes": bool,
        "combo_kernel_max_distance": int,
        "combo_kernel_max_num_args": int,
        "combo_kernel_max_num_nodes": int,
        "combo_kernel_peak_memory_increase_gb": float | None,
        "combo_kernel_peak_memory_pct_threshold": float | None,
        "combo_kernel_per_subkernel_blocks": bool,
        "combo_kernels": bool,
        "combo_kernels_autotune": int,
        "combo_kernels_pointwise_only": bool,
        "comment_origin": bool,
        "compile_threads": int | None,
        "compile_worker_mode": object,
        "compile_worker_wait_timeout": int,
        "compile_worker_watchdog_interval_seconds": object,
        "comprehensive_padding": bool,
        "compute_all_bounds": bool,
        "constant_and_index_propagation": bool,
        "conv_1x1_as_mm": bool,
        "coordinate_descent_check_all_directions": bool,
        "coordinate_descent_search_radius": int,
        "coordinate_descent_tuning": bool,
        "cpp.cxx": object,
        "cpp.descriptive_names": Literal["torch", "original_aten", "inductor_node"],
        "cpp.dynamic_threads": bool,
        "cpp.enable_concat_linear": bool,
        "cpp.enable_floating_point_contract_flag": str,
        "cpp.enable_grouped_gemm_template": bool,
        "cpp.enable_kernel_context_guard": object,
        "cpp.enable_kernel_profile": bool,
        "cpp.enable_loop_tail_vec": bool,
        "cpp.enable_tiling_heuristics": bool,
        "cpp.enable_unsafe_math_opt_flag": bool,
        "cpp.fallback_scatter_reduce_sum": bool,
        "cpp.force_inline_kernel": bool,
        "cpp.gemm_cache_blocking": str | None,
        "cpp.gemm_max_k_slices": int,
        "cpp.gemm_thread_factors": str | None,
        "cpp.inject_log1p_bug_TESTING_ONLY": str | None,
        "cpp.inject_relu_bug_TESTING_ONLY": str | None,
        "cpp.march": str | None,
        "cpp.max_horizontal_fusion_size": int,
        "cpp.min_chunk_size": int,
        "cpp.no_redundant_loops": bool,
        "cpp.simdlen": int | None,
        "cpp.threads": int | Literal[-1],
        "cpp.use_constexpr_for_int_array": bool,
        "cpp.use_decompose_tanh": bool,
        "cpp.use_small_dequant_buffer": bool,
        "cpp.use_two_step_variance_threshold": int,
        "cpp.vec_isa_ok": bool | None,
        "cpp.weight_prepack": bool,
        "cpp_cache_precompile_headers": bool,
        "cpp_wrapper": bool,
        "cpp_wrapper_build_separate": bool,
        "cpu_backend": Literal["cpp", "triton", "halide", "pallas"],
        "cpu_gpu_bw": float,
        "cuda.arch": str | None,
        "cuda.autotune_tunableop_dynamic_dims_wildcard": object,
        "cuda.binary_remote_cache_force_write": bool,
        "cuda.compile_opt_level": Literal["-O0", "-O1", "-O2", "-O3", "-OS"],
        "cuda.cuda_cxx": str | None,
        "cuda.cutlass_backend_min_gemm_size": int,
        "cuda.cutlass_dir": str,
        "cuda.cutlass_dynamic_cluster_fallback": object,
        "cuda.cutlass_dynamic_cluster_shape": object,
        "cuda.cutlass_enabled_ops": str,
        "cuda.cutlass_epilogue_fusion_enabled": bool,
        "cuda.cutlass_hash_with_compile_cmd": bool,
        "cuda.cutlass_instantiation_level": str,
        "cuda.cutlass_max_profiling_configs": int | None,
        "cuda.cutlass_max_profiling_swizzle_options": object,
        "cuda.cutlass_op_allowlist_regex": str | None,
        "cuda.cutlass_op_denylist_regex": str | None,
        "cuda.cutlass_prescreening": bool,
        "cuda.cutlass_tma_only": bool,
        "cuda.enable_caching_codegen": bool,
        "cuda.enable_cuda_lto": bool,
        "cuda.enable_debug_info": bool,
        "cuda.enable_ptxas_info": bool,
        "cuda.generate_test_runner": bool,
        "cuda.nvgemm_max_profiling_configs": int | None,
        "cuda.upload_to_binary_remote_cache": bool,
        "cuda.use_binary_remote_cache": bool,
        "cuda.use_fast_math": bool,
        "cuda.version": str | None,
        "cuda_backend": Literal["triton", "halide", "pallas"],
        "cudagraph_policy": object,
        "cudagraph_unsafe_unbacked_ops": object,
        "custom_partitioner_fn": object,
        "custom_should_partition_ops": object,
        "cutedsl_enable_autotuning": bool,
        "cutlass.binary_remote_cache_force_write": bool,
        "cutlass.compile_opt_level": Literal["-O0", "-O1", "-O2", "-O3", "-OS"],
        "cutlass.cutlass_backend_min_gemm_size": int,
        "cutlass.cutlass_dir": str,
        "cutlass.cutlass_dynamic_cluster_fallback": object,
        "cutlass.cutlass_dynamic_cluster_shape": object,
        "cutlass.cutlass_enabled_ops": str,
        "cutlass.cutlass_epilogue_fusion_enabled": bool,
        "cutlass.cutlass_hash_with_compile_cmd": bool,
        "cutlass.cutlass_instantiation_level": str,
        "cutlass.cutlass_max_profiling_configs": int | None,
        "cutlass.cutlass_max_profiling_swizzle_options": object,
        "cutlass.cutlass_op_allowlist_regex": str | None,
        "cutlass.cutlass_op_denylist_regex": str | None,
        "cutlass.cutlass_prescreening": bool,
        "cutlass.cutlass_tma_only": bool,
        "cutlass.enable_caching_codegen": bool,
        "cutlass.enable_debug_info": bool,
        "cutlass.generate_test_runner": bool,
        "cutlass.upload_to_binary_remote_cache": bool,
        "cutlass.use_binary_remote_cache": bool,
        "cutlass.use_fast_math": bool,
        "dce": bool,
        "debug": bool,
        "debug_fusion": bool,
        "debug_index_asserts": bool,
        "debug_ir_traceback": bool,
        "decompose_mem_bound_mm": bool,
        "decompose_shard_dim_alltoall": object,
        "dedup_reduce_scatters": bool,
        "delay_realize_cheap_outputs": bool,
        "deterministic": bool,
        "developer_warnings": bool,
        "disable_cpp_codegen": bool,
        "disable_padding_cpu": bool,
        "disable_progress": bool,
        "disabled_passes": str,
        "distributed_max_autotune_gemm": bool,
        "do_not_emit_runtime_assertions": bool,
        "dynamic_scale_rblock": bool,
        "eager_numerics.disable_ftz": bool,
        "eager_numerics.division_rounding": bool,
        "eager_numerics.use_pytorch_libdevice": bool,
        "efficient_conv_bn_eval_fx_passes": bool,
        "effort": Literal["quick", "full"],
        "emulate_precision_casts": bool,
        "emulate_precision_casts_on_saved_tensors": bool,
        "enable_auto_functionalized_v2": bool,
        "enable_autograd_for_aot": bool,
        "enable_caching_generated_triton_templates": bool,
        "enable_linear_binary_folding": bool,
        "enabled_metric_tables": str,
        "epilogue_fusion": bool,
        "epilogue_fusion_first": bool,
        "epilogue_fusion_user_defined_triton_kernel": bool,
        "epilogue_fusion_with_atomic_add": bool,
        "estimate_op_runtime": str,
        "expand_dimension_for_pointwise_nodes": bool,
        "external_matmul": object,
        "fallback_by_default": bool,
        "fallback_embedding_bag_byte_unpack": bool,
        "fallback_random": bool,
        "file_lock_timeout": int,
        "flydsl_enable_autotuning": object,
        "force_disable_caches": bool,
        "force_disable_cudagraph_TESTING_ONLY": bool,
        "force_fuse_int_mm_with_mul": bool,
        "force_layout_optimization": bool,
        "force_pointwise_cat": bool,
        "force_same_precision": object,
        "force_shape_pad": bool,
        "freezing": bool,
        "freezing_discard_parameters": bool,
        "fusion_memory_timeline_peak_memory_increase_gb": object,
        "fusion_memory_timeline_peak_memory_pct_threshold": object,
        "fx_graph_cache": bool,
        "fx_graph_remote_cache": bool | None,
        "fx_passes_numeric_check": object,
        "fx_wrapper": bool,
        "generate_intermediate_hooks": bool,
        "global_cache_dir": str | None,
        "graph_partition": bool,
        "group_fusion": bool,
        "halide.asserts": bool,
        "halide.cpu_target": str,
        "halide.debug": bool,
        "halide.gpu_target": str,
        "halide.scan_kernels": bool,
        "halide.scheduler_cpu": str,
        "halide.scheduler_cuda": str,
        "implicit_fallbacks": bool,
        "incremental_autotune": bool | None,
        "inductor_choices_class": object,
        "inductor_config": object,
        "inductor_default_autotune_rep": int,
        "inductor_default_autotune_warmup": int,
        "inplace_buffers": bool,
        "inplace_padding": bool,
        "inter_node_bw": int | None,
        "intra_node_bw": int | None,
        "is_nightly_or_source": bool,
        "is_predispatch": bool,
        "joint_custom_post_pass": object,
        "joint_custom_pre_pass": object,
        "joint_graph_constant_folding": bool,
        "keep_addmm_fused_for_half_dtypes": bool,
        "keep_output_stride": bool,
        "keep_static_cubin_raw": bool,
        "kernel_name_max_ops": int,
        "layout_opt_default": str,
        "layout_optimization": bool,
        "lock": str | None,
        "log_tlparse": bool,
        "lookup_table.check_src_hash": bool,
        "lookup_table.table": object,
        "loop_index_inversion_in_fusion": bool,
        "loop_ordering_after_fusion": bool,
        "loop_reindexing_after_fusion": bool,
        "match": Literal["exact", "device"],
        "max_autotune": bool,
        "max_autotune_allow_flexible_layouts": bool,
        "max_autotune_conv_backends": str,
        "max_autotune_conv_bwd_input_backends": str,
        "max_autotune_conv_bwd_weight_backends": str,
        "max_autotune_flex_search_space": Literal["DEFAULT", "EXHAUSTIVE"],
        "max_autotune_gemm": bool,
        "max_autotune_gemm_backends": str,
        "max_autotune_gemm_search_space": Literal["DEFAULT", "EXHAUSTIVE"],
        "max_autotune_pointwise": bool,
        "max_autotune_prune_choices_based_on_shared_mem": bool,
        "max_autotune_report_choices_stats": bool,
        "max_autotune_subproc_graceful_timeout_seconds": float,
        "max_autotune_subproc_result_timeout_seconds": float,
        "max_autotune_subproc_terminate_timeout_seconds": float,
        "max_complex_pointwise_cat_inputs": int,
        "max_epilogue_benchmarked_choices": int,
        "max_error": float | None,
        "max_fusion_buffer_group_pairwise_attempts": int,
        "max_fusion_size": int,
        "max_fusion_unique_io_buffers": int | None,
        "max_pointwise_cat_inputs": int,
        "max_template_fusion_benchmarked_choices": object,
        "memory_planning": bool,
        "memory_pool": Literal["none", "intermediates", "outputs", "combined"],
        "min_num_split": int,
        "min_overlap_ratio": float,
        "mixed_mm_choice": Literal["default", "triton", "aten", "heuristic"],
        "mode": str | None,
        "most_races": int,
        "mtia.disable_welford_reduction": bool,
        "multi_kernel_hints": object,
        "nan_asserts": bool,
        "non_blocking_remote_cache_write": bool,
        "numerics": object,
        "nvgemm_max_profiling_configs": int | None,
        "nvgemm_pdl": object,
        "nvgemm_supplement_configs": bool,
        "nvgemm_swap_ab": object,
        "objective": Literal["latency", "memory"],
        "on_progress": object,
        "online_softmax": bool,
        "optimize_scatter_upon_const_tensor": bool,
        "pad_channels_last": bool,
        "pad_dynamic_shapes": bool,
        "pad_outputs": bool,
        "padding_alignment_bytes": int,
        "padding_stride_threshold": int,
        "partitioned_scatter_enabled": bool,
        "partitioned_scatter_force": object,
        "partitioned_scatter_max_partitions": int,
        "partitioned_scatter_memory_budget": float,
        "partitioned_scatter_min_contention_ratio": object,
        "partitioned_scatter_min_index_size": object,
        "partitioned_scatter_min_partitions": int,
        "partitioned_scatter_non_model_floor_bytes": object,
        "pattern_matcher": bool,
        "permute_fusion": bool,
        "pick_loop_orders": bool,
        "pipeline_max_autotune_gemm": bool,
        "post_grad_custom_post_pass": object,
        "post_grad_custom_pre_pass": object,
        "post_grad_fusion_options": object,
        "pre_grad_custom_pass": object,
        "pre_grad_fusion_options": object,
        "pre_grad_pass_timing": Literal["early", "late", "default"],
        "precision": object,
        "precompilation_timeout_seconds": int,
        "process_budget_s": float,
        "profile_bandwidth": bool,
        "profile_bandwidth_output": str | None,
        "profile_bandwidth_regex": str,
        "profile_bandwidth_with_do_bench_using_profiling": bool,
        "profiler_mark_wrapper_call": bool,
        "prologue_fusion": bool,
        "quiesce_async_compile_pool": bool,
        "quiesce_async_compile_time": int,
        "race": Literal["missing", "never", "always"],
        "race_custom_ops": bool,
        "realize_acc_reads_size_threshold": int | None,
        "realize_acc_reads_threshold": int | None,
        "realize_cpu_acc_reads_threshold": int,
        "realize_cpu_opcount_threshold": int,
        "realize_opcount_threshold": int | None,
        "realize_opusers_threshold": object,
        "realize_reads_threshold": int,
        "record_cudagraphs": bool,
        "remote_gemm_autotune_cache": bool,
        "remove_pre_grad_passes": str | None,
        "reorder_for_compute_comm_overlap": bool,
        "reorder_for_compute_comm_overlap_passes": object,
        "reorder_for_locality": bool,
        "reorder_for_locality_in_training": object,
        "reorder_for_peak_memory": bool,
        "reorder_for_peak_memory_debug": bool,
        "reorder_prefetch_limit": int | None,
        "reproducible": Literal["pinned"] | None,
        "rewrites": object,
        "rocm.arch": object,
        "rocm.ck_dir": str | None,
        "rocm.ck_max_profiling_configs": int | None,
        "rocm.ck_supported_arch": object,
        "rocm.ck_tile_max_profiling_configs": int | None,
        "rocm.compile_opt_level": str,
        "rocm.contiguous_threshold": int,
        "rocm.flush_denormals": bool,
        "rocm.generate_test_runner": bool,
        "rocm.is_debug": bool,
        "rocm.kBatch_sweep": object,
        "rocm.n_max_profiling_configs": int | None,
        "rocm.origami": bool,
        "rocm.origami_topk": int,
        "rocm.print_kernel_resource_usage": bool,
        "rocm.rocm_home": str | None,
        "rocm.save_temps": bool,
        "rocm.split_k_threshold": int,
        "rocm.use_fast_math": bool,
        "rocm.use_preselected_instances": bool,
        "run_jit_post_compile_hook": bool,
        "runtime_estimations_mms_benchmark": bool,
        "runtime_triton_nan_asserts": bool,
        "save_args": bool,
        "scalar_asserts": bool,
        "score_fusion_memory_threshold": int,
        "search_autotune_cache": bool,
        "selective_decompose": bool,
        "shape_padding": bool,
        "size_asserts": bool,
        "size_threshold_for_succ_based_strategy": int,
        "sleep_sec_TESTING_ONLY": int | None,
        "small_memory_access_threshold": int,
        "split_cat_fx_passes": bool,
        "split_reductions": bool,
        "static_launch_user_defined_triton_kernels": bool,
        "static_weight_shapes": bool,
        "store": object,
        "strict": bool,
        "strict_output_strides": object,
        "strict_signed_zero": object,
        "strict_static_cuda_launcher": bool,
        "strict_static_triton_launcher": bool,
        "template": str,
        "test_configs.assume_bucketing_reduces_latency": bool,
        "test_configs.autotune_choice_desc_regex": str | None,
        "test_configs.autotune_choice_name_regex": str | None,
        "test_configs.bisect_keep_custom_backend_for_inductor": bool,
        "test_configs.bisect_pre_grad_graph": bool,
        "test_configs.distort_benchmarking_result": str,
        "test_configs.force_custom_op_decomposition": bool | None,
        "test_configs.force_extern_kernel_in_multi_template": bool,
        "test_configs.force_filter_reduction_configs": bool,
        "test_configs.force_no_impl_grouping": bool,
        "test_configs.graphsafe_rng_func_ignores_fallback_random": bool,
        "test_configs.max_flex_configs": int | None,
        "test_configs.max_mm_configs": int | None,
        "test_configs.runtime_triton_dtype_assert": bool,
        "test_configs.runtime_triton_shape_assert": bool,
        "test_configs.static_cpp_dtype_assert": bool,
        "test_configs.track_memory_lifecycle": Literal["assert", "log"] | None,
        "test_configs.use_libtorch": bool,
        "tolerance": float | None,
        "torchinductor_worker_logpath": str,
        "tpu_backend": Literal["pallas"],
        "trace.compile_profile": bool,
        "trace.debug_dir": str | None,
        "trace.debug_log": bool,
        "trace.dot_graph_shape": str | None,
        "trace.draw_orig_fx_graph": bool,
        "trace.enabled": bool,
        "trace.fx_graph": bool,
        "trace.fx_graph_transformed": bool,
        "trace.graph_diagram": bool,
        "trace.graph_diagram_format": str,
        "trace.info_log": bool,
        "trace.ir_post_fusion": bool,
        "trace.ir_pre_fusion": bool,
        "trace.log_autotuning_results": bool,
        "trace.log_url_for_graph_xform": str | None,
        "trace.orig_fx_graph_diagram_format": str,
        "trace.output_code": bool,
        "trace.provenance_tracking_level": int,
        "trace.provenance_tracking_max_events": object,
        "trace.provenance_tracking_to_timeline": object,
        "trace.save_real_tensors": bool,
        "trace.upload_tar": object,
        "triton.autotune_at_compile_time": bool | None,
        "triton.autotune_cublasLt": bool,
        "triton.autotune_pointwise": bool,
        "triton.autotune_with_sample_inputs": bool,
        "triton.coalesce_tiling_analysis": bool,
        "triton.codegen_upcast_to_fp32": bool,
        "triton.cooperative_reductions": bool,
        "triton.cudagraph_capture_sizes": object,
        "triton.cudagraph_dynamic_shape_rerecord_limit": object,
        "triton.cudagraph_dynamic_shape_warn_limit": int | None,
        "triton.cudagraph_initial_mempool_allocation_gb": object,
        "triton.cudagraph_managed_input_rerecord_action": object,
        "triton.cudagraph_managed_input_rerecord_limit": object,
        "triton.cudagraph_min_partition_size": int,
        "triton.cudagraph_or_error": bool,
        "triton.cudagraph_partition_memory_budget": float,
        "triton.cudagraph_skip_dynamic_graphs": bool,
        "triton.cudagraph_support_input_mutation": bool,
        "triton.cudagraph_trees": bool,
        "triton.cudagraph_trees_generation_cloning": object,
        "triton.cudagraph_trees_history_recording": bool,
        "triton.cudagraph_trees_objgraph": bool,
        "triton.cudagraph_unexpected_rerecord_limit": int,
        "triton.cudagraphs": bool,
        "triton.debug_dump_kernel_inputs": object,
        "triton.debug_sync_graph": bool,
        "triton.debug_sync_kernel": bool,
        "triton.decompose_k_threshold": int,
        "triton.decompose_sort_ops": bool,
        "triton.dense_indexing": bool,
        "triton.descriptive_names": Literal["torch", "original_aten", "inductor_node"],
        "triton.disallow_failing_autotune_kernels_TESTING_ONLY": bool,
        "triton.divisible_by_16": bool,
        "triton.dynamic_disable_pipelining": bool,
        "triton.emit_pointer_range_32": bool,
        "triton.enable_flex_tdm": object,
        "triton.enable_host_side_tma": object,
        "triton.enable_pdl": bool,
        "triton.enable_persistent_tma_matmul": bool,
        "triton.enable_template_autows": object,
        "triton.enable_template_tma_store": bool,
        "triton.enable_tlx_templates": object,
        "triton.enable_tma_load_for_template_epilogue": bool,
        "triton.fast_path_cudagraph_asserts": bool,
        "triton.force_cooperative_reductions": bool,
        "triton.force_cudagraph_sync": bool,
        "triton.force_cudagraphs_warmup": bool,
        "triton.inject_relu_bug_TESTING_ONLY": str | None,
        "triton.max_kernel_dump_occurrences": int,
        "triton.max_tiles": int | None,
        "triton.min_split_scan_rblock": int,
        "triton.mix_order_reduction": bool,
        "triton.mix_order_reduction_allow_multi_stages": bool,
        "triton.mix_order_reduction_autotune_split_size": bool,
        "triton.mix_order_reduction_initial_xblock": int,
        "triton.mix_order_reduction_max_reads": int,
        "triton.mix_order_reduction_non_strict_mode": bool,
        "triton.mix_order_reduction_split_size": int | None,
        "triton.multi_kernel": Literal[0, 1, 2, 3],
        "triton.native_matmul": bool,
        "triton.nested_reduction": bool,
        "triton.num_decompose_k_splits": int,
        "triton.persistent_reductions": bool,
        "triton.prefer_nd_tiling": bool,
        "triton.proton_group_by_sm": bool,
        "triton.proton_output_dir": str | None,
        "triton.proton_per_cta_occupancy": bool,
        "triton.proton_profiling": bool,
        "triton.proton_split_invocations": bool,
        "triton.reorder_for_reducing_graph_partitions": bool,
        "triton.scalar_accumulators": object,
        "triton.skip_cudagraph_warmup": bool,
        "triton.skip_l1_cache": bool,
        "triton.slow_path_cudagraph_asserts": bool,
        "triton.spill_threshold": int,
        "triton.store_cubin": bool,
        "triton.tile_reductions": bool,
        "triton.tiling_prevents_pointwise_fusion": bool,
        "triton.tiling_prevents_reduction_fusion": bool,
        "triton.tlx_mode": object,
        "triton.transpose_discontiguous_tensor_descriptor": bool,
        "triton.unique_kernel_names": bool,
        "triton.unique_user_kernel_names": bool,
        "triton.use_block_ptr": bool,
        "triton.use_tensor_descriptor": bool,
        "triton.use_two_step_variance_min_numel": int,
        "triton.use_two_step_variance_threshold": int,
        "triton_disable_device_detection": bool,
        "triton_kernel_default_layout_constraint": Literal["needs_fixed_stride_order", "flexible_layout"],
        "unbacked_symint_fallback": int,
        "unroll_reductions_threshold": int,
        "unsafe_ignore_unsupported_triton_autotune_args": bool,
        "unsafe_marked_cacheable_functions": object,
        "unsafe_skip_cache_dynamic_shape_guards": bool,
        "unsafe_skip_scalar_range_asserts": object,
        "use_aoti": bool,
        "use_dce": bool,
        "use_experimental_benchmarker": bool,
        "use_fast_math": bool,
        "use_fast_triton_launcher": bool,
        "use_joint_graph_passes": bool,
        "use_launch_metadata_schema": bool,
        "use_mixed_mm": bool,
        "use_post_grad_passes": bool,
        "use_pre_grad_passes": bool,
        "use_rand4x": object,
        "use_static_cuda_launcher": bool,
        "use_static_triton_launcher": bool,
        "use_torch_profiler_benchmarker": bool,
        "var_std_reduction_dedup": object,
        "verbose_progress": bool,
        "warn_mix_layout": bool,
        "worker_log_path": str | None,
        "worker_start_method": str,
        "worker_suppress_logging": bool,
        "wrap_inductor_compiled_regions": bool,
        "write_are_deterministic_algorithms_enabled": bool,
        "xpu.arch": str | None,
        "xpu.binary_remote_cache_force_write": bool,
        "xpu.compile_opt_level": Literal["-O0", "-O1", "-O2", "-O3", "-OS"],
        "xpu.cutlass_backend_min_gemm_size": int,
        "xpu.cutlass_dir": str,
        "xpu.cutlass_dynamic_cluster_fallback": object,
        "xpu.cutlass_dynamic_cluster_shape": object,
        "xpu.cutlass_enabled_ops": str,
        "xpu.cutlass_epilogue_fusion_enabled": bool,
        "xpu.cutlass_hash_with_compile_cmd": bool,
        "xpu.cutlass_instantiation_level": str,
        "xpu.cutlass_max_profiling_configs": int | None,
        "xpu.cutlass_max_profiling_swizzle_options": object,
        "xpu.cutlass_op_allowlist_regex": str | None,
        "xpu.cutlass_op_denylist_regex": str | None,
        "xpu.cutlass_prescreening": bool,
        "xpu.cutlass_tma_only": bool,
        "xpu.enable_caching_codegen": bool,
        "xpu.enable_debug_info": bool,
        "xpu.generate_test_runner": bool,
        "xpu.oneapi_root": str | None,
        "xpu.upload_to_binary_remote_cache": bool,
        "xpu.use_binary_remote_cache": bool,
        "xpu.use_fast_math": bool,
        "xpu.version": str | None,
        "xpu_backend": Literal["triton"],
    },
    total=False,
)

class InductorKeywords(TypedDict, total=False):
    add_pre_grad_passes: str | None
    aggressive_fusion: bool
    align_random_eager: bool
    alignment_asserts: bool
    alignment_asserts_inputs: object
    allow_buffer_reuse: bool
    always_complex_memory_overlap_TESTING_ONLY: object
    always_keep_tensor_constants: bool
    annotate_training: bool
    apply_gumbel_max_trick: bool
    assert_indirect_indexing: bool
    assume_32bit_indexing: bool
    assume_aligned_inputs: bool
    assume_unaligned_fallback_output: bool
    auto: bool
    autoheuristic_collect: object
    autoheuristic_log_path: str
    autoheuristic_use: object
    autotune_cudagraph_benchmarking: object
    autotune_cudagraph_benchmarking_iters: object
    autotune_fallback_to_aten: bool
    autotune_in_subproc: bool
    autotune_local_cache: bool
    autotune_lookup_table: object
    autotune_multi_device: bool
    autotune_num_choices_displayed: int | None
    autotune_remote_cache: bool | None
    b2b_gemm_pass: bool
    batch_fusion: bool
    batch_invariant: bool
    benchmark_combo_kernel: bool
    benchmark_epilogue_fusion: bool
    benchmark_fusion: bool
    benchmark_harness: bool
    benchmark_kernel: bool
    benchmark_template_fusion: object
    bmm_shared_a: object
    bucket_all_gathers_bucket_mode: Literal["default", "custom_ops", "custom_ops_multidtype"]
    bucket_all_gathers_fx: Literal["none", "all", "only_fsdp"]
    bucket_all_gathers_fx_bucket_size_determinator: object
    bucket_all_reduces_fx: Literal["none", "all"]
    bucket_all_reduces_fx_bucket_size_determinator: object
    bucket_reduce_scatters_bucket_mode: Literal["default", "custom_ops", "custom_ops_multidtype"]
    bucket_reduce_scatters_fx: Literal["none", "all"]
    bucket_reduce_scatters_fx_bucket_size_determinator: object
    budget_s: float
    bundle_triton_into_fx_graph_cache: bool | None
    bundled_autotune_remote_cache: bool | None
    bw_outputs_user_visible: bool
    cache_sdpa_constraint: bool
    can_inplace_pad_graph_input: bool
    candidates: object
    check_stack_no_cycles_TESTING_ONLY: bool
    clone_outputs: bool | None
    collective_benchmark_nruns: int
    collective_benchmark_timeout: float
    combo_kernel_allow_mixed_sizes: int
    combo_kernel_autotune_grouping: bool
    combo_kernel_compile_time_autotune: object
    combo_kernel_foreach_dynamic_shapes: bool
    combo_kernel_max_distance: int
    combo_kernel_max_num_args: int
    combo_kernel_max_num_nodes: int
    combo_kernel_peak_memory_increase_gb: float | None
    combo_kernel_peak_memory_pct_threshold: float | None
    combo_kernel_per_subkernel_blocks: bool
    combo_kernels: bool
    combo_kernels_autotune: int
    combo_kernels_pointwise_only: bool
    comment_origin: bool
    compile_threads: int | None
    compile_worker_mode: object
    compile_worker_wait_timeout: int
    compile_worker_watchdog_interval_seconds: object
    comprehensive_padding: bool
    compute_all_bounds: bool
    constant_and_index_propagation: bool
    conv_1x1_as_mm: bool
    coordinate_descent_check_all_directions: bool
    coordinate_descent_search_radius: int
    coordinate_descent_tuning: bool
    cpp_cache_precompile_headers: bool
    cpp_wrapper: bool
    cpp_wrapper_build_separate: bool
    cpu_backend: Literal["cpp", "triton", "halide", "pallas"]
    cpu_gpu_bw: float
    cuda_backend: Literal["triton", "halide", "pallas"]
    cudagraph_policy: object
    cudagraph_unsafe_unbacked_ops: object
    custom_partitioner_fn: object
    custom_should_partition_ops: object
    cutedsl_enable_autotuning: bool
    dce: bool
    debug: bool
    debug_fusion: bool
    debug_index_asserts: bool
    debug_ir_traceback: bool
    decompose_mem_bound_mm: bool
    decompose_shard_dim_alltoall: object
    dedup_reduce_scatters: bool
    delay_realize_cheap_outputs: bool
    deterministic: bool
    developer_warnings: bool
    disable_cpp_codegen: bool
    disable_padding_cpu: bool
    disable_progress: bool
    disabled_passes: str
    distributed_max_autotune_gemm: bool
    do_not_emit_runtime_assertions: bool
    dynamic_scale_rblock: bool
    efficient_conv_bn_eval_fx_passes: bool
    effort: Literal["quick", "full"]
    emulate_precision_casts: bool
    emulate_precision_casts_on_saved_tensors: bool
    enable_auto_functionalized_v2: bool
    enable_autograd_for_aot: bool
    enable_caching_generated_triton_templates: bool
    enable_linear_binary_folding: bool
    enabled_metric_tables: str
    epilogue_fusion: bool
    epilogue_fusion_first: bool
    epilogue_fusion_user_defined_triton_kernel: bool
    epilogue_fusion_with_atomic_add: bool
    estimate_op_runtime: str
    expand_dimension_for_pointwise_nodes: bool
    external_matmul: object
    fallback_by_default: bool
    fallback_embedding_bag_byte_unpack: bool
    fallback_random: bool
    file_lock_timeout: int
    flydsl_enable_autotuning: object
    force_disable_caches: bool
    force_disable_cudagraph_TESTING_ONLY: bool
    force_fuse_int_mm_with_mul: bool
    force_layout_optimization: bool
    force_pointwise_cat: bool
    force_same_precision: object
    force_shape_pad: bool
    freezing: bool
    freezing_discard_parameters: bool
    fusion_memory_timeline_peak_memory_increase_gb: object
    fusion_memory_timeline_peak_memory_pct_threshold: object
    fx_graph_cache: bool
    fx_graph_remote_cache: bool | None
    fx_passes_numeric_check: object
    fx_wrapper: bool
    generate_intermediate_hooks: bool
    global_cache_dir: str | None
    graph_partition: bool
    group_fusion: bool
    implicit_fallbacks: bool
    incremental_autotune: bool | None
    inductor_choices_class: object
    inductor_config: object
    inductor_default_autotune_rep: int
    inductor_default_autotune_warmup: int
    inplace_buffers: bool
    inplace_padding: bool
    inter_node_bw: int | None
    intra_node_bw: int | None
    is_nightly_or_source: bool
    is_predispatch: bool
    joint_custom_post_pass: object
    joint_custom_pre_pass: object
    joint_graph_constant_folding: bool
    keep_addmm_fused_for_half_dtypes: bool
    keep_output_stride: bool
    keep_static_cubin_raw: bool
    kernel_name_max_ops: int
    layout_opt_default: str
    layout_optimization: bool
    lock: str | None
    log_tlparse: bool
    loop_index_inversion_in_fusion: bool
    loop_ordering_after_fusion: bool
    loop_reindexing_after_fusion: bool
    match: Literal["exact", "device"]
    max_autotune: bool
    max_autotune_allow_flexible_layouts: bool
    max_autotune_conv_backends: str
    max_autotune_conv_bwd_input_backends: str
    max_autotune_conv_bwd_weight_backends: str
    max_autotune_flex_search_space: Literal["DEFAULT", "EXHAUSTIVE"]
    max_autotune_gemm: bool
    max_autotune_gemm_backends: str
    max_autotune_gemm_search_space: Literal["DEFAULT", "EXHAUSTIVE"]
    max_autotune_pointwise: bool
    max_autotune_prune_choices_based_on_shared_mem: bool
    max_autotune_report_choices_stats: bool
    max_autotune_subproc_graceful_timeout_seconds: float
    max_autotune_subproc_result_timeout_seconds: float
    max_autotune_subproc_terminate_timeout_seconds: float
    max_complex_pointwise_cat_inputs: int
    max_epilogue_benchmarked_choices: int
    max_error: float | None
    max_fusion_buffer_group_pairwise_attempts: int
    max_fusion_size: int
    max_fusion_unique_io_buffers: int | None
    max_pointwise_cat_inputs: int
    max_template_fusion_benchmarked_choices: object
    memory_planning: bool
    memory_pool: Literal["none", "intermediates", "outputs", "combined"]
    min_num_split: int
    min_overlap_ratio: float
    mixed_mm_choice: Literal["default", "triton", "aten", "heuristic"]
    mode: str | None
    most_races: int
    multi_kernel_hints: object
    nan_asserts: bool
    non_blocking_remote_cache_write: bool
    numerics: object
    nvgemm_max_profiling_configs: int | None
    nvgemm_pdl: object
    nvgemm_supplement_configs: bool
    nvgemm_swap_ab: object
    objective: Literal["latency", "memory"]
    on_progress: object
    online_softmax: bool
    optimize_scatter_upon_const_tensor: bool
    pad_channels_last: bool
    pad_dynamic_shapes: bool
    pad_outputs: bool
    padding_alignment_bytes: int
    padding_stride_threshold: int
    partitioned_scatter_enabled: bool
    partitioned_scatter_force: object
    partitioned_scatter_max_partitions: int
    partitioned_scatter_memory_budget: float
    partitioned_scatter_min_contention_ratio: object
    partitioned_scatter_min_index_size: object
    partitioned_scatter_min_partitions: int
    partitioned_scatter_non_model_floor_bytes: object
    pattern_matcher: bool
    permute_fusion: bool
    pick_loop_orders: bool
    pipeline_max_autotune_gemm: bool
    post_grad_custom_post_pass: object
    post_grad_custom_pre_pass: object
    post_grad_fusion_options: object
    pre_grad_custom_pass: object
    pre_grad_fusion_options: object
    pre_grad_pass_timing: Literal["early", "late", "default"]
    precision: object
    precompilation_timeout_seconds: int
    process_budget_s: float
    profile_bandwidth: bool
    profile_bandwidth_output: str | None
    profile_bandwidth_regex: str
    profile_bandwidth_with_do_bench_using_profiling: bool
    profiler_mark_wrapper_call: bool
    prologue_fusion: bool
    quiesce_async_compile_pool: bool
    quiesce_async_compile_time: int
    race: Literal["missing", "never", "always"]
    race_custom_ops: bool
    realize_acc_reads_size_threshold: int | None
    realize_acc_reads_threshold: int | None
    realize_cpu_acc_reads_threshold: int
    realize_cpu_opcount_threshold: int
    realize_opcount_threshold: int | None
    realize_opusers_threshold: object
    realize_reads_threshold: int
    record_cudagraphs: bool
    remote_gemm_autotune_cache: bool
    remove_pre_grad_passes: str | None
    reorder_for_compute_comm_overlap: bool
    reorder_for_compute_comm_overlap_passes: object
    reorder_for_locality: bool
    reorder_for_locality_in_training: object
    reorder_for_peak_memory: bool
    reorder_for_peak_memory_debug: bool
    reorder_prefetch_limit: int | None
    reproducible: Literal["pinned"] | None
    rewrites: object
    run_jit_post_compile_hook: bool
    runtime_estimations_mms_benchmark: bool
    runtime_triton_nan_asserts: bool
    save_args: bool
    scalar_asserts: bool
    score_fusion_memory_threshold: int
    search_autotune_cache: bool
    selective_decompose: bool
    shape_padding: bool
    size_asserts: bool
    size_threshold_for_succ_based_strategy: int
    sleep_sec_TESTING_ONLY: int | None
    small_memory_access_threshold: int
    split_cat_fx_passes: bool
    split_reductions: bool
    static_launch_user_defined_triton_kernels: bool
    static_weight_shapes: bool
    store: object
    strict: bool
    strict_output_strides: object
    strict_signed_zero: object
    strict_static_cuda_launcher: bool
    strict_static_triton_launcher: bool
    template: str
    tolerance: float | None
    torchinductor_worker_logpath: str
    tpu_backend: Literal["pallas"]
    triton_disable_device_detection: bool
    triton_kernel_default_layout_constraint: Literal["needs_fixed_stride_order", "flexible_layout"]
    unbacked_symint_fallback: int
    unroll_reductions_threshold: int
    unsafe_ignore_unsupported_triton_autotune_args: bool
    unsafe_marked_cacheable_functions: object
    unsafe_skip_cache_dynamic_shape_guards: bool
    unsafe_skip_scalar_range_asserts: object
    use_aoti: bool
    use_dce: bool
    use_experimental_benchmarker: bool
    use_fast_math: bool
    use_fast_triton_launcher: bool
    use_joint_graph_passes: bool
    use_launch_metadata_schema: bool
    use_mixed_mm: bool
    use_post_grad_passes: bool
    use_pre_grad_passes: bool
    use_rand4x: object
    use_static_cuda_launcher: bool
    use_static_triton_launcher: bool
    use_torch_profiler_benchmarker: bool
    var_std_reduction_dedup: object
    verbose_progress: bool
    warn_mix_layout: bool
    worker_log_path: str | None
    worker_start_method: str
    worker_suppress_logging: bool
    wrap_inductor_compiled_regions: bool
    write_are_deterministic_algorithms_enabled: bool
    xpu_backend: Literal["triton"]
