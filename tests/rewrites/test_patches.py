"""Convolutions of patches as one product: sizes, layouts, gradients, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.patches import multiply_patches
from tests.rewrites.on_a_cpu import compiled_by

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
X = torch.randn(2, 3, 12, 12).bfloat16()
W = torch.randn(8, 3, 4, 4).bfloat16()


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dims", CONVOLUTIONS)
def test_each_dimension(dims, last, bias, inductor):
    """Sequences, images and videos, some with numbers that fill no patch, have eager's result and strides."""
    size, image = (2, 4, 3)[:dims], (5, 9, 12)[:dims]
    conv = CONVOLUTIONS[dims](3, 8, size, stride=size, bias=bias).bfloat16()
    x = torch.randn(2, 3, *image).bfloat16()
    x = x.contiguous(memory_format=LAST[dims]) if last and dims > 1 else x
    fn, counts = compiled_by(multiply_patches, conv, inductor=inductor)
    with torch.no_grad():
        found, wanted = fn(x), conv(x)
    assert_close(found, wanted, atol=2e-2, rtol=2e-2)
    assert found.stride() == wanted.stride()
    assert counts == [1]


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 9),
    out=st.integers(1, 9),
    size=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    counts=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    rest=st.integers(0, 1),
    last=st.booleans(),
    dtype=st.sampled_from([*TOLERANCE]),
    seed=st.integers(0, 99),
)
def test_against_float64(batch, channels, out, size, counts, rest, last, dtype, seed):
    """The result and the gradients are within rounding of float64."""
    torch.manual_seed(seed)
    image = [count * each + rest for count, each in zip(counts, size, strict=True)]
    x, w = torch.randn(batch, channels, *image).to(dtype), torch.randn(out, channels, *size).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    args = [each.requires_grad_() for each in (x, w, torch.randn(out).to(dtype))]
    wide = [each.detach().double().requires_grad_() for each in args]
    fn, found = compiled_by(multiply_patches, lambda x, w, b: torch.conv2d(x, w, b, size))
    got, exact = fn(*args), torch.conv2d(*wide, size)
    near = {"atol": TOLERANCE[dtype] * 20, "rtol": TOLERANCE[dtype]}
    assert_close(got.double(), exact, **near)
    grad = torch.randn_like(exact).to(dtype)
    for one, other in zip(
        torch.autograd.grad(got, args, grad), torch.autograd.grad(exact, wide, grad.double()), strict=True
    ):
        assert_close(one.double(), other, **near)
    assert found == [1]


FORMS = {
    "positional": lambda x, w: torch.conv2d(x, w, None, 4, 0, 1, 1),
    "functional": lambda x, w: F.conv2d(x, w, stride=(4, 4)),
    "by keywords": lambda x, w: F.conv2d(weight=w, input=x, stride=[4, 4], padding=(0, 0), dilation=1, groups=1),
    "valid": lambda x, w: F.conv2d(x, w, stride=4, padding="valid"),
    "flattened": lambda x, w: F.conv2d(x, w, stride=4).flatten(2).transpose(1, 2),
    "viewed": lambda x, w: F.conv2d(x, w, stride=4).view(2, 8, 9),
    "written": lambda x, w: F.conv2d(x, w, stride=4).mul_(2).relu_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """Each spelling of the call, with what may follow it."""
    fn, counts = compiled_by(multiply_patches, FORMS[form], inductor=True)
    assert_close(fn(X, W), FORMS[form](X, W), atol=5e-2, rtol=2e-2)
    assert counts == [1]


def test_rows_of_aligned_length():
    """A patch whose numbers are no multiple of eight gets zeros, so that the product's rows are aligned."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(multiply_patches(gm, inputs).gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(lambda x, w: F.conv2d(x, w, stride=3), backend=backend)(X, W[..., :3, :3].contiguous())
    pads = [node.args[1] for node in graphs[0].nodes if node.target is F.pad]
    assert pads == [(0, 5), (0, 5)]


def test_batches_that_vary():
    """The batch may vary."""
    fn, counts = compiled_by(multiply_patches, FORMS["flattened"], inductor=True)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, 12, 12).bfloat16()
        assert_close(fn(x, W), FORMS["flattened"](x, W), atol=5e-2, rtol=2e-2)
    assert counts == [1, 1]


def test_images_that_vary_stay():
    """Images whose sizes vary have no fixed number of patches, so that the graph for all of them stays."""
    fn, counts = compiled_by(multiply_patches, FORMS["functional"])
    for side in (12, 16, 20):
        x = torch.randn(2, 3, side, side).bfloat16()
        assert_close(fn(x, W), FORMS["functional"](x, W), atol=5e-2, rtol=2e-2)
    assert counts == [1, 0]


def test_autocast():
    """Under autocast float32 images and weights give a product in half precision, as the convolution does."""

    def fn(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(x, w, stride=4)

    found, counts = compiled_by(multiply_patches, fn, inductor=True)
    got = found(X.float(), W.float())
    assert_close(got, fn(X.float(), W.float()), atol=5e-2, rtol=2e-2)
    assert counts == [1]


# What must not match.
NEAR = {
    "overlap": (lambda x, w: F.conv2d(x, w, stride=2), X, W),
    "gaps": (lambda x, w: F.conv2d(x, w, stride=5), X, W),
    "another stride in one dimension": (lambda x, w: F.conv2d(x, w, stride=(4, 2)), X, W),
    "padding": (lambda x, w: F.conv2d(x, w, stride=4, padding=2), X, W),
    "padding in one dimension": (lambda x, w: F.conv2d(x, w, stride=4, padding=(0, 1)), X, W),
    "dilation": (lambda x, w: F.conv2d(x, w, stride=4, dilation=2), X, W),
    "groups": (lambda x, w: F.conv2d(x, w, stride=4, groups=3), X, torch.randn(9, 1, 4, 4).bfloat16()),
    "single pixels": (F.conv2d, X, W[..., :1, :1].contiguous()),
    "float32": (lambda x, w: F.conv2d(x, w, stride=4), X.float(), W.float()),
    "float64": (lambda x, w: F.conv2d(x, w, stride=4), X.double(), W.double()),
    "one image without a batch": (lambda x, w: F.conv2d(x[0], w, stride=4), X, W),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w[:3, :], stride=4), X, W),
    "dilation in one dimension": (lambda x, w: F.conv2d(x, w, stride=4, dilation=(1, 2)), X, W),
    "a result in float32": (lambda x, w: F.conv2d(x.float(), w.float(), stride=4).bfloat16(), X, W),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name):
    """Other convolutions stay as they are."""
    call, x, w = NEAR[name]
    fn, counts = compiled_by(multiply_patches, call)
    assert_close(fn(x, w), call(x, w))
    assert counts == [0]
