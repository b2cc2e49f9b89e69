"""Gradients that are zero in exact arithmetic, and rounding noise in eager: noise passes, and nothing else does."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from backend_kwargs.trial import Roundings, check_all


# SiLU, not ReLU: where an input of ReLU is zero but for rounding, code that sums in another order finds it on the other
# side, and its gradients differ by a whole element, which is as much as wrong code may do.
def images(norm):
    """Return a convolution with a bias that the norm behind it takes away, and images."""
    layers = (nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16, 10)), torch.randn(8, 3, 32, 32)


def rows(layer):
    return nn.Sequential(layer, nn.BatchNorm1d(64), nn.SiLU(), nn.Linear(64, 8)), torch.randn(512, 32)


class Attention(nn.Module):
    """Attention, whose softmax takes the bias of the keys away."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return torch.softmax(self.q(x) @ self.k(x).mT / 6, -1) @ self.v(x)


MODELS = {
    "batch norm": (lambda: images(nn.BatchNorm2d), ["0.bias"]),
    "group norm": (lambda: images(lambda n: nn.GroupNorm(n, n)), ["0.bias"]),
    "instance norm": (lambda: images(lambda n: nn.InstanceNorm2d(n, affine=True)), ["0.bias"]),
    "layer norm": (
        lambda: (nn.Sequential(nn.Linear(8, 1), nn.LayerNorm(1), nn.Linear(1, 4)), torch.randn(64, 8)),
        ["0.weight", "0.bias", "1.weight"],
    ),
    "weight norm": (lambda: rows(nn.utils.parametrizations.weight_norm(nn.Linear(32, 64))), ["0.bias"]),
    "attention": (lambda: (Attention(), torch.randn(4, 50, 32)), ["k.bias"]),
}
models = pytest.mark.parametrize("name", MODELS)


def step(fn, model, x):
    """Return the gradients of a step."""
    model.zero_grad()
    fn(x).square().mean().backward()
    return {"gradient": {name: parameter.grad.clone() for name, parameter in model.named_parameters()}}


@cache
def made(name):
    """Return a model with its input, eager's gradients, those in float64, and the names of those that are zero."""
    torch.manual_seed(0)
    make, zero = MODELS[name]
    model, x = make()
    wide = copy.deepcopy(model).double()
    return model, x, step(model, model, x), step(wide, wide, x.double()), zero


@models
def test_compiled_gradients_pass(name, fresh_dynamo):
    """Inductor's gradients pass, though it sums in another order than eager does.

    So they do where nothing can be computed in float64, by runs of eager that round otherwise.
    """
    model, x, eager, precise, zero = made(name)
    compiled = step(torch.compile(model), model, x)
    roundings = Roundings(lambda: step(model, model, x), eager)
    for found in (
        check_all(compiled, eager, precise, training=True),
        check_all(compiled, eager, training=True, roundings=roundings),
    ):
        assert (found.status, found.reason) == ("pass", "")
    assert all(precise["gradient"][each].abs().max() < 1e-12 for each in zero)


@models
@pytest.mark.parametrize("referenced", [pytest.param(True, id="reference"), pytest.param(False, id="no reference")])
@pytest.mark.parametrize("share", [1.0, 0.01])
def test_a_wrong_gradient_fails(name, referenced, share):
    """A gradient that should be zero, and has the size of the others or a hundredth, fails."""
    model, x, eager, precise, zero = made(name)
    largest = max(float(each.square().mean().sqrt()) for each in eager["gradient"].values())
    roundings = Roundings(lambda: step(model, model, x), eager)
    for each in zero:
        wrong = {"gradient": eager["gradient"] | {each: torch.full_like(eager["gradient"][each], share * largest)}}
        found = check_all(wrong, eager, precise if referenced else None, training=True, roundings=roundings)
        assert found.status == "fail_accuracy"
        assert found.reason.startswith(f"gradient['{each}']")


@pytest.mark.parametrize("scale", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.5])
def test_a_small_gradient_that_is_real_must_be_right(scale, factor):
    """The gradient of a bias with a small effect is no noise, however small it is beside the others."""
    torch.manual_seed(0)

    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.faint = nn.Linear(16, 64), nn.Parameter(torch.randn(64))

        def forward(self, x):
            return self.large(x) + scale * self.faint

    model, x = Faint(), torch.randn(32, 16)
    eager = step(model, model, x)
    wide = copy.deepcopy(model).double()
    precise = step(wide, wide, x.double())
    wrong = {"gradient": eager["gradient"] | {"faint": factor * eager["gradient"]["faint"]}}
    roundings = Roundings(lambda: step(model, model, x), eager)
    found = check_all(wrong, eager, precise, training=True, roundings=roundings)
    assert found.status == "fail_accuracy"
    assert found.reason.startswith("gradient['faint']")


# ---- eager's own noise may be tiny


class Scaled(nn.Module):
    """A scale, which the norm behind it takes away but for its eps."""

    def __init__(self, *norm):
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(())), nn.Sequential(*norm, nn.Linear(32, 4))

    def forward(self, x):
        return self.norm(x * self.scale)


class OnlyBias(nn.Module):
    """A bias before a norm, with nothing else to train."""

    def __init__(self):
        super().__init__()
        self.bias, self.norm = nn.Parameter(torch.randn(32)), nn.BatchNorm1d(32, affine=False)

    def forward(self, x):
        return self.norm(x + self.bias).sin()


class Statistics(nn.Module):
    """Running statistics of what has a mean of zero, but for its rounding."""

    def __init__(self):
        super().__init__()
        self.then = nn.BatchNorm1d(32, affine=False)
        self.last = nn.InstanceNorm1d(32, track_running_stats=True, affine=True)

    def forward(self, x):
        return self.last(self.then(2 * x)[..., None].expand(-1, -1, 6) * torch.arange(-5.0, 7, 2).to(x))


INVARIANT = {
    **{name: make for name, (make, _) in MODELS.items()},
    "scale, layer norm": lambda: (Scaled(nn.LayerNorm(32)), torch.randn(256, 32)),
    "scale, batch norm": lambda: (Scaled(nn.BatchNorm1d(32)), torch.randn(256, 32)),
    "scale, RMS norm": lambda: (Scaled(nn.RMSNorm(32)), torch.randn(256, 32)),
    "only a bias": lambda: (OnlyBias(), torch.randn(512, 32)),
    "running statistics": lambda: (Statistics(), functional.batch_norm(torch.randn(64, 32), None, None, training=True)),
}


def whole_step(model, x):
    """Return the gradients of a step and the buffers that it writes, on a copy of the model."""
    model = copy.deepcopy(model)
    seen = step(model, model, x)
    return seen | {"written": {name: each for name, each in model.named_buffers() if each.is_floating_point()}}


@pytest.mark.parametrize("name", INVARIANT)
def test_noise_passes_where_eager_has_hardly_any(name):
    """If eager happens to be as precise as float64 rounded, another order of summation has a usual amount of noise."""
    torch.manual_seed(0)
    model, x = INVARIANT[name]()
    model.train()
    precise = whole_step(copy.deepcopy(model).double(), x.double())
    lucky = {what: {each: value.float() for each, value in values.items()} for what, values in precise.items()}
    roundings = Roundings(lambda: whole_step(model, x), whole_step(model, x))
    found = check_all(whole_step(model, x.flip(0)), lucky, precise, training=True, roundings=roundings)
    assert (found.status, found.reason) == ("pass", "")
