"""Frozen weights are part of the code, wherever a model uses them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from backend_kwargs import BackendKwargsWarning
from backend_kwargs.errors import warn_once
from backend_kwargs.graphs.freezing import reattach_parameters
from tests.graphs.frozen import code_and_result, compiled, conv_net, freezing_backend, graphs_compiled, inputs_of, mlp


@torch.no_grad()
def test_batch_norm_is_folded():
    """A convolution, its batch norm and its ReLU become one call with one input."""
    net, x = conv_net(), torch.randn(1, 3, 8, 8)
    (code,), result = code_and_result(net, x)
    assert_close(result, net(x))
    assert inputs_of(code) == 1
    assert len(re.findall(r"= torch.ops.mkldnn._convolution_pointwise.default\(.*'relu'", code)) == 1
    assert "rsqrt" not in code


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_parameters_are_constants(mode):
    """Without gradients the generated code has only the real input."""
    net, x = mlp(), torch.randn(2, 8)
    with mode():
        (code,), result = code_and_result(net, x)
        assert_close(result, net(x))
    assert inputs_of(code) == 1


@torch.no_grad()
def test_tied_parameters_are_constants():
    """Parameters that share memory and are only read are frozen like others."""
    net, x = mlp(), torch.randn(2, 8)
    net[2].weight = nn.Parameter(net[0].weight.detach())
    (code,), result = code_and_result(net, x)
    assert_close(result, net(x))
    assert inputs_of(code) == 1


def test_under_grad_gradients_flow():
    """With gradients enabled a warning says that nothing is frozen, and training works as in eager."""
    net, x = mlp(), torch.randn(2, 8)
    warn_once.cache_clear()
    with pytest.warns(BackendKwargsWarning) as warned:
        compiled(net)(x).sum().backward()
    assert [str(warning.message) for warning in warned] == [
        "Option 'freezing' is inert while gradients are recorded: call the model under torch.no_grad()."
    ]
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    assert_close(got, [p.grad for p in net.parameters()])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, self.one, self.two, (x,))


@pytest.mark.parametrize(
    ("make_net", "x"),
    [
        pytest.param(Tied, torch.arange(4), id="tied-weights"),
        pytest.param(Shared, torch.ones(2, 8), id="shared-module"),
        pytest.param(Branches, torch.ones(2, 8), id="cond"),
    ],
)
@torch.no_grad()
def test_numbers(make_net, x):
    """Weights used in several places, or in a branch, give eager's results in one graph."""
    net = make_net()
    assert_close(compiled(net, fullgraph=True)(x), net(x))


@torch.no_grad()
def test_dynamic_shapes():
    """One graph serves several batch sizes."""
    net = mlp()
    call = compiled(net, dynamic=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 8)
        assert_close(call(x), net(x))
    assert graphs_compiled() == 1


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.after(x)


@torch.no_grad()
def test_each_side_of_a_graph_break_is_frozen():
    """Both graphs have one input."""
    net, x = Broken(), torch.randn(2, 8)
    codes, result = code_and_result(net, x)
    assert_close(result, net(x))
    assert [inputs_of(code) for code in codes] == [1, 1]


@torch.no_grad()
def test_autocast():
    """Under autocast weights are cast once, at compile time."""
    net, x = mlp(), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (code,), result = code_and_result(net, x)
        assert_close(result, net(x), atol=2e-2, rtol=2e-2)
    assert inputs_of(code) == 1


@torch.no_grad()
def test_parameter_subclass_stays_an_input():
    """A parameter of a tensor subclass remains an input; the other one is frozen."""
    net, x = nn.Linear(8, 8), torch.randn(2, 8)
    net.weight = nn.Parameter(TwoTensor(torch.ones(8, 8), torch.ones(8, 8)), requires_grad=False)
    left = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        _, kept = reattach_parameters(gm, example_inputs)
        left.extend(type(example_inputs[i]) for i in kept)
        return freezing_backend(gm, example_inputs)

    assert_close(torch.compile(net, backend=backend)(x).a, net(x).a)
    assert sorted(left, key=str) == [torch.Tensor, TwoTensor]


@torch.no_grad()
def test_modules_that_differ_in_a_scalar_do_not_share_cached_code():
    """A number of one module that is written into the code is never used for another module."""

    class Multiplied(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(factor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    with fresh_cache():
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            assert_close(compiled(Multiplied(factor))(torch.ones(4)), torch.full((4,), factor))
