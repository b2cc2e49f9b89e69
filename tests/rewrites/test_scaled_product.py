"""Products of tensors that are scaled for each sample, by scaled weights: results, gradients, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.testing import assert_close

from backend_kwargs.rewrites.scaled_product import scale_weights
from tests.rewrites.on_a_cpu import compiled_by


def random(*sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).bfloat16()


X, W, B, C = random(2, 5, 6, 16), random(7, 16), random(7), random(16)


def normed(x):
    of_all = x.norm(p=2, dim=(1, 2), keepdim=True)
    return of_all / (of_all.mean(dim=-1, keepdim=True) + 1e-6)


def gate_of(x):
    return x.mean((2, 3), keepdim=True).sigmoid()


def timms_response_norm(x, w, b, c):
    x = F.gelu(x)
    return F.linear(x + torch.addcmul(c.view(1, 1, 1, -1), c.view(1, 1, 1, -1), x * normed(x)), w, b)


def transformers_response_norm(x, w, b, c):
    x = F.gelu(x)
    return F.linear(c.view(1, 1, 1, -1) * (x * normed(x)) + c + x, w, b)


def excitation(x, w, b, c):
    x = F.silu(x.permute(0, 3, 1, 2))
    return torch.conv2d(x * gate_of(x), w[..., None, None], b)


def excitation_by_keywords(x, w, b, c):
    x = F.silu(x.permute(0, 3, 1, 2))
    return F.conv2d(weight=w[..., None, None], input=torch.mul(gate_of(x), other=x), padding="valid").mul_(2)


def modulated_tokens(x, w, b, c):
    x = F.layer_norm(x.flatten(1, 2), (16,))
    scale, shift = (c * x.mean(1, keepdim=True)).chunk(2, -1)
    return F.linear(x * (1 + scale.repeat(1, 1, 2)) - shift.repeat(1, 1, 2), w, b) + x.sum()


def divided_pixels(x, w, b, c):
    x = F.relu(x).permute(0, 3, 1, 2)
    return F.conv2d(x.div(1 + x.amax((2, 3), True)) * 0.5 - 2, w[..., None, None], b)


FORMS = (
    timms_response_norm,
    transformers_response_norm,
    excitation,
    excitation_by_keywords,
    modulated_tokens,
    divided_pixels,
)


@pytest.mark.parametrize("form", FORMS)
def test_near_float64(form):
    """Results, in eager's layout, and gradients are about as near to float64 as eager's."""
    args = [each.clone().requires_grad_() for each in (X, W, B, C)]
    wide = [each.detach().double().requires_grad_() for each in args]
    fn, counts = compiled_by(scale_weights, form)
    found, eager, exact = fn(*args), form(*args), form(*wide)
    assert (found.stride(), found.dtype, counts) == (eager.stride(), eager.dtype, [1])
    made = [
        (result, *torch.autograd.grad(result.sum(), given, allow_unused=True, materialize_grads=True))
        for result, given in ((found, args), (eager, args), (exact, wide))
    ]
    for one, plain, right in zip(*made, strict=True):
        error, own = ((each.double() - right).abs().max() for each in (one, plain))
        assert error <= 1.5 * own + 2**-7 * right.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_in_inductor(form):
    """What is inserted compiles, in inference with parameters whose gradients are recorded elsewhere."""
    args = [each.clone().requires_grad_() for each in (X, W, B, C)]
    fn, counts = compiled_by(scale_weights, form, inductor=True)
    with torch.no_grad():
        found, wanted = fn(*args), form(*args)
    assert_close(found, wanted, atol=0.05, rtol=0.05)
    assert counts == [1]


def test_autocast():
    """Under autocast the norm is in float32, and the result has the dtype of the product."""

    def call(x, w, b, c):
        with torch.autocast("cpu", torch.bfloat16):
            return timms_response_norm(x, w, b, c)

    args = X, W.float(), B.float(), C.float()
    fn, counts = compiled_by(scale_weights, call)
    found, wanted = fn(*args), call(*args)
    assert_close(found, wanted, atol=0.05, rtol=0.05)
    assert (found.dtype, counts) == (torch.bfloat16, [1])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("at", range(4), ids=["input", "scale", "weight", "bias"])
def test_values_that_are_not_finite(at, value):
    """Nan and infinities spread as in eager, also where a scale is 0 or infinite."""
    scale = random(2, 1, 1, 16)
    scale[0, 0, 0, :2] = 0
    args = [X.clone(), scale, W.clone(), B.clone()]
    args[at].view(-1)[1] = float(value)

    def call(x, scale, w, b):
        return F.linear(x * scale, w, b), x.sum()

    fn, counts = compiled_by(scale_weights, call)
    assert_close(fn(*args)[0], call(*args)[0], equal_nan=True, atol=0.1, rtol=0.05)
    assert counts == [1]


S = random(2, 1, 1, 16)


def recorded_apart(x, w, s):
    with torch.no_grad():
        scaled = x * s
    return F.linear(scaled, w), x.sum()


def written_between(x, w, s):
    s = s + 0
    scaled = x * s
    s.zero_()
    return F.linear(scaled, w), x.sum()


def read_again(x, w, s):
    scaled = x * s
    return F.linear(scaled, w), scaled.sum(), x.sum()


# What must not match, of a tensor x that is read again, in which convolutions find channels last.
NEAR_MISSES = {
    "an input that is not read again": lambda x, w, s: F.linear(x * s, w),
    "an input that no other call reads": lambda x, w, s: F.linear((y := x.sin()) + y * s, w),
    "a vector of weights": lambda x, w, s: (F.linear(x * s, w[0]), x.sum()),
    "a scaled tensor that is read again": read_again,
    "many columns": lambda x, w, s: (F.linear(x * s, w.repeat(3, 1)), x.sum()),
    "few pixels": lambda x, w, s: (F.linear(x[:, :1] * s, w), x[:, :1].sum()),
    "an empty batch": lambda x, w, s: (F.linear((y := x[:0]) * s[:0], w), y.sum()),
    "no channels": lambda x, w, s: (F.linear((y := x[..., :0]) * s[..., :0], w[:, :0]), y.sum()),
    "no samples": lambda x, w, s: (F.linear(x[0, 0] * s[0, 0], w), x.sum()),
    "float16": lambda x, w, s: (F.linear(x.half() * s.half(), w.half()), x.sum()),
    "float32": lambda x, w, s: (F.linear((f := x.float()) * s.float(), w.float()), f.sum()),
    "a number": lambda x, w, s: (F.linear(x * 2, w), x.sum()),
    "numbers": lambda x, w, s: (F.linear(x * 3 / 8 + s, w), x.sum()),
    "a negative": lambda x, w, s: (F.linear(s - x, w), x.sum()),
    "a shift that is scaled": lambda x, w, s: (F.linear((x - 100 * s) * s, w), x.sum()),
    "a quotient by zero": lambda x, w, s: (F.linear(x / 0 * s, w).isnan(), x.sum()),
    "a number on the left": lambda x, w, s: (F.linear(2 * (x * s), w), x.sum()),
    "a shift alone": lambda x, w, s: (F.linear(x + s, w), x.sum()),
    "a scale for each pixel": lambda x, w, s: (F.linear(x * x[..., :1], w), x.sum()),
    "integers": lambda x, w, s: (F.linear(x * s.int(), w), x.sum()),
    "a square": lambda x, w, s: (F.linear(x * s * x, w), x.sum()),
    "two large tensors": lambda x, w, s: (F.linear(x * s + (y := x.sin()), w), x.sum(), y.sum()),
    "a quotient of large ones": lambda x, w, s: (F.linear(x * s / x, w), x.sum()),
    "a sample that is scaled in two ways": lambda x, w, s: (F.linear((y := x[:1]) * s, w), y.sum()),
    "channels first": lambda x, w, s: (
        torch.conv2d((y := x.movedim(-1, 1).contiguous()) * s.movedim(-1, 1), w[..., None, None]),
        y.sum(),
    ),
    "twice what is added": lambda x, w, s: (F.linear(torch.add(x * s, s, alpha=2), w), x.sum()),
    "twice a product": lambda x, w, s: (F.linear(torch.addcmul(s, x, s, value=2), w), x.sum()),
    "a quotient of integers": lambda x, w, s: (F.linear(torch.div(x, s, rounding_mode="floor"), w), x.sum()),
    "an activation between": lambda x, w, s: (F.linear((x * s).relu(), w), x.sum()),
    "every second pixel": lambda x, w, s: (
        torch.conv2d((y := x.movedim(-1, 1)) * s.movedim(-1, 1), w[..., None, None], stride=2),
        y.sum(),
    ),
    "a border": lambda x, w, s: (
        torch.conv2d((y := x.movedim(-1, 1)) * s.movedim(-1, 1), w[..., None, None], padding=1),
        y.sum(),
    ),
    "gaps": lambda x, w, s: (F.linear((y := x.mT) * s[..., :6], w[:, :6]), y.sum()),
    "recorded apart": recorded_apart,
    "a scale that is written meanwhile": written_between,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """Other products stay as they are."""
    args = X.clone().requires_grad_(), W, S
    fn, counts = compiled_by(scale_weights, NEAR_MISSES[name])
    assert_close(fn(*args), NEAR_MISSES[name](*args))
    assert counts == [0]


def test_sizes_that_vary_stay():
    """A graph for several sizes stays, so that it serves all of them."""
    fn, counts = compiled_by(scale_weights, timms_response_norm, dynamic=True)
    assert_close(fn(X, W, B, C), timms_response_norm(X, W, B, C))
    assert counts == [0]
