"""The target for which TVM generates code: the device's machine, or the target that the user names.

Math on CUDA is exact: TVM compiles with fast math, with which sin(1e4) has no correct digit, and float32 numbers below
1e-38 are zero. Eager's kernels do not use it.
"""

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import tvm
from tvm.target import Target, codegen

from backend_kwargs.errors import BackendKwargsError, error_text, shown
from backend_kwargs.options.option import Options
from backend_kwargs.torch_internals.replacing import replaced

HOW = 'a kind such as "llvm" or a dict such as {"kind": "llvm", "mcpu": "znver4", "num-cores": 4}'


def target_of(named: str | Options | None, device: torch.device) -> Target:
    """Return the target for a kind or a dict, or for the machine of `device` if none is named.

    A kind alone gets this machine's limits; a dict is used unchanged. Raises BackendKwargsError.
    """
    if named is None or named == kind_of(device):
        return _gpu(device) if device.type == "cuda" else Target(host())
    target = _checked(named)
    if target.kind.name != kind_of(device):
        wanted = f"TVM compiles for {device.type!r} by a target of kind {kind_of(device)!r}"
        raise BackendKwargsError(f"{wanted}, got {shown(named)}: leave 'target' out, or name that kind.")
    return target if device.type == "cpu" else Target(target, host=host())


def kind_of(device: torch.device) -> str:
    """Return the kind of TVM target for the device."""
    return {"cpu": "llvm"}.get(device.type, device.type)


def host() -> dict[str, Any]:
    """Return this machine's CPU as TVM's target dict, with the number of torch's threads as cores."""
    cpu = {
        "kind": "llvm",
        "mtriple": codegen.llvm_get_system_triple(),
        "mcpu": codegen.llvm_get_system_cpu(),
        "num-cores": torch.get_num_threads(),
    }
    # LLVM goes by the CPU's name, but a hypervisor may mask features, whose instructions would crash the process.
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    lacking = {name.replace("_", "") for name, has in capabilities.items() if has is False}
    masked = sorted(lacking.intersection(codegen.llvm_get_cpu_features(Target(cpu))))
    return cpu | ({"mattr": [f"-{feature}" for feature in masked]} if masked else {})


def why(error: Exception) -> str:
    """Return what TVM says of an option, without all that it would take."""
    return re.split(r"[.,]*\s?(?:Known options|candidates are|Target creation)", str(error))[0]


def _gpu(device: torch.device) -> Target:
    """Return the target of a GPU of this machine. Raises BackendKwargsError."""
    try:
        target = Target.from_device(tvm.device(device.type, device.index or 0))
    except Exception as error:
        wanted = f"{device.type!r} device {device.index or 0}"
        raise BackendKwargsError(f"TVM finds no {wanted}: {error_text(error)}") from error
    return Target(target, host=host())


def _checked(named: str | Options) -> Target:
    """Return the target that the user names. Raises BackendKwargsError for what TVM or LLVM does not know."""
    try:
        target = Target(named if isinstance(named, str) else dict(named))
    except Exception as error:
        raise BackendKwargsError(f"Option 'target' must be {HOW}, got {shown(named)}: {why(error)}.") from error
    triple, mcpu = str(target.attrs.get("mtriple", "")), str(target.attrs.get("mcpu", ""))
    if target.kind.name == "llvm" and mcpu and not codegen.llvm_is_valid_cpu(mcpu, triple or host()["mtriple"]):
        raise BackendKwargsError(f"Option 'target' names mcpu {mcpu!r}, which LLVM does not know: leave 'mcpu' out.")
    return target


FAST = b"--use_fast_math"
NVCC_IS_EXACT = "TVM_CUDA_NVCC_NO_FAST_MATH"

_compiling = threading.RLock()


@contextmanager
def exact_math(target: Target) -> Iterator[None]:
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
