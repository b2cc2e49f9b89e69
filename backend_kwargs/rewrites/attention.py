"""Attention written out, softmax(q @ kᵀ · scale + bias) @ v, as one call; also a library's, for a bias and few keys.

Inductor's own patterns run first and cover forms without a relative-position bias. If the weights are kept, for
instance for a backward pass, another node uses them and nothing matches. A bias that repeats, such as the masks of
shifted windows for each image, is passed on without the repetition.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from backend_kwargs.rewrites.library_attention import (
    CUDNN,
    EFFICIENT,
    HEADS_LAST,
    attention,
    has_few_keys,
    only_result,
    replace_results,
    scale_of,
)
from backend_kwargs.rewrites.matching import (
    DTYPES,
    FLOATS,
    AnyNode,
    arguments_of,
    aten,
    calls,
    insert,
    known_true,
    pattern_of,
    prims,
    replace,
    same_sizes,
    used_once,
    value_of,
)
from backend_kwargs.torch_internals.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass(slots=True)
class Attention:
    """The nodes of one attention; `sizes` are [batch, heads, queries, keys].

    Biases with five dimensions, [1, period, heads, queries, keys], repeat. `factors` multiply all scores of a head.
    """

    q: AnyNode
    k: AnyNode
    v: AnyNode
    product: AnyNode
    sizes: tuple[Any, ...]
    biases: list[AnyNode] = field(default_factory=list)
    scale: float = 1.0
    keys_before_width: bool = False
    factors: list[AnyNode] = field(default_factory=list)


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns of a softmax over the last dimension of scores, and of libraries' attention."""
    for target in (EFFICIENT, CUDNN):
        register_graph_pattern(
            CallFunctionVarArgs(target), extra_check=lambda match: _over_few_keys(match) is not None, pass_dict=passes
        )(_fuse_library)
    seen = set()
    for dtype, sizes in itertools.product(DTYPES, ((2, 4, 4), (2, 2, 4, 4))):
        for dim in (-1, len(sizes) - 1):
            pattern = pattern_of(partial(_softmax, dim), torch.empty(sizes, dtype=dtype))
            if repr(pattern) not in seen:
                seen.add(repr(pattern))
                register_graph_pattern(pattern, extra_check=partial(_is_attention, dim), pass_dict=passes)(
                    partial(_fuse, dim)
                )


def _softmax(dim: int, x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim)


def _is_attention(dim: int, match: Match) -> bool:
    return _parse(match, dim) is not None


def _fuse(dim: int, match: Match, x: AnyNode) -> None:
    found = _parse(match, dim)
    assert found is not None
    graph = found.product.graph
    with graph.inserting_before(found.product):
        q, k, v = (_of_four(graph, each) for each in (found.q, found.k, found.v))
        if not found.keys_before_width:
            k = insert(graph, aten.permute.default, k, [0, 1, 3, 2])
        for factor in found.factors:
            q = insert(graph, aten.mul.Tensor, q, factor)
        bias = _bias(graph, found, q.meta["val"].dtype)
        attended = insert(graph, attention, q, k, v, bias, found.scale)
    target = _heads_last(found)
    if target is not None:
        replace(target, attended)
        return
    with graph.inserting_before(found.product):
        attended = insert(graph, aten.permute.default, attended, HEADS_LAST)
        attended = insert(graph, aten.clone.default, attended, memory_format=torch.contiguous_format)
        sizes = [_size(graph, attended, dim) for dim in (2, 3)]
        attended = insert(graph, aten.reshape.default, attended, [-1, *sizes])
    replace(found.product, attended)


def _size(graph: Graph, node: AnyNode, dim: int) -> Any:
    size = node.meta["val"].shape[dim]
    return size if isinstance(size, int) else insert(graph, aten.sym_size.int, node, dim)


def _heads_last(found: Attention) -> AnyNode | None:
    """Return the [batch, queries, heads, width] copy that the model makes of the result, or None.

    The library returns this layout anyway, so the copy is dropped.
    """
    node = found.product
    for targets, args in ((VIEWS, None), ((aten.permute.default,), HEADS_LAST), ((aten.clone.default,), None)):
        if not used_once(node):
            return None
        node = next(iter(node.users))
        if not calls(node, *targets) or (args is not None and list(node.args[1]) != args):
            return None
    value, (batch, heads, queries, _) = value_of(node), found.sizes
    if value is None or value.dim() != 4 or not same_sizes(value.shape[:3], (batch, queries, heads)):
        return None
    return node if value.is_contiguous() else None


def _of_four(graph: Graph, node: AnyNode) -> AnyNode:
    return node if node.meta["val"].dim() == 4 else insert(graph, aten.unsqueeze.default, node, 0)


def _bias(graph: Graph, found: Attention, dtype: torch.dtype) -> Any:
    bias: Any = None
    for each in found.biases:
        if each.meta["val"].dim() == 5:
            each = insert(graph, aten.select.int, each, 0, 0)  # noqa: PLW2901
        bias = each if bias is None else insert(graph, aten.add.Tensor, bias, each)
    if bias is not None and bias.meta["val"].dtype != dtype:
        bias = insert(graph, prims.convert_element_type.default, bias, dtype)
    return bias


def _parse(match: Match, dim: int) -> Attention | None:
    """Return the attention around the matched softmax over `dim`, or None."""
    weights, scores = match.output_node(), match.kwargs["x"]
    product = _product_of(weights)
    whole, value = value_of(scores), value_of(product) if product else None
    if product is None or whole is None or value is None or value.dtype not in DTYPES:
        return None
    if whole.dim() not in (3, 4) or dim % whole.dim() != whole.dim() - 1:
        return None
    if not isinstance(scores, Node) or not set(match.nodes).issuperset(scores.users):
        return None
    found = _sum_of_scores(scores, whole)
    if found is None or not 0 < found[2] < math.inf:  # of negative ones, flash attention takes no maximum
        return None
    node, biases, scale, factors = found
    periods = [period for period in map(_period, biases) if not known_true(period == 1)]
    if not all(known_true(period == periods[0]) for period in periods):
        return None
    attention = _of_product(node, product, whole, biases, scale)
    if attention is None or any(value_of(each).dtype != value.dtype for each in factors):  # type: ignore[union-attr]
        return None
    if not _exact_in(value.dtype, biases):
        return None
    attention.factors = factors
    return attention


def _exact_in(dtype: torch.dtype, biases: list[AnyNode]) -> bool:
    """Return whether the sum of `biases` has no more digits than `dtype`, so that a call can take it in `dtype`."""
    given = [each.meta["val"].dtype for each in biases]
    if all(each == dtype for each in given):
        return True
    return len(biases) == 1 and (torch.promote_types(given[0], dtype) == dtype or _was_widened(biases[0], dtype))


def _was_widened(node: Any, dtype: torch.dtype) -> bool:
    """Return whether `node` has the values of a tensor of `dtype`."""
    same = (*VIEWS, aten.expand.default, aten.unsqueeze.default, aten.permute.default, aten.slice.Tensor)
    while calls(node, *same, aten.clone.default, prims.convert_element_type.default):
        node = node.args[0]
        value = value_of(node)
        if value is not None and value.dtype == dtype:
            return True
    return False


def _converts_floats(node: Any) -> bool:
    """Return whether `node` converts floating-point numbers to others; those to integers or to 8 bits are wanted."""
    values = (value_of(node), value_of(node.args[0])) if calls(node, prims.convert_element_type.default) else ()
    return bool(values) and all(each is not None and each.dtype in FLOATS for each in values)


def _sum_of_scores(scores: AnyNode, whole: torch.Tensor) -> tuple[AnyNode, list[AnyNode], float, list[AnyNode]] | None:
    """Return the product in `scores`, the biases added to it, its scale and the factors of its heads, or None."""
    biases: list[AnyNode] = []
    factors: list[AnyNode] = []
    scale = 1.0
    node: Any = scores
    while isinstance(node, Node) and (node is scores or used_once(node)):
        if _converts_floats(node):
            node = node.args[0]
        elif calls(node, aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[1], int | float):
            factor = float(node.args[1])
            if factor == 0:
                return None
            scale = scale * factor if calls(node, aten.mul.Tensor) else scale / factor
            node = node.args[0]
        elif calls(node, aten.mul.Tensor) and _is_factor_of_heads(node.args[1], whole):
            factors.append(node.args[1])
            node = node.args[0]
        elif calls(node, aten.add.Tensor) and not node.kwargs and scale == 1.0 and not factors:
            split = _scores_and_bias(node, whole)
            if split is None:
                return None
            node, bias = split
            biases += _parts_of_bias(bias)
        elif scale == 1.0 and not factors and (masked := _masked_windows(node)) is not None:
            node, bias = masked
            biases.append(bias)
        else:
            return node, biases, scale, factors
    return None


def _is_factor_of_heads(node: Any, whole: torch.Tensor) -> bool:
    """Return whether a tensor has one value for each head, or one for all, by which q can be multiplied as well."""
    value = value_of(node)
    if value is None or value.dim() not in (3, 4) or value.dim() > whole.dim() or not value.is_floating_point():
        return False
    return all(known_true(size == 1) for size in (*value.shape[:-3], *value.shape[-2:]))


def _of_product(
    node: AnyNode, product: AnyNode, whole: torch.Tensor, biases: list[AnyNode], scale: float
) -> Attention | None:
    """Return the attention whose scores are `node`, a product of q and k, or None."""
    if calls(node, *VIEWS):
        value = value_of(node)
        if value is None or value.dim() != 4 or not same_sizes(value.shape, whole.shape):
            return None
        node = node.args[0]
        if not used_once(node):
            return None
    if not calls(node, aten.bmm.default):
        return None
    q, k, v = (_source(each, whole.dim()) for each in (*node.args, product.args[1]))
    if q is None or k is None or v is None:
        return None
    keys_before_width = calls(k, aten.permute.default) and _swaps_last(k.args[1], whole.dim())
    if keys_before_width:
        k = k.args[0]
    values = value_of(q), value_of(k), value_of(v), value_of(product)
    if not _are_of_one_attention(*values, whole, keys_before_width):
        return None
    sizes = tuple(whole.shape) if whole.dim() == 4 else (1, *whole.shape)
    return Attention(q, k, v, product, sizes, biases, scale, keys_before_width)


def _are_of_one_attention(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    product: torch.Tensor | None,
    scores: torch.Tensor,
    keys_before_width: bool,
) -> bool:
    """Return whether q, k, v and the product have the sizes that the scores ask for, and one dtype.

    A view may have split the same heads and batches otherwise.
    """
    if q is None or k is None or v is None or product is None:
        return False
    *heads, queries, keys = scores.shape
    width, width_of_v = q.shape[-1], v.shape[-1]
    wanted = (
        (q, (*heads, queries, width)),
        (k, (*heads, keys, width) if keys_before_width else (*heads, width, keys)),
        (v, (*heads, keys, width_of_v)),
        (product, (math.prod(heads), queries, width_of_v)),
    )
    return all(
        same_sizes(each.shape, sizes) and known_true(each.numel() > 0) and each.dtype == product.dtype
        for each, sizes in wanted
    )


def _swaps_last(dims: Any, count: int) -> bool:
    return [dim % count for dim in dims] == [*range(count - 2), count - 1, count - 2]


def _product_of(weights: AnyNode) -> AnyNode | None:
    """Return the product of the weights and the values, or None if anything else uses the weights."""
    node = weights
    while used_once(node):
        user = next(iter(node.users))
        if calls(user, aten.bmm.default):
            return user if user.args[0] is node and user.args[1] is not node else None
        if not (calls(user, *VIEWS, aten.expand.default, aten.clone.default) or _converts_floats(user)):
            return None
        node = user
    return None


def _source(node: Any, dims: int) -> AnyNode | None:
    """Return the tensor, with as many dimensions as the scores, of which an operand of a bmm is a view, or None."""
    if not isinstance(node, Node):
        return None
    if dims == 3:
        return node
    merged = value_of(node)
    if not calls(node, *VIEWS):
        return None
    node = node.args[0]
    while calls(node, aten.expand.default, aten.clone.default):
        given, made = value_of(node.args[0]), value_of(node)
        if given is None or made is None or not same_sizes(given.shape, made.shape):
            break
        node = node.args[0]
    value = value_of(node)
    if value is None or merged is None or value.dim() != 4 or merged.dim() != 3:
        return None
    if not same_sizes((value.shape[0] * value.shape[1], *value.shape[2:]), merged.shape):
        return None
    return node


def _scores_and_bias(node: AnyNode, whole: torch.Tensor) -> tuple[Any, AnyNode] | None:
    """Return the scores and their bias, or None: only the scores come from a bmm and have the full shape."""
    for scores, bias in (node.args, node.args[::-1]):
        value, added = value_of(scores), value_of(bias)
        if value is None or added is None or not same_sizes(value.shape, whole.shape):
            continue
        broadcast = added.is_floating_point() and added.dim() <= whole.dim() and added.dim() >= 2
        if broadcast and _comes_from_product(scores):
            return scores, bias
    return None


def _period(bias: AnyNode) -> Any:
    sizes = bias.meta["val"].shape
    return sizes[-4] if len(sizes) >= 4 else 1


def _masked_windows(node: Any) -> tuple[Any, AnyNode] | None:
    """Return the scores and the masks of each image's windows that were added to them as [images, windows, ..]."""
    if not calls(node, *VIEWS) or not calls(node.args[0], aten.add.Tensor) or node.args[0].kwargs:
        return None
    added, whole = node.args[0], value_of(node)
    made = value_of(added)
    if whole is None or made is None or whole.dim() != 4 or made.dim() != 5 or not used_once(added):
        return None
    for scores, mask in (added.args, added.args[::-1]):
        value = value_of(mask)
        if not calls(scores, *VIEWS) or not used_once(scores) or value is None or value.dim() != 5:
            continue
        if not value.is_floating_point():
            continue
        before = value_of(scores.args[0])
        if before is None or not same_sizes(before.shape, whole.shape):
            continue
        if not same_sizes(made.shape[2:], whole.shape[1:]):
            continue
        if known_true(value.shape[0] == 1) and known_true(value.shape[1] == made.shape[1]):
            return scores.args[0], mask
    return None


def _parts_of_bias(bias: AnyNode) -> list[AnyNode]:
    """Return the terms of a bias, if one term is masks that were repeated for each image."""
    node = _unpadded(bias)
    if not calls(node, aten.add.Tensor) or node.kwargs:
        return [bias]
    for other, repeated in (node.args, node.args[::-1]):
        value, source = value_of(other), _repeated(repeated)
        if source is not None and value is not None and value.dim() <= 4 and value.is_floating_point():
            whole = value.dim() < 4 or known_true(value.shape[0] == 1)
            return [other, source] if whole else [bias]
    return [bias]


def _unpadded(node: Any) -> Any:
    """Return the node before copies to another layout, or padding and slicing, for the library's kernel."""
    while True:
        value = value_of(node)
        if calls(node, aten.expand.default, aten.clone.default):
            source = node.args[0]
        elif calls(node, aten.slice.Tensor) and calls(node.args[0], aten.constant_pad_nd.default):
            cut, (padded, pads, *_) = arguments_of(node) or {}, node.args[0].args
            from_start = cut.get("start") in (0, None) and cut.get("step") == 1 and not any(pads[::2])
            source = padded if from_start else None
        else:
            return node
        given = value_of(source)
        if value is None or given is None or not same_sizes(value.shape, given.shape):
            return node
        node = source


def _repeated(node: Any) -> AnyNode | None:
    """Return the [1, period, heads, queries, keys] that was repeated into the batches of `node`, or None."""
    if not calls(node, *VIEWS):
        return None
    value, node = value_of(node), node.args[0]
    while calls(node, aten.clone.default):
        node = node.args[0]
    whole = value_of(node)
    if not calls(node, aten.expand.default) or value is None or whole is None or (whole.dim(), value.dim()) != (5, 4):
        return None
    source = value_of(node.args[0])
    same = source is not None and source.dim() == 5 and same_sizes(whole.shape[2:], value.shape[1:])
    if not same or source is None or not source.is_floating_point():
        return None
    return node.args[0] if known_true(source.shape[0] == 1) and known_true(source.shape[1] == whole.shape[1]) else None


def _comes_from_product(node: Any) -> bool:
    while calls(node, aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, *VIEWS) or _converts_floats(node):
        node = node.args[0]
    return calls(node, aten.bmm.default)


# ---- a library's call


def _over_few_keys(match: Match) -> Attention | None:
    """Return the attention of a library's kernel if it has a bias and so few keys that ours is faster, or None."""
    node = match.output_node()
    given = arguments_of(node) or {}
    q, k, v, bias = (value_of(given.get(name)) for name in ("query", "key", "value", "attn_bias"))
    if q is None or k is None or v is None or bias is None or given.get("is_causal") or not only_result(node):
        return None
    biases, scale = _parts_of_bias(given["attn_bias"]), scale_of(given)
    if not has_few_keys(q, k, v) or not bias.is_floating_point() or bias.dim() > 4 or scale is None:
        return None
    if not _exact_in(q.dtype, biases):
        return None
    sizes = (*q.shape[:3], k.shape[2])
    return Attention(given["query"], given["key"], given["value"], node, sizes, biases, scale)


def _fuse_library(match: Match, *args: Any, **kwargs: Any) -> None:
    found = _over_few_keys(match)
    assert found is not None
    node, graph = found.product, found.product.graph
    with graph.inserting_before(node):
        bias = _bias(graph, found, found.q.meta["val"].dtype)
        attended = insert(graph, attention, found.q, found.k, found.v, bias, found.scale)
        attended = insert(graph, aten.permute.default, attended, HEADS_LAST)
    replace_results(node, attended)
