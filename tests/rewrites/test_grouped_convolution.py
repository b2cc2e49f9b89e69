"""Convolutions in groups by our own kernel: what matches, and what must not match."""

import pytest
import torch
from lowering import Rewriting, matched
from torch import nn

LAST = torch.channels_last


def layer(dtype=torch.bfloat16, ins=12, outs=12, groups=3, **options):
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1, **options}
    return nn.Conv2d(ins, outs, groups=groups, **options).to(dtype).to(memory_format=LAST).eval()


def image(dtype=torch.bfloat16, channels=12, side=6, layout=LAST):
    return torch.randn(2, channels, side, side).to(dtype).contiguous(memory_format=layout)


MATCHES = {
    "groups": {},
    "depthwise": {"groups": 12},
    "more outputs": {"outs": 24},
    "float16": {"dtype": torch.float16},
    "stride and dilation": {"stride": 2, "dilation": 2, "padding": 2},
    "no bias": {"bias": False},
    "one row": {"kernel_size": (1, 3), "padding": (0, 1)},
}


@pytest.mark.parametrize("options", MATCHES.values(), ids=MATCHES)
def test_matches(options):
    """Every such convolution becomes one call, with eager's strides and float64's result up to rounding."""
    assert matched(layer(**options), (image(options.get("dtype", torch.bfloat16)),), "grouped_convolution") == 1


NEAR_MISSES = {
    "one group": (layer(groups=1), image()),
    "float32": (layer(torch.float32), image(torch.float32)),
    "rows first": (layer(), image(layout=torch.contiguous_format)),
    "one pixel": (layer(), image(side=1)),
    "wide groups": (layer(ins=160, outs=160, groups=2), image(channels=160)),
    "transposed": (
        nn.ConvTranspose2d(12, 12, 3, groups=3).bfloat16().to(memory_format=LAST).eval(),
        image(),
    ),
    "one dimension": (nn.Conv1d(12, 12, 3, groups=3).bfloat16().eval(), torch.randn(2, 12, 9).bfloat16()),
}


@pytest.mark.parametrize(("model", "x"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_does_not_match(model, x):
    """Convolutions that the kernel has no tiles for, or that libraries compute well, stay as they are."""
    assert matched(model, (x,), "grouped_convolution") == 0


def test_dynamic_batches_match():
    """The batch may vary: one graph with a symbolic size serves several."""
    rewriting = Rewriting(layer(), "grouped_convolution")
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 12, 6, 6).bfloat16().contiguous(memory_format=LAST)
            torch._dynamo.mark_dynamic(x, 0)
            assert rewriting(x).shape == (batch, 12, 6, 6)
    assert (len(rewriting.graphs), rewriting.counts["grouped_convolution"]) == (1, 1)


def test_what_follows_stays_with_the_pattern_of_libraries():
    """Beside `convolution`, which fuses those without groups, each convolution is rewritten once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(12, 12, 1), nn.ReLU(), layer(), nn.ReLU()).bfloat16().to(memory_format=LAST).eval()
    rewriting = Rewriting(model, "grouped_convolution", "convolution")
    with torch.no_grad():
        rewriting(image())
    assert rewriting.operators() == ["conv_relu", "grouped_convolution"]
