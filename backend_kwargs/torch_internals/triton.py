"""Triton as torch uses it: kernels of the user's in a graph, their sources, and which machine can run it."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from torch.utils._triton import has_triton, has_triton_tma_device


def kernel_and_constants(kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, object]]:
    """Return the user's kernel that a node calls and its constant arguments, which its keywords name by number."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

    return table.get_kernel(kwargs["kernel_idx"]), table.get_constant_args(kwargs["constant_args_idx"])


def code_of(kernel: object) -> str:
    """Return the code of a Triton kernel and of all functions that it calls."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

    return user_defined_triton_kernel_transitive_closure_source_code(kernel)


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


def start_compile_processes() -> None:
    """Let Inductor's compile processes start, as torch's own backend does: until then it compiles kernel by kernel."""
    from torch._inductor.async_compile import maybe_warm_pool

    maybe_warm_pool()
