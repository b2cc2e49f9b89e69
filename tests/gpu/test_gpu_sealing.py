"""Sealed functions on a GPU: CUDA graphs are recorded ahead, for each size and thread, and kernels are loaded."""

import threading

import pytest
import torch
from torch import nn

import backend_kwargs as bk
from backend_kwargs.torch_internals import cudagraphs
from backend_kwargs.torch_internals.sealing import compile_events

DIMS = {"input": {0: "batch"}}


def network():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).cuda().eval()


def state():
    return compile_events(), cudagraphs.recorded_count()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@torch.no_grad()
def test_nothing_is_compiled_recorded_or_tuned(mode):
    """In each mode of torch, declared and other calls compile and record nothing, and results are eager's."""
    net = network()
    sealed = bk.seal(
        torch.compile(net, mode=mode), torch.randn(4, 64, device="cuda"), dims=DIMS, sizes={"batch": [1, 3, 8]}
    )
    before = state()
    for batch in (3, 1, 8, 5, 8, 3, 100):
        x = torch.randn(batch, 64, device="cuda")
        torch.testing.assert_close(sealed(x).clone(), net(x), rtol=1e-3, atol=1e-3)
    assert state() == before
    assert sealed.counters == {"compiled": 5, "padded": 0, "missed": 2}
    assert (before[1] > 0) == (mode != "default")


@torch.no_grad()
def test_a_range_with_cuda_graphs_is_recorded_for_each_size():
    """Code for any size has a CUDA graph of each; too many are refused."""
    net = network()
    compiled = torch.compile(net, mode="reduce-overhead")
    x = torch.randn(4, 64, device="cuda")
    sealed = bk.seal(compiled, x, dims=DIMS, sizes={"batch": range(1, 9)})
    before = state()
    for batch in (5, 1, 8, 2, 7):
        sealed(torch.randn(batch, 64, device="cuda"))
    assert (state(), sealed.counters["compiled"]) == (before, 5)
    with pytest.raises(bk.BackendKwargsError) as refused:
        bk.seal(compiled, x, dims=DIMS, sizes={"batch": range(1, 1000)})
    assert str(refused.value) == (
        "CUDA graphs are recorded for each of 999 combinations of sizes, at most 256: declare `buckets`, or compile "
        "without CUDA graphs."
    )


@torch.no_grad()
def test_other_threads_warm_up_first():
    """CUDA graphs belong to a thread: another runs in eager until it calls warm()."""
    net = network()
    sealed = bk.seal(torch.compile(net, mode="reduce-overhead"), torch.randn(4, 64, device="cuda"))
    found = []

    @torch.no_grad()
    def serve():
        x = torch.randn(4, 64, device="cuda")
        found.append(torch.allclose(sealed(x), net(x), rtol=1e-3, atol=1e-3))
        sealed.warm()
        before = state()
        found.append(torch.allclose(sealed(x), net(x), rtol=1e-3, atol=1e-3))
        found.append(state() == before)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert found == [True, True, True]
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 1}
    assert [*sealed.misses] == ["its CUDA graphs belong to another thread: call warm() in this one first"]


def test_training_steps_with_cuda_graphs():
    """Forward and backward graphs are recorded ahead."""
    net = network().train()
    sealed = bk.seal(
        torch.compile(net, mode="reduce-overhead"),
        torch.randn(4, 64, device="cuda"),
        dims=DIMS,
        sizes={"batch": [4, 8]},
    )
    before = state()
    for batch in (4, 8, 4, 8):
        net.zero_grad()
        sealed(torch.randn(batch, 64, device="cuda")).square().mean().backward()
    assert (state(), sealed.counters["compiled"]) == (before, 4)


@torch.no_grad()
def test_buckets_with_cuda_graphs():
    """Padded calls replay the bucket's graph."""
    net = network()
    sealed = bk.seal(
        torch.compile(net, mode="reduce-overhead"),
        torch.randn(4, 64, device="cuda"),
        dims=DIMS,
        buckets={"batch": [4, 8]},
    )
    before = state()
    for batch in range(1, 9):
        x = torch.randn(batch, 64, device="cuda")
        torch.testing.assert_close(sealed(x).clone(), net(x), rtol=1e-3, atol=1e-3)
    assert (state(), sealed.counters) == (before, {"compiled": 2, "padded": 6, "missed": 0})
