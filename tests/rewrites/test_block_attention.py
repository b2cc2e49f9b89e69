"""Attention whose mask has blocks that the graph tells is computed within each block."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.testing import assert_close

from backend_kwargs.auto.places import standing_alone
from backend_kwargs.rewrites.fused_attention import attend_in_four
from backend_kwargs.rewrites.traced import change_by
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by

SETTINGS = settings(
    max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
LOW = torch.finfo(torch.float32).min


def mask_of(sizes, *, fill=LOW, shown=0, dtype=torch.float32):
    """Make a mask as Pixtral does."""
    mask = torch.full((sum(sizes), sum(sizes)), fill_value=fill, dtype=dtype)
    start = 0
    for size in sizes:
        mask[start : start + size, start : start + size] = shown
        start += size
    return mask


def operands(rows, dtype=torch.float32, *, heads_last=True, batch=1, requires_grad=False):
    torch.manual_seed(0)
    shape = (batch, rows, 2, 8) if heads_last else (batch, 2, rows, 8)
    made = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    made = [each.transpose(1, 2) for each in made] if heads_last else made
    return [each.requires_grad_(requires_grad) for each in made]


def strides(x):
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


CALLS = st.tuples(
    st.one_of(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4).map(lambda size: [size] * 3)),
    st.sampled_from([torch.finfo(torch.float32).min, -torch.inf, False]),
    st.sampled_from([None, 0.3, -1.0]),
    st.booleans(),
)


@SETTINGS
@given(
    calls=st.lists(CALLS, min_size=5, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    heads_last=st.booleans(),
    batch=st.integers(1, 2),
    trained=st.booleans(),
)
def test_against_float64(calls, dtype, heads_last, batch, trained):
    """Results and gradients are within rounding of float64's, and strides are eager's."""
    args = operands(20, dtype, heads_last=heads_last, batch=batch, requires_grad=trained)

    def fn(q, k, v):
        made = []
        for sizes, fill, scale, expanded in calls:
            low = torch.finfo(q.dtype).min if fill not in (-torch.inf, False) else fill
            mask = mask_of(sizes, fill=low, shown=fill is False, dtype=torch.bool if fill is False else q.dtype)
            mask = mask[None, None].expand(batch, 1, -1, -1) if expanded else mask
            made.append(attention(*(each[:, :, : sum(sizes)] for each in (q, k, v)), attn_mask=mask, scale=scale))
        return made

    compiled, counts = compiled_by(attend_in_four, fn)
    got, want = compiled(*args), fn(*args)
    assert counts == [len(calls)]
    assert [*map(strides, got)] == [*map(strides, want)]
    agrees([each.detach() for each in got], fn, [each.detach() for each in args])
    if trained and dtype == torch.float32:
        grads = [torch.autograd.grad(sum(each.square().sum() for each in of), args) for of in (got, want)]
        assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 3), (2, 4)], ids=str)
def test_in_inductor(sizes):
    """Two layers that share a mask are computed without it."""
    args = operands(6)

    def fn(q, k, v):
        mask = mask_of(sizes)[None, None].expand(1, 1, -1, -1)
        return attention(attention(q, k, v, mask).relu(), k, v, attn_mask=mask)

    compiled, counts = compiled_by(attend_in_four, fn, inductor=True)
    assert_close(compiled(*args), fn(*args))
    assert counts == [2]


def test_what_is_not_finite_stays_in_its_block():
    """Nan or an infinity is as in eager within its block, and none of it is in others."""
    args = operands(6)
    args[1][0, 0, 0, 0] = torch.nan
    compiled, counts = compiled_by(attend_in_four, lambda q, k, v: attention(q, k, v, mask_of((2, 4))))
    got = compiled(*args)
    assert_close(got[:, :, :2], attention(*(each[:, :, :2] for each in args)), equal_nan=True)
    assert got[:, :, 2:].isfinite().all()
    assert counts == [1]


def test_a_place_has_what_makes_its_mask():
    """So that it can be raced by itself: the blocks are not known from the mask alone."""
    found = []

    def backend(gm, example_inputs):
        change_by("fused_attention", gm, example_inputs, found.append)
        return gm.forward

    def fn(q, k, v):
        mask = mask_of((3, 3))[None, None]
        return attention(attention(q, k, v, mask), k, v, mask)

    torch.compile(fn, backend=backend)(*operands(6))
    assert [place.signature for place in found] == [found[0].signature] * 2
    graph, reads = standing_alone(found[0].nodes)
    assert [*map(len, (reads, graph.graph.find_nodes(op="call_function", target=torch.full)))] == [3, 1]
    assert attend_in_four(graph, []).count == 1


def changed(mask):
    mask.mul_(2)
    return mask


def written(*blocks, rows=6, fill=LOW, value=0.0):
    """Make a mask by writes into these blocks."""
    mask = torch.full((rows, rows), fill)
    for row, column in blocks:
        mask[row, column] = value
    return mask


S = slice
OTHERS = {
    "a gap": lambda: written((S(0, 2), S(0, 2)), (S(3, 6), S(3, 6))),
    "the end is missing": lambda: written((S(0, 2), S(0, 2)), (S(2, 5), S(2, 5))),
    "they overlap": lambda: written((S(0, 3), S(0, 3)), (S(2, 6), S(2, 6))),
    "not on the diagonal": lambda: written((S(0, 3), S(3, 6)), (S(3, 6), S(0, 3))),
    "another value": lambda: written((S(0, 3), S(0, 3)), (S(3, 6), S(3, 6)), value=1.0),
    "not low enough": lambda: written((S(0, 3), S(0, 3)), (S(3, 6), S(3, 6)), fill=-1e9),
    "nan": lambda: written((S(0, 3), S(0, 3)), (S(3, 6), S(3, 6)), fill=torch.nan),
    "written through a view": lambda: changed(mask_of((3, 3))),
    "a copy": lambda: mask_of((3, 3)) * 1,
    "of every second row": lambda: mask_of((6, 6))[::2, ::2],
    "transposed": lambda: mask_of((3, 3)).T,
    "a step": lambda: written((S(0, 3, 1), S(0, 3, 1)), (S(3, 6), S(3, 6))),
}


@pytest.mark.parametrize("mask", OTHERS.values(), ids=OTHERS)
def test_other_masks_stay(mask):
    """What does not show exactly the blocks along the diagonal is left to torch."""
    args = operands(6)
    fn, counts = compiled_by(attend_in_four, lambda q, k, v: attention(q, k, v, mask()))
    assert_close(fn(*args), attention(*args, mask()), equal_nan=True)
    assert counts == [0]


def test_a_size_that_varies_is_not_fixed():
    """A mask of as many rows as there are keys, whose blocks end there in this call, stays as it is."""
    args = operands(6)
    for each in args:
        torch._dynamo.mark_dynamic(each, 2)

    def fn(q, k, v):
        mask = torch.full((q.shape[2], q.shape[2]), LOW)
        mask[0:2, 0:2], mask[2:6, 2:6] = 0, 0
        return attention(q, k, v, mask)

    compiled, counts = compiled_by(attend_in_four, fn)
    assert_close(compiled(*args), fn(*args))
    assert counts == [0]


def test_a_write_between_two_readers_is_seen():
    """The first is replaced, and the second, which a further write shows more, is not."""

    def fn(q, k, v):
        mask = mask_of((3, 3))
        first = attention(q, k, v, mask)
        mask[0:6, 0:6] = 0
        return first, attention(q, k, v, mask)

    args = operands(6)
    compiled, counts = compiled_by(attend_in_four, fn)
    assert_close(compiled(*args), fn(*args))
    assert counts == [1]


STAY = {
    "dropout": lambda q, k, v, mask: attention(q, k, v, mask, dropout_p=1e-9),
    "three dimensions": lambda q, k, v, mask: attention(q[0], k[0], v[0], mask),
    "other queries": lambda q, k, v, mask: attention(q[:, :, :1], k, v, mask[:1]),
    "one head of keys": lambda q, k, v, mask: attention(q, k[:, :1], v[:, :1], mask),
}


@pytest.mark.parametrize("call", STAY.values(), ids=STAY)
def test_other_calls_stay(call):
    """Dropout, other dimensions, and operands that broadcast."""
    args = operands(6)
    fn, counts = compiled_by(attend_in_four, lambda q, k, v: call(q, k, v, mask_of((2, 4))))
    assert_close(fn(*args), call(*args, mask_of((2, 4))))
    assert counts == [0]


def test_sizes_that_vary_stay():
    """Where the length of a block is a symbol, one graph serves other lengths, as it is."""
    fn, counts = compiled_by(
        attend_in_four, lambda q, k, v: attention(q, k, v, mask_of((q.shape[2] - 3, 3))), dynamic=True
    )
    for rows in (6, 9):
        args = operands(rows)
        assert_close(fn(*args), attention(*args, mask_of((rows - 3, 3))))
    assert counts == [0]
