"""Convolutions in wide groups as products over windows: results, gradients, memory, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx
from torch.testing import assert_close

from backend_kwargs.rewrites import convolution_as_product
from backend_kwargs.rewrites.convolution_as_product import multiply_windows
from tests.rewrites.on_a_cpu import compiled_by

X, W = torch.randn(2, 16, 11).bfloat16(), torch.randn(32, 8, 5).bfloat16()
IMAGE, FILTER = torch.randn(2, 16, 7, 6).bfloat16(), torch.randn(16, 8, 3, 2).bfloat16()
NEAR = {"atol": 0.2, "rtol": 2e-2}


FORMS = {
    "positional": lambda x, w: torch.conv1d(x, w, None, 1, 2, 1, 2),
    "by keywords": lambda x, w: F.conv1d(groups=2, weight=w, input=x, padding=[3], dilation=(2,)),
    "same": lambda x, w: F.conv1d(x, w[..., :4], padding="same", groups=2),
    "valid": lambda x, w: F.conv1d(x, w, padding="valid", groups=2, stride=3),
    "more padding than the kernel reaches": lambda x, w: F.conv1d(x, w, padding=7, groups=2),
    "written": lambda x, w: F.conv1d(x, w, groups=2).mul_(2).relu_(),
    "viewed": lambda x, w: F.conv1d(x, w, groups=2).view(2, 2, 112),
    "two dimensions": lambda x, w: F.conv2d(x[..., None], w[..., None], padding=(2, 0), stride=(2, 1), groups=2),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """Each spelling of the call, with what may follow it, in Inductor."""
    fn, counts = compiled_by(multiply_windows, FORMS[form], inductor=True)
    assert_close(fn(X, W), FORMS[form](X, W), **NEAR)
    assert counts == [1]


@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm], ids=["old", "new"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_positions_of_a_speech_encoder(norm):
    """Weights with either norm have its gradients, also where the input's channels lie beside each other."""

    def block(x, layer):
        x = x.transpose(1, 2)
        return (F.gelu(layer(x)[:, :, :-1]) + x).transpose(1, 2)

    fn, counts = compiled_by(multiply_windows, block, inductor=True)
    made = []
    for call, dtype in ((fn, torch.bfloat16), (block, torch.float32)):  # with AMX, oneDNN is wrong in bfloat16
        torch.manual_seed(0)
        layer = norm(nn.Conv1d(16, 16, 8, padding=4, groups=2).bfloat16(), dim=2).to(dtype)
        x = X.mT.to(dtype).contiguous().requires_grad_()
        made.append([y := call(x, layer), *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    assert_close(*made, **NEAR, check_dtype=False)
    assert counts == [1]


def errors(found, exact):
    return [float((one.double() - each).abs().max().detach()) for one, each in zip(found, exact, strict=True)]


@settings(max_examples=20, deadline=None)
@given(
    dims=st.integers(1, 2),
    groups=st.integers(2, 3),
    ins=st.sampled_from([8, 16]),
    outs=st.sampled_from([8, 24]),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 3)),
    stride=st.sampled_from([(1, 1), (1, 1), (2, 1), (3, 2)]),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    last=st.booleans(),
    at_once=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_no_less_exact_than_eager(
    dims, groups, ins, outs, kernel, stride, padding, dilation, last, at_once, dtype, seed
):
    """The result, in eager's layout, and the gradients are as near to float64 as eager's, in chunks or not."""
    torch.manual_seed(seed)
    x, w = torch.randn(2, groups * ins, *(11, 8)[:dims]), torch.randn(groups * outs, ins, *kernel[:dims])
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    args = [each.to(dtype).requires_grad_() for each in (x, w, torch.randn(groups * outs))]
    wide = [each.detach().double().requires_grad_() for each in args]

    def call(*args):
        return getattr(F, f"conv{dims}d")(*args, stride[:dims], padding[:dims], dilation[:dims], groups)

    fn, counts = compiled_by(multiply_windows, call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution_as_product, "MOST_BYTES", 256 << 20 if at_once else 0)
        found, eager, exact = fn(*args), call(*args), call(*wide)
        assert counts in ([1], [int(at_once)])  # windows of one group alone may be more than input and result
        grad = torch.randn_like(exact).to(dtype)
        grads = [
            torch.autograd.grad(result, given, grad.to(result.dtype))
            for result, given in ((found, args), (eager, args), (exact, wide))
        ]
    assert found.stride() == eager.stride()
    exact = exact, *grads[2]
    for one, plain in zip(errors((found, *grads[0]), exact), errors((eager, *grads[1]), exact), strict=True):
        assert one <= 1.1 * plain + 1e-3


def lowered(fn, *args):
    """Return the forward and the backward graph that Inductor lowers after the rewrite."""
    graphs = []

    def keep(gm, inputs, **_):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def backend(gm, inputs):
        return compile_fx(multiply_windows(gm, inputs).gm, inputs, inner_compile=keep)

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compile(fn, backend=backend)(*args).sum().backward()
    return graphs


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_the_backward_pass_has_no_windows_of_the_forward_pass(last):
    """What is kept is no larger than input, weights and result, which windows of 31 taps would be."""
    x, w = torch.randn(2, 16, 90).bfloat16(), torch.randn(16, 8, 31).bfloat16().requires_grad_()
    x = (x.mT.contiguous().mT if last else x).requires_grad_()
    forward, _ = lowered(lambda x, w: torch.conv1d(x.sin(), w, padding=15, groups=2).relu(), x, w)
    kept = [each.meta["val"].numel() for each in forward.output_node().args[0]]
    assert max(kept) <= max(x.numel(), w.numel())


def test_windows_of_a_few_groups_at_a_time(monkeypatch):
    """Where the windows take more than the limit, each product has as many groups as fit into it."""
    x, w = torch.randn(2, 64, 90).bfloat16().requires_grad_(), torch.randn(64, 16, 31).bfloat16().requires_grad_()
    monkeypatch.setattr(convolution_as_product, "MOST_BYTES", 3 * 2 * (2 * 90 * 16 * 31))
    graphs = lowered(lambda x, w: torch.conv1d(x, w, padding=15, groups=4), x, w)
    products = [
        [node.meta["val"].shape[0] for node in graph.nodes if node.target is torch.ops.aten.bmm.default]
        for graph in graphs
    ]
    assert products == [[3, 1], [3, 1, 3, 1]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e-40], ids=str)
@pytest.mark.parametrize("at", [0, 1], ids=["input", "weights"])
def test_values_at_the_edges(at, value):
    """Infinities, nan and a denormal give eager's results and gradients, away from the padding in the weights."""
    args = [X.clone(), W.clone()]
    args[at][1, 3, 2] = value
    args = [each.requires_grad_() for each in args]
    call = lambda x, w: torch.conv1d(x, w, padding=2, groups=2)  # noqa: E731
    fn, counts = compiled_by(multiply_windows, call)
    inner = (slice(None), slice(None), slice(2, -2) if at else slice(None))
    found, wanted = fn(*args)[inner], call(*args)[inner]
    assert_close(found, wanted, equal_nan=True, **NEAR)
    both = (torch.autograd.grad(each.sum(), args) for each in (found, wanted))
    for one, other in zip(*both, strict=True):
        assert_close(one[inner], other[inner], equal_nan=True, **NEAR)
    assert counts == [1]


def test_sizes_that_vary():
    """One graph serves other batches and lengths."""
    fn, counts = compiled_by(multiply_windows, FORMS["positional"], inductor=True)
    for batch, length in ((2, 11), (3, 17), (5, 23)):
        x = torch.randn(batch, 16, length).bfloat16()
        torch._dynamo.mark_dynamic(x, (0, 2))
        assert_close(fn(x, W), FORMS["positional"](x, W), **NEAR)
    assert counts == [1]


@pytest.mark.parametrize("x", [X.float(), X], ids=["float32", "half"])
def test_autocast(x):
    """Under autocast operands in float32, or weights alone, give a product in half precision, as the convolution."""

    def call(x, w, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.conv1d(x, w, bias, padding=2, groups=2)

    args = x, W.float(), torch.randn(32)
    fn, counts = compiled_by(multiply_windows, call, inductor=True)
    found, wanted = fn(*args), call(*args)
    assert found.dtype == torch.bfloat16
    assert_close(found, wanted, **NEAR)
    assert counts == [1]


# What must not match.
NEAR_MISSES = {
    "one group": (F.conv1d, X, torch.randn(8, 16, 5).bfloat16()),
    "depthwise": (lambda x, w: F.conv1d(x, w, groups=16), X, torch.randn(16, 1, 5).bfloat16()),
    "few results of a group": (lambda x, w: F.conv1d(x, w, groups=2), X, W[:8]),
    "channels that are not aligned": (lambda x, w: F.conv1d(x[:, 2:], w[:, 1:], groups=2), X, W),
    "float32": (lambda x, w: F.conv1d(x, w, groups=2), X.float(), W.float()),
    "float64": (lambda x, w: F.conv1d(x, w, groups=2), X.double(), W.double()),
    "without a batch": (lambda x, w: F.conv1d(x[0], w, groups=2), X, W),
    "transposed": (lambda x, w: F.conv_transpose1d(x, w[:16], groups=2), X, W),
    "three dimensions": (lambda x, w: F.conv3d(x[..., None, None], w[..., None, None], groups=2), X, W),
    "a result in float32": (lambda x, w: F.conv1d(x.float(), w.float(), groups=2).bfloat16(), X, W),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """Other convolutions stay as they are."""
    call, x, w = NEAR_MISSES[name]
    fn, counts = compiled_by(multiply_windows, call)
    assert_close(fn(x, w), call(x, w))
    assert counts == [0]


def test_weights_whose_sizes_vary_stay():
    """A kernel whose size varies has no fixed number of columns."""
    fn, counts = compiled_by(multiply_windows, FORMS["positional"])
    w = W.clone()
    torch._dynamo.mark_dynamic(w, 2)
    assert_close(fn(X, w), FORMS["positional"](X, w))
    assert counts == [0]


def test_windows_of_one_group_that_are_too_large_stay(monkeypatch):
    """Windows are made for whole groups."""
    monkeypatch.setattr(convolution_as_product, "MOST_BYTES", 0)
    fn, counts = compiled_by(multiply_windows, lambda x, w: torch.conv1d(x, w, padding=15, groups=2))
    fn(X, torch.randn(16, 8, 31).bfloat16())
    assert counts == [0]
