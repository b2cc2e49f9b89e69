"""Workarounds for faults of some torch releases, applied while Inductor compiles."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from inspect import signature
from typing import Any

from backend_kwargs.errors import unknown

# torch's "max-autotune-no-cudagraphs" does not turn CUDA graphs off.
MODE_ADDITIONS = {"max-autotune-no-cudagraphs": {"triton.cudagraphs": False}}


def mode_options(mode: str) -> dict[str, Any]:
    """Return the options of `mode`: torch's table, corrected to do what the names say."""
    from torch._inductor import list_mode_options

    modes = list_mode_options()
    if mode not in list(modes):  # a list, since `mode` may not be hashable
        raise unknown("mode", mode, modes, otherwise=f"Modes are {', '.join(modes)}.")
    return {**modes[mode], **MODE_ADDITIONS.get(mode, {})}


@cache
def name_torchs_ptxas() -> None:
    """Set Triton's path of ptxas to torch's in this process, as torch 2.11 and 2.12 do in their compile processes.

    torch does so in this process too, but only after asking Triton for the version of ptxas, which is part of a
    kernel's key and cached. So kernels of the compile processes are not found, and each kernel that tuning times is
    compiled again, one after the other.
    """
    with suppress(ImportError, AttributeError):  # none is public; if one is gone, the fault is gone too
        from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path
        from torch.utils._triton import triton_hash_with_backend
        from triton.backends.nvidia.compiler import get_ptxas_version  # type: ignore[import-untyped]

        triton_hash_with_backend()  # computed as in stock Inductor, whose tuning results are stored under it
        _set_triton_ptxas_path()
        get_ptxas_version.cache_clear()


def keeping_cubins(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the cubins that a C++ wrapper calls: torch 2.11 drops them when it compiles the backward graph."""
    from torch._inductor import config
    from torch._inductor.compile_fx import get_cpp_wrapper_config

    if "log_cudagraph_skip" in signature(get_cpp_wrapper_config).parameters:
        return inner_compile

    def compile_one(gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with config.patch(get_cpp_wrapper_config()):
            return inner_compile(gm, example_inputs, **kwargs)

    return compile_one


def region_name(compile_fx: Callable[..., Any], name: str | None) -> dict[str, Any]:
    """Return the argument of `compile_fx` that names the region, none for torch 2.11, which has no such argument."""
    return {"compile_region_name": name} if "compile_region_name" in signature(compile_fx).parameters else {}
