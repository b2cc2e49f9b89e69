"""Masks of `scaled_dot_product_attention` with a dense last dimension, without which torch chooses no fused kernel.

A mask that depends on the queries alone and is expanded over the keys has stride 0 there, as some releases of
transformers make it for encoders. Attention is then computed by products in float32 and a softmax.
"""

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

from backend_kwargs.backends import Inputs
from backend_kwargs.graphs.writes import written_between
from backend_kwargs.rewrites.matching import DTYPES, Arguments, known_true, require, value_of, values_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import Change, Wanted, every, replacing
from backend_kwargs.torch_internals.dynamo import is_erased

REWRITE = Rewrite(
    "Masks that are expanded over the keys, copied so that scaled_dot_product_attention has a fused kernel",
    traced=f"{__name__}:make_dense",
    needs=("gpu",),
    applies="float32 or half precision; masks without gradients, of last stride 0",
    costs="memory for the mask of one head",
    fitting=lambda stats: stats.gpu and stats.softmaxes + stats.attentions > 0,
    order=80,
)

ATTENTION = torch.nn.functional.scaled_dot_product_attention


def make_dense(gm: GraphModule, example_inputs: Inputs, wanted: Wanted = every) -> Change | None:
    """Return the graph in which masks of attention have dense rows, or None if all have."""
    copies: dict[Node, Node] = {}  # dense masks, by the mask

    def with_dense_mask(node: Node, args: Arguments) -> Node:
        mask = args["attn_mask"]
        q, _, value = values_of(args["query"], args["key"], mask)
        require(value.dim() > 1 and known_true(value.stride(-1) != 1) and known_true(value.shape[-1] != 1))
        require(not value.requires_grad and q.dtype in DTYPES)
        if mask not in copies or is_erased(copies[mask]) or written_between(copies[mask], node, [mask]):
            copies[mask] = _dense(mask)
        return node.graph.call_function(ATTENTION, (), {**args, "attn_mask": copies[mask]})

    return replacing((ATTENTION,), with_dense_mask)(gm, example_inputs, wanted)


def _dense(mask: Node) -> Node:
    """Insert a copy of the mask that has no stride 0 in the last two dimensions, and keeps it in the others."""
    (value,) = values_of(mask)
    expanded = [known_true(stride == 0) for stride in value.stride()[:-2]]
    if not any(expanded):
        return _called("contiguous", mask)
    index = (*(slice(0, 1) if each else slice(None) for each in expanded), slice(None), slice(None))
    return _called("expand_as", _called("contiguous", _called("__getitem__", mask, index)), mask)


def _called(method: str, mask: Node, *args: Argument) -> Node:
    """Insert a call of a method, with its fake result."""
    node = mask.graph.call_method(method, (mask, *args))
    others = [value_of(each) if isinstance(each, Node) else each for each in args]
    node.meta["example_value"] = getattr(value_of(mask), method)(*others)
    return node
