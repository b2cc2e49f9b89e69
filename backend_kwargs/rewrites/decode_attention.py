"""Attention of a few queries over many keys, as in decoding from a cache, by kernels that share the keys of a head.

With a mask torch has cuDNN's or its own kernel, in which one program reads all keys of a head, also those that the mask
hides. Models that repeat keys and values for the heads that share them write and read the whole cache once for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.attention_mask import ATTENTION
from backend_kwargs.rewrites.matching import (
    DTYPES,
    Arguments,
    arguments_of,
    define,
    have_one_dtype,
    hint,
    known_true,
    same_sizes,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, example, examples, replacing
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


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of attention; `repeats` is how often the model repeated each head of `k` and `v` before it.

    These may then have a dimension of size 1 after that of the heads.
    """

    q: Node
    k: Node
    v: Node
    mask: Node | None
    scale: float | None
    repeats: int


def _attention_in_splits(node: Node, args: Arguments) -> Node | None:
    """Insert the operator for attention of a few queries over many keys."""
    call, values = _call(args), examples(node)
    tensors = _tensors(call) if call else None
    if call is None or values is None or tensors is None or not _has_kernel(call, *tensors, values[0]):
        return None
    if changes_meanwhile(node, [call.q, call.k, call.v, call.mask]):
        return None
    (q, k, v, _), result = tensors, values[0]
    layouts = [last for last in (False, True) if _has_strides_of(result, _empty(q, k, v, last))]
    if not layouts:  # a view that needs eager's strides may follow
        return None
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    operands = [each and _detached(each) for each in (call.q, call.k, call.v, call.mask)]
    return node.graph.call_function(decode_attention, (*operands, float(scale), layouts[0]))


def _detached(node: Node) -> Node:
    """Insert `node` without gradients, which it may have if it was computed under `no_grad`."""
    new = node.graph.call_method("detach", (node,))
    value = example(node)
    return node.graph.call_method("squeeze", (new, 2)) if value is not None and value.dim() == 5 else new


def _call(args: Arguments) -> _Call | None:
    """Return the call with these arguments, or None if it is one that the operator has no form for."""
    scale = args["scale"]
    if args["dropout_p"] or args["is_causal"] or not (scale is None or isinstance(scale, int | float)):
        return None
    k, v, repeats = args["key"], args["value"], 1
    of_k, of_v = _repeated(k), _repeated(v)
    if of_k and of_v and of_k[1] == of_v[1]:
        (k, repeats), (v, _) = of_k, of_v
    return _Call(args["query"], k, v, args["attn_mask"], scale, repeats)


def _repeated(node: Node) -> tuple[Node, int] | None:
    """Return the tensor each of whose heads `node` repeats some times, and that number, or None."""
    result = example(node)
    source: Any
    if result is None or result.dim() != 4:
        return None
    if node.target in REPEAT:
        args = arguments_of(node) or {}
        source, times = args.get("input"), args.get("repeats")
        return (source, times) if isinstance(times, int) and args.get("dim") in (1, -3) else None
    expanded = node.args[0] if node.target in RESHAPE and node.args else None
    if not isinstance(expanded, Node) or expanded.target not in EXPAND:
        return None
    source = expanded.args[0]
    values = examples(source, expanded)
    if values is None or values[1].dim() != 5:
        return None
    one, many = values
    batch, heads, times, *rest = many.shape
    if not isinstance(times, int) or not same_sizes(one.shape, (batch, heads, 1, *rest)):
        return None
    return (source, times) if same_sizes(result.shape, (batch, heads * times, *rest)) else None


def _tensors(call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Return q, k, v and mask without the dimension along which the model repeats them, or None if one is unknown."""
    nodes = [call.q, call.k, call.v, *([] if call.mask is None else [call.mask])]
    if (values := examples(*nodes)) is None:
        return None
    q, k, v, *mask = (value.squeeze(2) if value.dim() == 5 else value for value in values)
    return q, k, v, mask[0] if mask else None


def _has_kernel(call: _Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, result: Tensor) -> bool:
    """Return whether the kernel can compute this result, which has no derivative, and may gain."""
    if result.requires_grad or (mask is None and call.repeats == 1):  # FlashAttention shares the keys itself
        return False
    if not have_one_dtype((q, k, v, result)) or any(each.dim() != 4 for each in (q, k, v)):
        return False
    if not known_true(result.numel() > 0):
        return False
    (batch, heads, queries, width), (_, shared, keys, _) = q.shape, k.shape
    if not all(isinstance(size, int) for size in (heads, queries, width, shared, v.shape[3])) or not width:
        return False
    if not same_sizes(result.shape, (batch, heads, queries, v.shape[3])):
        return False
    if not same_sizes(k.shape, (batch, shared, keys, width)) or not same_sizes(v.shape[:2], k.shape[:2]):
        return False
    if not _are_equal_here(v.shape[2], keys):  # those of two caches that grow are two symbols
        return False
    if heads % shared or heads // shared * queries > MOST_ROWS or max(width, v.shape[3]) > WIDEST:
        return False
    dense = known_true(k.stride(3) == 1) and known_true(v.stride(3) == 1)
    return dense and known_true(keys > queries) and (mask is None or _may_mask(mask, (batch, heads, queries, keys)))


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
