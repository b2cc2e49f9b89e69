"""What is mended of torch's, release by release, while Inductor compiles."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any

from backend_kwargs.errors import unknown

# torch's "max-autotune-no-cudagraphs" leaves CUDA graphs as it finds them.
MODE_ADDITIONS = {"max-autotune-no-cudagraphs": {"triton.cudagraphs": False}}


def mode_options(mode: str) -> dict[str, Any]:
    """Return what `mode` sets: torch's table, made to do what its names say."""
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in list(modes):  # a list, which may be asked for what has no hash
        raise unknown("mode", mode, modes, otherwise=f"Modes are {', '.join(modes)}.")
    return {**modes[mode], **MODE_ADDITIONS.get(mode, {})}


@cache
def name_torchs_ptxas() -> None:
    """Name torch's ptxas to Triton in this process, as torch 2.11 and 2.12 do in those that compile for it.

    torch does so here too, where this process compiles a kernel itself, but has asked Triton for its version before,
    which is part of a kernel's key and remembered. So what the others have compiled is not found, and each kernel
    that tuning times is compiled once more, one after the other.
    """
    with suppress(ImportError, AttributeError):  # none is public; where one is gone there is nothing to mend
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
        from torch.utils._triton import triton_hash_with_backend
        from triton.backends.nvidia.compiler import get_ptxas_version  # type: ignore[import-untyped]

        triton_hash_with_backend()  # as stock Inductor has it: what it has tuned is kept by it
        _set_triton_ptxas_path()
        get_ptxas_version.cache_clear()


def keeping_cubins(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the cubins that a C++ wrapper calls: torch 2.11 forgets to when the backward graph comes."""
    from torch._inductor import config
    from torch._inductor.compile_fx import get_cpp_wrapper_config

    if "log_cudagraph_skip" in signature(get_cpp_wrapper_config).parameters:
        return inner_compile

    def compile_one(gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with config.patch(get_cpp_wrapper_config()):
            return inner_compile(gm, example_inputs, **kwargs)

    return compile_one


def region_name(compile_fx: Callable[..., Any], name: str | None) -> dict[str, Any]:
    """Return the argument that names the region `compile_fx` compiles: torch 2.11 has none."""
    return {"compile_region_name": name} if "compile_region_name" in signature(compile_fx).parameters else {}
