"""Which graphs are raced, asked of graphs alone; what then runs is in test_auto_effects.py."""

import operator
from functools import partial

import pytest
import torch
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.utils.checkpoint import checkpoint

from backend_kwargs.graphs.writes import (
    communicates,
    holds_state,
    in_eager,
    is_tiny,
    may_communicate,
    why_not_repeatable,
)

MIB = 1 << 18  # numbers of four bytes


def graph_of(*targets, root=None):
    """Return a graph of calls in a chain."""
    graph = Graph()
    last = graph.placeholder("x")
    for target in targets:
        last = graph.call_function(target, (last,))
    graph.output(last)
    return GraphModule(root or torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("calls", "numbers", "tiny"),
    [
        pytest.param(2, (1,), True, id="both"),
        pytest.param(0, (), True, id="nothing"),
        pytest.param(3, (1,), False, id="three operators"),
        pytest.param(2, (MIB - 1,), True, id="less than a mebibyte"),
        pytest.param(2, (MIB,), False, id="a mebibyte"),
        pytest.param(2, (MIB // 2, MIB // 2), False, id="a mebibyte of two inputs"),
    ],
)
def test_a_graph_is_tiny(calls, numbers, tiny):
    """With fewer than three operators and less than a mebibyte of inputs a race costs more than it saves."""
    inputs = [torch.empty(count) for count in numbers]
    assert is_tiny(graph_of(*[torch.sin] * calls), [*inputs, 7]) is tiny


@pytest.mark.parametrize(
    ("gm", "inputs", "settings", "why"),
    [
        pytest.param(graph_of(torch.sin), [torch.ones(2)], {}, "", id="raced"),
        pytest.param(graph_of(torch.sin), [3], {}, "no input is a tensor", id="a number"),
        pytest.param(
            graph_of(torch.sin),
            [torch.ones(2), torch.empty(2, device="meta")],
            {},
            "an input is not a plain tensor",
            id="one without memory",
        ),
        pytest.param(
            graph_of(torch.sin),
            [[torch.ones(2)]],
            {},
            "an input is a list, which each call empties",
            id="the inputs of compiled autograd",
        ),
        pytest.param(
            graph_of(torch.ops.higher_order.tag_activation_checkpoint), [torch.ones(2)], {}, "", id="checkpointed"
        ),
        pytest.param(
            symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())),
            [torch.ones(2)],
            {},
            "it contains tensors, which a race would change",
            id="a module",
        ),
        pytest.param(graph_of(test_a_graph_is_tiny), [torch.ones(2)], {}, "", id="a function of somebody's"),
        pytest.param(
            graph_of(test_a_graph_is_tiny),
            [torch.ones(2)],
            {"custom_ops": False},
            "it has operators that are not torch's, and race_custom_ops is False",
            id="a function of somebody's, not to be raced",
        ),
        pytest.param(
            graph_of(torch.sin, operator.neg),
            [torch.ones(2)],
            {"custom_ops": False},
            "",
            id="torch's and Python's",
        ),
    ],
)
def test_why_a_graph_is_not_raced(gm, inputs, settings, why):
    """The first reason that holds."""
    assert why_not_repeatable(gm, inputs, **settings) == why


@pytest.mark.parametrize(
    ("target", "certain", "possible"),
    [
        pytest.param(torch.sin, False, False, id="torch"),
        pytest.param(torch.ops.aten.sin.default, False, False, id="an overload"),
        pytest.param(torch.ops.aten.sin, False, False, id="a packet"),
        pytest.param(operator.neg, False, False, id="Python"),
        pytest.param(abs, False, False, id="builtin"),
        pytest.param(test_a_graph_is_tiny, False, True, id="somebody's"),
        pytest.param(torch.ops._c10d_functional.wait_tensor.default, True, False, id="a collective"),
        pytest.param(torch.ops._c10d_functional.wait_tensor, True, False, id="a collective's packet"),
        pytest.param(torch.distributed.is_available, True, False, id="a function of torch.distributed"),
    ],
)
def test_which_operators_communicate(target, certain, possible):
    """Those of torch's namespaces are known; one of another may do so."""
    gm = graph_of(torch.sin, target)
    assert (communicates(gm), may_communicate(gm)) == (certain, possible)
    nested = graph_of(torch.sin)
    nested.body = gm
    assert (communicates(nested), may_communicate(nested)) == (certain, possible)


@pytest.mark.parametrize(
    ("value", "held"),
    [
        pytest.param(torch.ones(2), True, id="tensor"),
        pytest.param(graph_of(torch.sin), False, id="graph"),
        pytest.param(3, False, id="number"),
    ],
)
def test_what_a_graph_holds(value, held):
    """A tensor that is no input would be changed by each candidate; a branch's graph would not."""
    root = torch.nn.Module()
    root.held = torch.nn.Module()
    root.held.value = value
    graph = Graph()
    graph.placeholder("x")
    graph.output(graph.create_node("get_attr", "held.value"))
    assert holds_state(GraphModule(root, graph)) is held


def test_checkpoints_in_eager_repeat_their_draws():
    """The gradient in eager is that of the draws of the call, also in a checkpoint within a checkpoint."""
    inner = partial(checkpoint, torch.nn.functional.dropout, use_reentrant=False)
    outer = torch.compile(
        lambda x: checkpoint(lambda x: inner(x.sin()), x, use_reentrant=False), backend=lambda gm, _: in_eager(gm)
    )
    x = torch.ones(64, requires_grad=True)
    result = outer(x)
    result.sum().backward()
    torch.testing.assert_close(x.grad, 2 * (result != 0) * x.cos())


@pytest.mark.parametrize(
    ("versions", "requires_grad", "grad", "refused"),
    [
        pytest.param((0, 1), (False, True), True, True, id="changed"),
        pytest.param((0, 1), (False, True), False, False, id="changed without gradients"),
        pytest.param((1, 0), (False, True), True, False, id="another is changed"),
        pytest.param((0, 0), (True, True), True, False, id="none is changed"),
    ],
)
def test_inputs_that_train_and_are_changed(versions, requires_grad, grad, refused):
    """A copy of a leaf that requires grad cannot be changed in place as the original is."""
    graph = Graph()
    inputs = []
    for version, trains in zip(versions, requires_grad, strict=True):
        placeholder = graph.placeholder(f"x{len(inputs)}")
        placeholder.meta["example_value"] = fake = torch.ones(2)
        for _ in range(version):
            fake.add_(1)
        inputs.append(torch.ones(2, requires_grad=trains))
    graph.output(())
    why = "it changes in place an input that requires grad" if refused else ""
    with torch.set_grad_enabled(grad):
        assert why_not_repeatable(GraphModule(torch.nn.Module(), graph), inputs) == why
