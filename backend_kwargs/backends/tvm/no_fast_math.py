"""Exact math on CUDA: TVM compiles with fast math, which eager's kernels do not use.

With fast math, sin(1e4) has no correct digit, and float32 numbers below 1e-38 are zero.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from backend_kwargs.torch_internals.replacing import replaced

if TYPE_CHECKING:
    from tvm.target import Target

FAST = b"--use_fast_math"
NVCC_IS_EXACT = "TVM_CUDA_NVCC_NO_FAST_MATH"

_compiling = threading.RLock()


@contextmanager
def exact_math(target: "Target") -> Iterator[None]:
    """Generate CUDA code without fast math in this context; TVM_CUDA_NVRTC_EXTRA_OPTS can still request it.

    Other callers of NVRTC are not affected. With nvcc, TVM reads an environment variable instead.
    """
    if target.kind.name != "cuda":
        yield
        return
    with _compiling, replaced(os.environ, NVCC_IS_EXACT, os.environ.get(NVCC_IS_EXACT) or "1"), _exact():
        yield


def _exact() -> AbstractContextManager[None]:
    """Return what drops fast math from this thread's calls of NVRTC."""
    # No later option cancels this one, so it must not reach NVRTC.
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
    except ImportError:  # TVM's own error says what to install
        return nullcontext()
    return replaced(nvrtc, "nvrtcCompileProgram", _without_fast(nvrtc.nvrtcCompileProgram, threading.get_ident()))


def _without_fast(compiles: Callable[..., object], thread: int) -> Callable[..., object]:
    """Return NVRTC's function, which drops the first option for fast math on one thread."""

    def compile_program(program: object, count: int, options: Sequence[bytes]) -> object:
        flags = list(options)
        if threading.get_ident() == thread and FAST in flags:
            flags.remove(FAST)  # only the first one is TVM's
        return compiles(program, len(flags), flags)

    return compile_program
