"""Convolutions of few channels by our own kernel: what matches, and what must not match."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code

from backend_kwargs.rewrites.stem_convolution import stem_convolution
from backend_kwargs.rewrites.traced import PLACE, RewritePass
from tests.rewrites.lowering import Rewriting, matched

SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
LAST, FIRST = torch.channels_last, torch.contiguous_format
PAIR = st.tuples(st.integers(1, 3), st.integers(1, 3))


class Stem(nn.Module):
    """A convolution, what follows it, and sums of its channels, whose layout is free in between."""

    def __init__(self, *following, dtype=torch.bfloat16, layout=FIRST, ends=False, ins=3, outs=6, **options):
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d(ins, outs, **{"kernel_size": 3, "padding": 1, **options})
        self.body = nn.Sequential(conv, *following).to(dtype).to(memory_format=layout).eval()
        self.ends = ends

    def forward(self, x):
        made = self.body(x)
        return made if self.ends else made.sum((2, 3))


def image(dtype=torch.bfloat16, channels=3, layout=FIRST):
    torch.manual_seed(0)
    return torch.randn(2, channels, 9, 8).to(dtype).contiguous(memory_format=layout)


def norm(channels=6):
    made = nn.BatchNorm2d(channels)
    made.running_mean.normal_()
    made.running_var.uniform_(0.5, 2)
    return made


MATCHES = {
    "a convolution": (Stem(), image()),
    "a norm": (Stem(norm()), image()),
    "a norm and ReLU": (Stem(norm(), nn.ReLU()), image()),
    "GELU": (Stem(nn.GELU()), image()),
    "no bias": (Stem(nn.SiLU(), bias=False), image()),
    "channels last": (Stem(nn.ReLU(), layout=LAST), image(layout=LAST)),
    "channels last, returned": (Stem(nn.ReLU(), layout=LAST, ends=True), image(layout=LAST)),
    "by channel, returned": (Stem(ends=True), image()),
    "one channel": (Stem(ins=1), image(channels=1)),
    "four channels": (Stem(ins=4), image(channels=4)),
    "float16": (Stem(dtype=torch.float16), image(torch.float16)),
    "a long window, strides, gaps": (
        Stem(nn.ReLU(), kernel_size=(7, 3), stride=(2, 3), padding=(3, 0), dilation=(1, 2)),
        image(),
    ),
    "every second column": (Stem(), image()[..., ::2]),
}


@pytest.mark.parametrize(("model", "x"), MATCHES.values(), ids=MATCHES)
def test_matches(model, x):
    """Every such convolution becomes one call with what follows it, with float64's result up to rounding."""
    assert matched(model, (x,), "stem_convolution") == 1


NEAR_MISSES = {
    "five channels": (Stem(ins=5), image(channels=5)),
    "groups": (Stem(ins=2, groups=2), image(channels=2)),
    "float32": (Stem(dtype=torch.float32), image(torch.float32)),
    "transposed": (nn.ConvTranspose2d(3, 6, 3).bfloat16().to(memory_format=LAST).eval(), image(layout=LAST)),
    "one dimension": (nn.Conv1d(3, 6, 3).bfloat16().eval(), torch.randn(2, 3, 9).bfloat16()),
}


@pytest.mark.parametrize(("model", "x"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_does_not_match(model, x):
    """Convolutions that the kernel does not compute, or whose strides are seen, stay as they are."""
    assert matched(model, (x,), "stem_convolution") == 0


@SETTINGS
@given(
    ins=st.integers(1, 4),
    outs=st.integers(1, 5),
    kernel=PAIR,
    stride=PAIR,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=PAIR,
    bias=st.booleans(),
    layouts=st.tuples(st.sampled_from([LAST, FIRST]), st.sampled_from([LAST, FIRST])),
    scale=st.sampled_from([1e-4, 1.0, 100.0]),
)
def test_computes_the_same(ins, outs, kernel, stride, padding, dilation, bias, layouts, scale):
    """Whatever the geometry, the layouts and the scale, one call agrees with float64."""
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    of_weights, of_images = layouts
    model = Stem(norm(outs), nn.ReLU(), ins=ins, outs=outs, bias=bias, layout=of_weights, **geometry)
    x = image(channels=ins, layout=of_images) * scale
    assert matched(model, (x,), "stem_convolution") == 1


def test_the_result_is_channels_last():
    """The operator's result, of an empty batch too, has the layout that its fake kernel says."""
    for x in (image(), image()[:0], image(layout=LAST)):
        args = x, torch.randn(6, 3, 3, 3).bfloat16(), None, None, [1, 1], [1, 1], [1, 1], "relu"
        with torch._subclasses.FakeTensorMode() as mode:
            fake = stem_convolution(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
        got = stem_convolution(*args)
        assert (got.shape, got.stride()) == (fake.shape, fake.stride())
        assert got.is_contiguous(memory_format=LAST)


conv = Stem(ends=True)
READ_STRIDES = {
    "returned after others": lambda x: conv(x).relu().clamp(-1, 1),
    "as_strided": lambda x: conv(x).as_strided((5,), (3,)) + 1,
    "as_strided, later": lambda x: conv(x).sin().as_strided((5,), (3,)) + 1,
    "a write into as_strided": lambda x: (made := conv(x)).as_strided((3,), (2,)).fill_(0).sum() + made,
    "complex numbers": lambda x: torch.view_as_complex(conv(x).sin().float().view(2, 6, 9, 4, 2)).abs(),
    "another dtype": lambda x: conv(x).sin().view(torch.int32).flip(-1).view(torch.bfloat16) * 2,
}


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("fn", READ_STRIDES.values(), ids=READ_STRIDES)
def test_strides_that_are_read_are_eagers(fn):
    """Compiled code returns what eager does where strides are read, though a convolution is channels last."""
    torch._dynamo.reset()
    options = {PLACE: RewritePass(("stem_convolution",), ())}
    with torch.no_grad():
        want = fn(image())
        compiled = torch.compile(fn, backend=partial(compile_fx, config_patches=options))
        got, codes = run_and_get_code(compiled, image())
    (code,) = codes
    assert "backend_kwargs.stem_convolution" in code
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_dynamic_batches_match():
    """The batch may vary: one graph with a symbolic size serves several."""
    rewriting = Rewriting(Stem(nn.ReLU()), "stem_convolution")
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 3, 9, 8).bfloat16()
            torch._dynamo.mark_dynamic(x, 0)
            assert rewriting(x).shape == (batch, 6)
    assert (len(rewriting.graphs), rewriting.counts["stem_convolution"]) == (1, 1)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf"), 1e-40], ids=str)
def test_values_at_the_edges(value):
    """Infinities, nan, zero and a denormal give eager's results."""
    model, x = Stem(nn.ReLU(), layout=LAST, ends=True), image(layout=LAST)
    x[0, 0, 2, 2] = value
    rewriting = Rewriting(model, "stem_convolution")
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), model(x), rtol=0.02, atol=0.01, equal_nan=True)
    assert rewriting.counts["stem_convolution"] == 1
