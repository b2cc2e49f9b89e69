"""Attention of inputs for which torch has no fused kernel, with the four dimensions that fused kernels take.

Of more or fewer dimensions, or of heads and batches that broadcast, torch computes the scores in float32 without tensor
cores. A query that a mask lets see no key has 0 as its result there, which fused kernels do not promise.

A mask of blocks, as of several images in a row, is left out where the graph makes it by itself and so tells which keys
a query sees: a kernel that is given a matrix computes all scores.
"""

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn.functional import scaled_dot_product_attention

from backend_kwargs.graphs.writes import origin, storages_of, written_between
from backend_kwargs.rewrites.matching import (
    DTYPES,
    Arguments,
    arguments_of,
    calls,
    dying_with,
    have_one_dtype,
    known,
    known_true,
    matched,
    require,
    value_if_any,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_later, replacing

REWRITE = Rewrite(
    "Attention of other than four dimensions, of heads that broadcast, or in blocks, as torch has fused kernels for it",
    traced=f"{__name__}:attend_in_four",
    applies="scaled_dot_product_attention in float32 or half precision without dropout; added masks in inference",
    fitting=lambda stats: stats.softmaxes > 0,
    version=2,
    order=105,
)

MOST = 65535  # batches or heads of a launch


def attention_in_four(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return what `scaled_dot_product_attention` does, contiguous, by a call of it with four dimensions."""
    sizes = torch.broadcast_shapes(*(each.shape[:-2] for each in (q, k, v)))  # type: ignore[no-untyped-call]
    whole = [each.expand(*sizes, *each.shape[-2:]) for each in (q, k, v)]
    heads = _dimension_of_heads(whole)
    queries, keys, values = (_in_four(each, heads) for each in whole)
    if any(size > MOST for size in queries.shape[:2]):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    sees = None
    if mask is not None:
        mask = _in_four(_mask_of(mask, sizes, heads), heads)
        hidden = (mask.logical_not() if mask.dtype == torch.bool else mask == -torch.inf).all(-1, keepdim=True)
        mask, sees = mask.masked_fill(hidden, 1), hidden.logical_not()
    attended = scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal, scale=scale)
    if sees is not None:
        attended = attended * sees
    if len(sizes) > 2:
        others = (*sizes[:heads], *sizes[heads + 1 :])
        attended = attended.view(*others, *attended.shape[1:]).movedim(-3, heads)
    return attended.reshape(*sizes, *attended.shape[-2:]).contiguous()


def _dimension_of_heads(tensors: Sequence[Tensor]) -> int:
    """Return the leading dimension without which the others are one in memory, or the last one."""
    last = max(tensors[0].dim() - 3, 0)

    def are_one(heads: int, each: Tensor) -> bool:
        pairs = pairwise(at for at in range(last + 1) if at != heads)
        return all(known_true(each.stride(one) == each.shape[other] * each.stride(other)) for one, other in pairs)

    return next((at for at in range(last, -1, -1) if all(are_one(at, each) for each in tensors)), last)


def _in_four(x: Tensor, heads: int) -> Tensor:
    """Return [batch, heads, rows, columns]: all leading dimensions but that of the heads make the batch."""
    if x.dim() <= 4:
        return x[(None,) * (4 - x.dim())]
    return x.movedim(heads, -3).flatten(0, -4)


def _mask_of(mask: Tensor, sizes: Sequence[int], heads: int) -> Tensor:
    """Return a mask with all leading dimensions; those that make the batch have size 1 or are expanded."""
    mask = mask[(None,) * (len(sizes) + 2 - mask.dim())]
    wanted = [mask.shape[heads] if at == heads else size for at, size in enumerate(sizes)]
    alone = all(size == 1 for at, size in enumerate(mask.shape[:-2]) if at != heads)
    return mask if alone or len(sizes) < 3 else mask.expand(*wanted, *mask.shape[-2:])


def attention_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int], scale: float | None, heads_last: bool
) -> Tensor:
    """Return attention within blocks of these sizes; in memory the heads follow the rows, or lead them."""
    operands = q, k, v
    if len({*sizes}) == 1:  # as a batch
        a, b, c = (torch.unflatten(each, 2, (len(sizes), -1)).transpose(1, 2).flatten(0, 1) for each in operands)
        made = scaled_dot_product_attention(a, b, c, scale=scale)
        made = torch.unflatten(made, 0, (-1, len(sizes))).transpose(1, 2).flatten(2, 3)
    else:
        blocks = zip(*(torch.split(each, [*sizes], 2) for each in operands), strict=True)
        made = torch.cat([scaled_dot_product_attention(a, b, c, scale=scale) for a, b, c in blocks], 2)
    return made.transpose(1, 2).contiguous().transpose(1, 2) if heads_last else made.contiguous()


def _attended(node: Node, args: Arguments) -> Node:
    """Insert a call of our function for attention that has no fused kernel as it is, or that has blocks."""
    operands, mask, scale = [args[name] for name in ("query", "key", "value")], args["attn_mask"], args["scale"]
    *tensors, result = values = values_of(*operands, node)
    require(not (args["dropout_p"] or args["enable_gqa"]))
    require(not changes_later(node, [node]))  # fused kernels save their result
    require(have_one_dtype(tensors) and result.dtype in DTYPES and all(known_true(e.numel() > 0) for e in values))
    if sizes := matched(_blocks, mask, node):
        heads_last = result.transpose(1, 2).is_contiguous()
        require(all(each.dim() == 4 and each.shape[:3] == (*result.shape[:2], sum(sizes)) for each in tensors))
        require(not args["is_causal"] and (heads_last or result.is_contiguous()))
        return node.graph.call_function(attention_in_blocks, (*operands, sizes, scale, heads_last))
    require(result.is_contiguous() and (scale is None or (isinstance(scale, int | float) and scale > 0)))
    of_mask = value_if_any(mask)
    if of_mask is None or of_mask.dim() != 3:
        require(not all(each.dim() == 4 and _has_batches_of(each, tensors[0]) for each in tensors))
    # Where a mask adds about -1e9 to all scores of a query, the gradients of fused kernels are too large by a factor.
    if of_mask is not None and of_mask.dtype != torch.bool:
        require(of_mask.dtype == tensors[0].dtype and not result.requires_grad)
    return node.graph.call_function(attention_in_four, (*operands, mask, args["is_causal"], scale))


def _has_batches_of(one: Tensor, other: Tensor) -> bool:
    """Return whether the leading sizes may be equal: where it is not known, torch guards them itself."""
    return all(not known_true(a != b) for a, b in zip(one.shape[:-2], other.shape[:-2], strict=True))


def _blocks(mask: object, reader: Node) -> list[int]:
    """Return the sizes of the blocks that a mask shows, in their order."""
    full, *writes = _made_by(mask, reader)
    whole, seen = values_of(full, mask)
    (rows, *columns), is_boolean = whole.shape, seen.dtype == torch.bool
    hides: Any = full.args[1] if len(full.args) > 1 else full.kwargs["fill_value"]
    require(isinstance(rows, int) and columns == [rows])
    require(seen.shape[-2:] == (rows, rows) and seen.stride()[-2:] == (rows, 1) and isinstance(hides, int | float))
    require(not hides if is_boolean else hides <= torch.finfo(seen.dtype).min)
    ends = [0]
    for write in writes:
        _, index, shown = write.args
        stop: Any = getattr(index[0], "stop", None) if isinstance(index, tuple) else None
        require(index == (slice(ends[-1], stop),) * 2 and isinstance(stop, int) and bool(shown == is_boolean))
        ends.append(stop)
    sizes = [stop - start for start, stop in pairwise(ends)]
    require(ends[-1] == rows and min(sizes) > 0)
    return sizes


def _made_by(mask: object, reader: Node) -> list[Node]:
    """Return the call of `full` that a mask is a view of, and the writes before it is read; nothing else may write."""
    full = origin(known(mask if isinstance(mask, Node) else None))
    require(calls(full, torch.full) and storages_of(value_of(full)) == storages_of(value_of(mask)))
    writes = sorted(each for each in full.users if calls(each, operator.setitem) and each < reader)
    require(not written_between(full, reader, [full], writes))
    return [full, *writes]


def _placed(node: Node) -> list[Node]:
    """Return the call with all that makes its mask, which tells where the blocks are."""
    made = matched(_made_by, (arguments_of(node) or {}).get("attn_mask"), node) or []
    memory = {each for node in made[:1] for each in storages_of(value_of(node))}
    views = (each for each in node.graph.nodes if memory & storages_of(value_of(each)))
    return [*dict.fromkeys((*dying_with(node), *views, *made))]


attend_in_four = replacing((scaled_dot_product_attention,), _attended, _placed)
