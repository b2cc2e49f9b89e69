"""Which inputs of dynamo's graph become constants, and what becomes of the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

from backend_kwargs.graphs import freezing
from backend_kwargs.graphs.freezing import compile_frozen, reattach_parameters
from tests.graphs.frozen import compiled, freezing_backend, mlp


@torch.no_grad()
def test_one_graph_serves_frozen_and_unfrozen():
    """dynamo's graph is not changed, so candidates compiled from it agree."""
    net, x = mlp(), torch.randn(2, 8)

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        frozen, plain = freezing_backend(gm, example_inputs), gm.forward
        return lambda *inputs: [a - b for a, b in zip(frozen(*inputs), plain(*inputs), strict=True)]

    assert_close(torch.compile(net, backend=backend)(x), torch.zeros(2, 8))


@torch.no_grad()
def test_fake_inputs_are_left_alone():
    """With fake inputs, as under DDPOptimizer, the graph is returned unchanged."""
    answers = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        fake_mode = torch._subclasses.FakeTensorMode()
        fakes = [fake_mode.from_tensor(x) for x in example_inputs]
        answers.append(reattach_parameters(gm, fakes) == (gm, list(range(5))))
        return gm.forward

    torch.compile(mlp(), backend=backend)(torch.randn(2, 8))
    assert answers == [True]


@torch.no_grad()
def test_outside_dynamo_the_graph_is_left_alone():
    """Outside dynamo nothing is frozen, since no guard can check a parameter's identity."""
    calls = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        calls.append((gm, example_inputs))
        return gm.forward

    torch.compile(mlp(), backend=backend)(torch.randn(2, 8))
    ((gm, example_inputs),) = calls
    assert reattach_parameters(gm, example_inputs) == (gm, list(range(5)))


@torch.no_grad()
def test_no_cache_has_frozen_graphs():
    """Neither the cache on disk nor the remote one, since their keys lack the weights."""
    found = []

    def look(graph: torch.fx.Graph) -> None:
        found.append((config.fx_graph_cache, config.fx_graph_remote_cache))

    with config.patch(fx_graph_cache=True, fx_graph_remote_cache=True, post_grad_custom_post_pass=look):
        compiled(mlp())(torch.randn(2, 8))
    assert found == [(False, False)]


def test_a_name_that_is_free():
    """Underscores are added until no attribute has the name."""
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    gm.weight, gm.weight_ = 1, 2
    assert (freezing.unused_name(gm, "weight"), freezing.unused_name(gm, "other")) == ("weight__", "other")


def test_inputs_that_became_constants_are_dropped():
    """The callable takes all inputs of the graph and hands on those that are kept."""

    def compiled_gm(*inputs: Any) -> Any:
        return inputs

    call = freezing.taking_all_inputs(compiled_gm, [2, 0])
    assert call("a", "b", "c") == ("c", "a")
    assert call.__wrapped__ is compiled_gm


@pytest.mark.parametrize(
    ("value", "freezable"),
    [
        pytest.param(torch.zeros(2), True, id="buffer"),
        pytest.param(nn.Parameter(torch.zeros(2)), True, id="parameter"),
        pytest.param(torch.zeros(2, device="meta"), False, id="meta"),
        pytest.param(TwoTensor(torch.zeros(2), torch.zeros(2)), False, id="subclass"),
        pytest.param(3, False, id="number"),
    ],
)
def test_what_can_be_frozen(value, freezable):
    """A plain tensor or parameter with memory."""
    assert freezing._can_freeze(value) is freezable


class Weights(nn.Module):
    """A parameter, a buffer, and two inputs between which dynamo may place them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.full((3,), 5.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.shift - y


@torch.no_grad()
def test_what_becomes_of_lifted_parameters():
    """Parameters stay parameters, buffers stay buffers, and the positions of all other inputs are returned."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        lifted = freezing.lifted_parameters(gm, example_inputs)
        frozen_gm, kept = reattach_parameters(gm, example_inputs)
        others = [value for at, value in enumerate(example_inputs) if at not in lifted]
        seen.append((frozen_gm, kept, lifted, len(example_inputs), frozen_gm(*others)[0]))
        return gm.forward

    module, x, y = Weights(), torch.ones(3), torch.full((3,), 4.0)
    torch.compile(module, backend=backend)(x, y)
    ((frozen_gm, kept, lifted, count, result),) = seen
    assert sorted([*kept, *lifted]) == list(range(count))
    assert (len(kept), len(lifted)) == (2, 2)
    for held, own in ((frozen_gm.parameters(), module.weight), (frozen_gm.buffers(), module.shift)):
        (alias,) = held
        assert (alias.data_ptr(), alias._version, alias.requires_grad) == (
            own.data_ptr(),
            own._version,
            own.requires_grad,
        )
    assert torch.equal(result, torch.full((3,), 3.0))
    attributes = frozen_gm.graph.find_nodes(op="get_attr")
    assert [node.op for node in frozen_gm.graph.nodes][:4] == ["placeholder"] * 2 + ["get_attr"] * 2
    assert all("example_value" in node.meta and "grapharg" not in node.meta for node in attributes)
    assert {node.target for node in attributes} <= {*frozen_gm._param_name_to_source}


@torch.no_grad()
def test_a_graph_without_parameters_is_compiled_as_it_is():
    """Nothing is copied or wrapped where nothing can be frozen."""
    seen: list[Any] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        returned = compile_frozen(gm, example_inputs, lambda *args: seen.append(args) or gm.forward)
        assert returned == gm.forward
        assert seen == [(gm, example_inputs)]
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert len(seen) == 1


def shared_graph(*versions: int) -> torch.fx.GraphModule:
    """Return a graph of inputs of which dynamo has seen so many writes."""
    graph = torch.fx.Graph()
    for at, version in enumerate(versions):
        fake = torch.zeros(4)
        for _ in range(version):
            fake.add_(1)
        graph.placeholder(f"x{at}").meta["example_value"] = fake
    graph.output(())
    return torch.fx.GraphModule(nn.Module(), graph)


WHOLE, APART = torch.zeros(8), torch.zeros(4)


@pytest.mark.parametrize(
    ("versions", "inputs", "writes"),
    [
        pytest.param((0, 0), (WHOLE[:4], WHOLE[4:]), False, id="shared and read"),
        pytest.param((0, 1), (WHOLE[:4], WHOLE[4:]), True, id="shared and written"),
        pytest.param((1, 0), (WHOLE[:4], WHOLE[4:]), True, id="the first written"),
        pytest.param((1, 1), (WHOLE[:4], APART), False, id="written apart"),
        pytest.param((1, 0, 0), (APART, WHOLE[:4], WHOLE[4:]), False, id="another one written"),
        pytest.param((1, 1), (3, 4), False, id="numbers"),
    ],
)
def test_memory_that_is_shared_and_written(versions, inputs, writes):
    """Only inputs that share memory which the graph changes keep it from being frozen."""
    assert freezing._writes_shared_memory(shared_graph(*versions), inputs) is writes
