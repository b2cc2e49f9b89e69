"""Transposed convolutions whose results do not overlap, as of U-Nets and mask decoders, as one product."""

import math
from itertools import chain

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node

from backend_kwargs.rewrites.matching import DTYPES, Arguments, of_each, require, values_of
from backend_kwargs.rewrites.patches import geometry_of, has_channels_last
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import method, replacing

REWRITE = Rewrite(
    "Transposed convolutions that do not overlap as a product",
    traced=f"{__name__}:multiply_pixels",
    needs=("gpu",),
    applies="float32 or half precision; a stride of the kernel's size, no padding, one group",
    fitting=lambda stats: stats.gpu and stats.convolutions > 0,
    order=31,
)

CONVOLUTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


def _convolution(node: Node, args: Arguments) -> Node:
    """Insert the product for a transposed convolution, in the dtype and the layout of its result."""
    x, w, result = values_of(args["input"], args["weight"], node)
    size, dims = tuple(w.shape[2:]), w.dim() - 2
    last = has_channels_last(result)
    require(x.dim() == w.dim() and result.dtype in DTYPES and args["groups"] == 1)
    # The results of a pixel touch those of the next, and there is nothing else.
    none = [0] * dims
    require(geometry_of(args, tuple(w.shape)) == (2 * none, [*size], [1] * dims) and math.prod(size) > 1)
    require([*of_each(args["output_padding"], size)] == none)
    pixels, weight, bias = (
        each and method(each, "to", result.dtype) for each in (args["input"], args["weight"], args["bias"])
    )
    # [batch, *sizes, *size, channels], by weights whose rows are in this order.
    rows = method(method(method(weight, "movedim", 0, -1), "movedim", 0, -2), "flatten", 0, -2)
    product = node.graph.call_function(F.linear, (method(pixels, "movedim", 1, -1), rows))
    new = method(product, "unflatten", -1, (*size, w.shape[1]))
    new = method(new, "add", bias) if bias is not None else new
    pairs = [*chain.from_iterable(zip(range(1, 1 + dims), range(1 + dims, 1 + 2 * dims), strict=True))]
    new = method(new, "permute", (0, *pairs, 1 + 2 * dims) if last else (0, 1 + 2 * dims, *pairs))
    for at in range(dims):
        new = method(new, "flatten", at + (1 if last else 2), at + (2 if last else 3))
    new = method(new, "contiguous")
    return method(new, "movedim", -1, 1) if last else new


multiply_pixels = replacing(CONVOLUTIONS, _convolution)
