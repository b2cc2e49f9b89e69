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
from torch.fx import GraphModule

from backend_kwargs.rewrites.matching import AnyNode, bytes_of, known_true
from backend_kwargs.rewrites.traced import Change, changed, example
from backend_kwargs.torch_internals.modes import is_traceable_wrapper_subclass

SIGNATURE = signature(F.multi_head_attention_forward)
UNSUPPORTED = ("need_weights", "bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")


def attend_without_copies(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph in which `nn.MultiheadAttention` copies nothing, or None if there is none."""
    return changed(gm, example_inputs, lambda node: node.target is F.multi_head_attention_forward, _replace)


def _replace(node: AnyNode) -> float | None:
    given = _arguments(*node.args, **node.kwargs)
    inputs = [example(given[name]) for name in ("query", "key", "value")]
    if any(given[name] is not None and given[name] is not False for name in UNSUPPORTED):
        return None
    if any(each is None or each.dim() != 3 or is_traceable_wrapper_subclass(each) for each in inputs):
        return None
    if any(each.numel() == 0 for each in inputs if each is not None):  # kernels of attention refuse their strides
        return None
    node.target = multi_head_attention
    return 2 * sum(bytes_of(each) for each in inputs if each is not None)


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Return what `torch.nn.functional.multi_head_attention_forward` does, for these arguments without weights."""
    given = _arguments(*args, **kwargs)
    q, k, v = (each.unflatten(-1, (given["num_heads"], -1)).permute(1, 2, 0, 3) for each in _projected(given))
    causal = given["is_causal"] and given["key_padding_mask"] is None
    mask = None if causal else _mask(given["attn_mask"], given["key_padding_mask"], q)
    dropout = given["dropout_p"] if given["training"] else 0.0
    attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    sequences_first = _has_sequences_first(given["query"])
    rows = attended.permute(2, 0, 1, 3) if sequences_first else attended.transpose(1, 2)
    made = F.linear(rows.flatten(2), given["out_proj_weight"], given["out_proj_bias"])
    return (made if sequences_first else made.transpose(0, 1)).contiguous(), None


def _arguments(*args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _projected(given: dict[str, Any]) -> Sequence[Any]:
    """Return q, k and v, each [length, batch, width]; inputs that are the same tensor share a product."""
    inputs = [given[name] for name in ("query", "key", "value")]
    weight, bias = given["in_proj_weight"], given["in_proj_bias"]
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


def _mask(mask: Any, padding: Any, q: Tensor) -> Tensor | None:
    """Return what is added to the scores, [batch, heads, queries, keys] or less, or None."""
    if mask is not None:
        mask = _added(mask, q)
        mask = mask.unflatten(0, q.shape[:2]) if mask.dim() == 3 else mask
    if padding is not None:
        padding = _added(padding, q)[:, None, None, :]
    if mask is None or padding is None:
        return padding if mask is None else mask  # type: ignore[no-any-return]
    return mask + padding  # type: ignore[no-any-return]


def _added(mask: Tensor, q: Tensor) -> Any:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
