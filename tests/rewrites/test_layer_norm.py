"""The gradients of layer norm as one operator."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import backend_kwargs
from tests.rewrites.lowering import Changed, gradients

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
NAME = "layer_norm_backward"


def agree(changed, fn, args, dtype):
    """Raise unless results and gradients equal float64's up to the rounding of `dtype`, with eager's dtypes."""
    got, eager = gradients(changed, args), gradients(fn, args)
    want = gradients(fn, [arg.double() for arg in args])
    for one, plain, exact in zip(got, eager, want, strict=True):
        assert (one.dtype, one.shape) == (plain.dtype, plain.shape)
        own, scale = (plain.double() - exact).abs().max(), exact.abs().max()
        assert (one.double() - exact).abs().max() <= 2 * own + 8 * torch.finfo(dtype).eps * scale + 1e-5


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    columns=st.integers(2, 70),
    bias=st.booleans(),
    eps=st.sampled_from([1e-5, 1e-2]),
    shift=st.sampled_from([0.0, 30.0]),
    residual=st.booleans(),
    seed=st.integers(0, 9),
)
def test_computes_the_same(dtype, sizes, columns, bias, eps, shift, residual, seed):
    """Result and gradients agree with float64, for any sizes, with a bias or without, and far from zero."""
    torch.manual_seed(seed)
    x, weight = (torch.randn(*sizes, columns) + shift).to(dtype), torch.randn(columns).to(dtype)
    args = [x, weight, *([torch.randn(columns).to(dtype)] if bias else [])]

    def fn(x, weight, bias=None):
        made = F.layer_norm(x, (columns,), weight, bias, eps)
        return ((made + x if residual else made).sin()).sum()

    changed = Changed(fn, NAME)
    agree(changed, fn, args, dtype)
    assert changed.counts[NAME] == 1


W, B = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)


def without_gradients(call):
    with torch.no_grad():
        return call()


NEAR = {
    "no weight": lambda x: F.layer_norm(x, (6,)),
    "frozen": lambda x: F.layer_norm(x, (6,), W.detach(), B.detach()),
    "two dimensions": lambda x: F.layer_norm(x, (4, 6), torch.outer(W[:4], W)),
    "another dtype": lambda x: F.layer_norm(x.double(), (6,), W.double()),
    "columns apart": lambda x: F.layer_norm(x.transpose(1, 2), (4,), W[:4]),
    "RMS norm": lambda x: F.rms_norm(x, (6,), W),
    "group norm": lambda x: F.group_norm(x, 2, W[:4]),
    "no gradients": lambda x: F.layer_norm(x.detach(), (6,), W.detach()) + x,
    "an input without gradients": lambda x: F.layer_norm(x.detach(), (6,), W, B) + x,
    "under no_grad": lambda x: without_gradients(lambda: F.layer_norm(x, (6,), W, B)) + x,
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Other norms, and layer norms without these gradients, stay unchanged."""
    changed, x = Changed(lambda x: fn(x).sum().to(x.dtype), NAME), torch.randn(2, 4, 6)
    torch.testing.assert_close(gradients(changed, [x]), gradients(lambda x: fn(x).sum().to(x.dtype), [x]))
    assert changed.counts[NAME] == 0


def test_a_weight_of_another_dtype_stays():
    """A norm of half-precision rows by weights in float32 is no case of the kernel."""
    fn = lambda x: F.layer_norm(x.bfloat16(), (6,), W, B)  # noqa: E731
    changed, x = Changed(fn, NAME), torch.randn(2, 4, 6, requires_grad=True)
    torch.testing.assert_close(changed(x), fn(x), rtol=2e-2, atol=2e-2)
    assert changed.counts[NAME] == 0


def of_aten(grad, x, weight, bias, mask=(True, True, True), flat=False):
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, 1e-5)
    mean, rstd = (each.squeeze(-1) if flat else each for each in (mean, rstd))
    return torch.ops.aten.native_layer_norm_backward(grad, x, weight.shape, mean, rstd, weight, bias, [*mask])


def without_bias(grad, x, weight, bias):
    return of_aten(grad, x, weight, None, (True, True, False))[:2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_are_called(dtype):
    """ATen's own gradients, as compiled autograd calls them, are replaced by the operator and agree with float64."""
    args = [*torch.randn(2, 3, 5, 16), *torch.randn(2, 16)]
    changed = Changed(of_aten, NAME)
    got = changed(*(arg.to(dtype) for arg in args))
    want = of_aten(*(arg.to(dtype).double() for arg in args))
    assert [each.dtype for each in got] == [dtype] * 3
    torch.testing.assert_close([each.double() for each in got], [*want], rtol=1e-2, atol=20 * torch.finfo(dtype).eps)
    assert changed.operators() == ["layer_norm_backward"]


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(without_bias, id="no bias"),
        pytest.param(lambda g, x, w, b: of_aten(g, x, w, b, (True, True, False))[:2], id="not of the bias"),
    ],
)
def test_two_gradients_that_are_called(fn):
    """The gradient of a bias may be missing."""
    args = [*torch.randn(2, 5, 5, 16), *torch.randn(2, 16)]
    changed = Changed(fn, NAME)
    torch.testing.assert_close([*changed(*args)], [*fn(*args)])
    assert changed.operators() == ["layer_norm_backward"]


def test_gradients_that_are_differentiated():
    """ATen's gradients can be differentiated again, and ours cannot, so these calls stay."""

    def fn(*args):
        return sum(each.square().sum() for each in of_aten(*args))

    args = [*torch.randn(2, 3, 4, 8), *torch.randn(2, 8)]
    changed = Changed(fn, NAME)
    torch.testing.assert_close(gradients(changed, args), gradients(fn, args), rtol=1e-3, atol=1e-3)
    assert changed.counts[NAME] == 0


CALLED = {
    "not of the weight": lambda g, x, w, b: of_aten(g, x, w, b, (True, False, True))[::2],
    "rows of another shape": lambda g, x, w, b: of_aten(g, x, w, b, flat=True),
    "another dtype": lambda g, x, w, b: of_aten(g.double(), x.double(), w.double(), b.double()),
    "two dimensions": lambda g, x, w, b: of_aten(g, x, torch.outer(w[:5], w), torch.outer(b[:5], b)),
    "rows apart": lambda g, x, w, b: of_aten(g, x.transpose(0, 1), w, b),
}


@pytest.mark.parametrize("fn", CALLED.values(), ids=CALLED)
def test_gradients_that_stay(fn):
    """Calls of ATen's gradients that the kernel does not take stay as they are."""
    args = [*torch.randn(2, 5, 5, 16), *torch.randn(2, 16)]
    changed = Changed(fn, NAME)
    torch.testing.assert_close([*changed(*args)], [*fn(*args)])
    assert changed.counts[NAME] == 0


def test_inference_stays():
    """Without gradients nothing is replaced."""
    norm, x = nn.LayerNorm(8), torch.randn(4, 8)
    changed = Changed(norm, NAME)
    with torch.no_grad():
        torch.testing.assert_close(changed(x), norm(x))
    assert changed.counts[NAME] == 0


def test_compiled():
    """Inductor compiles the forward pass, the gradients are one operator, and training continues as in eager."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.LayerNorm(32))
    x = torch.randn(8, 16)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=(NAME,)))
    for _ in range(2):
        got, want = (torch.autograd.grad(fn(x).square().sum(), list(model.parameters())) for fn in (compiled, model))
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
    (graph,) = backend_kwargs.report(compiled).graphs
    assert graph.rewritten == {NAME: 2}
    assert not any("backend_kwargs.layer_norm." in code.source for code in graph.codes)


@pytest.mark.parametrize(("columns", "count"), [(8192, 1), (8193, 0)])
def test_the_longest_row(columns, count):
    """A row of 8192 numbers fits into one program; a longer one stays."""
    fn = lambda x, w: F.layer_norm(x, (columns,), w).sin().sum()  # noqa: E731
    changed, args = Changed(fn, NAME), [torch.randn(2, columns), torch.randn(columns)]
    torch.testing.assert_close(gradients(changed, args), gradients(fn, args), rtol=1e-3, atol=1e-3)
    assert changed.counts[NAME] == count


def test_dynamic_rows():
    """The number of rows may vary."""
    norm = nn.LayerNorm(8)
    changed = Changed(norm, NAME)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8, requires_grad=True)
        got, want = (torch.autograd.grad(fn(x).sin().sum(), [x, norm.weight]) for fn in (changed, norm))
        torch.testing.assert_close(got, want)
    assert changed.counts[NAME] == 2
