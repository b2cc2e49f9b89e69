"""Written-out attention as one call: what matches, what must not match, and the results."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from backend_kwargs.rewrites.attention import _attention, _with_aligned_rows
from backend_kwargs.rewrites.traced import RewritePass, rewrite_graph
from tests.rewrites.lowering import Rewriting, agrees, matched

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))

HEADS = torch.tensor([0.2, 0.3, 0.5]).reshape(3, 1, 1)
# How models write the scores.
SCORES = {
    "q scaled": lambda q, k, b: (q * 0.3) @ k.transpose(-2, -1) + b,
    "scaled": lambda q, k, b: (q @ k.transpose(-2, -1)) * 0.3 + b,
    "divided": lambda q, k, b: q @ k.transpose(-1, -2) / 4.0 + b,
    "bias first": lambda q, k, b: b + torch.matmul(q, k.permute(0, 1, 3, 2)),
    "two biases": lambda q, k, b: q @ k.transpose(-2, -1) + b + b * 0.5,
    "in place": lambda q, k, b: (q @ k.transpose(-2, -1)).mul_(0.3).add_(b),
    "no bias": lambda q, k, b: q @ k.transpose(-2, -1) * 0.3,
    "a scale of heads": lambda q, k, b: (q @ k.transpose(-2, -1)) * HEADS.to(q.dtype) + b,
    "a scale of heads in four dimensions": lambda q, k, b: (q @ k.transpose(-2, -1)) * HEADS.to(q.dtype)[None] + b,
    "float32": lambda q, k, b: (q @ k.transpose(-2, -1)).float() * 0.3 + b,
}
BIASES = {
    "relative": (3, 5, 7),
    "whole": (2, 3, 5, 7),
    "one head": (2, 1, 5, 7),
    "keys": (2, 1, 1, 7),
    "matrix": (5, 7),
}


def attention(scores, *, heads_last=True, bias=True):
    def call(q, k, v, b):
        weights = scores(q, k, b).softmax(-1).to(v.dtype)
        made = weights @ v
        return made.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) if heads_last else made

    return call


def factors(dtype=torch.float32, strided=False, bias="relative"):
    shapes = ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16))
    if strided:
        qkv = (torch.randn(s[0], s[2], s[1], s[3]).to(dtype).transpose(1, 2) for s in shapes)
    else:
        qkv = (torch.randn(s).to(dtype) for s in shapes)
    return (*qkv, torch.randn(BIASES[bias]).to(dtype))


@SETTINGS
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scores=st.sampled_from(sorted(SCORES)),
    bias=st.sampled_from(sorted(BIASES)),
    heads_last=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 9),
)
def test_computes_the_same(dtype, scores, bias, heads_last, strided, seed):
    """Every form becomes one call, by this rewrite or by Inductor, with float64's result up to rounding."""
    torch.manual_seed(seed)
    args = factors(dtype, strided, bias)
    rewriting = Rewriting(fn := attention(SCORES[scores], heads_last=heads_last), "attention")
    counters.clear()
    with torch.no_grad():
        agrees(rewriting(*args), fn, args)
    assert rewriting.counts["attention"] + counters["inductor"]["fuse_attention"] == 1


def windows(images, masks=4, mask_of_image=1, apply=torch.add):
    """Return attention in windows with a position bias and masks of each image's windows, as in Swin."""
    table, mask = torch.randn(3, 5, 5), torch.randn(mask_of_image, masks, 1, 5, 5).mul(9).round()

    def call(q, k, v, scale=0.3):
        scores = (q * scale) @ k.transpose(-2, -1) + table.to(q.dtype).unsqueeze(0)
        scores = apply(scores.view(-1, masks, 3, 5, 5), mask.to(q.dtype))
        weights = scores.view(-1, 3, 5, 5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(q.shape[0], 5, -1)

    return call, tuple(torch.randn(images * masks, 3, 5, 16) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("images", [1, 3])
def test_shifted_windows(images, dtype):
    """Masks that repeat for each image are passed on without the repetition, added to the bias."""
    fn, args = windows(images)
    args = tuple(arg.to(dtype) for arg in args)
    rewriting = Rewriting(fn, "attention")
    with torch.no_grad():
        agrees(rewriting(*args), fn, args)
    (gm,) = rewriting.graphs
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.backend_kwargs.attention.default)
    assert node.args[3].meta["val"].shape == (4, 3, 5, 5)


def test_masks_of_each_image_stay():
    """Masks that differ between images stay unchanged."""
    fn, args = windows(2, mask_of_image=2)
    assert matched(fn, args, "attention") == 0


def test_masks_that_multiply_stay():
    """Only masks that are added are a bias."""
    fn, args = windows(2, apply=torch.mul)
    assert matched(fn, args, "attention") == 0


def test_masks_of_windows_beside_a_bias_of_each_batch():
    """A bias of each batch has another period than masks that repeat for each image, so that both stay."""
    args = *windows(2)[1], torch.randn(8, 3, 5, 5)

    def call(q, k, v, b):
        mask = torch.arange(4.0).view(1, 4, 1, 1, 1) * torch.ones(5, 5).triu()
        scores = (q @ k.mT + b).view(-1, 4, 3, 5, 5) + mask
        return scores.view(-1, 3, 5, 5).softmax(-1) @ v

    assert matched(call, args, "attention") == 0


@pytest.mark.parametrize("dims", [(1, 0, 3, 2), (0, 1, 3, 2)], ids=["exchanged", "as they are"])
def test_keys_with_batches_and_heads_exchanged(dims):
    """Keys whose batches and heads change places are read in their new places."""
    q, k, v = (torch.randn(2, 2, length, 16) for length in (5, 7, 7))
    fn = lambda q, k, v, b: (q @ k.permute(dims) * 0.3 + b).softmax(-1) @ v  # noqa: E731
    assert matched(fn, (q, k, v, torch.randn(5, 7)), "attention") == 1


def test_keys_of_one_head():
    """Keys and values that are repeated for each head match, and are passed on as views without copies."""
    q, k, v, b = torch.randn(2, 3, 5, 16), torch.randn(2, 1, 7, 16), torch.randn(2, 1, 7, 16), torch.randn(5, 7)
    fn = lambda q, k, v, b: K(q, k.expand(2, 3, 7, 16), b).softmax(-1) @ v.expand(2, 3, 7, 16)  # noqa: E731
    rewriting = Rewriting(fn, "attention")
    with torch.no_grad():
        agrees(rewriting(q, k, v, b), fn, (q, k, v, b))
    assert rewriting.counts["attention"] == 1
    (gm,) = rewriting.graphs
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.backend_kwargs.attention.default)
    assert [each.meta["val"].stride(1) for each in node.args[1:3]] == [0, 0]


def test_heads_merged():
    """Attention with three dimensions matches."""
    q, k, v = (torch.randn(6, 5, 8) for _ in range(3))
    b = torch.randn(6, 5, 5)
    fn = lambda q, k, v, b: torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) + b, 2), v)  # noqa: E731
    assert matched(fn, (q, k, v, b), "attention") == 1


@pytest.mark.parametrize("value", [float("-inf"), -1e30, 1e4], ids=str)
def test_masks(value):
    """A bias of -inf masks its keys."""
    *qkv, b = factors(bias="keys")
    b[..., 2] = value
    assert matched(attention(SCORES["scaled"]), (*qkv, b), "attention") == 1


def regrouped(q, k, v, b, shape, split=None):
    """Return attention whose scores have a shape of their own as the bias is added to them."""
    q, k, v = (each.reshape(*(split or each.shape[:2]), *each.shape[2:]) for each in (q, k, v))
    heads = q.shape[:2].numel()
    q, k, v = q.reshape(heads, 5, 16), k.mT.reshape(heads, 16, 7), v.reshape(heads, 7, 16)
    weights = (torch.bmm(q, k).view(shape) * 0.3 + b).softmax(-1)
    return torch.bmm(weights.view(heads, 5, 7), v)


K, QUERIES = SCORES["scaled"], torch.rand(1, 5, 1)
NEAR = {
    "the bias is scaled too": lambda q, k, v, b: ((q @ k.transpose(-2, -1) + b) * 0.3).softmax(-1) @ v,
    "the weights are returned": lambda q, k, v, b: (w := K(q, k, b).softmax(-1), w @ v),
    "the scores are returned": lambda q, k, v, b: (s := K(q, k, b), s.softmax(-1) @ v),
    "the weights are scaled": lambda q, k, v, b: (K(q, k, b).softmax(-1) * 2) @ v,
    "over queries": lambda q, k, v, b: K(q, k, b).softmax(-2) @ v,
    "over heads": lambda q, k, v, b: K(q, k, b).softmax(1) @ v,
    "log-softmax": lambda q, k, v, b: K(q, k, b).log_softmax(-1) @ v,
    "a scale of heads after the bias": lambda q, k, v, b: ((q @ k.transpose(-2, -1) + b) * HEADS).softmax(-1) @ v,
    "a scale of heads of another dtype": lambda q, k, v, b: (
        (q @ k.transpose(-2, -1) * HEADS.double() + b).softmax(-1).to(v.dtype) @ v
    ),
    "a number added to the scores": lambda q, k, v, b: K(q, k, 0.5).softmax(-1) @ v,
    "a scale for each query": lambda q, k, v, b: (q @ k.transpose(-2, -1) * QUERIES).softmax(-1) @ v,
    "a scale of zero": lambda q, k, v, b: (q @ k.transpose(-2, -1) * 0.0 + b).softmax(-1) @ v,
    "a scale for each key": lambda q, k, v, b: (q @ k.transpose(-2, -1) * b).softmax(-1) @ v,
    "a function of the scores": lambda q, k, v, b: (q @ k.transpose(-2, -1)).tanh().softmax(-1) @ v,
    "weights on the right": lambda q, k, v, b: v.transpose(-2, -1) @ K(q, k, b).softmax(-1).transpose(-2, -1),
    "scores that are rounded to integers": lambda q, k, v, b: (
        ((q @ k.transpose(-2, -1)).to(torch.int32).float() + b).softmax(-1) @ v
    ),
    "weights that are rounded to integers": lambda q, k, v, b: (
        K(q, k, 1e5 * b).softmax(-1).to(torch.int32).to(v.dtype) @ v
    ),
    "scores that are quantised": lambda q, k, v, b: (
        ((q @ k.transpose(-2, -1)).to(torch.float8_e4m3fn).float() + b).softmax(-1) @ v
    ),
    "weights that are quantised": lambda q, k, v, b: K(q, k, b).softmax(-1).to(torch.float8_e4m3fn).to(v.dtype) @ v,
    "over queries, counted from the front": lambda q, k, v, b: K(q, k, b).softmax(2) @ v,
    "a negative scale": lambda q, k, v, b: (q @ k.transpose(-2, -1) * -0.3 + b).softmax(-1) @ v,
    "integers added to the scores": lambda q, k, v, b: K(q, k, (9 * b).long()).softmax(-1) @ v,
    "no keys": lambda q, k, v, b: K(q, k[:, :, :0], b[..., :0]).softmax(-1) @ v[:, :, :0],
    "no width": lambda q, k, v, b: K(q[..., :0], k[..., :0], b).softmax(-1) @ v,
    "weights of one query for many": lambda q, k, v, b: K(q[:, :, :1], k, b[:, :1]).softmax(-1).expand(2, 3, 5, 7) @ v,
    "a batch of weights for all": lambda q, k, v, b: K(q[:1], k[:1], b).softmax(-1).expand(2, 3, 5, 7) @ v,
    "scores of other batches and heads": lambda q, k, v, b: regrouped(q, k, v, b[:, None, :1], (3, 2, 5, 7)),
    "scores of other batches and as many heads": lambda q, k, v, b: regrouped(
        q[:, :2], k[:, :2], v[:, :2], b[:2, None, :1], (2, 2, 5, 7), (4, 1)
    ),
    "queries that are heads": lambda q, k, v, b: regrouped(q, k, v, b.flatten(0, 1), (2, 15, 7)),
    "factors of more heads": lambda q, k, v, b: torch.bmm((torch.bmm(q[0, :1], k[0, :1].mT) * HEADS).softmax(-1), v[0]),
    "a bias with a factor": lambda q, k, v, b: torch.add(q @ k.mT, b, alpha=2).softmax(-1) @ v,
    "a bias and scores with a factor": lambda q, k, v, b: torch.add(b, q @ k.mT, alpha=2).softmax(-1) @ v,
    "scores that are no product": lambda q, k, v, b: (b.expand(2, 3, 5, 7) * 2).softmax(-1) @ v,
    "the product is returned": lambda q, k, v, b: (s := q @ k.mT, (s * 0.3 + b).softmax(-1) @ v),
    "the scaled product is returned": lambda q, k, v, b: (s := q @ k.mT * 0.3, (s + b).softmax(-1) @ v),
    "weights of themselves": lambda q, k, v, b: torch.bmm(w := (torch.bmm(k[0], k[0].mT) * 0.3).softmax(-1), w),
    "float64": lambda q, k, v, b: K(q.double(), k.double(), b.double()).softmax(-1) @ v.double(),
    "values of another dtype": lambda q, k, v, b: K(q, k, b.bfloat16()).softmax(-1).bfloat16() @ v.bfloat16(),
    "an infinite scale": lambda q, k, v, b: ((q @ k.mT / 1e-320 + b).softmax(-1) @ v).nan_to_num(),
}


def test_a_bias_with_more_digits_stays():
    """A bias in float32 under heads in bfloat16 is not rounded, such as the masks that autocast leaves in float32."""
    q, k, v, b = factors(torch.bfloat16)
    fn = attention(lambda q, k, b: (q @ k.transpose(-2, -1)) * 0.3 + b)
    wide = (100 + torch.randn(b.shape), torch.full((5, 7), torch.finfo(torch.float32).min))
    assert [matched(fn, (q, k, v, each), "attention") for each in wide] == [0, 0]
    two = attention(lambda q, k, b: (q @ k.transpose(-2, -1)).float() * 0.3 + b.float() + b.float() * 0.001)
    assert matched(two, (q, k, v, b), "attention") == 0


def test_a_bias_with_fewer_digits_matches():
    """A bias in bfloat16 is widened for heads in float32, and one that was widened is passed on as it was."""
    q, k, v, b = factors()
    fn = attention(lambda q, k, b: (q @ k.transpose(-2, -1)) * 0.3 + b)
    assert matched(fn, (q, k, v, b.bfloat16()), "attention") == 1
    widened = attention(lambda q, k, b: (q @ k.transpose(-2, -1)).float() * 0.3 + b.float().unsqueeze(0))
    args = tuple(each.bfloat16() for each in (q, k, v, b))
    assert matched(widened, args, "attention") == 1


@pytest.mark.parametrize("bias", BIASES)
def test_dynamic_batches(bias):
    """The batch may vary: one graph with a symbolic size serves several, whichever dimensions the bias has."""
    rewriting = Rewriting(fn := attention(SCORES["scaled"]), "attention")
    for batch in (2, 3, 4):
        *qkv, b = factors(bias=bias)
        args = (*(torch.cat((each, -each))[:batch] for each in qkv), torch.cat((b, b))[:batch] if b.dim() == 4 else b)
        with torch.no_grad():
            agrees(rewriting(*args), fn, args)
    assert (rewriting.counts["attention"], len(rewriting.graphs)) == (2, 2)


def test_dynamic_lengths():
    """Numbers of queries and keys may vary too, where the result keeps the product's sizes."""
    rewriting = Rewriting(fn := attention(SCORES["scaled"], heads_last=False), "attention")
    for queries, keys in ((5, 7), (6, 9), (8, 10)):
        args = (*(torch.randn(2, 3, length, 16) for length in (queries, keys, keys)), torch.randn(3, queries, keys))
        with torch.no_grad():
            agrees(rewriting(*args), fn, args)
    assert (rewriting.counts["attention"], len(rewriting.graphs)) == (2, 2)


@pytest.mark.parametrize("sizes", [(0, 3, 5, 7), (2, 3, 0, 7)], ids=["no batch", "no queries"])
def test_nothing_to_attend(sizes):
    """Without batches or queries the result is empty, with eager's shape."""
    batch, heads, queries, keys = sizes
    args = (torch.randn(batch, heads, queries, 16), *(torch.randn(batch, heads, keys, 16) for _ in range(2)))
    fn = attention(SCORES["scaled"], heads_last=False)
    rewriting, b = Rewriting(fn, "attention"), torch.randn(heads, queries, keys)
    with torch.no_grad():
        got, want = rewriting(*args, b), fn(*args, b)
    assert (got.shape, got.stride()) == (want.shape, want.stride())


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_near_miss(fn):
    """Similar graphs stay unchanged."""
    rewriting = Rewriting(fn, "attention")
    args = factors()
    with torch.no_grad():
        got, want = rewriting(*args), fn(*args)
    assert rewriting.counts["attention"] == 0
    torch.testing.assert_close(got, want)


def test_a_view_without_a_value_stays():
    """Scores whose view another pass has inserted without its fake tensor stay as they are."""

    def lower(gm, example_inputs, **kwargs):
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
            for view in node.users:
                view.meta.pop("val")
        return Rewriting._lower(rewriting, gm, example_inputs, **kwargs)

    fn = attention(SCORES["scaled"])
    rewriting, args = Rewriting(fn, "attention"), factors()
    rewriting._lower = lower
    with torch.no_grad():
        agrees(rewriting(*args), fn, args)
    assert rewriting.counts["attention"] == 0


def test_queries_that_are_keys():
    """A tensor that attends to itself matches."""
    fn = lambda x, b: (x @ x.mT * 0.3 + b).softmax(-1) @ x  # noqa: E731
    rewriting, args = Rewriting(fn, "attention"), (torch.randn(2, 3, 5, 16), torch.randn(3, 1, 5))
    with torch.no_grad():
        agrees(rewriting(*args), fn, args)
    assert rewriting.counts["attention"] == 1


def test_training_keeps_weights():
    """In training nothing matches, since the backward pass needs the weights, and gradients equal eager's."""
    args = [each.requires_grad_() for each in factors()]
    fn = attention(SCORES["scaled"])
    rewriting = Rewriting(fn, "attention")
    rewriting(*args).square().sum().backward()
    got = [each.grad for each in args]
    for each in args:
        each.grad = None
    fn(*args).square().sum().backward()
    torch.testing.assert_close(got, [each.grad for each in args])
    assert rewriting.counts["attention"] == 0


def with_bias(by, keys, bias, grad=False, heads=4):
    """Return a graph of a library's attention in 8 windows with a bias, traced without a GPU."""
    aten = torch.ops.aten
    calls = {
        "efficient": lambda q, k, v, b: aten._scaled_dot_product_efficient_attention(q, k, v, b, grad, scale=0.2),
        "cudnn": lambda q, k, v, b: aten._scaled_dot_product_cudnn_attention(q, k, v, b, grad, scale=0.2),
    }
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        qkv = [torch.empty(8, keys, each, 32, **like).transpose(1, 2) for each in (4, heads, heads)]
        given = [torch.empty(4, keys, keys, **like), torch.empty(4, keys, keys, **like)]
        gm = make_fx(lambda *args: calls[by](*args[:3], bias(*args[3:]))[: 1 + grad])(*qkv, *given)
    gm.graph.eliminate_dead_code()
    return gm


def masks_of(mask):
    """Return masks of windows, repeated for each image and head."""
    keys = mask.shape[-1]
    return mask.view(1, 4, 1, keys, keys).expand(2, -1, 4, -1, -1).reshape(-1, 4, keys, keys)


def repeated(table, mask, first=False):
    """Return a bias with repeated masks, as timm passes it to scaled_dot_product_attention."""
    masks = masks_of(mask)
    return masks + table.unsqueeze(0) if first else table.unsqueeze(0) + masks


def pad(graph, start=0, left=0, step=1):
    """Pad the bias and slice it again, as torch does for the memory-efficient kernel."""
    aten = torch.ops.aten
    (node,) = graph.find_nodes(op="call_function", target=aten._scaled_dot_product_efficient_attention.default)
    bias = node.args[3]
    value = bias.meta["val"]
    with graph.inserting_before(node), value.fake_mode:
        width = 64 * step
        padded = graph.call_function(aten.constant_pad_nd.default, (bias, [left, width - 49 - left], 0.0))
        wide = padded.meta["val"] = torch.empty(*value.shape[:3], width, dtype=value.dtype, device=value.device)
        cut = graph.call_function(aten.slice.Tensor, (padded, -1, start, start + 49 * step, step))
        cut.meta["val"] = torch.empty_strided(value.shape, wide.stride(), dtype=value.dtype, device=value.device)
    node.update_arg(3, cut)


FEW = {
    "one of all": ("cudnn", lambda table, mask: table.expand(8, 4, *table.shape[1:]), (8, 4, 49, 49)),
    "one that repeats": ("cudnn", repeated, (4, 4, 49, 49)),
    "one that repeats, first": ("cudnn", lambda table, mask: repeated(table, mask, first=True), (4, 4, 49, 49)),
    "a sum": ("cudnn", lambda table, mask: table.expand(8, 4, *table.shape[1:]) + mask, (8, 4, 49, 49)),
    "one that was padded": ("efficient", repeated, (4, 4, 49, 49)),
    "one that repeats, and one of all": (
        "cudnn",
        lambda table, mask: masks_of(mask) + table.expand(8, 4, *table.shape[1:]),
        (8, 4, 49, 49),
    ),
    "masks of each image": (
        "cudnn",
        lambda table, mask: (
            table.unsqueeze(0)
            + mask.narrow(0, 0, 2).view(2, 1, 1, 49, 49).expand(2, 4, 4, -1, -1).reshape(-1, 4, 49, 49)
        ),
        (8, 4, 49, 49),
    ),
}


@pytest.mark.parametrize(("by", "bias", "wanted"), FEW.values(), ids=FEW)
def test_a_library_over_few_keys(by, bias, wanted):
    """With a bias and few keys our kernel replaces a library's, and repeated masks are not materialized."""
    gm = with_bias(by, 49, bias)
    if by == "efficient":
        pad(gm.graph)
    (before,) = gm.graph.output_node().all_input_nodes
    was = before.meta["val"]
    assert rewrite_graph(gm.graph, "attention") == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.backend_kwargs.attention.default)
    assert node.args[3].meta["val"].shape == wanted
    assert node.args[4] == 0.2
    (after,) = gm.graph.output_node().all_input_nodes
    assert (after.meta["val"].shape, after.meta["val"].stride()) == (was.shape, was.stride())
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)


STAYS = {
    "many keys": (300, False, repeated),
    "a bias with more digits": (49, False, lambda table, mask: table.float().expand(8, 4, 49, 49)),
    "training": (49, True, repeated),
    "no bias": (49, False, lambda *args: None),
}


@pytest.mark.parametrize(("keys", "grad", "bias"), STAYS.values(), ids=STAYS)
def test_a_library_stays(keys, grad, bias):
    """A library's kernel stays if there are many keys, no bias, or a backward pass."""
    assert rewrite_graph(with_bias("efficient", keys, bias, grad).graph, "attention") == 0


@pytest.mark.parametrize(
    ("start", "left", "step"), [(0, 3, 1), (15, 0, 1), (3, 3, 1), (0, 0, 2)], ids=["left", "start", "both", "step"]
)
def test_another_part_of_a_padded_bias(start, left, step):
    """A bias that is padded and sliced at other places is passed on as it is."""
    gm = with_bias("efficient", 49, repeated)
    pad(gm.graph, start, left, step)
    assert rewrite_graph(gm.graph, "attention") == 1
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.backend_kwargs.attention.default)
    assert node.args[3].target is torch.ops.aten.slice.Tensor


ROWS = {
    "unaligned": (torch.randn(2, 5, 13), 2 * 5 * 16),
    "aligned": (torch.randn(2, 5, 16), 2 * 5 * 16),
    "expanded": (torch.randn(1, 2, 5, 13).expand(6, 2, 5, 13), 2 * 5 * 16),
    "of keys": (torch.randn(6, 1, 1, 13).expand(6, 2, 5, 13), 6 * 16),
    "of queries": (torch.randn(2, 5, 1).expand(2, 5, 16), 2 * 5 * 16),
    "that repeats": (torch.randn(3, 2, 5, 13), 3 * 2 * 5 * 16),
    "transposed": (torch.randn(2, 16, 5).mT, 2 * 5 * 16),
}


@pytest.mark.parametrize(("bias", "numbers"), ROWS.values(), ids=ROWS)
def test_rows_of_a_bias(bias, numbers):
    """A library's kernel gets rows that begin at multiples of 16 bytes; what is expanded is copied once."""
    q, k, v = torch.randn(6, 2, 5, 8), *torch.randn(2, 6, 2, bias.shape[-1], 8)
    rows = _with_aligned_rows(bias)
    assert rows.numel() == numbers
    assert all(stride % 8 == 0 for stride in rows.stride()[:-1])
    assert rows.stride(-1) == 1
    whole = bias.repeat(2, 1, 1, 1) if bias.shape[0] == 3 else bias
    want = torch.softmax(q.double() @ k.mT.double() * 0.2 + whole.double(), -1) @ v.double()
    torch.testing.assert_close(_attention(q, k, v, bias, 0.2).double(), want.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_fewer_heads_of_keys_stay():
    """Grouped queries have no kernel of ours: it would read keys beyond the last head."""
    gm = with_bias("cudnn", 49, lambda table, mask: table.expand(8, 4, 49, 49), heads=2)
    assert rewrite_graph(gm.graph, "attention") == 0


ATEN = torch.ops.aten
OTHERWISE = {
    "causal": lambda q, k, v, b: ATEN._scaled_dot_product_efficient_attention(q, k, v, b, False, 0.0, True),
    "dropout": lambda q, k, v, b: ATEN._scaled_dot_product_efficient_attention(q, k, v, b, False, 0.5),
    "a negative scale": lambda q, k, v, b: ATEN._scaled_dot_product_cudnn_attention(q, k, v, b, False, scale=-0.2),
    "a scale of zero": lambda q, k, v, b: ATEN._scaled_dot_product_efficient_attention(q, k, v, b, False, scale=0.0),
    "two dtypes": lambda q, k, v, b: ATEN._scaled_dot_product_efficient_attention(q, k, v.half(), b, False),
    "in float32": lambda *args: ATEN._scaled_dot_product_efficient_attention(*(each.float() for each in args), False),
    "a mask": lambda q, k, v, b: ATEN._scaled_dot_product_cudnn_attention(q, k, v, b > 0, False),
}


@pytest.mark.parametrize("call", OTHERWISE.values(), ids=OTHERWISE)
def test_a_library_computes_something_else(call):
    """A library's kernel stays if ours has no such form."""
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    with FakeTensorMode():
        qkv = [torch.empty(8, 49, 4, 32, **like).transpose(1, 2) for _ in range(3)]
        gm = make_fx(lambda *args: call(*args)[0])(*qkv, torch.empty(8, 4, 49, 49, **like))
    gm.graph.eliminate_dead_code()
    assert rewrite_graph(gm.graph, "attention") == 0


CHOICES = {
    "flash": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, scale=0.2),
    "efficient": lambda q, k, v: torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, False),
    "cudnn": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, scale=0.2),
}


def test_keys_of_choices_of_attention():
    """Inductor's cache has other keys for each kernel that SDPA may choose, with the option and without it.

    This is shown on graphs that are traced for a GPU without having one: the operators and keys alone, no results.
    """
    with FakeTensorMode():
        qkv = [torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3)]
        traced = {by: make_fx(lambda *args, call=call: call(*args)[0])(*qkv) for by, call in CHOICES.items()}
    keys = []
    for own in (None, RewritePass(["attention"], [])):
        with config.patch(post_grad_custom_pre_pass=own):
            keys += [compiled_fx_graph_hash(gm, qkv, {}, [])[0] for gm in traced.values()]
    assert len(set(keys)) == 2 * len(CHOICES)
