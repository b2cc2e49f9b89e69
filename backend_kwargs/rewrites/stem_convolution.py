"""Convolutions of few channels, as of an image's colours in a network's first layer, by a kernel of our own.

cuDNN's kernels for tensor cores multiply eight channels of the input or more at a time, and its others take 8 to 60
times as long as to read and write the images. Ours multiplies whole windows, in any layout, and applies a norm in eval
mode and an activation before it stores, channels last, as Inductor wants what other convolutions read.
"""

from typing import Any

from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.grouped_convolution import NORMED, has_channels_last, register_norms, result_of, with_norm
from backend_kwargs.rewrites.matching import HALF, define, dense, have_one_dtype, read, require, same_sizes, values_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.torch_internals.pattern_matcher import PatternMatcherPass

REWRITE = Rewrite(
    "Convolutions of at most four channels with a norm and an activation by our own kernel",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::stem_convolution",),
    needs=("gpu",),
    applies="half precision, images of at most 4 channels",
    fitting=lambda stats: stats.gpu and stats.convolutions > 0 and not stats.training,
    order=5,
)

MOST_CHANNELS = 4

# ---- the operator


def _stem(x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, *rest: Any) -> Tensor:
    out = result_of(x, w, *rest[:3])
    return out.copy_(with_norm(x, w, scale, shift, *rest))


def _stem_cuda(x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, *rest: Any) -> Tensor:
    from backend_kwargs.rewrites.kernels.convolution import convolution_of_few_channels

    out = result_of(x, w, *rest[:3])
    return convolution_of_few_channels(x, w, dense(scale), dense(shift), out, *rest) if out.numel() else out


stem_convolution = define(
    f"stem_convolution{NORMED}",
    _stem,
    fake=lambda x, w, scale, shift, *rest: result_of(x, w, *rest[:3]),
    cuda=_stem_cuda,
)

# ---- patterns


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns."""
    register_norms(passes, stem_convolution, _require_kernel)


def _require_kernel(node: Node, end: Node) -> None:
    """Raise unless the kernel computes a convolution, and what ends in `end`."""
    args = read(node)
    x, w, result, wanted = values = values_of(args["input"], args["weight"], node, end)
    require(not args["transposed"] and args["groups"] == 1 and have_one_dtype(values, HALF))
    require(all(isinstance(size, int) for size in w.shape) and w.shape[1] <= MOST_CHANNELS and x.dim() == 4)
    require((has_channels_last(wanted) or wanted.is_contiguous()) and same_sizes(result.shape, wanted.shape))
