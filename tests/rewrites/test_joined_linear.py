"""Linear layers that share an input as one product: their forms, gradients, and what stays."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.joined_linear import join
from tests.rewrites.on_a_cpu import compiled_by
from tests.rewrites.test_aligned_products import Packed, random

X = random(2, 5, 16)


class Attention(nn.Module):
    """Products of one input, which attention reads."""

    def __init__(self, *, bias=True, columns=(16, 8, 8), view="view"):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, each, bias) for each in columns).bfloat16()
        self.view = view

    def forward(self, x):
        """Return what each head has found."""
        sizes = (*x.shape[:-1], -1, 8)
        q, k, v = (getattr(layer(x), self.view)(*sizes).transpose(1, 2) for layer in self.layers)
        return F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))


def near(found, wanted):
    assert_close(found, wanted, atol=0.02 * float(wanted.detach().abs().max()), rtol=0.02)


@pytest.mark.parametrize("inductor", [False, True], ids=["eager", "Inductor"])
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
def test_products_of_one_input(bias, inductor):
    """Their results, and the gradients of the input and of each parameter, are near eager's."""
    model, x = Attention(bias=bias), X.clone().requires_grad_()
    compiled, counts = compiled_by(join, model, inductor=inductor)
    read = [x, *model.parameters()]
    found, wanted = compiled(x), model(x)
    near(found, wanted)
    for one, other in zip(torch.autograd.grad(found.sum(), read), torch.autograd.grad(wanted.sum(), read), strict=True):
        near(one, other)
    assert counts == [1]


def test_autocast():
    """Under autocast weights in float32 are rounded where they are joined."""
    model, x = Attention().float(), X.float()

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    compiled, counts = compiled_by(join, fn)
    near(compiled(x), fn(x))
    assert counts == [1]


def test_lengths_that_vary():
    """The number of rows may vary."""
    model = Attention()
    compiled, counts = compiled_by(join, model)
    for length in (3, 4, 6):
        near(compiled(random(2, length, 16)), model(random(2, length, 16)))
    assert counts == [1, 1]


def test_weights_that_change():
    """Each call reads the weights anew."""
    model = Attention()
    compiled, _ = compiled_by(join, model)
    with torch.no_grad():
        compiled(X)
        model.layers[1].weight.data.mul_(2)
        near(compiled(X), model(X))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_values_that_are_not_finite(at):
    """What is not finite in one weight reaches the results of its own layer alone."""
    model = Attention()
    with torch.no_grad():
        model.layers[at].weight[3, 2] = float("nan")
    fn = lambda x: [layer(x) * 1 for layer in model.layers]  # noqa: E731
    compiled, counts = compiled_by(join, fn)
    assert [each.isnan().any().item() for each in compiled(X)] == [each == at for each in range(3)]
    assert counts == [1]


def partly_recorded(x):
    """Return two products, one of which is no part of the gradients."""
    with torch.no_grad():
        first = F.linear(x, W) * 1
    return first + F.linear(x, V)


W, V = random(8, 16), random(8, 16)
WIDE, W_WIDE, V_WIDE = random(128, 1024), random(64, 1024), random(64, 1024)
NEAR = {
    "another input": lambda x: F.linear(x, W) * F.linear(x + 1, V),
    "an input that is written": lambda x: F.linear(x, W) * F.linear(x.add_(1), V),
    "in another mode": partly_recorded,
    "a bias of one": lambda x: F.linear(x, W, W[:, 0]) * F.linear(x, V),
    "a bias for all": lambda x: F.linear(x, W, W[0, :1]) * F.linear(x, V, V[0, :1]),
    "computed weights": lambda x: F.linear(x, W * 2) * F.linear(x, V * 2),
    "float32": lambda x: F.linear(x.float(), W.float()) * F.linear(x.float(), V.float()),
    "a vector": lambda x: F.linear(x, W[0]) * F.linear(x, V[0]),
    "much work": lambda x: F.linear(WIDE, V_WIDE) * F.linear(WIDE, W_WIDE),
}


SEEN = {
    "returned": lambda x: (F.linear(x, W), F.linear(x, V)),
    "its strides are read": lambda x: F.linear(x, W).reshape(-1) * F.linear(x, V).reshape(-1),
    "rows are put together": lambda x: F.linear(x, W).view(2, -1) * F.linear(x, V).view(2, -1),
    "rows of a view are put together": lambda x: (
        F.linear(x, W).view(2, 5, 2, 4).view(2, 10, 4) * F.linear(x, V).view(2, 5, 2, 4).view(2, 10, 4)
    ),
    "rows of a permuted view are put together": lambda x: (
        F.linear(y := x[:, :4], W).view(2, 4, 2, 4).permute(0, 3, 1, 2).view(2, 4, 8) * F.linear(y, V)
    ),
    "an operator, which may read strides": lambda x: (
        torch.ops.aten.view(F.linear(x, W), [-1]) * torch.ops.aten.view(F.linear(x, V), [-1])
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_results_whose_strides_are_seen_have_memory_of_their_own(name):
    """They are copied, so that they have eager's strides and share no memory."""
    compiled, counts = compiled_by(join, SEEN[name])
    found, wanted = compiled(X), SEEN[name](X)
    assert_close(found, wanted, atol=0.05, rtol=0.02)
    if isinstance(found, tuple):
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
        assert len({each.untyped_storage().data_ptr() for each in found}) == 2
    assert counts == [1]


def test_results_that_are_written_have_versions_of_their_own():
    """Of a result that the backward pass reads, autograd sees no write into another one."""

    def fn(x):
        first, second = F.linear(x, W), F.linear(x, V)
        return first.sin() * second.mul_(2)

    compiled, counts = compiled_by(join, fn)
    found, wanted = (torch.autograd.grad(each(x := X.clone().requires_grad_()).sum(), x)[0] for each in (compiled, fn))
    near(found, wanted)
    assert counts == [1]


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name):
    """Similar products stay as they are."""
    compiled, counts = compiled_by(join, NEAR[name])
    assert_close(compiled(X.clone()), NEAR[name](X.clone()))
    assert counts == [0]


def test_weights_of_sizes_that_vary_stay():
    """No graph has a part whose size is not known."""
    compiled, counts = compiled_by(join, lambda x, w, v: F.linear(x, w) * F.linear(x, v), dynamic=True)
    assert_close(compiled(X, W, V), F.linear(X, W) * F.linear(X, V))
    assert counts == [0]


def test_parameters_of_which_some_are_trained_stay():
    """No gradient is computed of one that needs none."""
    model = Attention(columns=(8, 8, 8))
    model.layers[0].requires_grad_(False)
    compiled, counts = compiled_by(join, model)
    compiled(X).sum().backward()
    assert model.layers[0].weight.grad is None
    assert counts == [1]


def test_weights_of_another_class_stay():
    """They need not have what would join them."""
    weights = [Packed(torch.randint(-9, 9, (8, 16), dtype=torch.int8)) for _ in range(2)]
    fn = lambda x: F.linear(x, weights[0]) * F.linear(x, weights[1])  # noqa: E731
    compiled, counts = compiled_by(join, fn)
    with torch.no_grad():
        assert_close(compiled(X), fn(X))
    assert counts == [0]
