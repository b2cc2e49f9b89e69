"""`nn.MultiheadAttention` with queries, keys and values as views of its products, which torch copies.

torch computes with sequences first, also of inputs that have batches first, and copies the product of its packed
weights, so that each of the three is dense. Kernels of attention need dense rows only.
"""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.matching import Arguments, known_true, require, values_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import replacing
from backend_kwargs.torch_internals.tensors import is_traceable_wrapper_subclass

REWRITE = Rewrite(
    "nn.MultiheadAttention with queries, keys and values as views of its products, which torch copies",
    traced=f"{__name__}:attend_without_copies",
    needs=("gpu",),
    applies="calls with need_weights=False, as nn.TransformerEncoderLayer makes them in training",
    fitting=lambda stats: stats.gpu and stats.attentions > 0,
    order=90,
)

SIGNATURE = signature(F.multi_head_attention_forward)
UNSUPPORTED = ("need_weights", "bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")


def _call_without_copies(node: Node, args: Arguments) -> Node:
    """Insert the same call of our function."""
    values = values_of(args["query"], args["key"], args["value"])
    require(all(args[name] is None or args[name] is False for name in UNSUPPORTED))
    require(all(each.dim() == 3 and not is_traceable_wrapper_subclass(each) for each in values))
    require(all(each.numel() != 0 for each in values))  # kernels of attention refuse their strides
    return node.graph.call_function(multi_head_attention, node.args, node.kwargs)


def multi_head_attention(*positional: object, **named: object) -> tuple[Tensor, None]:
    """Return what `torch.nn.functional.multi_head_attention_forward` does, for these arguments without weights."""
    bound = SIGNATURE.bind(*positional, **named)
    bound.apply_defaults()
    args = bound.arguments
    q, k, v = (each.unflatten(-1, (args["num_heads"], -1)).permute(1, 2, 0, 3) for each in _projected(args))
    causal = args["is_causal"] and args["key_padding_mask"] is None
    mask = None if causal else _mask(args["attn_mask"], args["key_padding_mask"], q)
    dropout = args["dropout_p"] if args["training"] else 0.0
    attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    sequences_first = _has_sequences_first(args["query"])
    rows = attended.permute(2, 0, 1, 3) if sequences_first else attended.transpose(1, 2)
    result = F.linear(rows.flatten(2), args["out_proj_weight"], args["out_proj_bias"])
    return (result if sequences_first else result.transpose(0, 1)).contiguous(), None


def _projected(args: Arguments) -> Sequence[Any]:
    """Return q, k and v, each [length, batch, width]; inputs that are the same tensor share a product."""
    inputs = [args[name] for name in ("query", "key", "value")]
    weight, bias = args["in_proj_weight"], args["in_proj_bias"]
    sizes: tuple[int, ...] = (1, 1, 1)
    if inputs[1] is inputs[2]:
        sizes = (3,) if inputs[0] is inputs[1] else (1, 2)
    weights = weight.unflatten(0, (3, -1)).split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.unflatten(0, (3, -1)).split(sizes)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    products = (
        _linear(inputs[start], w.flatten(0, 1), b if b is None else b.flatten()).chunk(size, -1)
        for start, size, w, b in zip(starts, sizes, weights, biases, strict=True)
    )
    return [each for product in products for each in product]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _has_sequences_first(x):
        return F.linear(x, weight, bias)
    return F.linear(x.transpose(0, 1), weight, bias).transpose(0, 1)


def _has_sequences_first(x: Tensor) -> bool:
    """Return whether [length, batch, width] is the order in memory too."""
    return not known_true(x.stride(0) < x.stride(1))


def _mask(mask: Any, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Return what is added to the scores, [batch, heads, queries, keys] or less, or None."""
    if mask is not None:
        mask = _added(mask, q)
        mask = mask.unflatten(0, q.shape[:2]) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _added(padding, q)[:, None, None, :]
    if mask is None or padding is None:
        return padding if mask is None else mask
    return mask + padding  # type: ignore[no-any-return]


def _added(mask: Tensor, q: Tensor) -> Tensor:
    """Return a mask as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))


attend_without_copies = replacing((F.multi_head_attention_forward,), _call_without_copies)
