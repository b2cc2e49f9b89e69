"""cuDNN's kernel of attention in place of the one that `scaled_dot_product_attention` chose."""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.library_attention import (
    EFFICIENT,
    FLASH,
    HEADS_LAST,
    heads_last,
    only_result,
    replace_results,
    scale_of,
)
from backend_kwargs.rewrites.matching import aten, insert, known_true, read, register
from backend_kwargs.rewrites.operators import define
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import CallFunctionVarArgs, PatternMatcherPass

REWRITE = Rewrite(
    "cuDNN's kernel instead of the one that scaled_dot_product_attention chose",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::cudnn_attention",),
    needs=("gpu",),
    applies="inference in half precision",
    fitting=lambda stats: ran(stats, "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    order=70,
)

# ---- the operator


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Return attention by `scaled_dot_product_attention`, with queries before heads."""
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
    return attended.transpose(1, 2).contiguous()


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    result: Tensor = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, False, 0.0, is_causal, False, scale=scale)[
        0
    ]
    return result.transpose(1, 2).contiguous()


cudnn_attention = define(
    "cudnn_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool is_causal, float scale) -> Tensor",
    _attention,
    fake=heads_last,
    cuda=_cudnn_attention,
)


# ---- patterns


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register patterns of the other kernels of `scaled_dot_product_attention`, which cuDNN's replaces."""
    for target in (FLASH, EFFICIENT):
        register(passes, CallFunctionVarArgs(target), lambda match: _operands(match.output_node()), _fuse)


def _operands(node: Node) -> tuple[Argument, ...] | None:
    """Return the operator's arguments if cuDNN's kernel computes the same of them, or None."""
    args, scale = read(node), scale_of(node)
    if not only_result(node) or scale is None:
        return None
    q, k, v = (args[name] for name in ("query", "key", "value"))
    bias, causal = args.get("attn_bias"), bool(args["is_causal"])
    # Of other lengths, flash attention lets the last query see the last key, and cuDNN the first query the first key.
    square = node.target is EFFICIENT or known_true(q.meta["val"].shape[2] == k.meta["val"].shape[2])
    return (q, k, v, bias, causal, scale) if not causal or (bias is None and square) else None


def _fuse(node: Node, operands: tuple[Argument, ...]) -> None:
    attended = insert(node.graph, cudnn_attention, *operands)
    replace_results(node, insert(node.graph, aten.permute.default, attended, HEADS_LAST))
