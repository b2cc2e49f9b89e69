"""Sealed functions on a GPU: CUDA graphs are recorded ahead, for each size and thread, and kernels are loaded."""

import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    return compile_events(), cudagraphs.recorded_count(cudagraphs.managers())


def is_as(before):
    """Return whether nothing was compiled or recorded; garbage that is collected meanwhile may have had recordings."""
    return all(now <= then for now, then in zip(state(), before, strict=True))


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
    assert is_as(before)
    assert sealed.counters == {"compiled": 5, "padded": 0, "missed": 2}
    assert (before[1] > 0) == (mode != "default")


FIRST_CALL = """
import torch
import backend_kwargs as bk

def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}

net, x = torch.nn.Linear(64, 64).cuda(), torch.randn(4, 64, device="cuda")
with torch.no_grad():
    sealed = bk.seal(torch.compile(net, mode="reduce-overhead"), x)
    before = libraries()
    sealed(x)
    torch.cuda.synchronize()
print(sorted(libraries() - before), sealed.counters)
"""


def test_the_first_call_loads_no_library():
    """A process that has run nothing else has loaded what a call with CUDA graphs needs once it is sealed."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "[] {'compiled': 1, 'padded': 0, 'missed': 0}\n", ran.stderr


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
    assert (is_as(before), sealed.counters["compiled"]) == (True, 5)
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
        found.append(is_as(before))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert found == [True, True, True]
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 1}
    assert [*sealed.misses] == ["its CUDA graphs are recorded in another thread: call warm() in this one first"]


@pytest.mark.parametrize("backend", ["inductor", "tmpl-inductor:cudagraphs"])
@torch.no_grad()
def test_threads_that_call_at_the_same_time(backend):
    """Each has its own results, which it keeps, and nothing is recorded."""
    net = network()
    mode = {"mode": "reduce-overhead"} if backend == "inductor" else {"backend": backend}
    example = torch.randn(4, 64, device="cuda")
    sealed = bk.seal(torch.compile(net, **mode), example, dims=DIMS, sizes={"batch": [1, 4, 8]})
    found, barrier = {}, threading.Barrier(4)

    @torch.no_grad()
    def serve(seed):
        inputs = [torch.randn((1, 4, 8)[at % 3], 64, device="cuda") for at in range(200)]
        sealed.warm()
        barrier.wait()
        before = state()
        kept = [sealed(x) for x in inputs]
        found[seed] = all(torch.allclose(y, net(x), rtol=1e-3, atol=1e-3) for x, y in zip(inputs, kept, strict=True))
        found[seed] &= is_as(before)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)
    assert sealed.counters == {"compiled": 800, "padded": 0, "missed": 0}


@torch.no_grad()
def test_cuda_graphs_that_another_thread_recorded():
    """A function that was warmed up in one thread is sealed in another: the first is one of those that warm up."""
    net, x = network(), torch.randn(4, 64, device="cuda")
    compiled, made = torch.compile(net, mode="reduce-overhead"), []
    for _ in range(4):
        compiled(x)

    @torch.no_grad()
    def seal():
        made.append(bk.seal(compiled, x))

    thread = threading.Thread(target=seal)
    thread.start()
    thread.join()
    (sealed,) = made
    torch.testing.assert_close(sealed(x), net(x), rtol=1e-3, atol=1e-3)
    sealed.warm()
    torch.testing.assert_close(sealed(x), net(x), rtol=1e-3, atol=1e-3)
    assert sealed.counters == {"compiled": 1, "padded": 0, "missed": 1}


@torch.no_grad()
def test_a_pool_of_threads_warms_up_in_the_seals_mode():
    """Threads begin with gradients recorded; warm() takes the mode of the seal, and keeps what buffers have become."""
    net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda().eval()
    x = torch.randn(4, 64, device="cuda")
    sealed = bk.seal(torch.compile(net, mode="reduce-overhead"), x)
    net[1].running_mean.fill_(2.0)

    @torch.no_grad()
    def serve(_):
        return sealed(x)

    with ThreadPoolExecutor(2, initializer=sealed.warm) as pool:
        kept = [*pool.map(serve, range(20))]
    assert net[1].running_mean.unique().tolist() == [2.0]
    for result in kept:
        torch.testing.assert_close(result, net(x), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_results_in_an_object_are_copied():
    """A result in a dataclass is a thread's own too."""
    net, x = network(), torch.randn(4, 64, device="cuda")
    sealed = bk.seal(torch.compile(lambda x: Scored(net(x)), mode="reduce-overhead"), x)
    thread = threading.Thread(target=sealed.warm)
    thread.start()
    thread.join()
    first = sealed(x)
    sealed(torch.zeros_like(x))
    torch.testing.assert_close(first.scores, net(x), rtol=1e-3, atol=1e-3)


@dataclasses.dataclass
class Scored:
    scores: torch.Tensor


@torch.no_grad()
def test_a_seal_in_a_new_thread():
    """Another thread than the one that imported torch may compile, record and serve."""
    net, x, found = network(), torch.randn(4, 64, device="cuda"), []

    @torch.no_grad()
    def seal():
        sealed = bk.seal(torch.compile(net, mode="reduce-overhead"), x)
        found.append(sealed(x).clone())

    thread = threading.Thread(target=seal)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0], net(x), rtol=1e-3, atol=1e-3)


def test_training_steps_are_one_threads():
    """CUDA graphs of a backward pass run outside the turns that calls take: another thread is refused."""
    net = network().train()
    sealed = bk.seal(torch.compile(net, mode="reduce-overhead"), torch.randn(4, 64, device="cuda"))
    refused = []

    def serve():
        with pytest.raises(bk.BackendKwargsError) as raised:
            sealed.warm()
        refused.append(str(raised.value))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    (message,) = refused
    assert message == (
        "'Sequential' was sealed with its backward pass, whose CUDA graphs serve one thread: seal under "
        "torch.no_grad(), or compile without CUDA graphs."
    )


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
    assert (is_as(before), sealed.counters["compiled"]) == (True, 4)


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
    assert (is_as(before), sealed.counters) == (True, {"compiled": 2, "padded": 6, "missed": 0})
