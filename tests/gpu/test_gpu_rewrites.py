"""Rewrites on a GPU: the libraries' kernels compared with float64, layouts, CUDA graphs, and missing kernels."""

import re
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch._inductor.utils import run_and_get_code

from backend_kwargs import make_backend, report
from backend_kwargs.rewrites import attention, convolution, linear_activation
from backend_kwargs.rewrites.grouped_convolution import ACTIVATIONS, depthwise_norm, grouped_convolution
from backend_kwargs.rewrites.matching import _without_kernel
from backend_kwargs.rewrites.stem_convolution import stem_convolution
from tests.rewrites.calls import COMPILED, check
from tests.rewrites.test_drawn_attention import INFERENCE
from tests.rewrites.test_drawn_attention import PROGRAMS as ATTENTION
from tests.rewrites.test_drawn_calls import PROGRAMS, options

LAST = torch.channels_last
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def _every_kernel_is_tried():
    _without_kernel.clear()


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def close(got, want, dtype):
    """Check that results agree within the dtype's rounding of the largest value."""
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-6)
    assert error < TOLERANCE[dtype], float(error)


def exact(args):
    """Return the arguments in float64 on the CPU."""
    return [a.double().cpu() if isinstance(a, torch.Tensor) and a.is_floating_point() else
            a.cpu() if isinstance(a, torch.Tensor) else a for a in args]  # fmt: skip


def conv_args(dtype, channels=16, out=32, kernel=3, groups=1, residual=False):
    x = normal(4, channels, 14, 14, dtype=dtype).contiguous(memory_format=LAST)
    w = normal(out, channels // groups, kernel, kernel, dtype=dtype).contiguous(memory_format=LAST)
    z = [normal(4, out, 14, 14, dtype=dtype).contiguous(memory_format=LAST)] if residual else []
    return [x, w, *z, normal(out, dtype=dtype), [1, 1], [kernel // 2] * 2, [1, 1], groups]


def linear_args(dtype, rows=64, width=48, inner=96):
    return [normal(rows, width, dtype=dtype), normal(inner, width, dtype=dtype), normal(inner, dtype=dtype)]


def attention_args(dtype, tokens, *, bias):
    qkv = (normal(2, 4, tokens, 32, dtype=dtype) for _ in range(3))
    return [*qkv, normal(4, tokens, tokens, dtype=dtype) if bias else None, 0.2]


def window_args(dtype):
    qkv = (normal(12, 3, 49, 32, dtype=dtype) for _ in range(3))
    return [*qkv, normal(4, 3, 49, 49, dtype=dtype), 0.2]


CALLS = {
    "conv": lambda dtype: (convolution.conv_relu, conv_args(dtype)),
    "conv 1x1": lambda dtype: (convolution.conv_relu, conv_args(dtype, kernel=1)),
    "conv groups": lambda dtype: (convolution.conv_relu, conv_args(dtype, groups=4)),
    "conv odd channels": lambda dtype: (convolution.conv_relu, conv_args(dtype, channels=3, out=5)),
    "conv residual": lambda dtype: (convolution.conv_add_relu, conv_args(dtype, residual=True)),
    "linear relu": lambda dtype: (linear_activation.linear_relu, linear_args(dtype)),
    "linear gelu": lambda dtype: (linear_activation.linear_gelu, linear_args(dtype)),
    "linear odd": lambda dtype: (linear_activation.linear_gelu, linear_args(dtype, 3, 7, 5)),
    "attention bias": lambda dtype: (attention.attention, attention_args(dtype, 49, bias=True)),
    "attention bias repeats": lambda dtype: (attention.attention, window_args(dtype)),
    "attention": lambda dtype: (attention.attention, attention_args(dtype, 64, bias=False)),
    "attention tiles of keys": lambda dtype: (attention.attention, attention_args(dtype, 197, bias=True)),
    "attention many keys": lambda dtype: (attention.attention, attention_args(dtype, 300, bias=True)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_operator(name, dtype):
    """Each operator's CUDA kernel gives the composite kernel's float64 result, with the fake kernel's strides."""
    operator, args = CALLS[name](dtype)
    got = operator(*args)
    want = operator(*exact(args)) if "linear" not in name and "conv" not in name else composite(operator)(*exact(args))
    close(got.cpu(), want, dtype)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert fake.stride() == got.stride()


def composite(operator):
    """Return the operator in terms of ATen's operators, which accept float64."""
    by_aten = convolution.convolution
    return {
        convolution.conv_relu: lambda x, w, *geometry: by_aten(x, w, *geometry).relu(),
        convolution.conv_add_relu: lambda x, w, z, *geometry: (by_aten(x, w, *geometry) + z).relu(),
        linear_activation.linear_relu: lambda x, w, bias: F.linear(x, w, bias).relu(),
        linear_activation.linear_gelu: lambda x, w, bias: F.gelu(F.linear(x, w, bias), approximate="tanh"),
    }[operator]


GROUPED = {
    "groups of 24": (96, 96, 4, 3, 1),
    "stride": (96, 96, 4, 3, 2),
    "groups of 4": (32, 64, 8, 3, 1),
    "groups of 20": (160, 640, 8, 3, 1),
    "two groups": (256, 512, 2, 3, 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED)
def test_grouped_convolution(sizes, dtype):
    """Our kernel for convolutions in groups gives float64's result, with the fake kernel's strides."""
    ins, outs, groups, kernel, stride = sizes
    x = normal(4, ins, 15, 14, dtype=dtype).contiguous(memory_format=LAST)
    w = normal(outs, ins // groups, kernel, kernel, dtype=dtype).contiguous(memory_format=LAST)
    args = [x, w, normal(outs, dtype=dtype), [stride] * 2, [kernel // 2] * 2, [1, 1], groups]
    got = grouped_convolution(*args)
    close(got.cpu(), convolution.convolution(*exact(args)), dtype)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = grouped_convolution(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    assert fake.stride() == got.stride()
    assert not _without_kernel


DEPTHWISE = {
    "3x3": (70, 70, 3, 1, "relu"),
    "7x7": (64, 64, 7, 1, "gelu"),
    "stride": (64, 64, 5, 2, "silu"),
    "several results of a channel": (24, 48, 3, 2, "hardswish"),
    "one number": (64, 64, 1, 1, ""),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", DEPTHWISE.values(), ids=DEPTHWISE)
def test_depthwise_norm(sizes, dtype):
    """Our kernel for depthwise convolutions, a norm and an activation gives float64's result, in the usual layout."""
    ins, outs, kernel, stride, activation = sizes
    x = normal(4, ins, 15, 14, dtype=dtype).contiguous(memory_format=LAST)
    w = normal(outs, 1, kernel, kernel, dtype=dtype)
    scale, shift = normal(outs, dtype=torch.float32), normal(outs, dtype=torch.float32)
    geometry = [stride] * 2, [kernel // 2] * 2, [1, 1]
    got = depthwise_norm(x, w, scale, shift, *geometry, activation)
    made = convolution.convolution(*exact([x, w, None, *geometry, ins]))
    scaled = made * scale.cpu().double().view(-1, 1, 1) + shift.cpu().double().view(-1, 1, 1)
    close(got.cpu(), ACTIVATIONS[activation](scaled), dtype)
    assert got.is_contiguous(memory_format=LAST)
    assert not _without_kernel


STEMS = {
    "3x3": (3, 24, 3, 2, "relu"),
    "7x7": (3, 64, 7, 2, "silu"),
    "four channels": (4, 320, 3, 1, ""),
    "one channel": (1, 5, 5, 1, "gelu"),
}


@pytest.mark.parametrize("layout", [LAST, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", STEMS.values(), ids=STEMS)
def test_stem_convolution(sizes, dtype, layout):
    """Our kernel for images of few channels in any layout gives float64's result, channels last."""
    ins, outs, kernel, stride, activation = sizes
    x = normal(4, ins, 33, 30, dtype=dtype).contiguous(memory_format=layout)
    w = normal(outs, ins, kernel, kernel, dtype=dtype)
    scale, shift = normal(outs, dtype=torch.float32), normal(outs, dtype=torch.float32)
    geometry = [stride] * 2, [kernel // 2] * 2, [1, 1]
    got = stem_convolution(x, w, scale, shift, *geometry, activation)
    made = convolution.convolution(*exact([x, w, None, *geometry, 1]))
    scaled = made * scale.cpu().double().view(-1, 1, 1) + shift.cpu().double().view(-1, 1, 1)
    close(got.cpu(), ACTIVATIONS[activation](scaled), dtype)
    assert got.is_contiguous(memory_format=LAST)
    assert not _without_kernel


@pytest.mark.parametrize("groups", [2, 8], ids=["groups", "each channel"])
def test_grouped_convolution_of_many_pixels(groups):
    """More tiles than the second dimension of CUDA's grid may have are computed by the kernel too."""
    x = normal(18, 8, 1024, 1024).contiguous(memory_format=LAST)
    args = [x, normal(8, 8 // groups, 1, 1), None, [1, 1], [0, 0], [1, 1], groups]
    close(grouped_convolution(*args), convolution.convolution(*args), torch.bfloat16)
    assert not _without_kernel


@pytest.mark.parametrize("keys", [49, 300])
def test_a_query_that_sees_no_key(keys):
    """It gets 0 from `attention`, as from scaled_dot_product_attention, whichever kernel runs."""
    q, k, v = normal(2, 4, 49, 32), normal(2, 4, keys, 32), normal(2, 4, keys, 32)
    bias = normal(49, keys)
    bias[3] = -float("inf")
    got = attention.attention(q, k, v, bias, 0.2)
    assert not got[:, 3].any()
    close(got, F.scaled_dot_product_attention(q, k, v, bias, scale=0.2).transpose(1, 2), torch.bfloat16)


def test_a_product_of_nothing():
    """A linear layer without input features gives the activation of its bias."""
    x, w, b = normal(4, 0), normal(8, 0), normal(8)
    fn = lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh")  # noqa: E731
    got, _, _ = code_of(fn, (x, w, b), ("linear_activation",))
    close(got, fn(x, w, b), torch.bfloat16)


@pytest.mark.parametrize("shifted", [False, True], ids=["bias", "bias and masks"])
def test_windows_of_a_library(shifted):
    """In windows our kernel takes the place of scaled_dot_product_attention, as timm's Swin calls it."""
    qkv = normal(12, 49, 3, 4, 32).permute(2, 0, 3, 1, 4)
    table, mask = normal(4, 49, 49), torch.where(normal(4, 1, 49, 49) > 1, -100.0, 0.0).bfloat16()

    def attend(qkv, table, mask):
        q, k, v = qkv.unbind(0)
        bias = table.unsqueeze(0)
        if shifted:
            bias = bias + mask.view(1, 4, 1, 49, 49).expand(3, -1, 4, -1, -1).reshape(-1, 4, 49, 49)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)).transpose(1, 2).flatten(2)

    got, code, _ = code_of(attend, (qkv, table, mask), ("attention",))
    assert code.count("torch.ops.backend_kwargs.attention.default(") == 1
    assert not _without_kernel
    close(got.cpu(), attend(*exact([qkv, table, mask])), torch.bfloat16)


def test_no_engine():
    """If the library has no kernel, here for float64, the composite kernel runs, later without another attempt."""
    args = [a.double() if isinstance(a, torch.Tensor) else a for a in conv_args(torch.float32)]
    first, second = convolution.conv_relu(*args), convolution.conv_relu(*args)
    want = convolution.convolution(*args).relu()
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want)


def convs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU()
    )
    return model.to("cuda", dtype).eval().to(memory_format=LAST)


def code_of(fn, args, names, **options):
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", {"rewrites": names, **options}))
    with torch.no_grad():
        result, codes = run_and_get_code(compiled, *args)
    return result, codes[0], compiled


def stack(*channels, groups=1):
    """Return convolutions with norm and ReLU from each number of channels to the next."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(one, other, 3, padding=1, bias=False, groups=groups), nn.BatchNorm2d(other), nn.ReLU())
        for one, other in pairwise(channels)
    ]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16).eval().to(memory_format=LAST)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_masks_that_are_expanded_have_a_fused_kernel(training):
    """Attention with a mask that is expanded over the keys is one call, and products of float32 without the rewrite."""
    q, k, v = (normal(4, 8, 128, 64).requires_grad_(training) for _ in range(3))
    rows = torch.arange(128, device="cuda").view(1, 1, 128, 1)

    def fn(q, k, v, rows):
        mask = (rows >= 0).expand(4, 1, 128, 128)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sin()

    def seen(names):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", {"rewrites": names}))

        def run():
            result = compiled(q, k, v, rows)
            return (result, *(torch.autograd.grad(result.float().square().sum(), (q, k, v)) if training else ()))

        with torch.set_grad_enabled(training):
            return run_and_get_code(run)

    plain, codes = seen(())
    assert "extern_kernels.bmm" in codes[0]
    fused, codes = seen(("attention_mask",))
    assert not any("extern_kernels.bmm" in code for code in codes)
    assert "_scaled_dot_product" in codes[0]
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("weighted", [False, True], ids=["two factors", "three factors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contraction(dtype, weighted):
    """A broadcast product, summed, and its gradients agree with float64, under autocast too."""
    args = [normal(2, 96, 4, 64, dtype=dtype), normal(2, 80, 4, 64, dtype=dtype), normal(2, 96, 80, 4, dtype=dtype)]
    args = [each.requires_grad_() for each in args]

    def fn(a, b, c):
        made = a[:, :, None] * b[:, None]
        return (made * c[..., None] if weighted else made).sum(-1, dtype=a.dtype) + c

    grad = torch.randn(2, 96, 80, 4, dtype=dtype, device="cuda")
    for autocast in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            found, compiled = trained(fn, args, ("contraction",), grad)
        for one, want in zip(found, in_float64(fn, args, grad), strict=True):
            close(one.cpu(), want, dtype)
        assert report(compiled).graphs[0].rewritten == {"contraction": 1}


def scan(states, steps, decay):
    """Return the outputs of a scan over tokens, as in a state-space model without its own kernels."""
    state, outputs = states, []
    for at in range(steps.shape[1]):
        state = state * decay + steps[:, at, None, :]
        outputs.append(torch.matmul(state, steps[:, at].unsqueeze(-1)))
    return torch.stack(outputs, 1)


def test_matrices_times_vectors_are_fused():
    """No product is left in the code, and there are fewer kernels."""
    args = normal(2, 512, 16), normal(2, 12, 16), normal(16).sigmoid()
    plain, before, _ = code_of(scan, args, ())
    fused, after, compiled = code_of(scan, args, ("matrix_vector",))
    assert "extern_kernels.bmm" in before
    assert "extern_kernels.bmm" not in after
    assert after.count(".run(") < before.count(".run(") + before.count("extern_kernels.bmm(")
    close(fused, plain, torch.bfloat16)
    assert report(compiled).graphs[0].rewritten == {"matrix_vector": 12}


def test_norms_are_folded_in_one_launch():
    """One kernel folds the norms of all convolutions of a graph."""
    model, x = stack(*[64] * 7), normal(8, 64, 28, 28).contiguous(memory_format=LAST)
    result, code, _ = code_of(model, (x,), ("convolution",))
    assert code.count("torch.ops.backend_kwargs.conv_relu.default(") == 6
    assert len(re.findall(r"\btriton_\w+\.run\(", code)) == 1
    with torch.no_grad():
        close(result, model(x), torch.bfloat16)


def test_groups_are_not_for_cudnn():
    """Convolutions with groups are no calls of cuDNN's fused kernels, which are slow there."""
    x = normal(8, 72, 28, 28).contiguous(memory_format=LAST)
    _, code, _ = code_of(stack(72, 72, groups=3), (x,), ("convolution",))
    assert "backend_kwargs.conv" not in code


def test_no_layout_copy():
    """There is no kernel between fused convolutions; Triton only folds the norm."""
    model, x = convs(), normal(8, 32, 28, 28).contiguous(memory_format=LAST)
    result, code, _ = code_of(model, (x,), ("convolution",))
    assert code.count("torch.ops.backend_kwargs.conv_relu.default(") == 2
    calls = [line for line in code.splitlines() if ".run(" in line and "triton_" in line]
    biggest = [line for line in calls if str(8 * 64 * 28 * 28) in line or str(8 * 32 * 28 * 28) in line]
    assert not biggest, calls
    with torch.no_grad():
        close(result, model(x), torch.bfloat16)


def test_cuda_graphs():
    """A CUDA graph replays fused calls with changing inputs."""
    model = convs()
    x = normal(8, 32, 28, 28).contiguous(memory_format=LAST)
    _, _, compiled = code_of(model, (x,), ("convolution",), **{"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(4):
            x = normal(8, 32, 28, 28).contiguous(memory_format=LAST)
            close(compiled(x).clone(), model(x), torch.bfloat16)
    assert "recorded" in str(report(compiled))


def test_updated_weights():
    """A norm folded at each call follows updates of its weights."""
    model, x = convs(), normal(8, 32, 28, 28).contiguous(memory_format=LAST)
    _, _, compiled = code_of(model, (x,), ("convolution",))
    with torch.no_grad():
        model[1].weight.mul_(3)
        model[0].weight.add_(0.1)
        close(compiled(x), model(x), torch.bfloat16)


@pytest.mark.parametrize("columns", [1000, 32001], ids=str)
def test_cross_entropy(columns):
    """With ignored targets the loss and the gradient agree with float64."""
    logits = normal(64, columns).requires_grad_()
    target = torch.randint(columns, (64, 2), device="cuda")[:, 0]  # its numbers are apart
    target[::3] = -100

    def loss(logits):
        return F.cross_entropy(logits.float(), target) * 3

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=make_backend("tmpl-inductor", rewrites=("cross_entropy",)))

    def step():
        made = compiled(logits)
        made.backward()
        return made

    got, codes = run_and_get_code(step)
    assert not any("torch.ops.backend_kwargs" in code for code in codes)  # Inductor launches the kernels
    exactly = logits.detach().double().requires_grad_()
    want = F.cross_entropy(exactly, target) * 3
    want.backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    close(logits.grad, exactly.grad, torch.bfloat16)
    assert report(compiled).graphs[0].rewritten == {"cross_entropy": 1}


def trained(fn, args, names, grad):
    """Return the result and the gradients of a compiled function, and the function."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", {"rewrites": names}))
    made = compiled(*args)
    return [made, *torch.autograd.grad(made, [a for a in args if a.requires_grad], grad)], compiled


def in_float64(fn, args, grad):
    """Return the result and the gradients of a function in float64, on the CPU."""
    args = [a.detach().double().cpu().requires_grad_(a.requires_grad) for a in args]
    made = fn(*args)
    return [made, *torch.autograd.grad(made, [a for a in args if a.requires_grad], grad.double().cpu())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 50, 768), (300, 1000), (70, 8192)], ids=str)
def test_layer_norm_backward(shape, dtype):
    """The gradients of layer norm agree with float64, with Inductor's own forward pass."""
    args = [normal(*size, dtype=dtype).requires_grad_() for size in (shape, shape[-1:], shape[-1:])]

    def fn(x, weight, bias):
        return F.layer_norm(x, shape[-1:], weight, bias)

    grad = normal(*shape, dtype=dtype)
    got, compiled = trained(fn, args, ("layer_norm_backward",), grad)
    for one, want in zip(got, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    (graph,) = report(compiled).graphs
    assert graph.rewritten == {"layer_norm_backward": 1}
    assert not _without_kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("period", [1, 4])
@pytest.mark.parametrize(("tokens", "width"), [(49, 32), (64, 64), (16, 20)])
def test_window_attention(tokens, width, period, dtype):
    """Attention with a learnt bias, and masks of shifted windows, agrees with float64, forward and backward."""
    x = normal(8, tokens, 3, 2, width, dtype=dtype).requires_grad_()
    bias = normal(2, tokens, tokens, dtype=dtype).requires_grad_()
    args = [x, bias, normal(period, tokens, tokens, dtype=dtype)]

    def fn(x, bias, masks):
        masks = masks.view(1, period, 1, tokens, tokens).expand(8 // period, -1, 2, -1, -1)
        added = bias.unsqueeze(0) + masks.reshape(-1, 2, tokens, tokens)
        q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2).flatten(2)

    grad = normal(8, tokens, 2 * width, dtype=dtype)
    got, compiled = trained(fn, args, ("window_attention",), grad)
    for one, want in zip(got, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"window_attention": 1}
    assert not _without_kernel


@torch.no_grad()
@pytest.mark.parametrize("keys", [144, 197])
def test_attention_with_aligned_rows_of_a_bias(keys):
    """A bias over more keys than our kernel takes goes to a library's kernel, with aligned rows."""
    q, k, v = (normal(4, keys, 3, 64).transpose(1, 2) for _ in range(3))
    bias = normal(1, 3, keys, keys)
    fn = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias)  # noqa: E731
    got, code, _ = code_of(fn, (q, k, v, bias), ("attention",))
    close(got.cpu(), fn(*exact((q, k, v, bias))), torch.bfloat16)
    assert "torch.ops.backend_kwargs.attention" in code


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [49, 196, 197])
def test_aligned_products(tokens, dtype):
    """Layers over unaligned numbers of tokens, and products of batches, agree with float64, forward and backward."""
    sizes = (4, tokens, 64), (96, tokens), (96,), (tokens, 96), (tokens,), (4, 30, tokens)
    args = [normal(*each, dtype=dtype).requires_grad_() for each in sizes]

    def fn(x, w, b, v, c, y):
        mixed = F.linear(F.gelu(F.linear(x.mT, w, b)), v, c).mT
        return torch.bmm(y, mixed)

    grad = normal(4, 30, 64, dtype=dtype)
    got, compiled = trained(fn, args, ("aligned_products",), grad)
    for one, want in zip(got, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"aligned_products": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fused_attention(dtype):
    """A head of keys for several of queries, of which one sees no key, agrees with float64, forward and backward."""
    shown = torch.ones(2, 1, 70, 70, device="cuda", dtype=torch.bool).tril()
    shown[1, 0, 0] = False
    args = [normal(2, heads, 70, 64, dtype=dtype).requires_grad_() for heads in (6, 1, 1)]

    def fn(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, shown.to(q.device))

    grad = normal(2, 6, 70, 64, dtype=dtype)
    got, compiled = trained(fn, args, ("fused_attention",), grad)
    for one, want in zip(got, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"fused_attention": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("rows", [700, 90_000], ids=["few", "many rows for an index"])
@torch.no_grad()
def test_scatter_reduce(rows, reduction, dtype):
    """Rows that are reduced into those of their indices agree with float64, by kernels that Inductor launches."""

    def fn(src, index):
        return src.new_ones(90, 100).scatter_reduce(0, index[:, None].expand_as(src), src, reduction)

    args = [normal(rows, 100, dtype=dtype), torch.randint(80, (rows,), device="cuda")]
    got, code, compiled = code_of(fn, args, ("scatter_reduce",))
    close(got.cpu(), fn(*exact(args)), dtype)
    assert "torch.ops.backend_kwargs" not in code
    assert report(compiled).graphs[0].rewritten == {"scatter_reduce": 1}


GATHERED = {  # of a table [500, width], indices [60, 7] and weights [60, 7]
    "bags": lambda t, i, w: F.embedding_bag(i, t, mode="sum"),
    "weighted bags": lambda t, i, w: F.embedding_bag(i, t, mode="sum", per_sample_weights=w),
    "means of padded bags": lambda t, i, w: F.embedding_bag(i, t, mode="mean", padding_idx=3),
    "experts": lambda t, i, w: (t[i.flatten()].view(*i.shape, -1) * w.sigmoid()[..., None]).sum(1),
    "mean of tokens": lambda t, i, w: F.embedding(i.int(), t).mean(-2),
}


@pytest.mark.parametrize(
    ("width", "dtype"), [(1, torch.float32), (100, torch.float16), (3000, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("form", GATHERED)
@torch.no_grad()
def test_gather_sum(form, width, dtype):
    """Sums of gathered rows agree with float64, by a kernel that Inductor launches."""
    fn = GATHERED[form]
    indices = torch.randint(500, (60, 7), device="cuda")
    indices[:2] = 3
    args = [normal(500, width, dtype=dtype), indices, normal(60, 7, dtype=dtype)]
    got, code, compiled = code_of(fn, args, ("gather_sum",))
    close(got.cpu(), fn(*exact(args)), dtype)
    assert "torch.ops.backend_kwargs" not in code
    assert report(compiled).graphs[0].rewritten == {"gather_sum": 1}


@torch.no_grad()
def test_sums_of_rows_of_the_host_stay():
    """Where a GPU is visible, tables in the host's memory are left to ATen."""
    args = normal(50, 16, dtype=torch.float32).cpu(), torch.randint(50, (6, 5))
    *_, compiled = code_of(lambda t, i: t[i].sum(1), args, ("gather_sum",))
    assert report(compiled).graphs[0].rewritten == {}


@torch.no_grad()
def test_gathered_row_that_does_not_exist():
    """An index that is too large makes its sum nan, and those of negative indices count from the end."""
    table = normal(50, 16)
    indices = torch.tensor([[0, 1], [49, 50], [-50, -1], [-51, 0]], device="cuda")
    got, *_ = code_of(lambda t, i: t[i].sum(1), (table, indices), ("gather_sum",))
    close(got[::2], table[indices[::2]].sum(1), torch.bfloat16)
    assert got[1::2].isnan().all()


def repeated(x, times=4):
    batch, heads, keys, width = x.shape
    return x[:, :, None].expand(batch, heads, times, keys, width).reshape(batch, heads * times, keys, width)


ATTENDED = {  # of q [batch, 8, 1, width], k and v [batch, 2, keys, width], and a mask of the keys
    "shared heads": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
    "repeated heads": lambda q, k, v, m: F.scaled_dot_product_attention(q, repeated(k), repeated(v), m),
    "no mask": lambda q, k, v, m: F.scaled_dot_product_attention(q, repeated(k), repeated(v)),
    "added": lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.to(q).log(), enable_gqa=True),
    "heads last": lambda q, k, v, m: F.scaled_dot_product_attention(
        *(x.mT.contiguous().mT if x is q else x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)),
        m, enable_gqa=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "keys", "width", "dtype"),
    [
        (1, 3000, 64, torch.bfloat16), (3, 700, 128, torch.float16), (200, 50, 80, torch.bfloat16),
        (2, 500, 256, torch.bfloat16), (2, 500, 256, torch.float32), (2, 900, 100, torch.float32),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("form", ATTENDED)
@torch.no_grad()
def test_decode_attention(form, batch, keys, width, dtype):
    """Attention of one query over a cache agrees with float64, by kernels that Inductor launches."""
    fn = ATTENDED[form]
    k, v = normal(2, batch, 2, keys, width, dtype=dtype)
    mask = (torch.rand(batch, 1, 1, keys, device="cuda") < 0.5) & (torch.arange(keys, device="cuda") < keys * 0.8)
    mask[..., 0] = True
    args = [normal(batch, 8, 1, width, dtype=dtype), k, v, mask]
    got, code, compiled = code_of(fn, args, ("decode_attention",))
    close(got.cpu(), fn(*exact(args)), dtype)
    assert not re.search(r"= (torch\.ops|aten)\.", code[code.index("def call") :])
    assert report(compiled).graphs[0].rewritten == {"decode_attention": 1}


@pytest.mark.parametrize("queries", [1, 5, 16])
@torch.no_grad()
def test_decoding_from_a_static_cache(queries):
    """A step writes its keys into the cache and reads it in place, also under CUDA graphs, token after token."""
    cache = normal(2, 2, 2, 400, 64)
    plain = cache.clone()

    def step(q, new, at, cache):
        k, v = cache
        k.index_copy_(2, at, new)
        v.index_copy_(2, at, new)
        seen = torch.arange(400, device="cuda") <= at[:, None]
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), seen[None, None])

    compiled = torch.compile(
        step, backend=make_backend("tmpl-inductor:cudagraphs", rewrites=("decode_attention",), clone_outputs=True)
    )
    for start in range(0, 160, 2 * queries):
        at = torch.arange(start, start + queries, device="cuda")
        q, new = normal(2, 8, queries, 64), normal(2, 2, queries, 64)
        close(compiled(q, new, at, cache), step(q, new, at, plain), torch.bfloat16)
    assert torch.equal(cache, plain)
    assert report(compiled).graphs[0].rewritten == {"decode_attention": 1}


@pytest.mark.parametrize("batch_first", [False, True], ids=["sequences first", "batches first"])
def test_multihead_attention(batch_first):
    """An encoder layer's gradients agree with float64, and no kernel copies queries, keys and values."""
    torch.manual_seed(0)
    # A ReLU in half precision takes another branch near 0, in eager too.
    made = partial(nn.TransformerEncoderLayer, 128, 4, 256, dropout=0.0, batch_first=batch_first, activation="gelu")
    layer = made().to("cuda", torch.bfloat16)
    x = normal(5, 6, 128)
    exactly = made().double()
    exactly.load_state_dict(layer.state_dict())
    compiled = torch.compile(layer, backend=make_backend("tmpl-inductor", rewrites=("multihead_attention",)))
    got, want = compiled(x), exactly(x.double().cpu())
    close(got.cpu(), want, torch.bfloat16)
    grad = torch.randn_like(got)
    grads = torch.autograd.grad(got, [*layer.parameters()], grad)
    exact_grads = torch.autograd.grad(want, [*exactly.parameters()], grad.double().cpu())
    for one, other in zip(grads, exact_grads, strict=True):
        close(one.cpu(), other, torch.bfloat16)
    graph, *_ = report(compiled).graphs
    assert graph.rewritten == {"multihead_attention": 1}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("channels", "size"), [(3, 16), (3, 14), (1, 4), (40, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_patches(channels, size, last, dtype):
    """Patches of images and their gradients agree with float64, in eager's layout, without a convolution."""
    x = normal(3, channels, 4 * size, 5 * size, dtype=dtype)
    x = x.contiguous(memory_format=LAST) if last else x
    args = [x, normal(24, channels, size, size, dtype=dtype), normal(24, dtype=dtype)]
    fn = lambda x, w, b: F.conv2d(x, w, b, stride=size)  # noqa: E731
    with torch.no_grad():
        got, code, _ = code_of(fn, args, ("patches",))
    assert got.stride() == fn(*args).stride()
    assert "convolution" not in code[code.index("def call") :].replace("aten.convolution]", "")
    args = [each.requires_grad_() for each in args]
    grad = torch.randn_like(got)
    found, compiled = trained(fn, args, ("patches",), grad)
    for one, want in zip(found, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"patches": 1}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(("channels", "kernel", "stride"), [(48, 128, 1), (16, 7, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_convolution_as_product(channels, kernel, stride, last, dtype):
    """A convolution in wide groups and its gradients agree with float64, in eager's layout."""
    x = normal(2, 4 * channels, 150, dtype=dtype)
    x = x.mT.contiguous().mT if last else x
    args = [x, normal(4 * channels, channels, kernel, dtype=dtype), normal(4 * channels, dtype=dtype)]
    args = [each.requires_grad_() for each in args]
    fn = lambda x, w, b: F.conv1d(x, w, b, stride, kernel // 2, groups=4)  # noqa: E731
    grad = torch.randn_like(fn(*args))
    found, compiled = trained(fn, args, ("convolution_as_product",), grad)
    assert found[0].stride() == grad.stride()
    for one, want in zip(found, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"convolution_as_product": 1}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_interpolation(last, dtype):
    """Convolutions of joined and interpolated images, and their gradients, agree with float64, in eager's layout."""
    layout = LAST if last else torch.contiguous_format
    images = [normal(2, 16, side, side, dtype=dtype).contiguous(memory_format=layout) for side in (32, 16, 8)]
    args = [each.requires_grad_() for each in (*images, normal(16, 48, 1, 1, dtype=dtype), normal(16, dtype=dtype))]

    def fn(*args):
        *images, w, b = args
        return F.conv2d(torch.cat([F.interpolate(each, (32, 32), mode="bilinear") for each in images], 1), w, b)

    grad = torch.randn_like(fn(*args))
    found, compiled = trained(fn, args, ("interpolation",), grad)
    assert found[0].stride() == grad.stride()
    for one, want in zip(found, in_float64(fn, args, grad), strict=True):
        close(one.cpu(), want, dtype)
    assert report(compiled).graphs[0].rewritten == {"interpolation": 1}


def test_memory_of_windows():
    """The windows of a speech encoder's positions, 393 MB, take no more than 256 MiB beside results of 6 MB."""
    x, w = normal(8, 768, 249), normal(768, 48, 128)
    _, _, compiled = code_of(lambda x, w: F.conv1d(x, w, padding=64, groups=16), (x, w), ("convolution_as_product",))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        compiled(x, w)
    assert torch.cuda.max_memory_allocated() - before < (256 << 20) + 40e6


def test_training_step_under_cuda_graphs():
    """A CUDA graph replays the kernel with changing inputs."""
    norm = nn.LayerNorm(256).to("cuda", torch.bfloat16)

    def fn(x):
        return norm(x).sin().square().mean()  # the mean of the squares alone has almost no gradient

    torch._dynamo.reset()
    options = {"rewrites": ("layer_norm_backward",), "triton.cudagraphs": True}
    compiled = torch.compile(fn, backend=make_backend("tmpl-inductor", options))
    for _ in range(4):
        x = normal(4, 64, 256).requires_grad_()
        (got,) = torch.autograd.grad(compiled(x), [x])
        got = got.clone()
        (want,) = torch.autograd.grad(fn(x), [x])
        close(got, want, torch.bfloat16)


@torch.no_grad()
def test_cache_that_is_updated_in_place_under_cuda_graphs():
    """A step of decoding writes its key into the cache and attends to it, also where a CUDA graph replays it."""

    def fn(q, key, cache, at):
        cache.index_copy_(2, at, key)
        mask = torch.arange(16, device="cuda")[None, None, None] <= at
        return F.scaled_dot_product_attention(q, cache, cache, attn_mask=mask)

    torch._dynamo.reset()
    compiled = torch.compile(
        fn, backend=make_backend("tmpl-inductor", rewrites=("decode_attention",), **{"triton.cudagraphs": True})
    )
    ours, theirs = (torch.zeros(4, 8, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for step in range(5):
        q, key, at = normal(4, 8, 1, 128), normal(4, 8, 1, 128), torch.tensor([step], device="cuda")
        close(compiled(q, key, ours, at), fn(q, key, theirs, at), torch.bfloat16)
        assert torch.equal(ours, theirs)
    assert report(compiled).graphs[0].rewritten == {"decode_attention": 1}


def test_packed_under_cuda_graphs():
    """Packed weights keep their address, so a CUDA graph uses updates of the originals."""
    layers = nn.ModuleList(nn.Linear(256, n) for n in (256, 64, 64)).to("cuda", torch.bfloat16)

    def fn(x):
        return [layer(x) for layer in layers]

    x = normal(16, 256)
    _, _, compiled = code_of(fn, (x,), ("packed",), **{"triton.cudagraphs": True})
    with torch.no_grad():
        for _ in range(3):
            layers[1].weight.add_(0.1)
            for got, want in zip(compiled(x), fn(x), strict=True):
                close(got, want, torch.bfloat16)


@pytest.mark.parametrize("name", PROGRAMS)
def test_drawn_calls(name):
    """Whatever call is drawn, the compiled code gives eager's numbers; float32 may be computed as TF32."""
    given = options(name)
    check(name, PROGRAMS[name], COMPILED, device="cuda", compiled=True, **{**given, "atol": max(given["atol"], 2e-3)})


@pytest.mark.parametrize("name", ATTENTION)
def test_drawn_attention(name):
    """The same of attention, norms and rotations."""
    training = name not in INFERENCE
    check(name, ATTENTION[name], COMPILED, device="cuda", compiled=True, training=training, atol=2e-3)
