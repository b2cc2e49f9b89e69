"""Transposed convolutions that do not overlap as products: results, gradients, layouts, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from backend_kwargs.rewrites.transposed_convolution import multiply_pixels
from tests.rewrites.on_a_cpu import compiled_by

X, W, B = torch.randn(2, 6, 4, 5), torch.randn(6, 3, 2, 2), torch.randn(3)


def layout(result):
    return [stride for stride, size in zip(result.stride(), result.shape, strict=True) if size > 1]


@settings(max_examples=60, deadline=None)
@given(
    dims=st.integers(1, 3),
    kernel=st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3)),
    image=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    batch=st.integers(1, 2),
    channels=st.integers(1, 5),
    out=st.integers(1, 5),
    last=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_no_less_exact_than_eager(dims, kernel, image, batch, channels, out, last, bias, dtype, seed):
    """The result, in eager's layout, and the gradients are as near to float64 as eager's."""
    torch.manual_seed(seed)
    x, w = torch.randn(batch, channels, *image[:dims]), torch.randn(channels, out, *kernel[:dims])
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    args = [each.to(dtype).requires_grad_() for each in (x, w, *([torch.randn(out)] if bias else []))]
    wide = [each.detach().double().requires_grad_() for each in args]

    def call(x, w, b=None):
        return getattr(F, f"conv_transpose{dims}d")(x, w, b, stride=kernel[:dims])

    fn, counts = compiled_by(multiply_pixels, call)
    found, eager, exact = fn(*args), call(*args), call(*wide)
    assert (layout(found), counts) == (layout(eager), [1])
    grad = torch.randn_like(exact).to(dtype)
    made = [
        (result, *torch.autograd.grad(result, given, grad.to(result.dtype)))
        for result, given in ((found, args), (eager, args), (exact, wide))
    ]
    for one, plain, right in zip(*made, strict=True):
        error, own = ((each.double() - right).abs().max() for each in (one, plain))
        assert error <= 1.1 * own + 4 * torch.finfo(dtype).eps * right.abs().max().clamp(min=1)


FORMS = {
    "positional": lambda x, w, b: torch.conv_transpose2d(x, w, b, 2, 0, 0, 1, 1),
    "by keywords": lambda x, w, b: F.conv_transpose2d(weight=w, input=x, stride=[2], padding=(0, 0), dilation=1),
    "written": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2).mul_(2).relu_(),
    "viewed": lambda x, w, b: F.conv_transpose2d(x, w, stride=2).view(2, 3, 80),
    "channels last": lambda x, w, b: F.conv_transpose2d(x.to(memory_format=torch.channels_last), w, b, stride=2),
    "a row": lambda x, w, b: F.conv_transpose2d(x, w[..., :1, :], b, stride=(1, 2)),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """Each spelling of the call, with what may follow it, in Inductor."""
    fn, counts = compiled_by(multiply_pixels, FORMS[form], inductor=True)
    found, wanted = fn(X, W, B), FORMS[form](X, W, B)
    assert_close(found, wanted)
    assert (found.stride(), counts) == (wanted.stride(), [1])


def test_sizes_that_vary():
    """One graph serves other batches and sizes."""
    fn, counts = compiled_by(multiply_pixels, FORMS["written"], inductor=True)
    for batch, side in ((2, 4), (3, 7), (5, 2)):
        x = torch.randn(batch, 6, side, side + 1)
        torch._dynamo.mark_dynamic(x, (0, 2, 3))
        assert_close(fn(x, W, B), FORMS["written"](x, W, B))
    assert counts == [1]


def test_autocast():
    """Under autocast the result has the dtype of the convolution."""

    def call(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv_transpose2d(x, w, b, stride=2)

    fn, counts = compiled_by(multiply_pixels, call)
    found, wanted = fn(X, W, B), call(X, W, B)
    assert_close(found, wanted, atol=5e-2, rtol=2e-2)
    assert (found.dtype, counts) == (torch.bfloat16, [1])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("at", range(3), ids=["input", "weight", "bias"])
def test_values_that_are_not_finite(at, value):
    """They spread as in eager."""
    args = [X.clone(), W.clone(), B.clone()]
    args[at].view(-1)[2] = float(value)
    fn, counts = compiled_by(multiply_pixels, FORMS["positional"])
    assert_close(fn(*args), FORMS["positional"](*args), equal_nan=True)
    assert counts == [1]


# What must not match.
NEAR_MISSES = {
    "overlap": F.conv_transpose2d,
    "overlap in one dimension": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(2, 1)),
    "gaps": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=3),
    "padding": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=(0, 1)),
    "output padding": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
    "dilation": lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, dilation=(1, 2)),
    "groups": lambda x, w, b: F.conv_transpose2d(x, w, stride=2, groups=2),
    "single pixels": lambda x, w, b: F.conv_transpose2d(x, w[..., :1, :1], b),
    "without a batch": lambda x, w, b: F.conv_transpose2d(x[0], w, b, stride=2),
    "float64": lambda x, w, b: F.conv_transpose2d(x.double(), w.double(), stride=2),
    "not transposed": lambda x, w, b: F.conv2d(x, w.transpose(0, 1), b, stride=2),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """Other convolutions stay as they are."""
    fn, counts = compiled_by(multiply_pixels, NEAR_MISSES[name])
    assert_close(fn(X, W, B), NEAR_MISSES[name](X, W, B))
    assert counts == [0]


def test_a_row_of_pixels_has_eagers_strides():
    """Where all that is joined is a view, the result is still one in channels last."""
    x, w = torch.randn(2, 1, 5, 6).movedim(-1, 1), torch.randn(6, 3, 2, 1)

    def fn(x, w):
        return F.conv_transpose2d(x, w, stride=(2, 1))

    compiled, counts = compiled_by(multiply_pixels, fn)
    found, wanted = compiled(x, w), fn(x, w)
    assert_close(found, wanted)
    assert (found.stride(), counts) == (wanted.stride(), [1])
