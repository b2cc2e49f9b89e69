"""The deadline of tuning, which applies to one thread."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker
from torch._inductor.utils import fresh_cache

from backend_kwargs.auto import deadline, steps
from backend_kwargs.auto.deadline import OutOfTime, capped, capped_backward
from backend_kwargs.auto.store import Catalogue
from backend_kwargs.torch_internals.choices import TIMERS


def time_a_kernel():
    return benchmarker.benchmark_cpu(lambda: None, warmup=1, rep=1)


def test_a_kernel_is_timed_until_then():
    """Before the deadline kernels are timed as usual; after it no further kernel is timed."""
    with capped(math.inf):
        assert time_a_kernel() >= 0
    with capped(time.perf_counter() - 1), pytest.raises(OutOfTime):
        time_a_kernel()


def test_backward_graphs_are_found_behind_views():
    """Compiled backward graphs are found through views; inputs without a gradient are skipped."""
    weight = torch.ones(2, requires_grad=True)
    compiled = torch.compile(torch.sin, backend="aot_eager")(weight)
    found = deadline._compiled([(compiled.view(1, 2) * torch.ones(2)).grad_fn, (weight * weight).grad_fn, None])
    assert [node.name() for node in found] == [deadline.COMPILED]


def test_nothing_drops_it_as_one_kernel():
    """The deadline raises a BaseException, since Inductor skips a kernel after any Exception."""
    assert not issubclass(OutOfTime, Exception)


def test_other_threads_go_on():
    """The deadline applies only to the racing thread; another thread continues to time kernels."""
    seen = []
    with capped(time.perf_counter() - 1):
        other = threading.Thread(target=lambda: seen.append(time_a_kernel()))
        other.start()
        other.join()
    assert len(seen) == 1


@pytest.fixture(scope="module")
def tuned_in_backward():
    """Compile a function in which only the backward pass times a kernel."""
    library = "backend_kwargs_tests"

    @torch.library.custom_op(f"{library}::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @torch.library.custom_op(f"{library}::timed", mutates_args=())
    def timed(x: torch.Tensor) -> torch.Tensor:
        time_a_kernel()
        return x.clone()

    for op in (same, timed):
        op.register_fake(torch.empty_like)
    same.register_autograd(lambda ctx, grad: timed(grad))
    return torch.compile(lambda x: same(x) * 2, backend="inductor")


@pytest.mark.parametrize("view", [pytest.param(False, id="output"), pytest.param(True, id="view of it")])
def test_another_threads_backward_pass_ends_too(tuned_in_backward, view):
    """Autograd's thread gets the deadline of the thread that waits for it, and loses it afterwards."""
    x = torch.ones(4, requires_grad=True)
    with ThreadPoolExecutor(1) as autograds:
        with capped(time.perf_counter() - 1):
            out = tuned_in_backward(x).view(2, 2) if view else tuned_in_backward(x)
            with capped_backward([out]), pytest.raises(OutOfTime):
                autograds.submit(torch.autograd.grad, out, x, torch.ones_like(out)).result()
        assert autograds.submit(time_a_kernel).result() >= 0


def test_two_races_end_apart():
    """If two threads have a deadline, the first to finish does not remove the other's."""
    inside, left = threading.Event(), threading.Event()
    ended = []

    def second():
        with capped(time.perf_counter() - 1):
            inside.set()
            left.wait(30)
            with pytest.raises(OutOfTime):
                time_a_kernel()
            ended.append(True)

    other = threading.Thread(target=second)
    with capped(math.inf):
        other.start()
        inside.wait(30)
    left.set()
    other.join()
    assert (ended, set(TIMERS) & set(vars(benchmarker))) == ([True], set())


def test_a_candidate_is_given_up_with_the_budget(auto, store, monkeypatch):
    """Tuning beyond the budget is interrupted, the row says so, and the race continues without side effects."""
    monkeypatch.setattr(steps, "capped", lambda ends: capped(ends - 1e6))  # default's tuning never ends
    model, x = torch.nn.Linear(128, 128), torch.randn(128, 128)
    with torch.no_grad(), fresh_cache():  # which contains no earlier tuning
        seen = auto(model, ["max_autotune"], freezing=True)(x)  # frozen weights have their own products
        assert torch.allclose(seen, model(x), atol=1e-3)
    (decision,) = Catalogue(store).all()
    (row,) = [row for row in decision.rows if row.name == "max_autotune"]
    assert (row.status, row.reason) == ("timeout", "its tuning was interrupted when the budget of 300 s ended")
    assert (decision.cut_s, set(TIMERS) & set(vars(benchmarker))) == (300, set())
