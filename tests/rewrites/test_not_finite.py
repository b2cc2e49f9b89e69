"""Nan and infinities in the inputs of rewrites."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from backend_kwargs.rewrites.onednn import ACTIVATIONS
from backend_kwargs.rewrites.table import find_rewrite
from tests.rewrites.lowering import Changed, Rewriting

NAN, INF = float("nan"), float("inf")
TARGET = torch.tensor([1, 2, -100, 4])
FACTORS = torch.linspace(-1, 1, 24).reshape(4, 6)  # of the results, so that gradients differ from each other


def activated(activation, by=F.linear):
    return lambda x, w, b: activation(by(x, w, b))


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def normed(x, weight, bias):
    return F.layer_norm(x, (6,), weight, bias) * FACTORS


LINEAR, CONV = ((4, 3), (5, 3), (5,)), ((2, 3, 6, 6), (4, 3, 3, 3), (4,))
# The rewrite, the function, the shapes of its arguments, and how many of them have gradients.
CASES = {
    "ReLU": ("linear_activation", activated(F.relu), LINEAR, 0),
    "tanh-GELU": ("linear_activation", activated(tanh_gelu), LINEAR, 0),
    **{name: ("onednn", activated(function), LINEAR, 0) for name, (function, *_) in ACTIVATIONS.items()},
    **{
        f"convolution and {name}": ("onednn", activated(ACTIVATIONS[name][0], F.conv2d), CONV, 0)
        for name in ("swish", "hardsigmoid", "hardtanh")
    },
    "cross-entropy": ("cross_entropy", lambda x: F.cross_entropy(x, TARGET), ((4, 5),), 1),
    "linear and cross-entropy": (
        "linear_cross_entropy", lambda x, w: F.cross_entropy(F.linear(x, w), TARGET), ((4, 3), (5, 3)), 2,
    ),
    "layer norm": ("layer_norm_backward", normed, ((4, 6), (6,), (6,)), 3),
    "a column": ("matrix_vector", torch.matmul, ((3, 4, 5), (3, 5, 1)), 2),
    "a broadcast product": ("contraction", lambda a, b: (a[:, None] * b).sum(-1), ((8, 5), (9, 5)), 2),
    "a row": ("matrix_vector", torch.matmul, ((3, 1, 5), (3, 5, 4)), 2),
}  # fmt: skip
LOSE_NAN = [name for name in CASES if name.endswith(("ReLU", "hardsigmoid", "hardtanh"))]
LEFT = {
    *((name, at, "nan") for name in LOSE_NAN for at in range(3)),
    # Eager's exact GELU makes nan of inf, but not of a few elements.
    *(("gelu", at, "inf") for at in range(3)),
    # Eager's gradient of x is nan in a row where Inductor's, with the rewrite and without it, is inf in some places.
    ("layer norm", 1, "inf"),
    ("layer norm", 1, "-inf"),
}
PLACES = [
    (name, at, value) for name, (_, _, shapes, _) in CASES.items() for at in range(len(shapes))
    for value in ("nan", "inf", "-inf") if (name, at, value) not in LEFT
]  # fmt: skip


def results(fn, args, trained):
    """Return the result of `fn`, and the gradients of its first `trained` arguments."""
    given = [arg.clone().requires_grad_(at < trained) for at, arg in enumerate(args)]
    with torch.set_grad_enabled(trained > 0):
        made = fn(*given)
    return [made.detach(), *(torch.autograd.grad(made, given[:trained], torch.ones_like(made)) if trained else ())]


def of_both(name, at, value):
    """Return what the rewritten function gives, and what eager does, if one value of an argument is `value`."""
    torch.manual_seed(0)
    rewrite, fn, shapes, trained = CASES[name]
    args = [torch.randn(shape) for shape in shapes]
    args[at].view(-1)[math.prod(shapes[at]) // 5] = float(value)
    rewriting = (Changed if find_rewrite(rewrite).traced else Rewriting)(fn, rewrite)
    got, want = results(rewriting, args, trained), results(fn, args, trained)
    assert rewriting.counts[rewrite] == 1
    return got, want


@pytest.mark.parametrize(("name", "at", "value"), PLACES, ids=str)
def test_come_out_as_in_eager(name, at, value):
    """Nan or an infinity in one place of an argument gives eager's results and gradients."""
    got, want = of_both(name, at, value)
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LOSE_NAN)
def test_nan_may_be_lost(name):
    """Where eager gives nan, a library's ReLU, ReLU6 and Hardsigmoid give nan or a number, as documented."""
    (got,), (want,) = of_both(name, 0, "nan")
    assert want.isnan().any()
    torch.testing.assert_close(torch.where(want.isnan(), want, got), want, equal_nan=True, rtol=1e-4, atol=1e-5)
