"""Linear layers and convolutions with oneDNN's activations: what matches, what must not, and the results."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from backend_kwargs.rewrites.onednn import ACTIVATIONS
from backend_kwargs.rewrites.table import BUILT_IN
from tests.rewrites.lowering import Rewriting, matched

SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


class Activated(nn.Module):
    """A layer, a batch norm or none, and an activation."""

    def __init__(self, layer, activation, norm=None):
        super().__init__()
        self.layer, self.activation, self.norm = layer, activation, norm or nn.Identity()

    def forward(self, x):
        return self.activation(self.norm(self.layer(x)))


STRIDED = {
    "linear_relu": ("linear_activation", lambda x, b: F.relu(F.linear(x[:, :, 0, 0], W[:, :, 0, 0], b))),
    "linear_gelu": (
        "linear_activation",
        lambda x, b: F.gelu(F.linear(x[:, :, 0, 0], W[:, :, 0, 0], b), approximate="tanh"),
    ),
    "linear_onednn": ("onednn", lambda x, b: F.silu(F.linear(x[:, :, 0, 0], W[:, :, 0, 0], b))),
    "conv_relu": ("convolution", lambda x, b: F.relu(F.conv2d(x, W, b))),
    "conv_add_relu": ("convolution", lambda x, b: F.relu(F.conv2d(x, W, b) + x[:, :, 1:-1, 1:-1].contiguous())),
    "conv_onednn": ("onednn", lambda x, b: F.silu(F.conv2d(x, W, b))),
}
W = torch.randn(8, 8, 3, 3)


@pytest.mark.parametrize("bias", [torch.randn(8, 2)[:, 1], torch.ones(1).expand(8)], ids=["column", "expanded"])
@pytest.mark.parametrize("name", STRIDED)
@torch.no_grad()
def test_a_bias_that_is_not_dense(name, bias):
    """oneDNN ignores the stride of a bias, so a column of a matrix, or one value for all, is copied."""
    rewrite, fn = STRIDED[name]
    rewriting, x = Rewriting(fn, rewrite), torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(rewriting(x, bias), fn(x, bias), atol=1e-4, rtol=1e-4)
    assert rewriting.operators() == [name]


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    sizes=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    width=st.integers(2, 17),  # of one column Inductor makes no product
    inner=st.integers(1, 17),
    bias=st.booleans(),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 9),
)
def test_linear(dtype, name, sizes, width, inner, bias, scale, seed):
    """A linear layer with each activation, with a bias or without, agrees with float64."""
    torch.manual_seed(seed)
    model = Activated(nn.Linear(width, inner, bias=bias), ACTIVATIONS[name][0]).to(dtype).eval()
    x = (torch.randn(2, *sizes, width) * scale).to(dtype)
    assert matched(model, (x,), "onednn") == 1


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    channels=st.integers(1, 4),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    padding=st.integers(0, 2),
    bias=st.booleans(),
    norm=st.booleans(),
    last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_convolution(dtype, name, channels, groups, kernel, stride, dilation, padding, bias, norm, last, seed):
    """A convolution with each activation, whatever its geometry, agrees with float64; a norm between is folded."""
    torch.manual_seed(seed)
    width = channels * groups
    layer = nn.Conv2d(width, 2 * groups, kernel, stride, padding, dilation, groups, bias)
    between = nn.BatchNorm2d(2 * groups) if norm else None
    if between is not None:
        nn.init.uniform_(between.running_mean, -1, 1)
        nn.init.uniform_(between.running_var, 0.5, 2)
    model = Activated(layer, ACTIVATIONS[name][0], between).to(dtype).eval()
    x = torch.randn(2, width, 9, 8).to(dtype)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    assert matched(model, (x,), "onednn") == 1


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation(name):
    """Each of oneDNN's names stands for torch's function, from far below zero to far above."""
    model, x = Activated(nn.Linear(2, 2), ACTIVATIONS[name][0]).eval(), torch.linspace(-9, 9, 60).reshape(30, 2)
    with torch.no_grad():
        model.layer.weight.copy_(torch.eye(2))
    assert matched(model, (x,), "onednn") == 1


LINEAR, CONV = nn.Linear(6, 6), nn.Conv2d(3, 3, 1)
IMAGES = torch.randn(2, 3, 4, 4)
NEAR = {
    "ReLU": lambda x: F.relu(LINEAR(x)),
    "tanh-GELU": lambda x: F.gelu(LINEAR(x), approximate="tanh"),
    "another user": lambda x: (y := LINEAR(x)) * F.silu(y) + y,
    "the product is returned": lambda x: (y := LINEAR(x), F.silu(y)),
    "SiLU with a slope": lambda x: (y := LINEAR(x)) * torch.sigmoid(1.5 * y),
    "gated by another": lambda x: LINEAR(x) * torch.sigmoid(x),
    "ReLU up to 5": lambda x: F.hardtanh(LINEAR(x), 0.0, 5.0),
    "another dtype": lambda x: F.silu(LINEAR(x).double()),
    "no product": F.silu,
    "a convolution with another user": lambda x: (y := CONV(IMAGES)) + F.silu(y) * x.sum(),
    "a transposed convolution": lambda x: F.silu(F.conv_transpose2d(IMAGES * x[0, 0], CONV.weight)),
    "one dimension": lambda x: F.silu(F.conv1d(x[None], torch.ones(2, 6, 1))),
    "another user of a view": lambda x: (y := LINEAR(x.view(2, 3, 6)), F.silu(y)),
    "a scaled product": lambda x: F.silu(torch.addmm(LINEAR.bias, x, LINEAR.weight, alpha=2)),
    "a bias for each row": lambda x: F.silu(torch.addmm(x, x, LINEAR.weight)),
    "one image for all": lambda x: F.silu(CONV(IMAGES[:, :, :1, :1]) + IMAGES),
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """What is only alike stays as it is."""
    rewriting = Rewriting(fn, "onednn")
    x = torch.randn(6, 6)
    with torch.no_grad():
        got, want = rewriting(x), fn(x)
    assert rewriting.counts["onednn"] == 0
    torch.testing.assert_close(got, want)


class Sum(nn.Module):
    """A layer whose input is added in place, as in a residual branch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).add_(x)


IN_PLACE = {
    "ReLU, which other rewrites have": (Activated, F.relu_, 0),
    "ReLU as a module": (Activated, nn.ReLU(inplace=True), 0),
    "SiLU": (Activated, nn.SiLU(inplace=True), 1),
    "Hardswish": (Activated, nn.Hardswish(inplace=True), 1),
    "Hardsigmoid": (Activated, nn.Hardsigmoid(inplace=True), 1),
    "ReLU6": (Activated, nn.ReLU6(inplace=True), 1),
    "sigmoid": (Activated, torch.sigmoid_, 1),
    "tanh": (Activated, torch.tanh_, 1),
    "GELU after a sum in place": (lambda layer, act: Activated(Sum(layer), act), nn.GELU(), 0),
    "SiLU after a sum in place": (lambda layer, act: Activated(Sum(layer), act), nn.SiLU(inplace=True), 0),
}


@pytest.mark.parametrize("layer", [LINEAR, CONV], ids=["linear", "convolution"])
@pytest.mark.parametrize(("make", "activation", "count"), IN_PLACE.values(), ids=IN_PLACE)
def test_in_place(make, activation, count, layer):
    """Activations and sums that overwrite the layer's result give float64's results and leave the input as it was."""
    x = torch.randn(4, 6) if layer is LINEAR else IMAGES.clone()
    before = x.clone()
    assert matched(make(layer, activation).eval(), (x,), "onednn") == count
    assert torch.equal(x, before)


def test_half_stays():
    """oneDNN has no float16 on every CPU."""
    rewriting = Rewriting(Activated(nn.Linear(8, 8), F.silu).half(), "onednn")
    with torch.no_grad():
        rewriting(torch.randn(4, 8).half())
    assert rewriting.counts["onednn"] == 0


def test_training():
    """In training the backward pass needs the product, which stays with its gradients."""
    model, x = Activated(nn.Linear(8, 8), F.silu), torch.randn(4, 8, requires_grad=True)
    rewriting = Rewriting(model, "onednn")
    got, want = (torch.autograd.grad(fn(x).square().sum(), [x, *model.parameters()]) for fn in (rewriting, model))
    torch.testing.assert_close(got, want)
    assert rewriting.counts["onednn"] == 0


def test_beside_the_others():
    """With `linear_activation` and `convolution` each activation is fused once, by the rewrite that has it."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Flatten(), nn.Linear(64, 8),
                          nn.GELU(), nn.Linear(8, 8), nn.ReLU()).eval()  # fmt: skip
    rewriting = Rewriting(model, "onednn", "linear_activation", "convolution")
    with torch.no_grad():
        torch.testing.assert_close(rewriting(IMAGES), model(IMAGES), atol=1e-5, rtol=1e-5)
    assert rewriting.counts == {"onednn": 2, "linear_activation": 1, "convolution": 1}
    assert rewriting.operators() == ["conv_relu", "conv_onednn", "linear_onednn", "linear_relu"]


def test_auto_takes_it_on_a_cpu():
    """It is raced in inference on a CPU alone."""
    from types import SimpleNamespace

    def fits(**more):
        stats = {"gpu": False, "training": False, "gemms": 1, "convolutions": 0, "names": {"silu_"}, **more}
        return BUILT_IN["onednn"].fitting(SimpleNamespace(**stats))

    assert fits()
    assert fits(gemms=0, convolutions=2)
    assert not fits(gpu=True)
    assert not fits(training=True)
    assert not fits(gemms=0)
    assert not fits(names={"relu"})
