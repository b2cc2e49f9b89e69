"""The rotary embedding as one operator: the forms in which models write it, and similar graphs."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import backend_kwargs
from backend_kwargs.harness.named_models import imported
from backend_kwargs.rewrites import rotary
from tests.rewrites.lowering import Changed, gradients

SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def by_chunks(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1)


def joined(x, cos, sin):
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def joined_otherwise(x, cos, sin):
    half = x.shape[-1] // 2
    first, second = x[:, :, :, :half], x[:, :, :, half:]
    return torch.cat((cos * first - sin * second, sin * first + second * cos), -1)


# The name of each, whether its angles have half the width, and the function.
SPELLINGS = {
    "halves": (False, lambda x, cos, sin: (x * cos) + (rotate_half(x) * sin)),
    "chunks": (False, lambda x, cos, sin: by_chunks(x) * sin + cos * x),
    "joined": (True, joined),
    "joined otherwise": (True, joined_otherwise),
}
ANGLES = {"positions": (5,), "one batch": (1, 1, 5), "each batch": (2, 1, 5), "each head": (3, 5)}


def angles(shape, dtype, requires_grad=False):
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for _ in range(2)]


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spelling=st.sampled_from(sorted(SPELLINGS)),
    broadcast=st.sampled_from(sorted(ANGLES)),
    half=st.integers(2, 9),
    heads_last=st.booleans(),
    partly=st.booleans(),
    seed=st.integers(0, 9),
)
def test_computes_the_same(dtype, spelling, broadcast, half, heads_last, partly, seed):
    """Result and gradient of every form agree with float64."""
    torch.manual_seed(seed)
    halved, turn = SPELLINGS[spelling]
    wide = 3 * half if partly else 2 * half
    x = torch.randn(2, 5, 3, wide).transpose(1, 2) if heads_last else torch.randn(2, 3, 5, wide)
    x = x.to(dtype)
    cos, sin = angles((*ANGLES[broadcast], half if halved else 2 * half), dtype)

    def fn(x, cos=cos, sin=sin):
        return turn(x[..., : 2 * half], cos, sin).sin().square().sum()  # no cancellation in the sum

    changed = Changed(fn, "rotary")
    got, eager = gradients(changed, [x]), gradients(fn, [x])
    want = gradients(lambda x: fn(x, cos.double(), sin.double()), [x.double()])
    for one, plain, exact in zip(got, eager, want, strict=True):
        own, scale = (plain.double() - exact).abs().max(), exact.abs().max()
        assert (one.double() - exact).abs().max() <= 2 * own + 4 * torch.finfo(dtype).eps * scale + 1e-5
    assert changed.counts["rotary"] == 1


COS, SIN, MORE = torch.randn(5, 8), torch.randn(5, 8), torch.randn(3, 1, 5, 8)


def plus(x):
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def joined_of(first, second):
    cos, sin = COS[:, :4], SIN[:, :4]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def joined_by(x, less, factor, more, other_factor):
    cos, sin, first, second = COS[:, :4], SIN[:, :4], x[..., :4], x[..., 4:]
    one = less(first * cos, second * sin, alpha=factor)
    return torch.cat((one, more(second * cos, first * sin, alpha=other_factor)), -1)


def other_sines(x):
    cos, sin, first, second = COS[:, :4], SIN[:, :4], x[..., :4], x[..., 4:]
    return torch.cat((first * cos - second * sin, second * cos + first * (2 * sin)), -1)


NEAR = {
    "no rows": lambda x: (none := x[:0]) * COS + rotate_half(none) * SIN,
    "other sines": other_sines,
    "no sign": lambda x: x * COS + plus(x) * SIN,
    "less": lambda x: x * COS - rotate_half(x) * SIN,
    "a factor": lambda x: torch.add(x * COS, rotate_half(x) * SIN, alpha=2),
    "of another": lambda x: x * COS + rotate_half(x + 1) * SIN,
    "not halves": lambda x: x * COS + torch.cat((-x[..., 3:], x[..., :3]), -1) * SIN,
    "pairs": lambda x: x * COS + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * SIN,
    "another dimension": lambda x: x * COS + torch.cat((-x[:, 1:], x[:, :1]), 1) * SIN,
    "the first again": lambda x: x * COS + torch.cat((-x[..., :4], x[..., :4]), -1) * SIN,
    "other angles": lambda x: torch.cat(
        (x[..., :4] * COS[:, :4] - x[..., 4:] * SIN[:, :4], x[..., 4:] * COS[:, :4] + x[..., :4] * SIN[:, 4:]), -1
    ),
    "angles of no dimension": lambda x: x * COS.sum() + rotate_half(x) * SIN.sum(),
    "the same twice": lambda x: x * COS + x * SIN,
    "another user": lambda x: (r := rotate_half(x)) + x * COS + r * SIN,
    "three dimensions": lambda x: x[0] * COS + rotate_half(x[0]) * SIN,
    "another dtype": lambda x: x * COS.double() + rotate_half(x) * SIN.double(),
    "one angle": lambda x: x * COS[:, :1] + rotate_half(x) * SIN[:, :1],
    "one sine": lambda x: x * COS + rotate_half(x) * SIN[:, :1],
    "one head for all": lambda x: x * COS + rotate_half(x[:, 1:]) * SIN,
    "halves of one head for all": lambda x: x * COS + torch.cat((-x[:, 1:, :, 4:], x[:, 1:, :, :4]), -1) * SIN,
    "halves of two tensors": lambda x: x * COS + torch.cat((-x[..., 4:], (2 * x)[..., :4]), -1) * SIN,
    "more batches of angles": lambda x: (one := x[:1]) * MORE + rotate_half(one) * SIN,
    "more batches of sines": lambda x: (one := x[:1]) * COS + rotate_half(one) * MORE,
    "three parts": lambda x: x * COS + torch.cat((-x[..., 4:6], -x[..., 6:], x[..., :4]), -1) * SIN,
    "a factor of the sines": lambda x: joined_by(x, torch.sub, 2, torch.add, 1),
    "a factor of the other sines": lambda x: joined_by(x, torch.sub, 1, torch.add, 2),
    "sums in both halves": lambda x: joined_by(x, torch.add, 1, torch.add, 1),
    "differences in both halves": lambda x: joined_by(x, torch.sub, 1, torch.sub, 1),
    "the second half first": lambda x: joined_of(x[..., 4:], x[..., :4]),
    "products that are returned": lambda x: (p := x * COS) + (p + rotate_half(x) * SIN),
    "one cosine for both": lambda x: (two := x[..., :2]) * COS[:, :1] + rotate_half(two) * SIN[:, :2],
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Similar graphs stay unchanged."""
    call = lambda x: fn(x).square().sum().float()  # noqa: E731
    changed, x = Changed(call, "rotary"), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(gradients(changed, [x]), gradients(call, [x]))
    assert changed.counts["rotary"] == 0


def test_angles_with_gradients_stay():
    """Angles that need gradients keep them."""
    cos, sin = angles((5, 8), torch.float32, requires_grad=True)
    fn = lambda x: (x * cos + rotate_half(x) * sin).sum()  # noqa: E731
    changed, x = Changed(fn, "rotary"), torch.randn(2, 2, 5, 8)
    torch.testing.assert_close(gradients(changed, [x]), gradients(fn, [x]))
    assert changed.counts["rotary"] == 0


@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_are_dense(contiguous):
    """The kernel writes whole rows, so its result has these also where the input, such as a gradient, has columns."""
    x, (cos, sin) = torch.randn(2, 3, 8, 5).transpose(2, 3), angles((5, 8), torch.float32)
    made = rotary.rotary(x, cos, sin, contiguous, True)
    assert made.is_contiguous()
    torch.testing.assert_close(made, rotary.rotary(x.contiguous(), cos, sin, True, True))


def test_a_model():
    """In transformers' Llama the operator rotates the queries and keys of each layer, in training and inference."""
    pytest.importorskip("transformers")
    transformers = imported("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaModel(config)
    ids = torch.randint(64, (2, 6))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend_kwargs.make_backend("tmpl-inductor", rewrites=("rotary",)))
    got, want = (
        torch.autograd.grad(fn(ids).last_hidden_state.square().sum(), list(model.parameters()))
        for fn in (compiled, model)
    )
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    (graph,) = backend_kwargs.report(compiled).graphs
    assert graph.rewritten == {"rotary": 4}  # two layers, queries and keys
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).last_hidden_state, model(ids).last_hidden_state, atol=1e-4, rtol=1e-4)
