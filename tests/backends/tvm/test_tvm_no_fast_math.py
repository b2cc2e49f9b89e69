"""CUDA code without fast math, as far as it can be tested without a GPU: TVM compiles, and a fake NVRTC records."""

import os
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

tvm = pytest.importorskip("tvm")

import torch  # noqa: E402 - TVM's tests are skipped whole where it is missing
from tvm.support import nvcc  # noqa: E402

from backend_kwargs.backends.tvm.build import build  # noqa: E402
from backend_kwargs.backends.tvm.lowering.graph import lower  # noqa: E402
from backend_kwargs.backends.tvm.settings import TVMOptions  # noqa: E402
from backend_kwargs.backends.tvm.target import FAST, NVCC_IS_EXACT, exact_math  # noqa: E402
from tests.backends.tvm.lowered import traced  # noqa: E402

KEPT = b"--device-int128"  # another option of TVM's
GPU = {"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024, "thread_warp_size": 32}
GPU |= {"max_shared_memory_per_block": 49152}

CUDA = tvm.target.Target(GPU)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[bytes]]:
    """The options of each compile that reaches NVRTC."""
    seen: list[list[bytes]] = []

    def compile_program(program, count, options):
        seen.append(list(options))
        assert count == len(options)
        return (0,)

    results = SimpleNamespace(NVRTC_SUCCESS=0)
    nvrtc = SimpleNamespace(nvrtcResult=results, nvrtcCompileProgram=compile_program)
    nvrtc.nvrtcCreateProgram = nvrtc.nvrtcGetCUBINSize = lambda *args: (0, 1)
    nvrtc.nvrtcGetCUBIN = nvrtc.nvrtcDestroyProgram = lambda *args: (0,)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.delenv(NVCC_IS_EXACT, raising=False)
    cuda, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.nvrtc = nvrtc
    monkeypatch.setitem(sys.modules, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    return seen


def compiles():
    nvcc.compile_cuda("", target_format="cubin", arch="sm_90")


def test_tvms_code_is_exact_and_others_stays_as_it_was(asked):
    with exact_math(CUDA):
        compiles()
    compiles()
    assert [FAST in options for options in asked] == [False, True]
    assert all(KEPT in options for options in asked)


def test_a_build_for_cuda_is_exact(asked, monkeypatch):
    """TVM's CUDA code is compiled without fast math; without a GPU it would remain text."""
    monkeypatch.setattr(tvm.relax, "build", lambda *args, **kwargs: compiles())
    mod = lower(traced(torch.sin, torch.randn(4, 9))).mod
    build(mod, TVMOptions(target=GPU), torch.device("cuda"))
    assert [FAST in options for options in asked] == [False]


def test_another_thread_compiles_as_ever(asked):
    with exact_math(CUDA):
        thread = threading.Thread(target=compiles)
        thread.start()
        thread.join()
    assert FAST in asked[0]


def test_whoever_asks_for_fast_math_gets_it(asked, monkeypatch):
    monkeypatch.setenv("TVM_CUDA_NVRTC_EXTRA_OPTS", FAST.decode())
    with exact_math(CUDA):
        compiles()
    assert asked[0].count(FAST) == 1


@pytest.mark.parametrize("known", [None, "yes"])
def test_nvcc_is_told_by_tvms_variable_which_is_put_back(asked, monkeypatch, known):
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    if known:
        monkeypatch.setenv(NVCC_IS_EXACT, known)
    with exact_math(CUDA):
        assert os.environ[NVCC_IS_EXACT]
    assert os.environ.get(NVCC_IS_EXACT) == known


def test_without_nvrtc_nothing_is_in_the_way(monkeypatch):
    """Without NVRTC TVM's own error says what to install."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with exact_math(CUDA):
        pass


def test_on_a_cpu_nothing_is_touched(asked):
    with exact_math(tvm.target.Target({"kind": "llvm"})):
        compiles()
    assert FAST in asked[0]
