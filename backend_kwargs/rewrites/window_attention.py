"""Attention over few queries and keys with a bias in training, forward and backward, by kernels of our own.

A library's gradient of the bias is as large as the scores of all windows; ours sums it over windows that share the
bias. The weights are computed again for the gradients. Masks that repeat for each image are passed on without the
repetition.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.backends import Inputs
from backend_kwargs.rewrites.attention import _attention, _attention_cuda, _heads_last, parts_of_bias, scale_of
from backend_kwargs.rewrites.matching import (
    HALF,
    Arguments,
    Context,
    Gradients,
    define,
    have_one_dtype,
    known_true,
    require,
    same_sizes,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing

REWRITE = Rewrite(
    "Attention with a bias over few keys in training, by our own kernels",
    traced=f"{__name__}:attend_by_tiles",
    operators=("backend_kwargs::window_attention",),
    needs=("gpu",),
    applies="scaled_dot_product_attention in training, in half precision, with an added mask, of at most 64 queries "
    "and keys",
    fitting=lambda stats: stats.gpu and stats.training and stats.attentions > 0,
    order=65,
)

MOST = 64  # queries or keys of one tile, whose scores stay in registers
MOST_WIDTH = 64

# ---- operators


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, of_bias: bool
) -> tuple[Tensor, ...]:
    wide = torch.promote_types(q.dtype, torch.float32)
    given, queries, keys, values = (each.to(wide) for each in (grad.transpose(1, 2), q, k, v))
    scores = (_by_period(queries @ keys.mT * scale, bias) + bias).flatten(0, 1)
    weights = scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
    of_weights = given @ values.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    made = (of_scores @ keys * scale, of_scores.mT @ queries * scale, weights.mT @ given)
    low = [each.to(q.dtype).transpose(1, 2).contiguous() for each in made]
    return (*low, _summed(_by_period(of_scores, bias), bias) if of_bias else q.new_empty(0, dtype=wide))


def _by_period(scores: Tensor, bias: Tensor) -> Tensor:
    """Return scores as [sums, period, heads, queries, keys], where a bias repeats after `period` batches."""
    return scores.view(-1, bias.shape[0] if bias.dim() == 4 else 1, *scores.shape[1:])


def _summed(sums: Tensor, bias: Tensor) -> Tensor:
    """Return the gradient of the bias, of gradients that are [sums, period, heads, queries, keys]."""
    return sums.sum(0).sum_to_size(bias.shape).to(bias.dtype)


def _gradients_fake(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, of_bias: bool
) -> tuple[Tensor, ...]:
    made = [_heads_last(each, each, each) for each in (q, k, v)]
    if of_bias:
        return (*made, torch.empty_like(bias, memory_format=torch.contiguous_format))
    return (*made, q.new_empty(0, dtype=torch.promote_types(q.dtype, torch.float32)))


def _gradients_cuda(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, of_bias: bool
) -> tuple[Tensor, ...]:
    from backend_kwargs.rewrites.kernels.attention import gradients_over_few_keys

    *made, sums = gradients_over_few_keys(grad, q, k, v, bias, scale, of_bias=of_bias)
    return (*made, _summed(sums, bias) if of_bias else sums)


def _keep(ctx: Context, inputs: Inputs, output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Context, grad: Tensor) -> Gradients:
    *made, of_bias = window_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.needs_input_grad[3])
    return *(each.transpose(1, 2) for each in made), of_bias if ctx.needs_input_grad[3] else None, None


# The bias may have fewer batches, which repeat.
window_attention = define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor bias, float scale) -> Tensor",
    _attention,
    fake=_heads_last,
    cuda=_attention_cuda,
    keep=_keep,
    backward=_backward,
)
window_attention_backward = define(
    "window_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor bias, float scale, bool of_bias) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    fake=_gradients_fake,
    cuda=_gradients_cuda,
)


# ---- dynamo's graph


def _attended(node: Node, args: Arguments) -> Node:
    """Insert the operator for a call of attention that is trained."""
    q, k, v, bias = operands = [args[name] for name in ("query", "key", "value", "attn_mask")]
    values = values_of(*operands, node)
    require(not (args["dropout_p"] or args["enable_gqa"] or args["is_causal"]))
    scale = scale_of(args["scale"], values[0])
    _require_kernels(*values)
    terms = parts_of_bias(bias)
    require(not changes_meanwhile(node, [q, k, v, *terms]))
    if len(terms) == 2:
        bias = node.graph.call_function(torch.add, (terms[0], method(terms[1], "squeeze", 0)))
    rows = method(node.graph.call_function(window_attention, (q, k, v, bias, scale)), "transpose", 1, 2)
    return rows if values[-1].transpose(1, 2).is_contiguous() else method(rows, "contiguous")


def _require_kernels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, result: Tensor) -> None:
    """Raise unless the kernels compute this result and its gradients, for all values of the sizes' symbols."""
    require(q.dim() == 4 and have_one_dtype((q, k, v, result), HALF) and result.requires_grad)
    batch, heads, queries, width = q.shape
    keys, of_v = v.shape[-2:]
    wanted = (
        (k, (batch, heads, keys, width)),
        (v, (batch, heads, keys, of_v)),
        (result, (batch, heads, queries, of_v)),
    )
    require(all(known_true(size > 0) and known_true(size <= MOST) for size in (queries, keys)))
    require(all(isinstance(size, int) and 0 < size <= MOST_WIDTH for size in (width, of_v)))
    require(known_true(batch * heads > 0) and all(same_sizes(each.shape, sizes) for each, sizes in wanted))
    require(bias.is_floating_point() and bias.dim() <= 4)
    broadcast = zip(reversed(bias.shape), (keys, queries, heads, batch), strict=False)
    require(all(known_true(one == 1) or known_true(one == size) for one, size in broadcast))


attend_by_tiles = replacing((F.scaled_dot_product_attention,), _attended)
