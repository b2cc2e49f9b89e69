"""Convolution, norm, residual and ReLU as one call: what matches, what must not match, and the results."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.rewrites.lowering import Rewriting, agrees, matched

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


class Block(nn.Module):
    """A convolution, an optional norm, an optional residual, and ReLU."""

    def __init__(self, *, norm="batch", residual="", inplace=False, affine=True, **conv):
        super().__init__()
        self.conv = nn.Conv2d(**conv)
        channels = conv["out_channels"]
        self.norm = nn.BatchNorm2d(channels, affine=affine) if norm == "batch" else nn.Identity()
        self.relu = nn.ReLU(inplace=inplace)
        self.residual = residual
        if norm == "batch":
            nn.init.uniform_(self.norm.running_mean, -1, 1)
            nn.init.uniform_(self.norm.running_var, 0.5, 2)
            if affine:
                nn.init.uniform_(self.norm.weight, 0.5, 1.5)
                nn.init.uniform_(self.norm.bias, -1, 1)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5) if norm == "scale" else None
        self.eval()

    def forward(self, x, z=None):
        y = self.norm(self.conv(x))
        if self.scale is not None:
            y = y * self.scale
        if self.residual == "right":
            y = y + z
        if self.residual == "left":
            y = z + y
        if self.residual == "inplace":
            y += z
        return self.relu(y)


def block(dtype=torch.float32, **options):
    given = {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "padding": 1, **options}
    return Block(**given).to(dtype)


def image(*sizes, dtype=torch.float32, last=True):
    return (
        torch.randn(*sizes).to(dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    )


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    norm=st.sampled_from(["batch", "", "scale"]),
    residual=st.sampled_from(["", "left", "right", "inplace"]),
    groups=st.sampled_from([1, 2]),
    kernel=st.sampled_from([1, 3, (1, 3)]),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    inplace=st.booleans(),
    affine=st.booleans(),
    last=st.booleans(),
    seed=st.integers(0, 9),
)
def test_computes_the_same(dtype, norm, residual, groups, kernel, stride, dilation, bias, inplace, affine, last, seed):
    """Every kind of convolution becomes one call, with float64's result up to rounding."""
    torch.manual_seed(seed)
    model = block(
        dtype, norm=norm, residual=residual, groups=groups, kernel_size=kernel, stride=stride, dilation=dilation,
        bias=bias, inplace=inplace, affine=affine,
    )  # fmt: skip
    x = image(4, 4, 9, 8, dtype=dtype, last=last)  # large enough that folding pays
    with torch.no_grad():
        z = torch.randn_like(model.conv(x))
    assert matched(model, (x, z) if residual else (x,), "convolution") == 1


@pytest.mark.parametrize("value", [0.0, float("inf"), float("-inf"), 1e-40], ids=str)
def test_values_at_the_edges(value):
    """Infinities, zero and a denormal give eager's results."""
    model = block(norm="")
    x = image(1, 4, 5, 5)
    x[0, 0, 2, 2] = value
    rewriting = Rewriting(model, "convolution")
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), model(x), equal_nan=True)
    assert rewriting.counts["convolution"] == 1


def test_nan():
    """Where eager gives nan, the library's ReLU gives nan or 0, as documented; all other values equal eager's."""
    model, x = block(norm=""), image(1, 4, 5, 5)
    x[0, 0, 2, 2] = float("nan")
    with torch.no_grad():
        got, want = Rewriting(model, "convolution")(x), model(x)
    lost = want.isnan() & (got == 0)
    torch.testing.assert_close(torch.where(lost, want, got), want, equal_nan=True)


def test_updated_weights_show():
    """A norm is folded at each call, so changes of weights and statistics take effect."""
    model, x = block(), image(2, 4, 6, 6)
    rewriting = Rewriting(model, "convolution")
    with torch.no_grad():
        rewriting(x)
        model.conv.weight.mul_(2)
        model.norm.running_mean.add_(1)
        agrees(rewriting(x), model, (x,))
    assert rewriting.counts["convolution"] == 1


def test_two_branches():
    """If both branches of a sum end in a norm, both are folded."""
    one, other = block(), block()
    x = image(2, 4, 6, 6)
    both = Rewriting(lambda x: F.relu(one.norm(one.conv(x)) + other.norm(other.conv(x))), "convolution")
    with torch.no_grad():
        got = both(x)
        want = F.relu(one.norm(one.conv(x)) + other.norm(other.conv(x)))
    torch.testing.assert_close(got, want)
    assert both.operators() == ["conv_add_relu"]
    (gm,) = both.graphs
    assert not [
        node
        for node in gm.graph.nodes
        if "relu.default" in str(node.target) and "backend_kwargs" not in str(node.target)
    ]


CONV = nn.Conv2d(4, 4, 3, padding=1).eval()
NORM = nn.BatchNorm2d(4).eval()
CHANNELS = torch.tensor([0.5, -1.0, 2.0, 1.0]).view(4, 1, 1)
NEAR = {
    "ReLU6": lambda x: F.relu6(CONV(x)),
    "leaky ReLU": lambda x: F.leaky_relu(CONV(x)),
    "another user of the convolution": lambda x: (F.relu(y := CONV(x)), y + 1)[0] + y,
    "another user of the sum": lambda x: (y := CONV(x) + x) * F.relu(y),
    "the sum is returned": lambda x: (y := CONV(x) + x, F.relu(y)),
    "broadcast residual": lambda x: F.relu(CONV(x) + x[:, :, :1, :1]),
    "residual for each position": lambda x: F.relu(CONV(x) + x[:1, :1]),
    "residual of another layout": lambda x: F.relu(CONV(x) + x.transpose(2, 3)),
    "scaled residual": lambda x: F.relu(torch.add(CONV(x), x, alpha=2)),
    "transposed convolution": lambda x: F.relu(F.conv_transpose2d(x, CONV.weight)),
    "one dimension": lambda x: F.relu(F.conv1d(x[:, :, 0], CONV.weight[:, :, 0])),
    "residual of another dtype": lambda x: F.relu(CONV(x) + x.bfloat16()),
    "integers for each channel": lambda x: F.relu(CONV(x) + torch.arange(4).view(4, 1, 1)),
    "a mask for each position": lambda x: F.relu(CONV(x) * x[:1, :1]),
    "a subtrahend": lambda x: F.relu(1 - CONV(x)),
    "norm in training mode": lambda x: F.relu(F.batch_norm(CONV(x), None, None, training=True)),
    "another dtype after": lambda x: F.relu(CONV(x).double()),
    "a convolution that is quantised": lambda x: F.relu(CONV(x).to(torch.float8_e4m3fn).float()),
    "a sum that is quantised": lambda x: F.relu((CONV(x) + x).to(torch.float8_e4m3fn).float()),
    "a convolution of one pixel for all": lambda x: F.relu(CONV(x[:, :, :1, :1]) + x),
    "one channel, scaled to many": lambda x: F.relu(F.conv2d(x, CONV.weight[:1], padding=1) * CHANNELS),
    "a shift with a factor": lambda x: F.relu(torch.add(CONV(x), CHANNELS, alpha=2)),
    "a subtrahend with a factor": lambda x: F.relu(torch.sub(CONV(x), CHANNELS, alpha=2)),
    "subtracted from each channel": lambda x: F.relu(CHANNELS - CONV(x)),
    "a conversion that is returned": lambda x: ((y := CONV(x).double()), F.relu((y * 2).float())),
    "a scaled convolution that is returned": lambda x: ((y := CONV(x) * CHANNELS), F.relu(y + x)),
    "float64": lambda x: F.relu(F.conv2d(x.double(), CONV.weight.double(), padding=1)),
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Similar graphs stay unchanged."""
    rewriting = Rewriting(fn, "convolution")
    x = image(2, 4, 6, 6)
    with torch.no_grad():
        got, want = rewriting(x), fn(x)
    assert rewriting.counts["convolution"] == 0
    torch.testing.assert_close(got, want)


def test_the_result_has_other_users():
    """The ReLU's result may have other users, also a view that is written to."""

    def fn(x):
        y = F.relu(CONV(x))
        z = y * 2
        y[:, 0].add_(1)
        return y, z

    rewriting = Rewriting(fn, "convolution")
    x = image(2, 4, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), fn(x))
    assert rewriting.counts["convolution"] == 1


def test_an_aliased_residual():
    """A residual that is the input itself, changed in place before, has its value of that time."""

    def fn(x):
        x = x.clone()
        y = CONV(x)
        x.mul_(2)
        return F.relu(y + x)

    rewriting = Rewriting(fn, "convolution")
    x = image(2, 4, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), fn(x))
    assert rewriting.counts["convolution"] == 1


@pytest.mark.parametrize("norm", ["", "batch"])
def test_training(norm):
    """In training the backward pass has what it needs, and gradients equal eager's."""
    model = block(norm=norm)
    x = image(2, 4, 6, 6).requires_grad_()
    rewriting = Rewriting(model, "convolution")
    rewriting(x).square().sum().backward()
    got = [x.grad, *(parameter.grad for parameter in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)  # sums in another order
    assert rewriting.counts["convolution"] == (1 if norm == "" else 0)


def test_dynamic_sizes():
    """A graph with symbolic sizes matches, and serves other sizes."""
    model = block(residual="right")
    rewriting = Rewriting(model, "convolution")
    with torch.no_grad():
        for side in (5, 7, 9):
            x, z = image(2, 4, side, side), image(2, 8, side, side)
            torch.testing.assert_close(rewriting(x, z), model(x, z))
    assert rewriting.counts["convolution"] == len(rewriting.graphs) == 2


FOLDING = {
    "weights smaller than the result": (block, 4, 1),
    "weights as large as the result": (lambda: block(in_channels=4, out_channels=4, kernel_size=3), 1, 0),
    "a bias alone": (lambda: block(norm="", out_channels=4), 1, 1),
}


@pytest.mark.parametrize(("make", "batch", "count"), FOLDING.values(), ids=FOLDING)
def test_folding_pays(make, batch, count):
    """A norm is folded only into weights that are smaller than the result, which the fused call saves to move."""
    assert matched(make(), (image(batch, 4, 6, 6),), "convolution") == count
