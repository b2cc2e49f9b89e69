"""Attention written out, softmax(q @ kᵀ · scale + bias) @ v, as one call; also a library's, for a bias and few keys.

Inductor's own patterns run first and cover forms without a relative-position bias. If the weights are kept, for
instance for a backward pass, another node uses them and nothing matches. A bias that repeats, such as the masks of
shifted windows for each image, is passed on without the repetition.
"""

import math
import operator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import (
    DTYPES,
    HALF,
    NoMatchError,
    aten,
    calls,
    converts_floats,
    define,
    erase_dead,
    have_one_dtype,
    input_of,
    insert,
    known_true,
    matched,
    orders_of_terms,
    patterns_of,
    prims,
    read,
    register,
    replace,
    require,
    same_sizes,
    used_once,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass

REWRITE = Rewrite(
    "Attention that is spelt out, or has a bias over few keys, as one call",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::attention",),
    applies="inference in float32 or half precision; a bias has no more digits than the heads",
    fitting=lambda stats: (
        (stats.softmaxes > 0 and stats.gemms > 1)
        or ran(stats, "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
    ),
    order=60,
    version=2,
)

HEADS_LAST = [0, 2, 1, 3]
# The first result of each is the attention's.
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
VIEWS = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
# The same in dynamo's graph.
RESHAPE, EXPAND = ("reshape", "view", torch.reshape), ("expand", torch.Tensor.expand)

# ---- the operator

MOST_KEYS, MOST_WIDTH = 128, 128  # the limits of one tile of our kernel
SHARED = 4  # batches with the same bias, from where our kernel takes several tiles
MOST_KEYS_OF_LIBRARY = 256  # with a bias whose rows are aligned, a library's kernel takes half of cuDNN's time
ALIGNED = 8  # numbers: rows of a bias as the library's kernel reads them


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    if bias is not None:
        keys = k.shape[-2]
        bias = _with_aligned_rows(bias.expand(*bias.shape[:-1], keys))
        if bias.dim() == 4 and bias.shape[0] not in (1, q.shape[0]):  # such as masks for the windows of one image
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)
        bias = bias[..., :keys].expand(*q.shape[:-1], keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2).contiguous()


def _with_aligned_rows(bias: Tensor) -> Tensor:
    """Return a bias, possibly with further keys, as a library's kernel reads it; what is expanded is copied once."""
    once = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride()[:-1])]
    missing = -bias.shape[-1] % ALIGNED
    return F.pad(once, (0, missing)) if missing else once.contiguous()


def _attention_cuda(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    from backend_kwargs.rewrites.kernels.attention import attention_over_few_keys

    # A bias that few batches share costs more to copy, with rows of whole tiles, than is gained.
    is_shared = bias is not None and q.dtype in HALF and (bias.dim() < 4 or bias.shape[0] * SHARED <= q.shape[0])
    most = MOST_KEYS_OF_LIBRARY if is_shared else MOST_KEYS
    has_kernel = _has_few_keys(q, k, v, most) and q.numel() > 0 and k.numel() > 0
    return (attention_over_few_keys if has_kernel else _attention)(q, k, v, bias, scale)


def _has_few_keys(q: Tensor, k: Tensor, v: Tensor, most: int) -> bool:
    """Return whether there are at most so many keys, and tiles for the widths, for all values of their symbols."""
    return known_true(k.shape[2] <= most) and known_true(max(q.shape[3], v.shape[3]) <= MOST_WIDTH)


def _heads_last(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    """Return an empty [batch, queries, heads, width]: kernels write this layout, and the next layer reads it."""
    batch, heads, queries, _width = q.shape
    return q.new_empty(batch, queries, heads, v.shape[-1])


# The bias may have fewer batches, which repeat.
attention = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float scale) -> Tensor",
    _attention,
    fake=_heads_last,
    cuda=_attention_cuda,
)


# ---- patterns


@dataclass(frozen=True, slots=True)
class Attention:
    """The nodes of one attention; `sizes` are [batch, heads, queries, keys].

    Biases with five dimensions, [1, period, heads, queries, keys], repeat. `factors` multiply all scores of a head.
    """

    q: Node
    k: Node
    v: Node
    product: Node
    sizes: tuple[int, ...]
    biases: list[Node]
    scale: float
    keys_before_width: bool = False
    factors: list[Node] = field(default_factory=list)


class Scores(NamedTuple):
    """What a softmax is of: a product of q and k, multiplied by a scale and factors of heads, then biases added."""

    product: Node
    biases: list[Node]
    scale: float
    factors: list[Node]


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns of a softmax over the last dimension of scores, and of libraries' attention."""
    for target in (EFFICIENT, CUDNN):
        register(passes, CallFunctionVarArgs(target), lambda match: _over_few_keys(match.output_node()), _fuse_library)
    for dim, sizes in ((-1, (2, 4, 4)), (2, (2, 4, 4)), (3, (2, 2, 4, 4))):
        for pattern in patterns_of(partial(torch.softmax, dim=dim), DTYPES, sizes):
            register(passes, pattern, partial(_around, dim), _fuse)


def _fuse(weights: Node, parts: Attention) -> None:
    """Replace the product of the weights and the values, or the copy that the model makes of it."""
    product, graph = parts.product, parts.product.graph
    with graph.inserting_before(product):
        q, k, v = (_of_four(graph, each) for each in (parts.q, parts.k, parts.v))
        if not parts.keys_before_width:
            k = insert(graph, aten.permute.default, k, [0, 1, 3, 2])
        for factor in parts.factors:
            q = insert(graph, aten.mul.Tensor, q, factor)
        attended = insert(graph, attention, q, k, v, _bias(graph, parts), parts.scale)
        if (copied := matched(_copy_with_heads_last, parts)) is not None:
            replace(copied, attended)
            return
        attended = insert(graph, aten.permute.default, attended, HEADS_LAST)
        attended = insert(graph, aten.clone.default, attended, memory_format=torch.contiguous_format)
        sizes = [
            size if isinstance(size, int) else insert(graph, aten.sym_size.int, attended, at)
            for at, size in [*enumerate(attended.meta["val"].shape)][2:]
        ]
        replace(product, insert(graph, aten.reshape.default, attended, [-1, *sizes]))


def _copy_with_heads_last(parts: Attention) -> Node:
    """Return the [batch, queries, heads, width] copy that the model makes of the result.

    The library returns this layout anyway, so the copy is dropped.
    """
    node = parts.product
    for targets in (VIEWS, (aten.permute.default,), (aten.clone.default,)):
        require(used_once(node))
        node = next(iter(node.users))
        require(calls(node, *targets) and (node.target is not aten.permute.default or read(node)["dims"] == HEADS_LAST))
    (value,), (batch, heads, queries, _) = values_of(node), parts.sizes
    require(value.dim() == 4 and same_sizes(value.shape[:3], (batch, queries, heads)) and value.is_contiguous())
    return node


def _of_four(graph: Graph, node: Node) -> Node:
    """Return `node` with four dimensions, of which the first may be new."""
    return node if node.meta["val"].dim() == 4 else insert(graph, aten.unsqueeze.default, node, 0)


def _bias(graph: Graph, parts: Attention) -> Node | None:
    """Insert the sum of the biases, in the dtype of q."""
    bias: Node | None = None
    for each in parts.biases:
        term = insert(graph, aten.select.int, each, 0, 0) if each.meta["val"].dim() == 5 else each
        bias = term if bias is None else insert(graph, aten.add.Tensor, bias, term)
    dtype = parts.q.meta["val"].dtype
    if bias is not None and bias.meta["val"].dtype != dtype:
        bias = insert(graph, prims.convert_element_type.default, bias, dtype)
    return bias


def _around(dim: int, match: Match) -> Attention:
    """Return the attention around the matched softmax over `dim`."""
    scores, product = match.kwargs["x"], _product_of(match.output_node())
    whole, result = values_of(scores, product)
    require(set(match.nodes).issuperset(scores.users))
    require(result.dtype in DTYPES and whole.dim() in (3, 4) and dim % whole.dim() == whole.dim() - 1)
    parts = _parts_of(scores, whole)
    require(0 < parts.scale < math.inf)  # of negative ones, flash attention takes no maximum
    periods = [period for period in map(_period, parts.biases) if not known_true(period == 1)]
    require(all(known_true(period == periods[0]) for period in periods))
    require(all(each.meta["val"].dtype == result.dtype for each in parts.factors))
    require(_is_exact_in(result.dtype, parts.biases))
    return _of_product(parts, product, whole)


def _is_exact_in(dtype: torch.dtype, biases: list[Node]) -> bool:
    """Return whether the sum of `biases` has no more digits than `dtype`, so that a call can take it in `dtype`."""
    dtypes = [each.meta["val"].dtype for each in biases]
    if all(each == dtype for each in dtypes):
        return True
    return len(biases) == 1 and (torch.promote_types(dtypes[0], dtype) == dtype or _was_widened(biases[0], dtype))


def _was_widened(node: object, dtype: torch.dtype) -> bool:
    """Return whether `node` has the values of a tensor of `dtype`."""
    same = (*VIEWS, aten.expand.default, aten.unsqueeze.default, aten.permute.default, aten.slice.Tensor)
    while calls(node, *same, aten.clone.default, prims.convert_element_type.default):
        node = input_of(node)
        value = value_of(node)
        if value is not None and value.dtype == dtype:
            return True
    return False


def _parts_of(scores: Node, whole: Tensor) -> Scores:
    """Return the parts of the scores, which have the shape of `whole`."""
    biases: list[Node] = []
    factors: list[Node] = []
    scale = 1.0
    node: Argument = scores
    while isinstance(node, Node) and (node is scores or used_once(node)):
        multiplies = calls(node, aten.mul.Tensor, aten.div.Tensor)
        by = read(node)["other"] if multiplies else None
        if converts_floats(node):
            node = input_of(node)
        elif multiplies and isinstance(by, int | float):
            require(by != 0)
            scale = scale * by if node.target is aten.mul.Tensor else scale / by
            node = input_of(node)
        elif calls(node, aten.mul.Tensor) and _is_factor_of_heads(by, whole):
            factors.append(by)
            node = input_of(node)
        elif scale == 1.0 and not factors and orders_of_terms(node):
            node, bias = _scores_and_bias(node, whole)
            biases += parts_of_bias(bias)
        elif scale == 1.0 and not factors and (split := matched(_masked_windows, node)):
            node, bias = split
            biases.append(bias)
        else:
            return Scores(node, biases, float(scale), factors)
    raise NoMatchError


def _is_factor_of_heads(node: object, whole: Tensor) -> TypeGuard[Node]:
    """Return whether a tensor has one value for each head, or one for all, by which q can be multiplied as well."""
    value = value_of(node)
    if value is None or value.dim() not in (3, 4) or value.dim() > whole.dim() or not value.is_floating_point():
        return False
    return all(known_true(size == 1) for size in (*value.shape[:-3], *value.shape[-2:]))


def _of_product(parts: Scores, product: Node, whole: Tensor) -> Attention:
    """Return the attention of these parts, whose weights are multiplied with the values in `product`."""
    node, count = parts.product, whole.dim()
    if calls(node, *VIEWS):
        require(count == 4 and same_sizes(values_of(node)[0].shape, whole.shape))
        node = input_of(node)
        require(used_once(node))
    require(calls(node, aten.bmm.default))
    q, k, v = (_source(each, count) for each in (*read(node).values(), read(product)["mat2"]))
    last_swapped = [*range(count - 2), count - 1, count - 2]
    keys_before_width = calls(k, aten.permute.default) and [dim % count for dim in read(k)["dims"]] == last_swapped
    if keys_before_width:
        k = input_of(k)
    require(_are_of_one_attention(values_of(q, k, v, product), whole, keys_before_width))
    sizes = (*whole.shape,) if count == 4 else (1, *whole.shape)
    return Attention(q, k, v, product, sizes, parts.biases, parts.scale, keys_before_width, parts.factors)


def _are_of_one_attention(operands: list[Tensor], scores: Tensor, keys_before_width: bool) -> bool:
    """Return whether q, k, v and the product have the sizes that the scores ask for, and one dtype.

    A view may have split the same heads and batches otherwise.
    """
    q, k, v, product = operands
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


def _product_of(weights: Node) -> Node:
    """Return the product of the weights and the values, which nothing else may use."""
    node = weights
    while used_once(node):
        user = next(iter(node.users))
        if calls(user, aten.bmm.default):
            left, right = read(user).values()
            require(left is node and right is not node)
            return user
        require(calls(user, *VIEWS, aten.expand.default, aten.clone.default) or converts_floats(user))
        node = user
    raise NoMatchError


def _source(node: Node, dims: int) -> Node:
    """Return the tensor, with as many dimensions as the scores, of which an operand of a bmm is a view."""
    if dims == 3:
        return node
    merged = node
    require(calls(node, *VIEWS))
    node = input_of(node)
    while calls(node, aten.expand.default, aten.clone.default) and _has_sizes_of(input_of(node), node):
        node = input_of(node)
    value, whole = values_of(node, merged)
    require(value.dim() == 4 and same_sizes((value.shape[0] * value.shape[1], *value.shape[2:]), whole.shape))
    return node


def _has_sizes_of(node: object, other: object) -> bool:
    """Return whether two nodes are known to have the same sizes."""
    one, two = value_of(node), value_of(other)
    return one is not None and two is not None and same_sizes(one.shape, two.shape)


def _scores_and_bias(node: Node, whole: Tensor) -> tuple[Node, Node]:
    """Return the scores and their bias that a sum adds: only the scores come from a bmm and have the full shape."""
    for scores, bias in orders_of_terms(node):
        value, added = values_of(scores, bias)
        is_bias = added.is_floating_point() and 2 <= added.dim() <= whole.dim()
        if is_bias and same_sizes(value.shape, whole.shape) and _comes_from_product(scores):
            return scores, bias
    raise NoMatchError


def _period(bias: Node) -> int:
    """Return after how many batches a bias repeats."""
    sizes = bias.meta["val"].shape
    return sizes[-4] if len(sizes) >= 4 else 1


def _masked_windows(node: Node) -> tuple[Node, Node]:
    """Return the scores and the masks of each image's windows that were added to them as [images, windows, ..]."""
    require(calls(node, *VIEWS))
    added = input_of(node)
    result, whole = values_of(added, node)
    require(used_once(added) and result.dim() == 5 and same_sizes(result.shape[2:], whole.shape[1:]))
    for scores, mask in orders_of_terms(added):
        (value,) = values_of(mask)
        is_mask = value.dim() == 5 and value.is_floating_point() and same_sizes(value.shape[:2], (1, result.shape[1]))
        if is_mask and calls(scores, *VIEWS) and used_once(scores) and _has_sizes_of(input_of(scores), node):
            return input_of(scores), mask
    raise NoMatchError


def parts_of_bias(bias: Node) -> list[Node]:
    """Return the terms of a bias, if one term is masks that were repeated for each image."""
    for other, repeated in orders_of_terms(_unpadded(bias)):
        value, source = value_of(other), matched(_repeated, repeated)
        if source is not None and value is not None and value.dim() <= 4 and value.is_floating_point():
            whole = value.dim() < 4 or known_true(value.shape[0] == 1)
            return [other, source] if whole else [bias]
    return [bias]


def _unpadded(node: Node) -> Node:
    """Return the node before copies to another layout, or padding and slicing, for the library's kernel."""
    while True:
        source = None
        if calls(node, aten.expand.default, aten.clone.default):
            source = input_of(node)
        elif calls(node, aten.slice.Tensor) and calls(input_of(node), aten.constant_pad_nd.default):
            cut, padded = read(node), read(input_of(node))
            from_start = cut["start"] in (0, None) and cut["step"] == 1 and not any(padded["pad"][::2])
            source = padded["input"] if from_start else None
        if source is None or not _has_sizes_of(source, node):
            return node
        node = source


def _repeated(node: Node) -> Node:
    """Return the [1, period, heads, queries, keys] that was repeated into the batches of `node`."""
    require(calls(node, *VIEWS, *RESHAPE))
    expanded = input_of(node)
    while calls(expanded, aten.clone.default):
        expanded = input_of(expanded)
    require(calls(expanded, aten.expand.default, *EXPAND))
    source: Node = input_of(expanded)
    value, whole, one = values_of(node, expanded, source)
    require([value.dim(), whole.dim(), one.dim()] == [4, 5, 5] and one.is_floating_point())
    require(same_sizes(whole.shape[2:], value.shape[1:]) and same_sizes(one.shape[:2], (1, whole.shape[1])))
    return source


def _comes_from_product(node: object) -> bool:
    """Return whether scaling, adding and views lead from a bmm to `node`."""
    while calls(node, aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, *VIEWS) or converts_floats(node):
        node = input_of(node)
    return calls(node, aten.bmm.default)


# ---- a library's call


def _over_few_keys(node: Node) -> Attention:
    """Return the attention of a library's kernel if it has a bias and so few keys that ours is faster.

    Keys and values must have as many heads as queries.
    """
    args = read(node)
    q, k, v, bias = values_of(*(args[name] for name in ("query", "key", "value", "attn_bias")))
    require(not (args["is_causal"] or args["dropout_p"] or args.get("return_debug_mask")))
    require(have_one_dtype((q, k, v), HALF) and all(known_true(each.numel() > 0) for each in (q, k, v)))
    require(same_sizes(k.shape, (*q.shape[:2], k.shape[2], q.shape[3])) and same_sizes(v.shape[:3], k.shape[:3]))
    require(_has_few_keys(q, k, v, MOST_KEYS_OF_LIBRARY) and bias.is_floating_point() and bias.dim() <= 4)
    biases = parts_of_bias(args["attn_bias"])
    require(_is_exact_in(q.dtype, biases) and all(map(_is_first_result, node.users)))
    sizes, scale = (*q.shape[:3], k.shape[2]), scale_of(args["scale"], q)
    return Attention(args["query"], args["key"], args["value"], node, sizes, biases, scale)


def _is_first_result(user: Node) -> bool:
    """Return whether a user of a call is its first result, in the layout of our operator; others are for training."""
    is_first = user.target is operator.getitem and user.args[1] == 0
    return bool(is_first and user.meta["val"].transpose(1, 2).is_contiguous())


def scale_of(scale: object, q: Tensor) -> float:
    """Return the scale of a call of attention, which must be a number above 0."""
    if scale is None and isinstance(q.shape[-1], int) and q.shape[-1]:
        return float(q.shape[-1] ** -0.5)
    if not isinstance(scale, int | float) or scale <= 0:
        raise NoMatchError
    return float(scale)


def _fuse_library(node: Node, parts: Attention) -> None:
    attended = insert(node.graph, attention, parts.q, parts.k, parts.v, _bias(node.graph, parts), parts.scale)
    attended = insert(node.graph, aten.permute.default, attended, HEADS_LAST)
    for user in [*node.users]:  # of the first result
        user.replace_all_uses_with(attended)
        node.graph.erase_node(user)
    erase_dead(node)
