"""Convolutions in groups, depthwise ones among them, by kernels of our own: cuDNN's are slow, channels last.

The kernel computes the convolution and its bias; what follows stays Inductor's.
"""

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.convolution import GEOMETRY, Ints, convolution, operands
from backend_kwargs.rewrites.matching import HALF, aten, have_one_dtype, insert, read, register, values_of
from backend_kwargs.rewrites.operators import define
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import CallFunctionVarArgs, PatternMatcherPass

REWRITE = Rewrite(
    "Convolutions in groups by our own kernels",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::grouped_convolution",),
    needs=("gpu",),
    applies="half precision in channels last, at most 512 channels in a group",
    costs="depthwise ones have not been timed",
    fitting=lambda stats: stats.gpu and ran(stats, "convolution in groups") and not stats.training,
    version=2,
    order=20,
)

MOST_CHANNELS = 512  # of a group; cuDNN copies the slices of a few wide groups, in kernels that take most of the time


def _grouped_cuda(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    from backend_kwargs.rewrites.kernels.convolution import convolution_in_groups

    sizes = [
        (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, apart in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    shape = (x.shape[0], w.shape[0], *sizes)
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return convolution_in_groups(x, w, bias, out, stride, padding, dilation, groups) if out.numel() else out


grouped_convolution = define(f"grouped_convolution(Tensor x, Tensor w, {GEOMETRY}", convolution, cuda=_grouped_cuda)


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern: a convolution in groups."""
    register(
        passes,
        CallFunctionVarArgs(aten.convolution.default),
        lambda match: _operands(match.output_node()),
        lambda node, args: insert(node.graph, grouped_convolution, *args),
    )


def _operands(node: Node) -> tuple[Argument, ...] | None:
    """Return the operands of a convolution that the kernel computes, by its dtype, layout and groups, or None."""
    args = read(node)
    values, groups = values_of(args["input"], args["weight"], node), args["groups"]
    if values is None or args["transposed"] or not isinstance(groups, int) or groups == 1:
        return None
    x, w, result = values
    if result.dim() != 4 or not have_one_dtype(values, HALF):
        return None
    if not all(isinstance(size, int) for size in w.shape) or max(w.shape[1], w.shape[0] // groups) > MOST_CHANNELS:
        return None
    last = torch.channels_last  # and in no other layout, as images of one pixel or none are
    dense = all(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in (x, result))
    return operands(node) if dense else None
