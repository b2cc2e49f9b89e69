"""Inductor's compilers, and torch.compile's own wrappers around them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch._inductor import compile_fx as inductor
from torch._inductor import config, list_mode_options
from torch._inductor.compile_fx import compile_fx, get_cpp_wrapper_config
from torch._inductor.utils import get_donated_idxs

# The backends that torch.compile makes for "inductor", the second ahead of time. They are called with mode, options and
# dynamic, and have `config` and `reset`.
InductorWrapper, AheadWrapper = torch._TorchCompileInductorWrapper, torch._TorchCompileAOTInductorWrapper
# Whether `compile_fx` takes the name of a region, `compile_region_name`: torch 2.11 does not.
NAMES_REGIONS = "compile_region_name" in signature(compile_fx).parameters
UNUSED = "aot_inductor.metadata"  # acts ahead of time alone, so that elsewhere it changes nothing but the keys
USUAL: Mapping[str, object] = {
    "autocast cpu": torch.bfloat16,
    "autocast cuda": torch.float16,
    "dtype": torch.float32,
    "cudnn": ("none", "tf32"),
}


def compile_fx_inner(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Compile a lowered graph, with the saved tensors that it may overwrite in the key of torch's cache.

    A backward graph overwrites those that nobody reads afterwards, its donated buffers. torch's key has only the graph
    (2.11 to 2.14), so for one whose saved tensors are also results of the call, or are read again under `retain_graph`,
    code that overwrites them would be found, and such results and gradients be wrong.
    """
    donated = get_donated_idxs() if kwargs.get("is_backward") else None
    # Not by torch's `cache_key_tag`, which is also in the key of what Triton's kernels have been tuned to.
    beside = config.aot_inductor.metadata | ({"overwrites": str(donated)} if donated else {})
    with config.patch({UNUSED: beside}):
        return inductor.compile_fx_inner(gm, example_inputs, **kwargs)


def lost_cpp_wrapper_options() -> Mapping[str, object]:
    """Return the options that a C++ wrapper needs, which torch forgets for the backward graph; {} since 2.13."""
    kept = "log_cudagraph_skip" in signature(get_cpp_wrapper_config).parameters
    return {} if kept else get_cpp_wrapper_config()


def inductor_wrapper(options: Mapping[str, object], besides: Collection[str], *, code_for: str = "") -> Any:
    """Return torch's own wrapper for "inductor" with `options`, without those named in `besides`.

    It sets the CUPTI variables, and has the bisector's changes. torch gives these, `get_compiler_config`, `reset` and
    ahead-of-time compiling to the name "inductor" alone, so its wrapper is used, not copied.

    With `code_for`, "cpu" or "cuda", it has options for what code depends on and torch's keys of its caches lack, since
    code for another state of torch would be found: the bits of vectors on a CPU, before torch 2.13 the default dtype
    and those of autocast, and whether convolutions may use TF32, where these are not torch's defaults.
    """
    kind: Any = AheadWrapper if options.get("use_aoti") else InductorWrapper
    wrapper = kind(None, {"triton.cudagraphs": True} if options.get("triton.cudagraphs") else None, None)
    # Not by its apply_options(), which rejects every value of an option whose declared type is NoneType.
    own = {name: value for name, value in options.items() if name not in besides}
    of_bisector = {name: value for name, value in wrapper.config.items() if name != "triton.cudagraphs"}
    wrapper.config = {**own, **of_bisector}
    if code_for == "cpu":
        given, here = config.cpp.simdlen, {"AVX512": 512, "AVX2": 256}.get(torch.backends.cpu.get_cpu_capability())
        wrapper.config.setdefault("cpp.simdlen", here if given is None else given)
    if code_for:
        state: dict[str, object] = {f"autocast {each}": torch.get_autocast_dtype(each) for each in ("cpu", "cuda")}
        cudnn: Any = torch.backends.cudnn
        state |= {"dtype": torch.get_default_dtype(), "cudnn": (cudnn.fp32_precision, cudnn.conv.fp32_precision)}
        if unusual := {name: str(value) for name, value in state.items() if value != USUAL[name]}:
            wrapper.config[UNUSED] = {**wrapper.config.get(UNUSED, config.aot_inductor.metadata), **unusual}
    return wrapper
