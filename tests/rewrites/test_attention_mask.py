"""Masks that are expanded over the keys are copied, so that attention has a fused kernel."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.testing import assert_close

import backend_kwargs as bk
from backend_kwargs.rewrites.attention_mask import make_dense
from tests.rewrites.lowering import agrees
from tests.rewrites.on_a_cpu import compiled_by

SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
B, H, Q, K, D = 2, 3, 5, 7, 8


def operands(**given):
    torch.manual_seed(0)
    return tuple(torch.randn(B, H, length, D, **given) for length in (Q, K, K))


def of_queries(*shape, dtype=torch.bool):
    """Return a mask that depends on the queries alone, expanded over the keys."""
    rows = torch.arange(Q).view(Q, 1)
    made = rows >= 1 if dtype is torch.bool else rows.to(dtype)
    return made.expand(*shape, Q, K)


def strides_seen(fn, args):
    """Return the strides of each attention's mask in the rewritten graph, and the number of copies."""
    found = []

    def backend(gm, example_inputs):
        change = make_dense(gm, example_inputs)
        for node in change.gm.graph.nodes:
            if node.target is attention:
                mask = node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"]
                found.append(mask.meta["example_value"].stride())
        copies.append(sum(node.target == "contiguous" for node in change.gm.graph.nodes))
        return change.gm.forward

    copies = []
    torch._dynamo.reset()
    torch.compile(fn, backend=backend)(*args)
    return found, copies


@pytest.mark.parametrize("inductor", [False, True], ids=["as it is", "Inductor"])
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(of_queries(), id="two dimensions"),
        pytest.param(of_queries(B, 1), id="a batch"),
        pytest.param(of_queries(B, H), id="a batch and heads"),
        pytest.param(of_queries(B, H, dtype=torch.float32), id="a bias"),
        pytest.param(torch.zeros(1, 1, Q, 1, dtype=torch.bool).expand(B, H, Q, K), id="all masked out"),
        pytest.param(torch.randn(B, H, K, Q).transpose(-1, -2), id="transposed"),
    ],
)
def test_it_computes_the_same(mask, inductor):
    """Attention with the copied mask is what it was, in eager and compiled."""
    q, k, v = operands()
    fn, counts = compiled_by(make_dense, attention, inductor=inductor)
    assert_close(fn(q, k, v, mask), attention(q, k, v, mask))
    assert counts == [1]


LAYOUTS = {
    "dense": lambda mask: mask,
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "every second key": lambda mask: mask.repeat_interleave(2, -1)[..., ::2],
}


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    bias=st.booleans(),
    leading=st.sampled_from([(), (1, 1), (B, 1), (1, H), (B, H)]),
    queries=st.sampled_from([1, 2, 5]),
    keys=st.sampled_from([1, 2, 7]),
    one_query=st.booleans(),
    one_key=st.booleans(),
    expanded=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    scale=st.sampled_from([None, 0.3]),
    named=st.booleans(),
    seed=st.integers(0, 9),
)
def test_against_float64(dtype, bias, leading, queries, keys, one_query, one_key, expanded, layout, scale, named, seed):
    """A mask is copied if and only if its keys are apart; whatever its sizes, float64's result comes out."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, H, length, D).to(dtype) for length in (queries, keys, keys))
    mask = LAYOUTS[layout](torch.randn(*leading, 1 if one_query else queries, 1 if one_key else keys))
    mask = mask.to(dtype) if bias else mask > -0.5
    if expanded:
        mask = mask.expand(B, H, queries, keys)

    def fn(q, k, v, mask):
        return attention(q, k, v, attn_mask=mask, scale=scale) if named else attention(q, k, v, mask, scale=scale)

    compiled, counts = compiled_by(make_dense, fn)
    agrees(compiled(q, k, v, mask), fn, (q, k, v, mask))
    assert counts == [int(mask.shape[-1] > 1 and mask.stride(-1) != 1)]


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan"), 1e-40], ids=str)
def test_values_at_the_edges(value):
    """A bias of nan, an infinity or a denormal gives eager's results, in the copy as before."""
    q, k, v = operands()
    rows = torch.zeros(Q, 1)
    rows[1] = value
    mask = rows.expand(B, H, Q, K)
    compiled, counts = compiled_by(make_dense, attention)
    assert_close(compiled(q, k, v, mask), attention(q, k, v, mask), equal_nan=True)
    assert counts == [1]


def test_gradients_are_the_same():
    """The gradients of q, k and v do not change."""
    mask, given = of_queries(B, 1), operands(requires_grad=True)
    fn, counts = compiled_by(make_dense, lambda q, k, v: attention(q, k, v, attn_mask=mask).square(), inductor=True)
    found = torch.autograd.grad(fn(*given).sum(), given)
    assert_close(found, torch.autograd.grad(attention(*given, attn_mask=mask).square().sum(), given))
    assert counts == [1]


def test_one_copy_serves_all_calls():
    """Layers that share a mask share its copy, which is dense only in its last two dimensions."""
    q, k, v = operands()
    mask = of_queries(B, H)
    found, copies = strides_seen(
        lambda q, k, v, m: attention(q, k, v, m) + attention(q + 1, k, v, attn_mask=m), (q, k, v, mask)
    )
    assert found == [(0, 0, K, 1)] * 2
    assert copies == [1]


def test_a_mask_that_changes_in_between_is_copied_again():
    """A write into the mask between two calls is seen by the second."""
    q, k, v = operands()

    def fn(q, k, v, mask):
        one = attention(q, k, v, mask.expand(B, H, Q, K))
        mask.logical_not_()
        return one, attention(q, k, v, mask.expand(B, H, Q, K))

    start = (torch.arange(Q) >= 2).view(1, 1, Q, 1)
    compiled, counts = compiled_by(make_dense, fn)
    assert_close(compiled(q, k, v, start.clone()), fn(q, k, v, start.clone()))
    assert counts == [2]

    def same_node(q, k, v, mask):
        wide = mask.expand(B, H, Q, K)
        one = attention(q, k, v, wide)
        mask.logical_not_()
        return one, attention(q, k, v, wide)

    compiled, counts = compiled_by(make_dense, same_node)
    assert_close(compiled(q, k, v, start.clone()), same_node(q, k, v, start.clone()))
    assert counts == [2]


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        pytest.param(None, torch.float32, id="no mask"),
        pytest.param(torch.ones(Q, K, dtype=torch.bool), torch.float32, id="a dense one"),
        pytest.param(torch.ones(1, K, dtype=torch.bool).expand(B, H, Q, K), torch.float32, id="expanded over queries"),
        pytest.param(of_queries(dtype=torch.float64), torch.float64, id="float64"),
    ],
)
def test_others_stay(mask, dtype):
    """Masks with dense rows, masks that need gradients, and what no fused kernel computes stay as they are."""
    q, k, v = operands(dtype=dtype)
    fn, counts = compiled_by(make_dense, lambda q, k, v: attention(q, k, v, attn_mask=mask))
    assert_close(fn(q, k, v), attention(q, k, v, attn_mask=mask))
    assert counts == [0]


def test_a_mask_that_is_trained_stays():
    """A bias that needs gradients is left to torch."""
    q, k, v = operands()
    bias = torch.zeros(B, H, Q, 1, requires_grad=True)
    fn, counts = compiled_by(make_dense, lambda q, k, v, bias: attention(q, k, v, bias.expand(B, H, Q, K)))
    assert_close(fn(q, k, v, bias), attention(q, k, v, bias.expand(B, H, Q, K)))
    assert counts == [0]


def test_one_key_needs_no_copy():
    """A mask of a single key is dense whatever its stride."""
    q, k, v = (torch.randn(B, H, 1, D) for _ in range(3))
    mask = torch.ones(B, 1, 1, 1, dtype=torch.bool).expand(B, H, 1, 1)
    fn, counts = compiled_by(make_dense, lambda q, k, v: attention(q, k, v, attn_mask=mask))
    assert_close(fn(q, k, v), attention(q, k, v, attn_mask=mask))
    assert counts == [0]


def test_sizes_may_vary():
    """With symbolic sizes one graph serves other lengths."""
    fn, counts = compiled_by(
        make_dense,
        lambda q, k, v: attention(q, k, v, (torch.arange(q.shape[2]) >= 1)[:, None].expand(q.shape[2], k.shape[2])),
        dynamic=True,
    )
    for length in (5, 9):
        q, k, v = (torch.randn(B, H, length, D) for _ in range(3))
        mask = (torch.arange(length) >= 1)[:, None].expand(length, length)
        assert_close(fn(q, k, v), attention(q, k, v, mask))
    assert counts == [1]


def test_without_a_gpu_nothing_is_copied():
    """The rewrite needs a GPU, as `strict` says; elsewhere the graph stays as it is."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(bk.BackendKwargsError) as error:
        bk.make_backend("tmpl-inductor", rewrites=("attention_mask",), strict=True)
    assert str(error.value).startswith("Rewrite 'attention_mask' cannot work here: no CUDA GPU is visible")
