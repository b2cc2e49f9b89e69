"""Random generators are of all threads: a race leaves them alone, unless its graph draws and no other thread runs."""

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import cudagraph_trees
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from backend_kwargs.graphs.replay import run_apart
from backend_kwargs.torch_internals.rng import left_to_dynamo
from backend_kwargs.torch_internals.threads import running_threads
from tests.auto.graphs import backend_of, chain, logged, rows_of

SEED = 7


class OtherThread:
    """Draws in a thread of its own, at points of a race, from generators that it has seeded at the first."""

    def __init__(self):
        self.drawn = []

    def draw(self):
        if not self.drawn:
            torch.manual_seed(SEED), random.seed(SEED), np.random.seed(SEED)
        self.drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))

    def __call__(self, *_):
        thread = threading.Thread(target=self.draw)
        thread.start()
        thread.join()


def draws(count):
    """Return what a thread draws that is alone."""
    own, pythons, numpys = torch.Generator().manual_seed(SEED), random.Random(SEED), np.random.RandomState(SEED)
    return [(torch.rand((), generator=own).item(), pythons.random(), numpys.rand()) for _ in range(count)]


@contextmanager
def restored():
    """Put the generators of this process back, of which a test seeds and draws."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])


def test_another_threads_draws_go_on_in_a_race(auto, store):
    """What another thread seeds and draws between candidates, and while one compiles, never repeats."""
    other = OtherThread()
    with restored(), torch.no_grad():
        auto(chain, ["combo_kernels", "max_autotune"], on_progress=other, post_grad_custom_post_pass=other)(
            torch.randn(8, 64)
        )
    assert {row.status for row in rows_of(store).values()} >= {"pass"}
    assert len(other.drawn) > 3
    assert other.drawn == draws(len(other.drawn))


def is_moved(draw):
    before = torch.get_rng_state()
    draw()
    return not torch.equal(before, torch.get_rng_state())


def recording():
    """Draw while torch records CUDA graphs, as another thread may."""
    with cudagraph_trees.preserve_rng_state():
        torch.rand(1)


def while_compiling(look):
    """Return what `look` finds while dynamo compiles."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(look())
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return seen[0]


def test_nothing_of_torch_puts_generators_back_in_a_race():
    """Neither what compiles nor what records CUDA graphs: each module that has torch's function has another one."""

    name, torchs = "preserve_rng_state", cudagraph_trees.preserve_rng_state
    owners = [each for each in sys.modules if each.startswith("torch.") and name in vars(sys.modules[each])]

    def look():
        with left_to_dynamo():
            return [each for each in owners if vars(sys.modules[each])[name] is torchs]

    assert len(owners) > 2
    assert while_compiling(look) == []


def in_backward(draw):
    """Draw in a backward pass."""
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: draw())
    (x * 2).backward()


def test_only_a_races_thread_and_backward_passes_leave_generators_alone():
    """Torch still puts them back in other threads, and after the race in these too."""
    backward = partial(in_backward, recording)

    def look():
        with restored(), ThreadPoolExecutor(1) as pool:
            with left_to_dynamo():
                found = [is_moved(recording)]
                found += [pool.submit(is_moved, each).result() for each in (recording, backward)]
            return [*found, is_moved(recording), is_moved(backward)]

    assert while_compiling(look) == [True, False, True, False, False]


def test_what_is_imported_in_a_race_puts_generators_back_after_it():
    """A module keeps the function that it found in the race, which from then on does what torch's own does."""

    def look():
        with left_to_dynamo():
            kept = cudagraph_trees.preserve_rng_state

        def draw():
            with kept():
                torch.rand(1)

        with restored():
            return [is_moved(draw), is_moved(partial(in_backward, draw))]

    assert while_compiling(look) == [False, False]


def test_a_call_without_dynamo_leaves_the_generators(store):
    """A backend that is called itself, which nothing puts back, draws nothing from the caller's generators."""
    with restored():
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        backend_of()(torch.fx.symbolic_trace(nn.Sequential(nn.ReLU())), [torch.ones(3)])
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]


@contextmanager
def running(work):
    """Run `work(stopped)` in another thread, from before the block until after it."""
    began, stopped = threading.Event(), threading.Event()

    def run():
        began.set()
        work(stopped)

    thread = threading.Thread(target=run, name="drawing")
    thread.start()
    began.wait()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def busy(stopped):
    while not stopped.is_set():
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("fn", "work", "raced"),
    [
        pytest.param(functional.dropout, busy, False, id="draws beside a thread that runs"),
        pytest.param(functional.dropout, threading.Event.wait, True, id="draws beside a thread that waits"),
        pytest.param(partial(functional.dropout, training=False), busy, True, id="draws nothing"),
    ],
)
def test_a_graph_that_draws_is_raced_alone(fn, work, raced, auto, store, log):
    """A graph that draws random numbers is not raced while another thread may draw, and the report says so."""
    with running(work), torch.no_grad():
        auto(lambda x: fn(x) * 2 + 1)(torch.randn(8, 64))
    why = "it may draw random numbers, which a race repeats, while another thread runs: 'drawing'"
    assert store.exists() is raced
    assert (logged(log) == f"auto: default for a graph not raced: {why} (0.0 s)") is not raced


def test_threads_that_wait_or_are_a_pools_do_not_count():
    """Neither an idle thread of a pool nor one that waits for another counts, but one that runs the user's code."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with running(threading.Event.wait):
            assert running_threads() == []
            with running(busy):
                assert running_threads() == ["drawing"]


def test_code_that_python_holds_in_itself_is_not_the_users():
    """As that of imports."""
    began, stopped = threading.Event(), threading.Event()
    code = compile("began.set()\nwhile not stopped.is_set(): sleep(0.001)", "<frozen importlib._bootstrap>", "exec")
    names = {"__name__": "importlib._bootstrap", "began": began, "stopped": stopped, "sleep": time.sleep}
    thread = threading.Thread(target=exec, args=(code, names))
    thread.start()
    began.wait()
    try:
        assert running_threads() == []
    finally:
        stopped.set()
        thread.join()


@torch.library.custom_op("backend_kwargs_tests::may_draw", mutates_args=())
def may_draw(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


may_draw.register_fake(torch.empty_like)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


class Quiet(Noisy):
    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def branching(fn, x):
    return torch.cond(x.sum() > 0, fn, torch.cos, (x,))


MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)
Q = torch.ones(1, 2, 4, 8)
X = torch.ones(4, 8)
ATTENTION = functional.scaled_dot_product_attention


# dynamo makes an instance of the class.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("fn", "x", "expected"),
    [
        pytest.param(chain, X, False, id="nothing"),
        pytest.param(partial(functional.dropout, p=0.5), X, True, id="dropout"),
        pytest.param(partial(functional.dropout, p=0.5, training=False), X, False, id="dropout, evaluated"),
        pytest.param(functional.rrelu, X, False, id="rrelu, evaluated"),
        pytest.param(lambda x: ATTENTION(x, x, x), Q, False, id="attention"),
        pytest.param(lambda x: ATTENTION(x, x, x, dropout_p=0.1), Q, True, id="attention with dropout"),
        pytest.param(lambda x: x + torch.randperm(8), X, True, id="a factory"),
        pytest.param(lambda x: x.clone().uniform_(), X, True, id="in place"),
        pytest.param(functional.gumbel_softmax, X, True, id="a function of Python"),
        pytest.param(may_draw, X, True, id="a user's operator"),
        pytest.param(
            lambda x: torch.cond(x.sum() > 0, functional.dropout, torch.clone, (x,)), X, True, id="in a branch"
        ),
        pytest.param(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), X, False, id="in no branch"),
        pytest.param(lambda x: checkpoint(functional.dropout, x, use_reentrant=False), X, True, id="checkpointed"),
        pytest.param(lambda x: checkpoint(torch.sin, x, use_reentrant=False), X, False, id="checkpointed, without"),
        pytest.param(lambda x: Noisy.apply(x) + 1, X.clone().requires_grad_(), True, id="in a backward pass"),
        pytest.param(lambda x: Quiet.apply(x) + 1, X.clone().requires_grad_(), False, id="in no backward pass"),
    ],
)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_what_draws_is_found_without_drawing(fn, x, expected, mode, fresh_dynamo):
    """Whether a graph may draw is found by running it, which leaves the generators as they were."""
    seen = []

    def look(gm, example_inputs):
        state = torch.get_rng_state()
        _, drawn = run_apart(gm, lambda: [value.detach() for value in example_inputs])
        seen.append(drawn)
        assert torch.equal(torch.get_rng_state(), state)
        return gm.forward

    if mode is torch.enable_grad or not x.requires_grad:
        with mode():
            torch.compile(fn, backend=look)(x)
        assert seen == [expected]
