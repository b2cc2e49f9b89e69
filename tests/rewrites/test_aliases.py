"""Lowered graphs with in-place operations and aliases, and parameters that change between calls."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import backend_kwargs
from backend_kwargs.rewrites.table import find_rewrite
from tests.rewrites.lowering import Changed, Rewriting

LAST = torch.channels_last
torch.manual_seed(0)
LINEAR, CONV = nn.Linear(6, 6), nn.Conv2d(6, 6, 3, padding=1).eval()
TARGET = torch.tensor([1, 2, 3, 0])
ROWS, IMAGES = torch.randn(4, 6), torch.randn(2, 6, 4, 4)


def aliases(values):
    """Return for each tensor the number of the first one that shares its memory."""
    at = [value.untyped_storage().data_ptr() for value in values]
    return [at.index(each) for each in at]


def check(fn, name, x):
    """Compare results, the argument afterwards and what aliases what with eager's; return the number of matches."""
    rewriting, theirs, ours = Rewriting(fn, name), x.clone(), x.clone()
    with torch.no_grad():
        got, want = rewriting(ours), fn(theirs)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)
    got, want = ([each] if isinstance(each, torch.Tensor) else [*each] for each in (got, want))
    assert aliases([*got, ours]) == aliases([*want, theirs])
    assert len(rewriting.graphs) == 1
    return rewriting.counts[name]


# ---- parameters


class WithBias(nn.Module):
    """Written-out attention with a bias that is a parameter."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 5, 7))

    def forward(self, q, k, v):
        return ((q @ k.transpose(-2, -1)) * 0.3 + self.bias).softmax(-1) @ v


class WithLoss(nn.Module):
    """A linear layer and its mean cross-entropy."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x):
        return F.cross_entropy(self.head(x), TARGET)


def grouped():
    return nn.Conv2d(12, 12, 3, groups=3).bfloat16().to(memory_format=LAST).eval()


def image():
    return torch.randn(2, 12, 6, 6).bfloat16().contiguous(memory_format=LAST)


def heads():
    return torch.randn(2, 3, 5, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16)


MODELS = {
    "linear_activation": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), lambda: (torch.randn(4, 6),)),
    "onednn": (lambda: nn.Sequential(nn.Linear(6, 6), nn.SiLU()), lambda: (torch.randn(4, 6),)),
    "onednn, a convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.SiLU()).eval(),
        lambda: (torch.randn(2, 3, 9, 9),),
    ),
    "grouped_convolution": (grouped, lambda: (image(),)),
    "stem_convolution": (
        lambda: nn.Conv2d(3, 6, 3, bias=False).bfloat16().to(memory_format=LAST).eval(),
        lambda: (torch.randn(2, 3, 9, 9).bfloat16().contiguous(memory_format=LAST),),
    ),
    "attention": (WithBias, heads),
    "cross_entropy": (WithLoss, lambda: (torch.randn(4, 6),)),
    "linear_cross_entropy": (WithLoss, lambda: (torch.randn(4, 6),)),
}


def rewriting_of(model, name):
    return (Changed if find_rewrite(name).traced else Rewriting)(model, name)


@pytest.mark.parametrize(("case", "make"), MODELS.items(), ids=MODELS)
def test_parameters_that_change_between_calls(case, make):
    """A compiled module computes with its parameters' values at each call, without another compile."""
    torch.manual_seed(0)
    name, model, args = case.partition(",")[0], make[0](), make[1]()
    rewriting = rewriting_of(model, name)
    with torch.no_grad():
        first = rewriting(*args)
        for parameter in model.parameters():
            parameter.mul_(-2).add_(0.5)
        got, want = rewriting(*args), model(*args)
    torch.testing.assert_close(got, want)
    assert not torch.allclose(first, want, atol=0.1)
    assert (rewriting.counts[name], len(rewriting.graphs)) == (1, 1)


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_steps_of_an_optimizer(name):
    """Losses and gradients of training follow the optimizer's updates in place as eager's do."""
    torch.manual_seed(0)
    model, x = WithLoss(), torch.randn(4, 6)

    def trained(make):
        model.head.load_state_dict(start)
        call, optimizer, losses = make(model), torch.optim.SGD(model.parameters(), 0.5), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(call(x))
            losses[-1].backward()
            optimizer.step()
        return torch.stack(losses).detach(), model.head.weight.detach().clone()

    start = {key: value.clone() for key, value in model.head.state_dict().items()}
    rewriting = rewriting_of(model, name)
    torch.testing.assert_close(trained(lambda _: rewriting), trained(lambda model: model))
    assert rewriting.counts[name] == 1


# ---- aliases

LAYERS = {"linear_activation": (F.relu, F.relu_), "onednn": (F.silu, lambda y: F.silu(y, inplace=True))}


def in_place_and_view(x, act, act_):
    y = LINEAR(x)
    view = y.view(-1)
    return view, act_(y)


def in_place_and_itself(x, act, act_):
    y = LINEAR(x)
    return y, act_(y)


def view_is_returned(x, act, act_):
    y = LINEAR(x)
    return y.view(-1), act(y)


def detached_is_returned(x, act, act_):
    y = LINEAR(x)
    return y.detach(), act(y)


def view_changes_before(x, act, act_):
    y = LINEAR(x)
    y[0].add_(1)
    return act(y)


def view_changes_later(x, act, act_):
    y = LINEAR(x)
    made = act(y)
    y[0].add_(1)
    return made


def view_changes_later_and_is_returned(x, act, act_):
    y = LINEAR(x)
    made = act(y)
    y[0].add_(1)
    return made, y


def result_changes_later(x, act, act_):
    made = act(LINEAR(x))
    made[0].add_(1)
    return made


def input_changes_between(x, act, act_):
    y = LINEAR(x)
    x.add_(1)
    return act(y)


def weight_changes_between(x, act, act_):
    weight, bias = LINEAR.weight * 2, LINEAR.bias * 2
    y = F.linear(x, weight, bias)
    weight.add_(1)
    bias.add_(1)
    return act(y), weight, bias


def result_is_the_input(x, act, act_):
    x.copy_(act(LINEAR(x)))
    return x


BESIDE_A_LAYER = {
    "in place, and a view is returned": (in_place_and_view, 1),
    "in place, and both are returned": (in_place_and_itself, 1),
    "a view of the product is returned": (view_is_returned, 0),
    "the product is returned, detached": (detached_is_returned, 0),
    "a view of the product changes before": (view_changes_before, 0),
    "a view of the product changes later": (view_changes_later, 1),
    "a view of the product changes later, and it is returned": (view_changes_later_and_is_returned, 0),
    "a view of the result changes later": (result_changes_later, 1),
    "the input changes between": (input_changes_between, 1),
    "weight and bias change between": (weight_changes_between, 1),
    "the result is written into the input": (result_is_the_input, 1),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("fn", "count"), BESIDE_A_LAYER.values(), ids=BESIDE_A_LAYER)
def test_aliases_beside_a_layer(fn, count, name):
    """A linear layer's product is fused only if nothing else sees it, and whatever changes, changes as in eager."""
    act, act_ = LAYERS[name]
    assert check(lambda x: fn(x, act, act_), name, ROWS) == count


def residual_is_the_convolution(x):
    y = CONV(x)
    return F.relu(y + y)


def residual_is_its_view(x):
    y = CONV(x)
    return F.relu(y + y.flatten().view_as(y))


def residual_is_the_argument(x):
    return x.add_(CONV(x)).relu_()


def residual_is_changed_and_returned(x):
    z = x * 2
    return z.add_(CONV(x)).relu_(), z


def result_is_written_into_the_residual(x):
    z = x * 2
    made = F.relu(CONV(x) + z)
    z.copy_(made)
    return made, z


def convolution_is_returned(x):
    y = CONV(x)
    return y, F.relu(y + x)


def view_of_the_convolution_changes_before(x):
    y = CONV(x)
    y[0].mul_(2)
    return F.relu(y + x)


def view_of_the_convolution_changes_later(x):
    y = CONV(x)
    made = F.relu(y + x)
    y[0].mul_(2)
    return made


BESIDE_A_CONVOLUTION = {
    "the residual is the convolution": (residual_is_the_convolution, 0),
    "the residual is a view of the convolution": (residual_is_its_view, 0),
    "the residual is the argument, which becomes the result": (residual_is_the_argument, 1),
    "the residual becomes the result": (residual_is_changed_and_returned, 1),
    "the result is written into the residual": (result_is_written_into_the_residual, 1),
    "the convolution is returned": (convolution_is_returned, 0),
    "a view of the convolution changes before": (view_of_the_convolution_changes_before, 0),
    "a view of the convolution changes later": (view_of_the_convolution_changes_later, 1),
}


@pytest.mark.parametrize(("fn", "count"), BESIDE_A_CONVOLUTION.values(), ids=BESIDE_A_CONVOLUTION)
def test_aliases_beside_a_convolution(fn, count):
    """A convolution is fused with a residual only if nothing else, the residual included, sees the convolution."""
    assert check(fn, "convolution", IMAGES) == count


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_residual_that_becomes_the_result_in_inductor():
    """Inductor's buffers keep the residual until the fused call has read it, though the result overwrites it."""
    made = torch.compile(
        residual_is_the_argument, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=("convolution",))
    )
    ours, theirs = IMAGES.clone(), IMAGES.clone()
    with torch.no_grad():
        assert made(ours) is ours
        residual_is_the_argument(theirs)
    torch.testing.assert_close(ours, theirs)
    assert backend_kwargs.report(made).graphs[0].rewritten == {"convolution": 1}
