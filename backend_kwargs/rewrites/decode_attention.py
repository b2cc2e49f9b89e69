"""Attention of a few queries over many keys, as in decoding from a cache, by kernels that share the keys of a head.

With a mask torch has cuDNN's or its own kernel, in which one program reads all keys of a head, also those that the mask
hides. Models that repeat keys and values for the heads that share them write and read the whole cache once for each.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.attention_mask import ATTENTION
from backend_kwargs.rewrites.matching import (
    DTYPES,
    Arguments,
    calls,
    define,
    have_one_dtype,
    hint,
    input_of,
    known_true,
    matched,
    read,
    require,
    same_sizes,
    value_if_any,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing
from backend_kwargs.torch_internals.symbols import check

REWRITE = Rewrite(
    "Attention of a few queries over many keys, as in decoding, by kernels that share the keys of a head",
    traced=f"{__name__}:split_keys",
    needs=("gpu",),
    applies="float32 or half precision, without gradients; with a mask or repeated keys; at most 64 queries, "
    "counted for each head that shares keys",
    fitting=lambda stats: stats.gpu and stats.attentions + stats.softmaxes > 0 and not stats.training,
    order=100,
)

MOST_ROWS = 64  # queries, times the heads that share keys
WIDEST = 256
RESHAPE, EXPAND = (torch.reshape, "reshape", "view", "flatten"), (torch.Tensor.expand, "expand")
REPEAT = (torch.repeat_interleave, "repeat_interleave")

# ---- the operator


def _empty(q: Tensor, k: Tensor, v: Tensor, heads_last: bool) -> Tensor:
    """Return an empty [batch, heads, queries, width], with heads or queries first in memory."""
    message = lambda: f"Got {k.shape[2]} keys, but {v.shape[2]} values."  # noqa: E731
    check(k.shape[2] == v.shape[2], message)
    (batch, heads, queries, _), width = q.shape, v.shape[-1]
    if heads_last:
        return q.new_empty((batch, queries, heads, width)).transpose(1, 2)
    return q.new_empty((batch, heads, queries, width))


def _decode(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, heads_last: bool) -> Tensor:
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return _empty(q, k, v, heads_last).copy_(attended)


def _decode_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, heads_last: bool, **options: Any
) -> Tensor:
    from backend_kwargs.rewrites.kernels.decode import attention_in_splits

    q = q if q.stride(-1) == 1 else q.contiguous()
    return attention_in_splits(q, k, v, mask, scale, _empty(q, k, v, heads_last), **options)


decode_attention = define(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool heads_last) -> Tensor",
    _decode,
    fake=lambda q, k, v, mask, scale, heads_last: _empty(q, k, v, heads_last),
    cuda=_decode_cuda,
    inlined=True,
)


# ---- dynamo's graph


def _attention_in_splits(node: Node, args: Arguments) -> Node:
    """Insert the operator for attention of a few queries over many keys."""
    scale, k, v, repeats = args["scale"], args["key"], args["value"], 1
    require(not (args["dropout_p"] or args["is_causal"]) and (scale is None or isinstance(scale, int | float)))
    before_k, before_v = matched(_repeated, k), matched(_repeated, v)
    if before_k and before_v and before_k[1] == before_v[1]:
        (k, repeats), (v, _) = before_k, before_v
    nodes = [args["query"], k, v, args["attn_mask"]]
    # Without the dimension along which the model repeats them.
    of_q, of_k, of_v = (value.squeeze(2) if value.dim() == 5 else value for value in values_of(*nodes[:3]))
    (result,), mask = values_of(node), value_if_any(nodes[3])
    require(mask is not None or repeats > 1)  # FlashAttention shares the keys itself
    _require_kernel(of_q, of_k, of_v, mask, result)
    require(not changes_meanwhile(node, nodes))
    layouts = [last for last in (False, True) if _has_strides_of(result, _empty(of_q, of_k, of_v, last))]
    require(bool(layouts))  # a view that needs eager's strides may follow
    scale = of_q.shape[-1] ** -0.5 if scale is None else scale
    operands = [each and _detached(each) for each in nodes]
    return node.graph.call_function(decode_attention, (*operands, float(scale), layouts[0]))


def _detached(node: Node) -> Node:
    """Insert `node` without gradients, which it may have if it was computed under `no_grad`."""
    (value,), new = values_of(node), method(node, "detach")
    return method(new, "squeeze", 2) if value.dim() == 5 else new


def _repeated(node: Node) -> tuple[Node, int]:
    """Return the tensor each of whose heads `node` repeats some times, and that number.

    The tensor may have a dimension of size 1 after that of the heads.
    """
    (result,) = values_of(node)
    require(result.dim() == 4)
    if calls(node, *REPEAT):
        args = read(node)
        require(isinstance(args["repeats"], int) and args["dim"] in (1, -3))
        return args["input"], args["repeats"]
    expanded = input_of(node)
    require(calls(node, *RESHAPE) and calls(expanded, *EXPAND))
    source = input_of(expanded)
    one, many = values_of(source, expanded)
    require(many.dim() == 5)
    batch, heads, times, *rest = many.shape
    require(isinstance(times, int) and same_sizes(one.shape, (batch, heads, 1, *rest)))
    require(same_sizes(result.shape, (batch, heads * times, *rest)))
    return source, times


def _require_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, result: Tensor) -> None:
    """Raise unless the kernel can compute this result, which has no derivative."""
    require(not result.requires_grad and known_true(result.numel() > 0))
    require(have_one_dtype((q, k, v, result)) and all(each.dim() == 4 for each in (q, k, v)))
    (batch, heads, queries, width), (_, shared, keys, _) = q.shape, k.shape
    require(all(isinstance(size, int) for size in (heads, queries, width, shared, v.shape[3])) and width > 0)
    require(same_sizes(result.shape, (batch, heads, queries, v.shape[3])))
    require(same_sizes(k.shape, (batch, shared, keys, width)) and same_sizes(v.shape[:2], k.shape[:2]))
    require(_are_equal_here(v.shape[2], keys))  # those of two caches that grow are two symbols
    require(heads % shared == 0 and heads // shared * queries <= MOST_ROWS and max(width, v.shape[3]) <= WIDEST)
    require(known_true(k.stride(3) == 1) and known_true(v.stride(3) == 1) and known_true(keys > queries))
    require(mask is None or _may_mask(mask, (batch, heads, queries, keys)))


def _may_mask(mask: Tensor, sizes: Sequence[int]) -> bool:
    """Return whether a mask has a dtype that the kernel takes, and can be expanded to `sizes`."""
    if mask.dtype not in (torch.bool, *DTYPES) or mask.dim() > len(sizes):
        return False
    return all(
        _are_equal_here(one, size) or known_true(one == 1)
        for one, size in zip(mask.shape, sizes[len(sizes) - mask.dim() :], strict=True)
    )


def _are_equal_here(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Return whether two sizes are equal in this call: attention itself takes no others of sizes above 1."""
    unknown = any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in (one, other))
    return known_true(one == other) or (not unknown and hint(one) == hint(other))


def _has_strides_of(one: Tensor, other: Tensor) -> bool:
    """Return whether all dimensions of more than one number have the same strides."""
    return all(
        known_true(size == 1) or known_true(a == b)
        for size, a, b in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


split_keys = replacing((ATTENTION,), _attention_in_splits)
