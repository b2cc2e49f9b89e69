"""Attention with a bias over few keys in training: forms that match, gradients, and similar calls."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.testing import assert_close

from backend_kwargs.rewrites.window_attention import attend_by_tiles
from tests.rewrites.on_a_cpu import compiled_by

BATCH, HEADS, TOKENS, WIDTH, PERIOD = 6, 2, 9, 8, 3
SCORES = (HEADS, TOKENS, TOKENS)
attention = F.scaled_dot_product_attention


def operands(dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, TOKENS, HEADS, WIDTH, dtype=dtype).transpose(1, 2) for _ in range(3))
    return [each.requires_grad_() for each in (q, k, v)]


def bias_of(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def gradients(fn, args):
    """Return the result and the gradients of all floating arguments."""
    made = fn(*args)
    torch.manual_seed(1)
    given = torch.randn(made.shape).to(made.dtype)
    trained = [each for each in args if each.requires_grad]
    return [made, *torch.autograd.grad(made, trained, given, materialize_grads=True)]


def check(fn, args):
    """Compare the result and all gradients with float64's; return how many calls were replaced."""
    compiled, counts = compiled_by(attend_by_tiles, fn)
    got, eager = gradients(compiled, args), gradients(fn, args)
    want = gradients(fn, [a.detach().double().requires_grad_(a.requires_grad) for a in args])
    assert [each.stride() for each in got[:1]] == [each.stride() for each in eager[:1]]
    for one, plain, exact in zip(got, eager, want, strict=True):
        assert (one.dtype, one.shape) == (plain.dtype, plain.shape)
        own, scale = ((each.double() - exact).abs().max() for each in (plain, torch.zeros(())))
        assert (one.double() - exact).abs().max() <= 2 * own + 2 * torch.finfo(one.dtype).eps * scale
    return counts


def repeated(masks, images=1):
    """Return masks for the windows of all images, as shifted windows in timm have them."""
    masks = masks.view(images, PERIOD, 1, TOKENS, TOKENS).expand(BATCH // PERIOD, -1, HEADS, -1, -1)
    return masks.reshape(-1, HEADS, TOKENS, TOKENS)


def of_swin(q, k, v, bias, masks):
    return attention(q, k, v, attn_mask=bias.unsqueeze(0) + repeated(masks))


MATCHES = {
    "a bias of heads": (attention, [bias_of(1, *SCORES)]),
    "of three dimensions": (lambda q, k, v, b: attention(q, k, v, b, scale=0.3), [bias_of(*SCORES)]),
    "of all windows": (lambda q, k, v, b: attention(q, k, v, attn_mask=b), [bias_of(BATCH, *SCORES)]),
    "of the keys": (lambda q, k, v, b: attention(q, k, v, attn_mask=b), [bias_of(BATCH, 1, 1, TOKENS)]),
    "fewer queries": (lambda q, k, v, b: attention(q[:, :, :4], k, v, b[:, :, :4]), [bias_of(1, *SCORES)]),
    "a wider value": (lambda q, k, v, b: attention(q, k, torch.cat((v, v), -1), b), [bias_of(1, *SCORES)]),
    "without a gradient": (lambda q, k, v, b: attention(q, k, v, b.detach()), [bias_of(1, *SCORES).detach()]),
    "shifted windows": (of_swin, [bias_of(*SCORES), bias_of(PERIOD, TOKENS, TOKENS).detach()]),
    "learnt masks": (of_swin, [bias_of(*SCORES), bias_of(PERIOD, TOKENS, TOKENS)]),
    "masks first": (lambda q, k, v, b, m: attention(q, k, v, repeated(m) + b), [bias_of(*SCORES), bias_of(PERIOD, 81)]),
    "twice the masks": (
        lambda q, k, v, b, m: attention(q, k, v, torch.add(b, repeated(m), alpha=2)),
        [bias_of(*SCORES), bias_of(PERIOD, 81)],
    ),
    "masks of each image": (
        lambda q, k, v, b, m: attention(q, k, v, b + repeated(m, 2)),
        [bias_of(*SCORES), bias_of(2 * PERIOD, 81)],
    ),
    "masks and a bias of all windows": (
        lambda q, k, v, b, m: attention(q, k, v, b + repeated(m)),
        [bias_of(BATCH, *SCORES), bias_of(PERIOD, 81)],
    ),
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("form", MATCHES)
def test_gradients(form, dynamic):
    """Results and gradients of each form are as near to float64's as eager's are, in eager's layout."""
    fn, biases = MATCHES[form]
    args = [*operands(), *biases]
    for each in args if dynamic else ():
        if each.shape[0] == BATCH and len(biases) == 1:  # masks of windows have their sizes written out
            torch._dynamo.mark_dynamic(each, 0)
    assert check(fn, args) == [1]


def masks_of(fn):
    """Return the shapes of the biases that the operators take after the rewrite."""
    found = []

    def backend(gm, example_inputs):
        change = attend_by_tiles(gm, example_inputs)
        call = change.gm.graph.find_nodes(op="call_function", target=torch.ops.backend_kwargs.window_attention.default)
        found.extend(node.args[3] for node in call)
        return change.gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*operands(), *MATCHES["shifted windows"][1])
    return found


def test_masks_of_shifted_windows_are_not_repeated():
    """The operator takes the sum of the bias and the masks of one image."""
    (bias,) = masks_of(of_swin)
    added, masks = bias.args
    assert bias.target is torch.add
    assert (masks.target, masks.args[1]) == ("squeeze", 0)
    assert masks.args[0].target == "view"
    assert added.meta["example_value"].shape == (1, *SCORES)


def changed_masks(q, k, v, bias, masks):
    masks = masks * 1.0
    added = bias.unsqueeze(0) + repeated(masks)
    masks.zero_()
    return attention(q, k, v, attn_mask=added)


def test_masks_that_change_before_the_call():
    """A call whose masks are written after they were added stays as it is."""
    assert check(changed_masks, [*operands(), *MATCHES["shifted windows"][1]]) == [0]


BIAS = bias_of(1, *SCORES)
NEAR = {
    "no bias": attention,
    "a boolean mask": lambda q, k, v: attention(q, k, v, BIAS > 0),
    "a negative scale": lambda q, k, v: attention(q, k, v, BIAS, scale=-0.3),
    "a scale of zero": lambda q, k, v: attention(q, k, v, BIAS, scale=0),
    "three dimensions": lambda q, k, v: attention(q[0], k[0], v[0], BIAS[0]),
    "heads that are shared": lambda q, k, v: attention(q, k[:, :1], v[:, :1], BIAS, enable_gqa=True),
    "keys of another batch": lambda q, k, v: attention(q, k[:1], v[:1], BIAS),
    "float32": lambda q, k, v: attention(q.float(), k.float(), v.float(), BIAS.float()),
    "many keys": lambda q, k, v: attention(q, k.repeat(1, 1, 8, 1), v.repeat(1, 1, 8, 1), BIAS.repeat(1, 1, 1, 8)),
    "many queries": lambda q, k, v: attention(q.repeat(1, 1, 8, 1), k, v, BIAS.repeat(1, 1, 8, 1)),
    "wide heads": lambda q, k, v: attention(q.repeat(1, 1, 1, 9), k.repeat(1, 1, 1, 9), v, BIAS),
    "no windows": lambda q, k, v: attention(q[:0], k[:0], v[:0], BIAS),
    "no gradient": lambda q, k, v: attention(q.detach(), k.detach(), v.detach(), BIAS.detach()) + q,
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Similar calls stay as they are."""
    compiled, counts = compiled_by(attend_by_tiles, fn)
    assert_close(gradients(compiled, operands()), gradients(fn, operands()))
    assert counts == [0]


def test_dropout_stays():
    """A call with dropout stays as it is."""
    compiled, counts = compiled_by(attend_by_tiles, lambda q, k, v: attention(q, k, v, BIAS, dropout_p=0.5))
    compiled(*operands())
    assert counts == [0]


def test_a_query_that_sees_no_key():
    """Its result and its gradients are 0, as of the library's fused kernels."""
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bfloat16)
    hidden[2] = -float("inf")
    compiled, _ = compiled_by(attend_by_tiles, lambda q, k, v: attention(q, k, v, hidden))
    args = operands()
    made = compiled(*args)
    of_q, *others = torch.autograd.grad(made, args, torch.ones_like(made))
    assert made[:, :, 2].eq(0).all()
    assert of_q[:, :, 2].eq(0).all()
    assert all(each.isfinite().all() for each in others)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("at", [0, 1, 2, 3], ids=["query", "key", "value", "bias"])
def test_values_that_are_not_finite(at, value):
    """Results and gradients are not finite where eager's are not."""
    args = [*(each.detach().clone() for each in operands()), BIAS.detach().clone()]
    args[at][0, 0, 1, 2] = value
    args = [each.requires_grad_() for each in args]
    compiled, counts = compiled_by(attend_by_tiles, attention)
    for one, other in zip(gradients(compiled, args), gradients(attention, args), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
    assert counts == [1]


class Windows(nn.Module):
    """The attention of a Swin block of timm."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.table = nn.Parameter(torch.randn(25, HEADS))
        self.register_buffer("index", torch.randint(25, (TOKENS, TOKENS)))

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(-1, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index].permute(2, 0, 1).contiguous().unsqueeze(0)
        return attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_module(autocast):
    """A layer in bfloat16, or under autocast, whose table is in float32 then, trains as in eager."""
    torch.manual_seed(0)
    layer, x = Windows(), torch.randn(BATCH, TOKENS, HEADS * WIDTH)
    if not autocast:
        layer, x = layer.bfloat16(), x.bfloat16()

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return layer(x).float().square().sum()

    compiled, counts = compiled_by(attend_by_tiles, fn)
    got, want = (torch.autograd.grad(call(x), list(layer.parameters())) for call in (compiled, fn))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=0.05, atol=0.05 * float(other.abs().max()))
    assert counts == [1]


def added_then_scaled(q, k, v, bias, masks):
    scores = bias.unsqueeze(0) + repeated(masks)
    scores.mul_(3)
    return attention(q, k, v, attn_mask=scores)


def masked_after_repeating(q, k, v, bias, masks):
    whole = repeated(masks)
    whole[..., 0] = -100.0
    return attention(q, k, v, attn_mask=bias + whole)


@pytest.mark.parametrize("fn", [added_then_scaled, masked_after_repeating], ids=["the sum", "the repeated masks"])
def test_what_is_written_into_the_bias_counts(fn):
    """The terms are read as they are at the call, or the sum is."""
    args = [*operands(), torch.randn(SCORES, dtype=torch.bfloat16), torch.randn(PERIOD, TOKENS, TOKENS).bfloat16()]
    check(fn, args)
