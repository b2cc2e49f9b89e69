"""Inputs that share memory which a graph writes run in eager; all others run compiled code."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import backend_kwargs as bk
from backend_kwargs.graphs.memory import SharedMemory, overlapping, unless_shared
from backend_kwargs.graphs.writes import copy_of_graph

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def apart():
    return torch.ones(4), torch.ones(4)


def views(first, second):
    """Return two views of one tensor that begin at these elements."""
    memory = torch.ones(12)
    return memory[first : first + 4], memory[second : second + 4]


def of_numpy():
    memory = np.ones(8, dtype=np.float32)
    return torch.from_numpy(memory[:4]), torch.from_numpy(memory[2:6])


def add(x, y):
    x.add_(1)
    return x * y


def add_each(x, y):
    torch._foreach_add_([y], 1)
    return x * y


CALLS = {
    "after": (apart, lambda: views(0, 2)),
    "before": (lambda: views(2, 0), apart),
    "otherwise": (lambda: views(0, 2), lambda: views(0, 3)),
    "no more": (lambda: views(0, 2), lambda: views(0, 4)),
    "of two storages": (apart, of_numpy),
}


@pytest.mark.parametrize("function", [add, add_each])
@pytest.mark.parametrize("order", CALLS)
@torch.no_grad()
def test_each_call_is_eagers(function, order):
    """Whatever inputs came first, each call gives eager's result and writes what eager does."""

    def backend(gm, example_inputs):
        shares, eager = SharedMemory(gm, example_inputs), copy_of_graph(gm)
        if shares(example_inputs):
            return eager.forward
        return unless_shared(shares, eager, torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs))

    compiled = torch.compile(function, backend=backend)
    for make in CALLS[order]:
        inputs, others = make(), make()
        assert compiled(*inputs).tolist() == function(*others).tolist()
        assert [*map(torch.Tensor.tolist, inputs)] == [*map(torch.Tensor.tolist, others)]


class Owner(torch.nn.Module):
    """Adds one to an input, and reads a parameter then."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        x.add_(1)
        return self.weight * x


def given_by_data(module, memory):
    module.weight.data = memory
    return module


def of_another_module(_, memory):
    return given_by_data(Owner(), memory)


@pytest.mark.parametrize("give", [given_by_data, of_another_module], ids=lambda each: each.__name__)
@torch.no_grad()
def test_a_parameter_may_get_other_memory(give):
    """It counts where a call's parameters are, and not where those of the first call were."""

    def backend(gm, example_inputs):
        shares, eager = SharedMemory(gm, example_inputs), copy_of_graph(gm)
        return unless_shared(shares, eager, torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs))

    first = Owner()
    compiled = torch.compile(lambda module, x: module(x), backend=backend)
    assert compiled(first, torch.ones(4)).tolist() == [2] * 4
    memory = torch.ones(4)
    module = give(first, memory)
    with torch.compiler.set_stance("fail_on_recompile") if module is first else nullcontext():
        assert compiled(module, memory).tolist() == [4] * 4


@torch.no_grad()
def test_code_that_writes_nothing_is_called_at_once():
    """Nothing is put before compiled code whose inputs may share memory."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(unless_shared(SharedMemory(gm, example_inputs), gm, gm.forward) == gm.forward)
        return gm.forward

    torch.compile(lambda x, y: x * y, backend=backend)(*views(0, 2))
    assert seen == [True]


@pytest.mark.parametrize(
    ("tensors", "written", "pair"),
    [
        pytest.param(lambda m: [m[:4], m[4:8], m[2:6]], None, (0, 2), id="any"),
        pytest.param(lambda m: [m[:4], m[4:8], m[2:6]], [1], (1, 2), id="only where one is written"),
        pytest.param(lambda m: [m[:4], m[2:6], m[8:]], [2], None, id="both are read"),
        pytest.param(lambda m: [m[:8], m[1:3], m[6:9]], [2], (0, 2), id="behind a shorter one"),
        pytest.param(lambda m: [m.view(3, 4)[:, :2], m.view(3, 4)[:, 2:]], None, None, id="columns"),
        pytest.param(lambda m: [m[:4], m[2:2]], None, None, id="empty"),
    ],
)
def test_tensors_that_share_memory(tensors, written, pair):
    """Two tensors overlap if they have an element in common."""
    assert overlapping(tensors(torch.ones(12)), written) == pair


@torch.no_grad()
def test_a_bundle_that_is_active_runs_them_in_eager():
    """dynamo's guards do not tell whether inputs are apart."""

    class Adds(torch.nn.Module):
        def forward(self, x, y):
            return add(x, y)

    config = bk.CompileConfig(backend="aot_eager", check_numbers="off")
    compiled = bk.CompiledModule(config).build(Adds(), [apart()])
    assert compiled(*views(0, 2)).tolist() == [4, 4, 2, 2]
