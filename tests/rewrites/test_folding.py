"""Norms of several convolutions, folded together in lists of tensors."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from backend_kwargs import make_backend
from backend_kwargs.rewrites import folding
from tests.rewrites.lowering import Rewriting, agrees
from tests.rewrites.test_convolution import block, image

LIST = torch.ops.aten._foreach_mul.Scalar


@pytest.fixture(autouse=True)
def _on_a_cpu_too(monkeypatch, fresh_dynamo):
    monkeypatch.setattr(folding, "DEVICES", ("cpu",))


def stack(count, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(block(in_channels=8, **options) for _ in range(count)))


def lists(rewriting):
    """Return the number of tensors of each list in the rewritten graph."""
    (gm,) = rewriting.graphs
    return [len(node.args[0]) for node in gm.graph.nodes if node.target is LIST]


def rewritten(fn, *args):
    rewriting = Rewriting(fn, "convolution")
    with torch.no_grad():
        if isinstance(fn, nn.Module):
            agrees(rewriting(*args), fn, args)
        else:
            torch.testing.assert_close(rewriting(*args), fn(*args))
    return rewriting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_list(dtype):
    """Weights and biases of all norms are one list, in the layout of the weights."""
    model = stack(3, dtype=dtype).to(memory_format=torch.channels_last)
    assert lists(rewritten(model, image(4, 8, 9, 8, dtype=dtype))) == [6]


def test_the_same_rounding(monkeypatch):
    """Each weight and bias has the bits that it has when it is folded alone."""
    model, x = stack(3, dtype=torch.bfloat16), image(4, 8, 9, 8, dtype=torch.bfloat16)
    results = []
    for devices in (("cpu",), ()):
        monkeypatch.setattr(folding, "DEVICES", devices)
        rewriting = Rewriting(model, "convolution")
        with torch.no_grad():
            results.append(rewriting(x))
        assert bool(lists(rewriting)) is bool(devices)
    assert torch.equal(*results)


def test_several_lists(monkeypatch):
    """A list has `AT_ONCE` tensors at most, and each comes before its first convolution only."""
    monkeypatch.setattr(folding, "AT_ONCE", 4)
    rewriting = rewritten(stack(3), image(4, 8, 9, 8))
    assert lists(rewriting) == [4, 2]
    (gm,) = rewriting.graphs
    order = [node.target for node in gm.graph.nodes if node.target is LIST or "conv" in str(node.target)]
    assert [target is LIST for target in order] == [True, False, False, True, False]


def test_one_tensor():
    """One tensor needs no list."""
    layer, scale = nn.Conv2d(4, 8, 3), torch.rand(8, 1, 1)
    fn = lambda x: F.relu(F.conv2d(x, layer.weight) * scale)  # noqa: E731
    assert lists(rewritten(fn, image(8, 4, 6, 6))) == []


def test_biases_of_two_branches():
    """The sum of two branches' biases is one tensor of the list."""
    one, other = block(), block()
    fn = lambda x: F.relu(one.norm(one.conv(x)) + other.norm(other.conv(x)))  # noqa: E731
    assert lists(rewritten(fn, image(8, 4, 6, 6))) == [3]


def test_a_bias_that_is_given():
    """A bias that needs no computing, since the other branch has none, is no part of a list."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1, bias=each % 2 == 0) for each in range(4)]

    def fn(x):
        for one, other in (layers[:2], layers[2:]):
            x = F.relu(one(x) + other(x))
        return x

    assert lists(rewritten(fn, image(4, 8, 9, 8))) == []


def test_a_scale_that_is_computed():
    """A scale that depends on another convolution is not moved before it."""
    first, second = block(), block(in_channels=8)

    def fn(x):
        y = first(x)
        gate = y.mean((0, 2, 3)).sigmoid().reshape(1, 8, 1, 1)
        return F.relu(second.norm(second.conv(y)) * gate)

    assert lists(rewritten(fn, image(8, 4, 6, 6))) == [2]  # the first block's


def test_updated_weights_show():
    """Each call folds the current weights and statistics."""
    model, x = stack(2), image(4, 8, 9, 8)
    compiled = torch.compile(model, backend=make_backend("tmpl-inductor", rewrites=("convolution",)))
    with torch.no_grad():
        agrees(compiled(x), model, (x,))
        model[1].conv.weight.mul_(2)
        model[0].norm.running_var.add_(1)
        agrees(compiled(x), model, (x,))


def test_dynamic_sizes():
    """Images of other sizes use the same lists."""
    model = stack(2)
    rewriting = Rewriting(model, "convolution")
    with torch.no_grad():
        for side in (7, 9, 11):
            x = image(4, 8, side, side)
            agrees(rewriting(x), model, (x,))
    assert [[len(n.args[0]) for n in gm.graph.nodes if n.target is LIST] for gm in rewriting.graphs] == [[4], [4]]


def test_mutated_statistics():
    """Statistics that the graph itself changes are folded as they were when the convolution ran."""
    model = stack(2)

    def fn(x):
        y = model(x)
        model[1].norm.running_mean.add_(1)
        return y

    rewriting, x = Rewriting(fn, "convolution"), image(4, 8, 9, 8)
    with torch.no_grad():
        for _ in range(2):
            mean = model[1].norm.running_mean.clone()
            got = rewriting(x)
            model[1].norm.running_mean.copy_(mean)
            torch.testing.assert_close(got, fn(x))
    assert lists(rewriting) == [4]
