"""Convolutions in groups by our own kernel: what matches, and what must not match."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.testing import assert_close

from backend_kwargs.rewrites.convolution import convolution
from backend_kwargs.rewrites.convolution_as_product import multiply_windows
from backend_kwargs.rewrites.depthwise_convolution import sum_shifted
from backend_kwargs.rewrites.grouped_convolution import _grouped_cuda
from tests.rewrites.lowering import Rewriting, agrees, matched

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
LAST = torch.channels_last
PAIR = st.tuples(st.integers(1, 2), st.integers(1, 2))
KERNEL = st.tuples(st.integers(1, 3), st.integers(1, 3))


def layer(dtype=torch.bfloat16, ins=12, outs=12, groups=3, **options):
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1, **options}
    return nn.Conv2d(ins, outs, groups=groups, **options).to(dtype).to(memory_format=LAST).eval()


def image(dtype=torch.bfloat16, channels=12, side=6, layout=LAST):
    return torch.randn(2, channels, side, side).to(dtype).contiguous(memory_format=layout)


MATCHES = {
    "groups": {},
    "depthwise": {"groups": 12},
    "depthwise, several results of each": {"groups": 12, "outs": 36},
    "depthwise, without bias": {"groups": 12, "bias": False},
    "more outputs": {"outs": 24},
    "float16": {"dtype": torch.float16},
    "stride and dilation": {"stride": 2, "dilation": 2, "padding": 2},
    "no bias": {"bias": False},
    "one row": {"kernel_size": (1, 3), "padding": (0, 1)},
    "a depthwise window of 7": {"groups": 12, "kernel_size": (7, 3), "dilation": (1, 3), "padding": 3},
    "groups of 512 results": {"outs": 1024, "groups": 2},
}


@pytest.mark.parametrize("options", MATCHES.values(), ids=MATCHES)
def test_matches(options):
    """Every such convolution becomes one call, with eager's strides and float64's result up to rounding."""
    assert matched(layer(**options), (image(options.get("dtype", torch.bfloat16)),), "grouped_convolution") == 1


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("groups", [3, 12], ids=["groups", "depthwise"])
def test_a_list_of_one_number_is_that_for_both_dimensions(name, groups):
    """ATen's lists need not have a number for each dimension."""
    module = layer(groups=groups)
    setattr(module, name, (2,))
    assert matched(module, (image(),), "grouped_convolution") == 1


@SETTINGS
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    groups=st.integers(2, 5),
    ins=st.integers(1, 3),
    outs=st.integers(1, 3),
    kernel=KERNEL,
    stride=PAIR,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=PAIR,
    bias=st.booleans(),
    of_weights=st.sampled_from([LAST, torch.contiguous_format]),
    scale=st.sampled_from([1e-4, 1.0, 100.0]),
    seed=st.integers(0, 9),
)
def test_computes_the_same(dtype, groups, ins, outs, kernel, stride, padding, dilation, bias, of_weights, scale, seed):
    """Whatever the groups, the geometry, the weights' layout and the scale, one call agrees with float64."""
    torch.manual_seed(seed)
    geometry = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    conv = nn.Conv2d(groups * ins, groups * outs, groups=groups, bias=bias, **geometry)
    model = conv.to(dtype).to(memory_format=of_weights).eval()
    x = (torch.randn(2, groups * ins, 9, 8) * scale).to(dtype).contiguous(memory_format=LAST)
    assert matched(model, (x,), "grouped_convolution") == 1


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), float("-inf"), 1e-40], ids=str)
def test_values_at_the_edges(value):
    """Infinities, nan, zero and a denormal give eager's results."""
    model, x = layer(), image()
    x[0, 0, 2, 2] = value
    rewriting = Rewriting(model, "grouped_convolution")
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), model(x), equal_nan=True)
    assert rewriting.counts["grouped_convolution"] == 1


@settings(SETTINGS, max_examples=100)
@given(
    sizes=st.tuples(st.integers(5, 12), st.integers(5, 12)),
    kernel=KERNEL,
    stride=PAIR,
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilation=PAIR,
)
def test_sizes_of_the_result(sizes, kernel, stride, padding, dilation):
    """The kernel's result has the sizes of ATen's, whatever the geometry; an empty batch needs no GPU to show it."""
    x, w = torch.empty(0, 4, *sizes), torch.empty(6, 2, *kernel)
    args = x, w, None, stride, padding, dilation, 2
    assert _grouped_cuda(*args).shape == convolution(*args).shape


NEAR_MISSES = {
    "one group": (layer(groups=1), image()),
    "float32": (layer(torch.float32), image(torch.float32)),
    "rows first": (layer(), image(layout=torch.contiguous_format)),
    "one pixel": (layer(), image(side=1)),
    "wide groups": (layer(ins=1026, outs=2, groups=2, kernel_size=1, padding=0), image(channels=1026)),
    "wide groups of results": (layer(ins=4, outs=1026, groups=2), image(channels=4)),
    "a long depthwise window": (layer(groups=12, kernel_size=(1, 8)), image(side=9)),
    "a wide depthwise window": (layer(groups=12, dilation=(4, 1)), image(side=9)),
    "float64": (layer(torch.float64), image(torch.float64)),
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


def norm(channels=12):
    torch.manual_seed(1)
    made = nn.BatchNorm2d(channels)
    for each in (made.weight, made.bias, made.running_mean, made.running_var):
        each.data.uniform_(0.5, 2)
    return made


ENDS = {
    "a norm": [norm()],
    "ReLU": [nn.ReLU()],
    "a norm and ReLU": [norm(), nn.ReLU()],
    "a norm and ReLU6": [norm(), nn.ReLU6()],
    "a norm and SiLU": [norm(), nn.SiLU()],
    "a norm and hardswish": [norm(), nn.Hardswish()],
    "a norm and GELU": [norm(), nn.GELU()],
    "two norms": [norm(), norm()],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_follows_a_depthwise_one(end, dtype):
    """A norm in eval mode and an activation are in the call of a depthwise convolution, with or without bias."""
    for bias in (True, False):
        model = nn.Sequential(layer(dtype, groups=12, bias=bias), *end).to(dtype).eval()
        rewriting, x = Rewriting(model, "grouped_convolution"), image(dtype)
        with torch.no_grad():
            agrees(rewriting(x), model, (x,))
        (gm,) = rewriting.graphs
        (made,) = gm.graph.output_node().args[0]
        assert (rewriting.operators(), made.target.name()) == (["depthwise_norm"], "backend_kwargs::depthwise_norm")


def test_numbers_that_follow_are_in_the_call():
    """A factor and a term for all channels are made where no tensor is an operand."""
    conv = layer(groups=12, bias=False)
    rewriting, x = Rewriting(lambda x: (conv(x) * 2 - 1).relu(), "grouped_convolution"), image()
    with torch.no_grad():
        assert_close(rewriting(x), (conv(x) * 2 - 1).relu(), atol=0.02, rtol=0.02)
    assert rewriting.operators() == ["depthwise_norm"]


class Twice(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.conv, self.end = layer(groups=12), end

    def forward(self, x):
        made = self.conv(x)
        return made, self.end(made)


# What follows a depthwise convolution, and how many operations on its result are left.
LEFT = {
    "another activation": (nn.Sequential(layer(groups=12), norm(), nn.Sigmoid()), ["sigmoid"]),
    "a result that is returned too": (Twice(nn.ReLU()), ["relu"]),
    "a norm of groups of channels": (nn.Sequential(layer(), norm(), nn.ReLU()), ["sub", "mul", "mul", "add", "relu"]),
    "numbers of each pixel": (nn.Sequential(layer(groups=12), nn.LayerNorm(6, bias=False), nn.ReLU()), ["relu"]),
}


@pytest.mark.parametrize(("model", "left"), LEFT.values(), ids=LEFT)
def test_what_is_left(model, left):
    """What the kernel cannot apply is computed after it."""
    rewriting, x = Rewriting(model.bfloat16().eval(), "grouped_convolution"), image()
    with torch.no_grad():
        agrees(rewriting(x), model, (x,))
    (gm,) = rewriting.graphs
    names = [node.target.__name__.split(".")[0] for node in gm.graph.nodes if node.op == "call_function"]
    assert rewriting.counts["grouped_convolution"] == 1
    assert [name for name in names if name in left][-len(left) :] == left


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_values_at_the_edges_of_depthwise_ones(end, value):
    """Infinities and nan come out of a norm and an activation as in eager, and stay in their channel."""
    model, x = nn.Sequential(layer(groups=12), *end).bfloat16().eval(), image()
    x[0, 3, 2, 2] = value
    rewriting = Rewriting(model, "grouped_convolution")
    with torch.no_grad():
        torch.testing.assert_close(rewriting(x), model(x), equal_nan=True, atol=0.05, rtol=0.02)


def on_a_gpu(rewrite, channels, groups, *, kernel=3, dilation=1, dtype=torch.bfloat16, layout=LAST):
    """Return whether `rewrite` changes a convolution of dynamo's graph of images on a GPU, which need not be there."""
    graph, side = Graph(), 10 - dilation * (kernel - 1)
    given = {"dtype": dtype, "device": "cuda", "memory_format": layout}
    with FakeTensorMode():
        x, made = (torch.empty(2, channels, size, size, **given) for size in (8, side))
        w = torch.empty(channels, channels // groups, kernel, kernel, **given)
        nodes = [graph.placeholder("x"), graph.placeholder("w")]
        nodes.append(graph.call_function(torch.conv2d, (*nodes, None, 1, 1, dilation, groups)))
        for node, value in zip(nodes, (x, w, made), strict=True):
            node.meta["example_value"] = value
        graph.output((nodes[-1],))
        return rewrite(GraphModule({}, graph), [x, w]) is not None


OTHERS = {
    "depthwise": (sum_shifted, (16, 16), {}, False),
    "depthwise, of few numbers": (sum_shifted, (16, 16), {"kernel": 2}, True),
    "depthwise in float32": (sum_shifted, (16, 16), {"dtype": torch.float32}, True),
    "depthwise, channels first": (sum_shifted, (16, 16), {"layout": None}, False),
    "depthwise, far": (sum_shifted, (16, 16), {"dilation": 2, "layout": None}, True),
    "wide groups": (multiply_windows, (2048, 4), {}, False),
}


@pytest.mark.parametrize(("rewrite", "sizes", "options", "changes"), OTHERS.values(), ids=OTHERS)
def test_what_other_rewrites_leave(rewrite, sizes, options, changes):
    """The rewrites of dynamo's graph, which come first, leave what the kernels compute."""
    assert on_a_gpu(rewrite, *sizes, **options) is changes
