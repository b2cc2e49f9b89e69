"""CUDA's exact mathematics: TVM asks for the fast kind, by which eager's kernels are not made.

With it sin(1e4) is anything, and float32 numbers below 1e-38 are zero.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

FAST = b"--use_fast_math"
NVCC_IS_EXACT = "TVM_CUDA_NVCC_NO_FAST_MATH"  # TVM's own, read where TVM_CUDA_COMPILE_MODE is "nvcc"

_compiling = threading.Lock()


@contextmanager
def exact_math() -> Iterator[None]:
    """Keep fast math from what this thread compiles for CUDA; TVM_CUDA_NVRTC_EXTRA_OPTS can still ask for it."""
    with _compiling, _nvcc_exact(), _nvrtc_exact():
        yield


@contextmanager
def _nvcc_exact() -> Iterator[None]:
    known = os.environ.get(NVCC_IS_EXACT)
    os.environ[NVCC_IS_EXACT] = known or "1"
    try:
        yield
    finally:
        if known is None:
            del os.environ[NVCC_IS_EXACT]
        else:
            os.environ[NVCC_IS_EXACT] = known


@contextmanager
def _nvrtc_exact() -> Iterator[None]:
    # No later option takes this one back, so it has to be kept from NVRTC.
    try:
        nvrtc = import_module("cuda.bindings.nvrtc")
    except ImportError:  # TVM says what to install
        yield
        return
    compiles = _without_fast(nvrtc.nvrtcCompileProgram, threading.get_ident())
    with patch.object(nvrtc, "nvrtcCompileProgram", compiles):
        yield


def _without_fast(compiles: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def compile_program(program: Any, count: int, options: Sequence[bytes]) -> Any:
        kept = list(options)
        if threading.get_ident() == thread and FAST in kept:
            kept.remove(FAST)  # the first is TVM's
        return compiles(program, len(kept), kept)

    return compile_program
