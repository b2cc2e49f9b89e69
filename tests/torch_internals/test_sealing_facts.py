"""Facts about dynamo's callbacks: what torch.compile consists of, and what a callback of one's own can do."""

import threading

import pytest
import torch
from torch import nn

from backend_kwargs.torch_internals import cudagraphs, sealing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X = torch.ones(3)


def sin(x):
    return x.sin()


def compiled_sin(**kwargs):
    call = torch.compile(sin, backend="eager", dynamic=False, **kwargs)
    call(X)
    return call, sealing.wrapped(call)


def test_what_torch_compile_consists_of():
    """The function and dynamo's callback are those of the wrapper, for functions, methods and modules."""

    class Net(nn.Module):
        def forward(self, x):
            return x.sin()

    net, called = Net(), Net()  # a module of torch's own is wrapped once more, from torch 2.14 on
    called.compile(backend="eager")
    assert sealing.wrapped(torch.compile(sin, backend="eager")).function is sin
    assert sealing.wrapped(torch.compile(net, backend="eager")).function.__self__ is net
    assert sealing.wrapped(called).function == called._call_impl
    assert callable(sealing.wrapped(called).callback)
    assert [*map(sealing.wrapped, (sin, net, torch.compile(sin, disable=True), None))] == [None] * 4


def test_the_module_that_is_compiled():
    """It is the user's, and its eager call does not go through a compiled one."""
    net = nn.Linear(3, 3)
    net.compile(backend="eager")
    assert sealing.module_of(torch.compile(net, backend="eager")) is net
    assert sealing.module_of(sin) is None
    assert sealing.uncompiled(net, sealing.wrapped(net)) == net._call_impl
    assert [*sealing.compiled_parts(nn.Sequential(nn.ReLU(), net))] == ["1"]


def test_a_callback_that_compiles_nothing():
    """Code that fits runs; else the frame runs in eager, and later calls find code as before."""
    missed = []
    _, parts = compiled_sin()
    run = sealing.without_compiling(parts, missed.append)
    before = sealing.compile_events()
    for x in (X, torch.ones(4), X):
        torch.testing.assert_close(run(x), x.sin())
    assert sealing.compile_events() == before
    assert missed == ["tensor 'L['x']' size mismatch at index 0. expected 3, actual 4"]


def test_the_callback_is_of_the_thread():
    """While a call runs without compiling, another thread compiles."""
    entered, done = threading.Event(), threading.Event()

    def waits(x):
        entered.set()
        done.wait(60)
        return x.sin()

    parts = sealing.wrapped(torch.compile(waits, backend="eager"))
    thread = threading.Thread(target=sealing.without_compiling(parts, lambda reason: None), args=(X,))
    thread.start()
    entered.wait(60)
    before = sealing.compile_events()
    torch.compile(lambda x: x.cos(), backend="eager")(X)
    after = sealing.compile_events()
    done.set()
    thread.join()
    assert after > before


def test_code_of_another_backend_is_not_run():
    """dynamo compares the backend that a callback names."""
    torch.compile(sin, backend=lambda gm, _: lambda *args: (torch.zeros(3),))(X)
    missed = []
    parts = sealing.wrapped(torch.compile(sin, backend="eager"))
    torch.testing.assert_close(sealing.without_compiling(parts, missed.append)(X), X.sin())
    assert missed == ["no code was compiled for 'sin'"]


@pytest.mark.skipif(not hasattr(sealing.frames, "set_eval_frame_isolate_recompiles_id"), reason="torch before 2.13")
def test_code_of_another_region_is_not_run():
    """Code of torch.compile(..., isolate_recompiles=True) is found by its own region alone."""
    missed = []
    _, own = compiled_sin(isolate_recompiles=True)
    sealing.without_compiling(own, missed.append)(X)
    other = sealing.wrapped(torch.compile(sin, backend="eager", isolate_recompiles=True))
    sealing.without_compiling(other, missed.append)(X)
    assert missed == ["no code was compiled for 'sin'"]


def test_looking_runs_nothing():
    """It says whether code fits, or which guard fails."""
    ran = []

    class Net(nn.Module):
        def forward(self, x):
            return x.sin()

    net = Net()
    call = torch.compile(net, backend=lambda gm, _: lambda *args: ran.append(1) or gm(*args), dynamic=False)
    call(X)
    look = sealing.looking(sealing.wrapped(call))
    assert (look(X), look(torch.ones(4))) == ("", "tensor 'L['x']' size mismatch at index 0. expected 3, actual 4")
    assert ran == [1]


def test_marks_decide_what_is_a_symbol():
    """A marked size serves all unmarked calls, and one that is marked static is for itself, whatever `dynamic` is."""
    for dynamic in (None, True, False):
        torch._dynamo.reset()
        seen = []
        call = torch.compile(sin, backend=lambda gm, _, seen=seen: seen.append(gm) or gm.forward, dynamic=dynamic)
        with sealing.compiling_ahead(dynamic=False):
            for size in (3, 4):
                x = torch.ones(size)
                sealing.mark(x, 0, dynamic=False)
                call(x)
            exact = len(seen)
            x = torch.ones(7)
            sealing.mark(x, 0, dynamic=True)
            call(x)
        for size in (5, 6, 9):
            call(torch.ones(size))
        assert (exact, len(seen)) == (2, 3)


def test_a_backward_pass_is_an_event():
    """The counter rises with a first compile, a recompile, and a backward pass that is compiled late."""
    counts = [sealing.compile_events()]
    call = torch.compile(sin, backend="inductor")
    x = torch.ones(3, requires_grad=True)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # with the cache both are compiled at once
        result = call(x)
        counts.append(sealing.compile_events())
        result.sum().backward()
    counts.append(sealing.compile_events())
    call(x).sum().backward()
    counts.append(sealing.compile_events())
    assert counts[0] < counts[1] < counts[2] == counts[3]


def test_no_cuda_graphs_without_a_gpu():
    """The count is a number on every machine."""
    assert cudagraphs.recorded_count(cudagraphs.managers()) >= 0
