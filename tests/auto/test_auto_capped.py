"""Tuning that ends by a time, in one thread alone."""

import math
import threading
import time

import pytest
import torch
from torch._inductor.runtime.benchmarking import benchmarker

from backend_kwargs.compilers.auto import race, settings
from backend_kwargs.compilers.auto.capped import TIMERS, OutOfTime, capped
from backend_kwargs.compilers.auto.decisions import Store


def time_a_kernel():
    return benchmarker.benchmark_cpu(lambda: None, warmup=1, rep=1)


def test_a_kernel_is_timed_until_then():
    """Before the end kernels are timed as ever; after it the next one is not."""
    with capped(math.inf):
        assert time_a_kernel() >= 0
    with capped(time.perf_counter() - 1), pytest.raises(OutOfTime):
        time_a_kernel()


def test_nothing_drops_it_as_one_kernel():
    """Inductor drops a kernel for any Exception; the end of all tuning is none."""
    assert not issubclass(OutOfTime, Exception)


def test_other_threads_go_on():
    """The end is of the thread that races; another one times its kernels meanwhile."""
    seen = []
    with capped(time.perf_counter() - 1):
        other = threading.Thread(target=lambda: seen.append(time_a_kernel()))
        other.start()
        other.join()
    assert len(seen) == 1


def test_two_races_end_apart():
    """Of two threads with an end, the first to leave does not lift the other's."""
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


def test_a_candidate_is_given_up_at_the_cap(auto, store, monkeypatch):
    """Tuning that lasts beyond two budgets is ended, its row says so, and the race goes on without a trace of it."""
    monkeypatch.setattr(settings, "CAP", -1)
    monkeypatch.setattr(race._Race, "_over", False)  # for the race itself there is time
    model, x = torch.nn.Linear(128, 128), torch.randn(128, 128)
    with torch.no_grad():
        seen = auto(model, ["max_autotune"], freezing=True)(x)  # frozen weights have products of Inductor's own
        assert torch.allclose(seen, model(x), atol=1e-3)
    (decision,) = Store(store).all()
    (row,) = [row for row in decision.rows if row["name"] == "max_autotune"]
    assert (row["status"], row["reason"]) == ("timeout", "its tuning was ended after -60 s of the race")
    assert (decision.cut_s, set(TIMERS) & set(vars(benchmarker))) == (60, set())
