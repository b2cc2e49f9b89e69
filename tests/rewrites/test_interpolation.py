"""Convolutions of single pixels before an interpolation: results, gradients, what spreads, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.interpolation import convolve_before
from tests.rewrites.on_a_cpu import compiled_by

A, LARGE = torch.randn(2, 4, 3, 5), torch.randn(2, 3, 6, 10)
W, WIDE = torch.randn(6, 4, 1, 1), torch.randn(2, 7, 1, 1)
B = torch.randn(6)
NEAR = {"atol": 1e-4, "rtol": 1e-4}


class Head(nn.Module):
    """The head of a segmentation model as SegFormer has it."""

    def __init__(self, widths=(8, 16, 24), inner=12):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(width, inner) for width in widths)
        self.fuse = nn.Conv2d(inner * len(widths), inner, 1, bias=False)
        self.norm = nn.BatchNorm2d(inner)
        self.classes = nn.Conv2d(inner, 5, 1)

    def forward(self, *stages):
        images = []
        for stage, projection in zip(stages, self.projections, strict=True):
            small = projection(stage.flatten(2).transpose(1, 2)).permute(0, 2, 1)
            small = small.reshape(stage.shape[0], -1, *stage.shape[2:])
            size = stages[0].size()[2:]
            images.append(F.interpolate(small, size=size, mode="bilinear", align_corners=False))
        return self.classes(F.relu(self.norm(self.fuse(torch.cat(images[::-1], dim=1)))))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
def test_decode_head(inductor, training):
    """Each stage is convolved at its own size, forward and backward."""
    torch.manual_seed(0)
    head = Head().train(training)
    stages = [torch.randn(2, width, 8 >> at, 8 >> at) for at, width in enumerate((8, 16, 24))]
    fn, counts = compiled_by(convolve_before, head, inductor=inductor)
    with torch.set_grad_enabled(training):
        found, wanted = fn(*stages), head(*stages)
    assert_close(found, wanted, **NEAR)
    assert found.stride() == wanted.stride()
    if training:
        grads = [torch.autograd.grad(each.square().sum(), [*head.parameters()]) for each in (found, wanted)]
        assert_close(*grads, atol=1e-3, rtol=1e-3)
    assert counts == [1]


def test_channels_last_in_a_batch_of_one():
    """Linear layers keep channels last where a convolution would take a batch of one for contiguous."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(convolve_before(gm, inputs).gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(Head().eval(), backend=backend)(*(torch.randn(1, 8 * (at + 1), 8, 8 >> at) for at in range(3)))
    targets = [node.target for node in graphs[0].nodes]
    assert (targets.count(F.linear), targets.count(torch.conv2d)) == (3 + 3, 1)


def up(a, mode="bilinear", **options):
    return F.interpolate(a, **({"scale_factor": 2} | options), mode=mode)


FORMS = {
    "size": lambda a, large, w, wide, b: F.conv2d(F.interpolate(a, (7, 9), mode="bilinear"), w, b),
    "one size": lambda a, large, w, wide, b: F.conv2d(F.interpolate(input=a, size=8), w),
    "another scale of each side": lambda a, large, w, wide, b: F.conv2d(up(a, scale_factor=(1.0, 2.5)), w, b),
    "a scale that is computed again": lambda a, *more: F.conv2d(
        up(a, scale_factor=2.3, recompute_scale_factor=True), more[1]
    ),
    "corners": lambda a, large, w, wide, b: F.conv2d(up(a, align_corners=True), w, b),
    "bicubic": lambda a, large, w, wide, b: F.conv2d(up(a, "bicubic"), w, b),
    "antialias": lambda a, large, w, wide, b: F.conv2d(up(a, antialias=True), w, b),
    "nearest": lambda a, large, w, wide, b: F.conv2d(up(a, "nearest"), w, b),
    "nearest-exact": lambda a, large, w, wide, b: F.conv2d(up(a, "nearest-exact"), w, b),
    "area": lambda a, large, w, wide, b: F.conv2d(up(a, "area"), w, b),
    "Upsample": lambda a, large, w, wide, b: F.conv2d(nn.Upsample(scale_factor=2)(a), w, b, padding="same"),
    "linear": lambda a, large, w, wide, b: torch.conv1d(up(a[..., 0], "linear"), w[..., 0], b),
    "trilinear": lambda a, large, w, wide, b: F.conv3d(up(a[..., None], "trilinear"), w[..., None], b),
    "joined": lambda a, large, w, wide, b: F.conv2d(torch.cat([up(a), large], 1), wide, b[:2]),
    "joined after another": lambda a, large, w, wide, b: F.conv2d(torch.cat([large, up(a)], -3), wide),
    "joined among others": lambda a, large, w, wide, b: F.conv2d(
        torch.concat((large[:, :1], up(a), large[:, 1:]), dim=1), wide, b[:2], padding="valid"
    ),
    "joined twice": lambda a, large, w, wide, b: F.conv2d(torch.cat([up(a[:, 1:]), up(a)], 1), wide),
    "channels last": lambda a, large, w, wide, b: F.conv2d(
        torch.cat(
            [up(a.to(memory_format=torch.channels_last)), up(large, "nearest", scale_factor=None, size=(6, 10))], 1
        ),
        wide,
    ),
    "viewed": lambda a, large, w, wide, b: F.conv2d(up(a), w, b).view(2, 6, 60).relu_(),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """Each kind of interpolation and of joining others, with results and gradients of eager in its layout."""
    given = [each.clone().requires_grad_() for each in (A, LARGE, W, WIDE, B)]
    fn, counts = compiled_by(convolve_before, FORMS[form])
    found, wanted = fn(*given), FORMS[form](*given)
    assert_close(found, wanted, **NEAR)
    assert found.stride() == wanted.stride()
    grads = [
        torch.autograd.grad(each.square().sum(), given, allow_unused=True, materialize_grads=True)
        for each in (found, wanted)
    ]
    assert_close(*grads, atol=1e-3, rtol=1e-3)
    assert counts == [1]


@settings(max_examples=40, deadline=None)
@given(
    images=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 8), st.booleans()), min_size=1, max_size=4),
    outs=st.integers(1, 9),
    mode=st.sampled_from(["nearest", "bilinear", "bicubic", "area"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_no_less_exact_than_eager(images, outs, mode, dtype, seed):
    """The error to float64 is that of eager, but for the rounding of the terms of a sum."""
    torch.manual_seed(seed)
    x = [torch.randn(2, channels, *((side, side) if small else (8, 8))) for channels, side, small in images]
    args = [each.to(dtype) for each in (*x, torch.randn(outs, sum(each.shape[1] for each in x), 1, 1))]

    def call(*args):
        *x, w = args
        large = [
            up(each, mode, scale_factor=None, size=(8, 8)) if at[2] else each
            for at, each in zip(images, x, strict=True)
        ]
        return F.conv2d(torch.cat(large, 1) if len(large) > 1 else large[0], w)

    fn, _ = compiled_by(convolve_before, call)
    found, eager, exact = fn(*args), call(*args), call(*(each.double() for each in args))
    own, error = ((each.double() - exact).abs().max() for each in (eager, found))
    assert error <= 2 * own + 4 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("values", [("nan",), ("inf",), ("inf", "-inf"), ("inf", "inf")], ids=str)
@pytest.mark.parametrize("form", ["one", "joined"])
def test_values_at_the_edges(form, values, mode):
    """Nan and infinities, two of them in neighbouring pixels of two channels too, spread as in eager."""
    a = A.clone()
    for at, value in enumerate(values):
        a[0, 1 + at, 1, 2 + at] = float(value)

    def call(a, large):
        large = torch.cat([up(a, mode), large], 1) if form == "joined" else up(a, mode)
        return F.conv2d(large, WIDE if form == "joined" else W)

    fn, counts = compiled_by(convolve_before, call)
    assert_close(fn(a, LARGE), call(a, LARGE), equal_nan=True, **NEAR)
    assert counts == [1]


def test_infinite_weights():
    """Where a weight is infinite, infinities may become nan, and nothing else changes."""
    w, b = W.clone(), B.clone()
    w[1, 2], b[3] = float("inf"), float("nan")
    call = lambda a, w, b: F.conv2d(up(a), w, b)  # noqa: E731
    fn, counts = compiled_by(convolve_before, call)
    found, wanted = fn(A, w, b), call(A, w, b)
    assert not wanted[:, 1].isnan().any()
    assert_close(torch.where(found.isnan() & wanted.isinf(), wanted, found), wanted, equal_nan=True, **NEAR)
    assert counts == [1]


def test_sizes_that_vary():
    """One graph serves other batches and sizes."""

    def call(a, large, wide):
        return F.conv2d(torch.cat([F.interpolate(a, size=large.shape[2:], mode="bilinear"), large], 1), wide)

    fn, counts = compiled_by(convolve_before, call, inductor=True)
    for batch, side in ((2, 3), (3, 5), (5, 4)):
        a, large = torch.randn(batch, 4, side, side + 1), torch.randn(batch, 3, 2 * side, 2 * side + 1)
        for each in (a, large):
            torch._dynamo.mark_dynamic(each, (0, 2, 3))
        assert_close(fn(a, large, WIDE), call(a, large, WIDE), **NEAR)
    assert counts == [1]


def test_autocast():
    """Under autocast the result has the dtype of the convolution."""

    def call(a, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(up(a), w, b)

    fn, counts = compiled_by(convolve_before, call, inductor=True)
    found, wanted = fn(A, W, B), call(A, W, B)
    assert found.dtype == torch.bfloat16
    assert_close(found, wanted, atol=5e-2, rtol=5e-2)
    assert counts == [1]


def read_twice(a, large, w, wide, b):
    big = up(a)
    return F.conv2d(big, w) + big.sum()


def joined_twice(a, large, w, wide, b):
    both = torch.cat([up(a), large], 1)
    return F.conv2d(both, wide) + both.sum()


def written_between(a, large, w, wide, b):
    a = a + 0
    big = up(a)
    a.zero_()
    return F.conv2d(big, w) + a.sum()


def without_gradients(a, large, w, wide, b):
    with torch.no_grad():
        big = up(a)
    return F.conv2d(big, w)


def joined_without_gradients(a, large, w, wide, b):
    big = up(a)
    with torch.no_grad():
        both = torch.cat([big, large], 1)
    return F.conv2d(both, wide)


# What must not match.
NEAR_MISSES = {
    "smaller": lambda a, large, w, wide, b: F.conv2d(F.interpolate(a, size=(2, 2), mode="bilinear"), w),
    "as large": lambda a, large, w, wide, b: F.conv2d(F.interpolate(a, size=(3, 5), mode="bilinear"), w),
    "a larger kernel": lambda a, large, w, wide, b: F.conv2d(up(a), w.expand(6, 4, 3, 3)),
    "a longer kernel": lambda a, large, w, wide, b: F.conv2d(up(a), w.expand(6, 4, 1, 2)),
    "a stride": lambda a, large, w, wide, b: F.conv2d(up(a), w, stride=2),
    "a stride in one dimension": lambda a, large, w, wide, b: F.conv2d(up(a), w, stride=(1, 2)),
    "padding": lambda a, large, w, wide, b: F.conv2d(up(a), w, b, padding=(0, 1)),
    "groups": lambda a, large, w, wide, b: F.conv2d(up(a), w[:, :2], groups=2),
    "without a batch": lambda a, large, w, wide, b: F.conv2d(up(a[0], "nearest"), w),
    "transposed": lambda a, large, w, wide, b: F.conv_transpose2d(up(a), w[:4]),
    "float64": lambda a, large, w, wide, b: F.conv2d(up(a.double()), w.double()),
    "float16": lambda a, large, w, wide, b: F.conv2d(up(a.half()), w.half()).float(),
    "an activation between": lambda a, large, w, wide, b: F.conv2d(up(a).relu(), w),
    "joined in another dimension": lambda a, large, w, wide, b: F.conv2d(torch.cat([up(a), up(a)], 2), w),
    "nothing interpolated": lambda a, large, w, wide, b: F.conv2d(torch.cat([large, large, large[:, :1]], 1), wide),
    "another reader": read_twice,
    "another reader of what is joined": joined_twice,
    "an image that is written meanwhile": written_between,
    "an image without gradients": without_gradients,
    "joined without gradients": joined_without_gradients,
    "many results of few channels": lambda a, large, w, wide, b: F.conv2d(
        torch.cat([up(a[:, :1]), large[:, :1]], 1), w[:1, :2].expand(600, 2, 1, 1)
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """Other convolutions stay as they are."""
    given = A.clone().requires_grad_(), LARGE, W.clone().requires_grad_(), WIDE, B
    fn, counts = compiled_by(convolve_before, NEAR_MISSES[name])
    assert_close(fn(*given), NEAR_MISSES[name](*given))
    assert counts == [0]
