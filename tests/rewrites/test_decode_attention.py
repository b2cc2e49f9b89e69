"""Attention of a few queries over many keys as one operator: masks, shared heads, and what must stay."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from backend_kwargs.rewrites.decode_attention import split_keys
from backend_kwargs.rewrites.kernels.decode import splits_of
from tests.rewrites.on_a_cpu import compiled_by

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
sdpa = F.scaled_dot_product_attention


def made(batch=2, heads=8, shared=2, queries=1, keys=40, width=16, dtype=torch.float32):
    """Return queries, keys, values, and a mask that hides some keys, but not the first."""
    q = torch.randn(batch, heads, queries, width, dtype=dtype)
    k, v = torch.randn(2, batch, shared, keys, width, dtype=dtype)
    seen = torch.rand(batch, 1, queries, keys) > 0.4
    seen[..., 0] = True
    return q, k, v, seen


def repeated(x, times=4):
    """Repeat each head, as transformers' `repeat_kv` does."""
    batch, heads, keys, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, keys, width).reshape(batch, heads * times, keys, width)


# Each of queries with eight heads, keys and values with two, and a mask.
FORMS = {
    "enable_gqa": lambda q, k, v, m: sdpa(q, k, v, attn_mask=m, enable_gqa=True),
    "positional": lambda q, k, v, m: sdpa(q, k, v, m, 0.0, False, enable_gqa=True),
    "by keywords": lambda q, k, v, m: sdpa(query=q, key=k, value=v, attn_mask=m, scale=0.3, enable_gqa=True),
    "repeated": lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), m),
    "repeated, without a mask": lambda q, k, v, m: sdpa(q, repeated(k), repeated(v)),
    "repeat_interleave": lambda q, k, v, m: sdpa(q, k.repeat_interleave(4, 1), torch.repeat_interleave(v, 4, dim=1), m),
    "unsqueezed": lambda q, k, v, m: sdpa(
        q, *(x.unsqueeze(2).expand(-1, -1, 4, -1, -1).flatten(1, 2) for x in (k, v)), m
    ),
    "heads as queries": lambda q, k, v, m: sdpa(q.reshape(q.shape[0], 2, -1, q.shape[3]), k, v, m[:, :, :1]),
    "added": lambda q, k, v, m: sdpa(q, k, v, torch.where(m, 0.5, -1e4).to(q), enable_gqa=True),
    "a mask for each head": lambda q, k, v, m: sdpa(q, k, v, m & (q[..., :1] < 9), enable_gqa=True),
    "a mask of keys": lambda q, k, v, m: sdpa(q, k, v, m[0, 0, :1], enable_gqa=True),
    "heads last": lambda q, k, v, m: sdpa(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), m, enable_gqa=True
    ),
}


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form(form, inductor):
    """Each spelling of shared heads and of masks, with eager's result and strides."""
    fn, counts = compiled_by(split_keys, FORMS[form], inductor=inductor)
    args = made()
    with torch.no_grad():
        found, wanted = fn(*args), FORMS[form](*args)
    assert_close(found, wanted)
    assert all(a == b for a, b, size in zip(found.stride(), wanted.stride(), wanted.shape, strict=True) if size > 1)
    assert counts == [1]


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([*FORMS]),
    batch=st.integers(1, 3),
    queries=st.integers(1, 4),
    keys=st.integers(17, 40),
    width=st.integers(1, 20),
    dtype=st.sampled_from([*TOLERANCE]),
    seed=st.integers(0, 99),
)
def test_against_float64(form, batch, queries, keys, width, dtype, seed):
    """In each dtype and size the result is within rounding of float64."""
    torch.manual_seed(seed)
    *heads, mask = made(batch, queries=queries, keys=keys, width=width, dtype=dtype)
    fn, counts = compiled_by(split_keys, FORMS[form])
    found, exact = fn(*heads, mask), FORMS[form](*(x.double() for x in heads), mask)
    assert found.dtype == dtype
    assert_close(found.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert counts == [1]


@pytest.mark.parametrize("form", ["enable_gqa", "heads last"])
def test_layout_of_several_queries(form):
    """Results of several queries have eager's strides, whether heads or queries come first in memory."""
    args = made(queries=3)
    fn, counts = compiled_by(split_keys, FORMS[form])
    assert fn(*args).stride() == FORMS[form](*args).stride()
    assert counts == [1]


def test_hidden_rows():
    """A query that sees no key attends to nothing, as in eager."""
    q, k, v, mask = made()
    mask[1] = False
    fn, _ = compiled_by(split_keys, FORMS["enable_gqa"])
    assert_close(fn(q, k, v, mask), FORMS["enable_gqa"](q, k, v, mask), equal_nan=True)


def test_cache_that_the_graph_writes():
    """The new token's keys are in the cache before attention reads it."""
    q, k, v, mask = made()

    def step(q, k, v, mask, new, at):
        k.index_copy_(2, at, new)
        return sdpa(q, repeated(k), repeated(v), mask)

    fn, counts = compiled_by(split_keys, step, inductor=True)
    new, at = 5 * torch.randn(2, 2, 1, 16), torch.tensor([7])
    other = k.clone()
    assert_close(fn(q, k, v, mask, new, at), step(q, other, v, mask, new, at))
    assert_close(k, other)
    assert counts == [1]


def test_cache_written_after_it_was_repeated():
    """Heads repeated before a write have the values from before it, so that they stay."""
    q, k, v, mask = made()

    def step(q, k, v, mask):
        many, values = repeated(k), repeated(v)
        k.zero_()
        return sdpa(q, many, values, mask)

    fn, counts = compiled_by(split_keys, step, inductor=True)
    assert_close(fn(q, k.clone(), v, mask), step(q, k.clone(), v, mask))
    assert counts == [0]


@pytest.mark.parametrize("varying", ["keys", "batch"])
def test_sizes_that_vary(varying):
    """A cache that grows and a batch that changes are compiled once for all sizes, after the first."""
    fn, counts = compiled_by(split_keys, FORMS["repeated"], inductor=True)
    for size in (23, 40, 57):
        args = made(**{varying: size})
        assert_close(fn(*args), FORMS["repeated"](*args))
    assert counts == [1, 1]


def test_cached_under_no_grad():
    """Keys that have gradients, read where none are recorded, give a result without."""
    q, k, v, mask = made()

    def fn(q, k, v, mask, weight):
        keys = k * weight
        with torch.no_grad():
            attended = FORMS["enable_gqa"](q, keys, v, mask)
        return (keys.sum() + attended.sum(),)

    weight = torch.ones((), requires_grad=True)
    found, counts = compiled_by(split_keys, fn, inductor=True)
    (result,) = found(q, k, v, mask, weight)
    result.backward()
    assert_close(weight.grad, k.sum(), atol=1e-3, rtol=1e-4)
    assert counts == [1]


def arguments(**sizes):
    return lambda: made(**sizes)


def heads_of(keys, values, **sizes):
    """Return arguments with other heads of keys and of values."""
    return lambda: [*made(shared=keys, **sizes)[:2], made(shared=values, **sizes)[2], made(**sizes)[3]]


# What must not match: the call, and its arguments.
NEAR = {
    "no mask, heads shared": (lambda q, k, v, m: sdpa(q, k, v, enable_gqa=True), made),
    "dropout": (lambda q, k, v, m: sdpa(q, k, v, m, 0.5, enable_gqa=True), made),
    "causal": (
        lambda q, k, v, m: sdpa(q, repeated(k), repeated(v), is_causal=True),
        arguments(queries=5, keys=7),
    ),
    "many queries": (FORMS["enable_gqa"], arguments(queries=17)),
    "as many keys as queries": (FORMS["enable_gqa"], arguments(queries=6, keys=6)),
    "float64": (FORMS["enable_gqa"], arguments(dtype=torch.float64)),
    "wide heads": (FORMS["enable_gqa"], arguments(width=264)),
    "keys last": (lambda q, k, v, m: sdpa(q, k.mT.contiguous().mT, v, m, enable_gqa=True), made),
    "values last": (lambda q, k, v, m: sdpa(q, k, v.mT.contiguous().mT, m, enable_gqa=True), made),
    "more heads of values than of keys": (FORMS["enable_gqa"], heads_of(2, 4)),
    "more heads of keys than of values": (FORMS["enable_gqa"], heads_of(4, 2)),
    "more heads of values, one batch": (FORMS["enable_gqa"], heads_of(2, 4, batch=1)),
    "more heads of values, without a mask": (lambda q, k, v, m: sdpa(q, repeated(k), repeated(v, 2)), heads_of(2, 4)),
    "values of one batch": (FORMS["enable_gqa"], lambda: [*made()[:2], made(batch=1)[2], made()[3]]),
    "no width": (lambda q, k, v, m: sdpa(q[..., :0], k[..., :0], v, m, scale=1.0, enable_gqa=True), made),
    "five dimensions": (
        lambda q, k, v, m: sdpa(*(x[:, :2, None] for x in (q, k, v)), m[:, :, None]),
        made,
    ),
    "three dimensions": (lambda q, k, v, m: sdpa(q[:, 0], k[:, 0], v[:, 0], m[:, 0]), made),
    "keys for all batches": (lambda q, k, v, m: sdpa(q[:, :2], k[:1], v[:1], m), made),
    "repeated in turn": (lambda q, k, v, m: sdpa(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1)), made),
    "tiled": (
        lambda q, k, v, m: sdpa(q, *(x[:, None].expand(-1, 4, -1, -1, -1).flatten(1, 2) for x in (k, v))),
        made,
    ),
    "keys repeated along the keys": (
        lambda q, k, v, m: sdpa(q[:, :2], k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)),
        made,
    ),
    "keys expanded along the keys": (
        lambda q, k, v, m: sdpa(
            q[:, :2], *(x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(*x.shape[:2], -1, x.shape[3]) for x in (k, v))
        ),
        made,
    ),
    "keys that are added to": (
        lambda q, k, v, m: sdpa(
            q, *((x[:, :, None] + torch.arange(4.0)[:, None, None]).reshape(q.shape[0], 8, -1, 16) for x in (k, v))
        ),
        made,
    ),
    "keys of two dimensions": (
        lambda q, k, v, m: sdpa(q[:, :2], *(x[:1].reshape(1, -1).expand(2, -1).reshape(x.shape) for x in (k, v))),
        made,
    ),
    "no batch": (FORMS["enable_gqa"], arguments(batch=0)),
    "heads repeated unequally": (
        lambda q, k, v, m: sdpa(q, *(x.repeat_interleave(torch.tensor([3, 5]), 1, output_size=8) for x in (k, v))),
        made,
    ),
    "gradients": (FORMS["enable_gqa"], lambda: [made()[0].requires_grad_(), *made()[1:]]),
    "a mask with gradients": (
        lambda q, k, v, m: sdpa(q, k, v, m, enable_gqa=True),
        lambda: [*made()[:3], torch.randn(2, 1, 1, 40, requires_grad=True)],
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_miss(name):
    """Other attention stays as it is."""
    call, args = NEAR[name]
    fn, counts = compiled_by(split_keys, call)
    torch.manual_seed(0)
    given = args()
    torch.manual_seed(1)
    found = fn(*given)
    torch.manual_seed(1)
    assert_close(found, call(*given))
    assert counts == [0]


def test_keys_repeated_more_often_than_values():
    """Keys and values that do not share heads alike are read as they are."""
    q, k, v, mask = made()

    def fn(q, k, v, m):
        return sdpa(q, repeated(k), repeated(v.repeat_interleave(2, 1), 2), m)

    found, counts = compiled_by(split_keys, fn, inductor=True)
    assert_close(found(q, k, v, mask), fn(q, k, v, mask))
    assert counts == [1]


@pytest.mark.parametrize(
    ("places", "keys", "splits"),
    [(8, 2048, 16), (128, 2048, 4), (256, 8192, 1), (1, 100_000, 64), (8, 100, 1), (1000, 9000, 1)],
)
def test_splits(places, keys, splits):
    """Four programs for each of 132 processors, none with fewer than 128 keys; two would be slower than one."""
    assert splits_of(132, places, keys) == splits


def test_scale():
    """Without a scale it is one over the square root of the width."""
    fn, _ = compiled_by(split_keys, FORMS["enable_gqa"])
    q, k, v, mask = made()
    assert_close(fn(q, k, v, mask), sdpa(q, k, v, mask, scale=1 / math.sqrt(16), enable_gqa=True))
