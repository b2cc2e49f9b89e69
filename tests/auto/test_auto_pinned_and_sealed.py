"""Sealed and pinned, each together with lower precision, rewrites, `auto` and bundles."""

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.torch_internals.sealing import compile_events

BACKENDS = {
    "precision": ("tmpl-inductor", {"precision": "bf16", "max_error": 0.05}),
    "rewrites": ("tmpl-inductor", {"rewrites": ("linear_activation", "packed")}),
    "auto": ("tmpl-inductor:auto", {"candidates": ["no_size_asserts"], "budget_s": 300.0}),
    "auto, precision": (
        "tmpl-inductor:auto",
        {"precision": "bf16", "max_error": 0.05, "candidates": [], "budget_s": 300.0},
    ),
}
TOLERANCE = {"atol": 0.05, "rtol": 0.05}  # of bfloat16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()


def backend_of(kind):
    name, options = BACKENDS[kind]
    return bk.make_backend(name, options)


@pytest.mark.parametrize("kind", BACKENDS)
@torch.no_grad()
def test_sealed(store, kind):
    """All sizes run compiled code, which is right, and nothing is compiled."""
    model = net()
    compiled = torch.compile(model, backend=backend_of(kind))
    sealed = bk.seal(compiled, torch.randn(4, 32), dims={"input": {0: "n"}}, sizes={"n": [1, 4]}, tol=0.05)
    before = compile_events()
    for n in (4, 1, 4):
        x = torch.randn(n, 32)
        torch.testing.assert_close(sealed(x), model(x), **TOLERANCE)
    assert compile_events() == before
    assert sealed.counters == {"compiled": 3, "padded": 0, "missed": 0}


@pytest.mark.parametrize("kind", BACKENDS)
@torch.no_grad()
def test_pinned(store, tmp_path, kind):
    """What a lock serves is right, and has the same bits when it is compiled once more."""
    model, x = net(), torch.randn(4, 32)
    serving = bk.make_backend(bk.pin(model, x, lock=tmp_path / "k.lock", backend=backend_of(kind)), strict=True)
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        results.append(torch.compile(model, backend=serving)(x))
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], model(x), **TOLERANCE)


@torch.no_grad()
def test_a_bundle_of_what_is_pinned(store, tmp_path):
    """It is built by the lock, and gives the same bits where it is served."""
    model, x = net(), torch.randn(4, 32)
    serving = bk.pin(model, x, lock=tmp_path / "k.lock", backend=backend_of("auto"))
    config = bk.CompileConfig("tmpl-inductor:auto", dict(serving.options), dynamic=False)
    bk.CompiledModule(config).build(model, [x]).save(tmp_path / "bundle")
    torch._dynamo.reset()
    loaded = bk.CompiledModule.load(tmp_path / "bundle", model, trust=True)
    loaded.deploy()
    assert "held: 1 of 1" in loaded.describe()
    torch._dynamo.reset()
    assert torch.equal(loaded(x), torch.compile(model, backend=serving)(x))


@torch.no_grad()
def test_a_sealed_bundle_of_what_is_pinned(store, tmp_path):
    """All three together: nothing is timed when it is built, and nothing compiled when it serves."""
    model, x = net(), torch.randn(4, 32)
    serving = bk.pin(model, x, lock=tmp_path / "k.lock", backend="tmpl-inductor")
    config = bk.CompileConfig("tmpl-inductor", dict(serving.options), dynamic=False)
    built = bk.CompiledModule(config).build(model, [x])
    sealed = bk.seal(built, x)
    before = compile_events()
    torch.testing.assert_close(sealed(x), model(x), **TOLERANCE)
    assert compile_events() == before
    assert sealed.counters["compiled"] == 1
