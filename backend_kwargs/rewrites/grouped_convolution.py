"""Convolutions in groups, depthwise ones among them, by kernels of our own: cuDNN's are slow, channels last.

The kernel computes the convolution and its bias; what follows stays Inductor's.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.convolution import GEOMETRY, convolution, operands, read
from backend_kwargs.rewrites.matching import HALF, AnyNode, aten, insert, replace, value_of
from backend_kwargs.rewrites.operators import define, nbytes
from backend_kwargs.torch_internals.pattern_matcher import (
    CallFunctionVarArgs,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

MOST_CHANNELS = 64  # of a group: more of them fill cuDNN's tiles too
PASSES = 7  # over images and results: cuDNN took longer than our kernel by the time of 7 to 20 on an H200


def _grouped_cuda(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    from backend_kwargs.rewrites.kernels.convolution import convolution_in_groups

    sizes = [
        (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, apart in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    shape = (x.shape[0], w.shape[0], *sizes)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return convolution_in_groups(x, w, bias, out, stride, padding, dilation, groups) if out.numel() else out


def _saved(node: Node) -> float:
    """Return the bytes that the memory could move in the additional time of cuDNN's kernels."""
    return PASSES * (nbytes(node.args[0]) + nbytes(node))


grouped_convolution = define(
    f"grouped_convolution(Tensor x, Tensor w, {GEOMETRY}", convolution, cuda=_grouped_cuda, saved=_saved
)


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern: a convolution in groups."""

    @register_graph_pattern(
        CallFunctionVarArgs(aten.convolution.default),
        extra_check=lambda match: _fits(match.output_node()),
        pass_dict=passes,
    )
    def fuse(match: Match, *args: Any, **kwargs: Any) -> None:
        node = match.output_node()
        with node.graph.inserting_before(node):
            new = insert(node.graph, grouped_convolution, *operands(node))
        replace(node, new)


def _fits(node: AnyNode) -> bool:
    """Return whether the kernel computes this convolution: its dtype, its layout, and the size of its groups."""
    given = read(node)
    x, w, made, groups = *map(value_of, (given["input"], given["weight"], node)), given["groups"]
    if x is None or w is None or made is None or made.dim() != 4 or given["transposed"] or not isinstance(groups, int):
        return False
    if groups == 1 or not x.dtype == w.dtype == made.dtype or made.dtype not in HALF:
        return False
    if not all(isinstance(size, int) for size in w.shape) or max(w.shape[1], w.shape[0] // groups) > MOST_CHANNELS:
        return False
    last = torch.channels_last  # and in no other layout, as images of one pixel or none are
    return all(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in (x, made))
