"""CUDA's exact mathematics: TVM asks for the fast kind, by which eager's kernels are not made.

With it sin(1e4) is anything, and float32 numbers below 1e-38 are zero.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

FAST = b"--use_fast_math"
MODE = "TVM_CUDA_COMPILE_MODE"
NVCC_IS_EXACT = "TVM_CUDA_NVCC_NO_FAST_MATH"

_compiling = threading.RLock()


@contextmanager
def exact_math(target: Any) -> Iterator[None]:
    """Keep fast math from what is generated for CUDA meanwhile; TVM_CUDA_NVRTC_EXTRA_OPTS can still ask NVRTC for it.

    NVRTC's other callers are left alone. Where TVM is told to take nvcc, it reads a variable of the process.
    """
    if target.kind.name != "cuda":
        yield
    elif os.environ.get(MODE) == "nvcc":
        with _compiling, _nvcc_exact():
            yield
    else:
        with _compiling, _nvrtc_exact():
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
    compiles = nvrtc.nvrtcCompileProgram
    nvrtc.nvrtcCompileProgram = _without_fast(compiles, threading.get_ident())  # type: ignore[attr-defined]
    try:
        yield
    finally:
        nvrtc.nvrtcCompileProgram = compiles  # type: ignore[attr-defined]


def _without_fast(compiles: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def compile_program(program: Any, count: int, options: Sequence[bytes]) -> Any:
        kept = list(options)
        if threading.get_ident() == thread and FAST in kept:
            kept.remove(FAST)  # the first is TVM's
        return compiles(program, len(kept), kept)

    return compile_program
