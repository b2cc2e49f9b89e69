"""Bundles on a GPU: cubins instead of a compile, CUDA graphs, and freed memory."""

import gc
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import backend_kwargs as bk

ROOT = str(Path(__file__).parents[2])
MODEL = """
    import torch

    def mlp(seed=0, width=256, depth=4):
        torch.manual_seed(seed)
        layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(depth)]
        return torch.nn.Sequential(*layers, torch.nn.LayerNorm(width)).eval().cuda().half()
"""
SERVE = """
    import json, sys
    started = []
    STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system")
    sys.addaudithook(lambda event, args: started.append(str(args[:2])) if event in STARTS else None)
    import torch
    import backend_kwargs as bk

    x = torch.randn(8, 256, device="cuda").half()
    loaded = bk.CompiledModule.load(sys.argv[1], mlp(seed=3), trust=True)
    loaded.deploy()
    results = [loaded(x).clone() for _ in range(3)]
    with torch.no_grad():
        expected = mlp()(x)
    right = all(torch.allclose(result, expected, atol=1e-2, rtol=1e-2) for result in results)
    print(json.dumps({"right": right, "started": started, "says": loaded.describe()}))
"""
exec(textwrap.dedent(MODEL))  # the same model here and in the serving process


@pytest.fixture
def x():
    return torch.randn(8, 256, device="cuda").half()


def serve_elsewhere(bundle, folder):
    """Serve a bundle in a fresh process with an empty cache and without a compiler."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("g++", "gcc", "c++", "cc", "clang", "nvcc", "ptxas"):
        (programs / name).write_text("#!/bin/sh\nexit 1\n")
        (programs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"} | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CXX": str(programs / "g++"),
        "CC": str(programs / "gcc"),
        "HOME": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    program = textwrap.dedent(MODEL) + textwrap.dedent(SERVE)
    command = [sys.executable, "-c", program, str(bundle)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["default", "CUDA graphs"])
def test_a_fresh_process_compiles_nothing(mode, x, tmp_path, evidence):
    """The bundle contains cubins and Triton's extension, so no compiler is started."""
    bk.CompiledModule(bk.CompileConfig(mode=mode)).build(mlp(), [x]).save(tmp_path / "bundle")  # noqa: F821
    served = serve_elsewhere(tmp_path / "bundle", tmp_path)
    evidence("bundle", f"MLP, {mode}", started=served["started"], says=served["says"])
    assert served["right"]
    assert not [each for each in served["started"] if any(name in each for name in ("gcc", "g++", "nvcc"))]
    assert "graphs loaded in this process: 1, compiled: 0" in served["says"]


def test_memory_of_cuda_graphs_is_freed_with_the_last_module(x, evidence):
    """The pool that two modules share is freed when both are deactivated, as describe() says."""

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    config = bk.CompileConfig(mode="reduce-overhead")
    wide = torch.randn(1024, 1024, device="cuda").half()
    modules = [mlp(seed, width=1024) for seed in (0, 1)]  # noqa: F821
    reserved_before = reserved()
    compiled = [bk.CompiledModule(config).build(module, [wide]) for module in modules]
    for each in compiled:
        for _ in range(3):
            each(wide)
    with_two = reserved()
    assert "share torch's memory pool" in compiled[0].describe()
    expected = compiled[1](wide).clone()
    compiled[0].deactivate()
    with_one = reserved()
    torch.testing.assert_close(compiled[1](wide).clone(), expected)
    compiled[1].deactivate()
    with_none = reserved()
    evidence("bundle", "two active MLPs", before=reserved_before, one=with_one, two=with_two, none=with_none)
    assert with_none <= with_one <= with_two
    assert with_none < with_two


def test_another_gpu_compiles_anew(x, tmp_path):
    """A bundle of another GPU names the difference and is compiled again."""
    bk.CompiledModule(bk.CompileConfig(backend="tmpl-inductor")).build(mlp(), [x]).save(tmp_path / "bundle")  # noqa: F821
    file = tmp_path / "bundle" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["environment"]["gpu"] = "Another GPU"
    file.write_text(json.dumps(manifest))
    with pytest.warns(bk.BackendKwargsWarning, match=r"GPU: Another GPU in the bundle, .* here"):
        loaded = bk.CompiledModule.load(tmp_path / "bundle", mlp(3), trust=True)  # noqa: F821
    loaded.deploy()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), mlp()(x), atol=1e-2, rtol=1e-2)  # noqa: F821
