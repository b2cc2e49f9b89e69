"""Masks of `scaled_dot_product_attention` with a dense last dimension, without which torch chooses no fused kernel.

A mask that depends on the queries alone and is expanded over the keys has stride 0 there, as some releases of
transformers make it for encoders. Attention is then computed by products in float32 and a softmax.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.graphs.writes import written_between
from backend_kwargs.rewrites.matching import DTYPES, AnyNode, arguments_of, hint, known_true
from backend_kwargs.rewrites.traced import Change, changed, example

ATTENTION = torch.nn.functional.scaled_dot_product_attention
PASSES, PASSES_BACK = 4, 8  # over the scores in float32, forward and backward, that a fused kernel saves


def make_dense(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph in which masks of attention have dense rows, or None if all have."""
    made: dict[AnyNode, AnyNode] = {}  # dense masks, by the mask

    def replace(node: AnyNode) -> float | None:
        given = arguments_of(node) or {}
        q, mask = example(given.get("query")), given.get("attn_mask")
        if mask is None or not _needs_copy(q, example(mask)):
            return None
        if mask not in made or written_between(made[mask], node, [mask]):
            with node.graph.inserting_before(node):
                made[mask] = _dense(mask)
        if "attn_mask" in node.kwargs:
            node.update_kwarg("attn_mask", made[mask])
        else:
            node.update_arg(3, made[mask])
        return _saved(q, example(given["key"]))

    return changed(gm, example_inputs, lambda node: node.target is ATTENTION, replace)


def _needs_copy(q: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    if mask is None or q is None or mask.dim() < 2 or mask.requires_grad or q.dtype not in DTYPES:
        return False
    return known_true(mask.stride(-1) != 1) and known_true(mask.shape[-1] != 1)


def _dense(mask: AnyNode) -> AnyNode:
    """Insert a copy of the mask that has no stride 0 in the last two dimensions, and keeps it in the others."""
    value = example(mask)
    assert value is not None
    expanded = [known_true(stride == 0) for stride in value.stride()[:-2]]
    if not any(expanded):
        return _called("contiguous", mask)
    index = (*(slice(0, 1) if each else slice(None) for each in expanded), slice(None), slice(None))
    return _called("expand_as", _called("contiguous", _called("__getitem__", mask, index)), mask)


def _called(method: str, *args: Any) -> AnyNode:
    node = args[0].graph.call_method(method, args)
    values = [example(each) if isinstance(each, Node) else each for each in args]
    node.meta["example_value"] = getattr(values[0], method)(*values[1:])
    return node


def _saved(q: torch.Tensor | None, k: torch.Tensor | None) -> float:
    if q is None or k is None:
        return 0.0
    passes = PASSES + PASSES_BACK * (torch.is_grad_enabled() and q.requires_grad)
    return passes * 4.0 * hint(q.numel()) / hint(q.shape[-1]) * hint(k.shape[-2])
