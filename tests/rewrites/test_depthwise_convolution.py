"""Depthwise convolutions as sums of shifted products: results, gradients, what is stored, and what must stay."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code, run_fw_bw_and_get_code
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from backend_kwargs.rewrites.depthwise_convolution import sum_shifted
from tests.rewrites.on_a_cpu import compiled_by

X, W, B = torch.randn(2, 6, 11), torch.randn(6, 1, 4), torch.randn(6)
IMAGE, FILTER = torch.randn(2, 6, 7, 9), torch.randn(6, 1, 3, 2)


def causal(x, w, b=None):
    return F.silu(F.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=w.shape[0])[..., : x.shape[-1]])


FORMS = {
    "positional": lambda x, w, b: torch.conv1d(x, w, None, 1, 2, 1, 6),
    "by keywords": lambda x, w, b: F.conv1d(groups=6, weight=w, input=x, padding=[3], dilation=(2,), bias=b),
    "same": lambda x, w, b: F.conv1d(x, w, b, padding="same", groups=6),
    "valid": lambda x, w, b: F.conv1d(x, w, b, padding="valid", groups=6, stride=3),
    "more padding than the kernel reaches": lambda x, w, b: F.conv1d(x, w, padding=7, groups=6),
    "written": lambda x, w, b: F.conv1d(x, w, b, groups=6).mul_(2).relu_(),
    "viewed": lambda x, w, b: F.conv1d(x, w, groups=6).view(2, 48),
    "one number": lambda x, w, b: F.conv1d(x, w[..., :1], groups=6),
    "one channel": lambda x, w, b: F.conv1d(x[:, :1], w[:1], b[:1]),
    "causal, returned": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11],
    "causal, turned": lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11].mT.relu() + x.mT,
    "a long window": lambda x, w, b: F.conv2d(IMAGE, FILTER.repeat(1, 1, 11, 1)[..., :1], padding=(16, 0), groups=6),
    "several results of a channel": lambda x, w, b: F.conv1d(x[:, :3], w, b, groups=3, padding=2),
    "several results, images": lambda x, w, b: F.conv2d(IMAGE[:, :2], FILTER, b, padding=1, groups=2).relu(),
    "images": lambda x, w, b: F.conv2d(IMAGE, FILTER, b, padding=(2, 0), stride=(1, 2), dilation=(2, 3), groups=6),
    "images, causal": lambda x, w, b: F.conv2d(IMAGE, FILTER, padding=(0, 1), groups=6)[..., :9],
    "volumes": lambda x, w, b: F.conv3d(IMAGE[..., None], FILTER[..., None], padding=1, groups=6),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form):
    """Each spelling of the call, with what may follow it, has results and gradients of eager in its layout."""
    args = [each.clone().requires_grad_() for each in (X, W, B)]
    fn, counts = compiled_by(sum_shifted, FORMS[form])
    found, wanted = fn(*args), FORMS[form](*args)
    assert_close(found, wanted)
    assert (found.stride(), counts) == (wanted.stride(), [1])
    if wanted.requires_grad:
        options = {"allow_unused": True, "materialize_grads": True}
        grads = [torch.autograd.grad(each.square().sum(), args, **options) for each in (found, wanted)]
        assert_close(*grads, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own, for dual numbers
def test_tangents_of_forward_mode():
    """A graph with dual numbers is left as it is, and they keep their tangents."""

    def fn(x):
        with dual_level():
            return unpack_dual(F.conv1d(make_dual(x, x), W, groups=6)).tangent

    compiled, counts = compiled_by(sum_shifted, fn)
    assert_close(compiled(X), fn(X))
    assert counts == [0]


def layout(result):
    return [stride for stride, size in zip(result.stride(), result.shape, strict=True) if size > 1]


@settings(max_examples=60, deadline=None)
@given(
    dims=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
    stride=st.sampled_from([(1, 1, 1), (1, 1, 1), (2, 1, 1), (3, 2, 1)]),
    padding=st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)),
    last=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_no_less_exact_than_eager(dims, kernel, stride, padding, dilation, last, bias, dtype, seed):
    """The result, in eager's layout, and the gradients are as near to float64 as eager's."""
    torch.manual_seed(seed)
    x, w = torch.randn(2, 5, *(9, 6, 5)[:dims]), torch.randn(5, 1, *kernel[:dims])
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
    args = [each.to(dtype).requires_grad_() for each in (x, w, *([torch.randn(5)] if bias else []))]
    wide = [each.detach().double().requires_grad_() for each in args]

    def call(x, w, b=None):
        return getattr(F, f"conv{dims}d")(x, w, b, stride[:dims], padding[:dims], dilation[:dims], 5)

    fn, counts = compiled_by(sum_shifted, call)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_nothing_between_is_stored(dtype, last):
    """One kernel reads what a causal convolution is of where it is, and writes what follows: nothing padded or wide."""
    x = X.mT.contiguous().mT if last else X
    fn, counts = compiled_by(sum_shifted, causal, inductor=True)
    args = [each.to(dtype) for each in (x, W, B)]
    with torch.no_grad():
        found, (code,) = run_and_get_code(fn, *args)
        wanted = causal(*(each.double() for each in args))
    assert_close(found.double(), wanted, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2)
    assert (code.count("= empty_strided_cpu("), code.count("async_compile.cpp_pybinding("), counts) == (1, 1, [1])


@pytest.mark.parametrize("training", [False, True])
def test_operands_are_computed_once(training):
    """What leads to operands, or to gradients, is computed once."""
    fn, _ = compiled_by(sum_shifted, lambda x, w: F.gelu(F.conv1d(F.gelu(x), w.erf(), groups=6)), inductor=True)
    args = [each.clone().requires_grad_(training) for each in (X, W.repeat(1, 1, 2))]
    _, codes = (run_fw_bw_and_get_code if training else run_and_get_code)(lambda: fn(*args))
    assert str(codes).count("erf(") <= 10


def strided(x, w, b):
    return torch.as_strided(F.conv1d(x, w, b, padding=3, groups=6)[..., :11], (2, 6, 5), (84, 14, 2)).relu()


# What computes with the part of a causal convolution that is read, and whether only that part is computed.
READERS = {
    "an activation": (causal, True),
    "after a view": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[:, :, :11].mT.relu(), True),
    "from the end": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :-3] * 2, False),
    "written": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11].mul_(2).sum(), True),
    "returned": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11], False),
    "a view is returned": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11].mT, False),
    "by strides": (strided, False),
    "in a graph of its own": (
        lambda x, w, b: checkpoint(torch.relu, F.conv1d(x, w, b, padding=3, groups=6)[..., :11], use_reentrant=False),
        False,
    ),
    "more": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :12].relu(), False),
    "other channels": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[:, :3, :11].relu(), False),
    "channels alone": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[:, :-3].relu(), False),
    "from another start": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., 3:].relu(), False),
    "in steps": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6)[..., :11:2].relu(), False),
    "with a stride": (lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=6, stride=2)[..., :4].relu(), False),
}


@pytest.mark.parametrize("name", READERS)
def test_only_what_is_read(name):
    """Of a causal convolution only what is read is computed, unless its strides are seen."""
    call, shorter = READERS[name]
    graphs = []

    def backend(gm, inputs):
        graphs.append(sum_shifted(gm, inputs).gm)
        return graphs[0].forward

    torch._dynamo.reset()
    found, wanted = torch.compile(call, backend=backend)(X, W, B), call(X, W, B)
    assert_close(found, wanted)
    assert found.stride() == wanted.stride()
    assert [node.args[1] for node in graphs[0].graph.nodes if node.target is F.pad] == [[3, 0 if shorter else 3]]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_lengths_that_vary(training):
    """One graph serves other batches and lengths, of which only what is read is computed."""
    w = W.clone().requires_grad_(training)
    fn, counts = compiled_by(sum_shifted, causal, inductor=True)
    for batch, length in ((2, 11), (3, 5), (4, 40)):
        x = torch.randn(batch, 6, length)
        torch._dynamo.mark_dynamic(x, (0, 2))
        found, wanted = fn(x, w, B), causal(x, w, B)
        assert_close(found, wanted)
        if training:
            assert_close(*(torch.autograd.grad(each.sum(), w) for each in (found, wanted)), atol=1e-4, rtol=1e-4)
    assert counts == [1]


def test_autocast():
    """Under autocast operands are rounded as for the convolution, and so is the result."""

    def call(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv1d(x, w, b, groups=6)

    fn, counts = compiled_by(sum_shifted, call)
    found, wanted = fn(X, W, B), call(X, W, B)
    assert_close(found, wanted, atol=1e-6, rtol=8e-3)
    assert (found.dtype, counts) == (torch.bfloat16, [1])


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("at", range(3), ids=["input", "weight", "bias"])
def test_values_that_are_not_finite(at, value):
    """They spread as in eager; only where padding meets an infinite weight may eager leave its products out."""
    args = [X.clone(), W.clone(), B.clone()]
    args[at].view(-1)[2] = float(value)
    fn, counts = compiled_by(sum_shifted, causal)
    found, wanted = fn(*args), causal(*args)
    differs = found.isnan() & ~wanted.isnan()
    assert not differs.any() or (at == 1 and not differs[:, 1:].any() and not differs[..., 3:].any())
    assert_close(torch.where(differs, wanted, found), wanted, equal_nan=True)
    assert counts == [1]


# What must not match.
NEAR_MISSES = {
    "wider groups": lambda x, w, b: F.conv1d(x, w.expand(6, 2, 4), groups=3),
    "no groups": lambda x, w, b: F.conv1d(x[:, :1], w),
    "a large window": lambda x, w, b: F.conv1d(x, w.repeat(1, 1, 17)[..., :65], groups=6, padding=32),
    "many numbers of an image": lambda x, w, b: F.conv2d(IMAGE, torch.ones(6, 1, 6, 6), groups=6),
    "without a batch": lambda x, w, b: F.conv1d(x[0], w, groups=6),
    "float64": lambda x, w, b: F.conv1d(x.double(), w.double(), groups=6),
    "transposed": lambda x, w, b: F.conv_transpose1d(x, w, groups=6),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    """Other convolutions stay as they are."""
    fn, counts = compiled_by(sum_shifted, NEAR_MISSES[name])
    assert_close(fn(X, W, B), NEAR_MISSES[name](X, W, B))
    assert counts == [0]


def test_a_long_window_in_training():
    """It stays as it is: each number of its gradient would be a sum over the whole result."""
    fn, counts = compiled_by(sum_shifted, lambda x, w: F.conv1d(x, w, groups=6, padding=16))
    long = W.repeat(1, 1, 9)
    for training in (True, False):
        fn(X, long.clone().requires_grad_(training))
    assert counts == [0, 1]


def copied(x, w):
    y = F.conv1d(x, w, padding=3, groups=6)[..., :11]
    z = y.contiguous()
    z.mul_(2)
    return y.sin() + z


def reshaped(x, w):
    y = F.conv1d(x, w, padding=3, groups=6)[..., :11]
    z = y.reshape(2, -1)
    z.relu_()
    return y.reshape(-1) + z.view(-1)


BY_LAYOUT = {
    "copied, then written": copied,
    "reshaped, then written": reshaped,
    "turned in place": lambda x, w: F.conv1d(x, w, groups=6).transpose_(1, 2),
    "shorter than its padding": lambda x, w: F.conv1d(x[..., :1], w[..., :1].expand(-1, -1, 5), padding=2, groups=6)[
        ..., :-1
    ].relu(),
    "as many as a mask lets through": lambda x, w: F.conv1d(x[x[:, 0, 0] < 9], w, groups=6).relu(),
}


@pytest.mark.parametrize("form", BY_LAYOUT)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_what_depends_on_the_layout_is_eagers(form):
    """A copy that another layout would make a view stays one, and sizes that are not known are no error."""
    fn, _ = compiled_by(sum_shifted, BY_LAYOUT[form])
    found, wanted = fn(X, W), BY_LAYOUT[form](X, W)
    assert_close(found, wanted)
    assert found.stride() == wanted.stride()
