"""The operators of attention, and cuDNN's kernel in place of the one that scaled_dot_product_attention chose."""

import operator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.matching import (
    HALF,
    AnyNode,
    arguments_of,
    aten,
    erase_dead,
    hint,
    insert,
    known_true,
    same_sizes,
    value_of,
)
from backend_kwargs.rewrites.operators import define
from backend_kwargs.torch_internals.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

HEADS_LAST = [0, 2, 1, 3]

# ---- the operators

MOST_KEYS, MOST_WIDTH = 256, 128  # the limits of one tile of our kernel


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is not None:
        if bias.dim() == 4 and bias.shape[0] not in (1, q.shape[0]):  # such as masks for the windows of one image
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        bias = bias.expand(*q.shape[:-1], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2).contiguous()


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    from backend_kwargs.rewrites.kernels.attention import attention_over_few_keys

    fits = has_few_keys(q, k, v) and q.numel() > 0 and k.numel() > 0
    return (attention_over_few_keys if fits else _attention)(q, k, v, bias, scale)


def has_few_keys(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether our kernel has tiles for these sizes, for all values of their symbols."""
    return known_true(k.shape[2] <= MOST_KEYS) and known_true(max(q.shape[3], v.shape[3]) <= MOST_WIDTH)


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


def _saved_by_attention(node: Node) -> float:
    """Return the traffic of the scores and the weights, each written once and read once."""
    q, k = (each.meta["val"] for each in node.all_input_nodes[:2])
    batch, heads, queries, _ = map(hint, q.shape)
    return float(4 * batch * heads * queries * hint(k.shape[-2]) * q.element_size())


# The result is [batch, queries, heads, width]: the kernels write this layout, and the next layer reads it. The
# bias may have fewer batches, which repeat.
attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> Tensor",
    _attention,
    fake=_attention_fake,
    cuda=_attention_cuda,
    saved=_saved_by_attention,
)


def _any_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    return attended.transpose(1, 2).contiguous()


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    by = torch.ops.aten._scaled_dot_product_cudnn_attention
    result: Tensor = by(q, k, v, bias, False, 0.0, is_causal, False, scale=scale)[0]
    return result.transpose(1, 2).contiguous()


cudnn_attention = define(
    "cudnn_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool is_causal, float scale) -> Tensor",
    _any_attention,
    fake=lambda q, k, v, bias, is_causal, scale: _attention_fake(q, k, v, bias, scale),
    cuda=_cudnn_attention,
    saved=lambda node: 0.0,  # a faster kernel for the same traffic
)


# ---- calls in a lowered graph

# The first result of each is the attention's.
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default


def only_result(node: AnyNode) -> bool:
    """Return whether only the first result is used, in the layout [batch, queries, heads, width] of our operator.

    The other results are for the backward pass of the same kernel. Keys and values must have as many heads as queries.
    """
    given = arguments_of(node) or {}
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users):
        return False
    if not all(user.meta["val"].transpose(1, 2).is_contiguous() for user in node.users):
        return False
    q, k, v = (value_of(given.get(name)) for name in ("query", "key", "value"))
    if q is None or k is None or v is None or q.dtype not in HALF or not q.dtype == k.dtype == v.dtype:
        return False
    if not same_sizes(k.shape, (*q.shape[:2], k.shape[2], q.shape[3])) or not same_sizes(v.shape[:3], k.shape[:3]):
        return False
    if not all(known_true(each.numel() > 0) for each in (q, k, v)):
        return False
    return not given.get("dropout_p") and not given.get("return_debug_mask")


def scale_of(given: dict[str, Any]) -> float | None:
    """Return the scale of a call with these arguments, or None if it is not a number above 0."""
    scale, width = given.get("scale"), given["query"].meta["val"].shape[-1]
    if scale is None and isinstance(width, int):
        return float(width**-0.5)
    return float(scale) if isinstance(scale, int | float) and scale > 0 else None


def replace_results(node: AnyNode, attended: AnyNode) -> None:
    """Replace the results of a library's call, of which only the first is used."""
    for user in [*node.users]:
        user.replace_all_uses_with(attended)
        node.graph.erase_node(user)
    erase_dead(node)


# ---- patterns


def add_cudnn_patterns(passes: PatternMatcherPass) -> None:
    """Register patterns of the other kernels of scaled_dot_product_attention, which cuDNN's replaces."""
    for target in (FLASH, EFFICIENT):
        register_graph_pattern(
            CallFunctionVarArgs(target), extra_check=lambda match: _may_use_cudnn(match.output_node()), pass_dict=passes
        )(_by_cudnn)


def _may_use_cudnn(node: AnyNode) -> bool:
    given = arguments_of(node) or {}
    if not only_result(node) or scale_of(given) is None:
        return False
    if not given.get("is_causal"):
        return True
    # Of other lengths, flash attention lets the last query see the last key, and cuDNN the first query the first key.
    q, k = (given[name].meta["val"] for name in ("query", "key"))
    return given.get("attn_bias") is None and (node.target is EFFICIENT or known_true(q.shape[2] == k.shape[2]))


def _by_cudnn(match: Match, *args: Any, **kwargs: Any) -> None:
    node = match.output_node()
    given = arguments_of(node)
    assert given is not None
    q, k, v = (given[name] for name in ("query", "key", "value"))
    bias, causal = given.get("attn_bias"), bool(given.get("is_causal"))
    graph = node.graph
    with graph.inserting_before(node):
        attended = insert(graph, cudnn_attention, q, k, v, bias, causal, scale_of(given))
        attended = insert(graph, aten.permute.default, attended, HEADS_LAST)
    replace_results(node, attended)
