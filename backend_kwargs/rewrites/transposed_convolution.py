"""Transposed convolutions whose results do not overlap, as of U-Nets and mask decoders, as one product."""

import math
from itertools import chain

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import DTYPES, Arguments, of_each
from backend_kwargs.rewrites.patches import geometry_of, has_channels_last
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import example, examples, replacing

REWRITE = Rewrite(
    "Transposed convolutions that do not overlap as a product",
    traced=f"{__name__}:multiply_pixels",
    needs=("gpu",),
    applies="float32 or half precision; a stride of the kernel's size, no padding, one group",
    fitting=lambda stats: stats.gpu and stats.convolutions > 0,
    order=31,
)

CONVOLUTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)


def _convolution(node: Node, args: Arguments) -> Node | None:
    """Insert the product for a transposed convolution, in the dtype and the layout of its result."""
    values = examples(args["input"], args["weight"], node)
    if values is None or (example(args["bias"]) is None) != (args["bias"] is None):
        return None
    x, w, result = values
    size = tuple(w.shape[2:])
    last = has_channels_last(result)
    if x.dim() != w.dim() or result.dtype not in DTYPES or last is None:
        return None
    if not _fills(args, tuple(w.shape)):
        return None

    def call(made: Node, name: str, *given: Argument) -> Node:
        return node.graph.call_method(name, (made, *given))

    pixels, weight, bias = (
        each and call(each, "to", result.dtype) for each in (args["input"], args["weight"], args["bias"])
    )
    # [batch, *sizes, *size, channels], by weights whose rows are in this order.
    rows = call(call(call(weight, "movedim", 0, -1), "movedim", 0, -2), "flatten", 0, -2)
    product = node.graph.call_function(F.linear, (call(pixels, "movedim", 1, -1), rows))
    new = call(product, "unflatten", -1, (*size, w.shape[1]))
    new = call(new, "add", bias) if bias is not None else new
    dims = len(size)
    pairs = [*chain.from_iterable(zip(range(1, 1 + dims), range(1 + dims, 1 + 2 * dims), strict=True))]
    new = call(new, "permute", (0, *pairs, 1 + 2 * dims) if last else (0, 1 + 2 * dims, *pairs))
    for at in range(dims):
        new = call(new, "flatten", at + (1 if last else 2), at + (2 if last else 3))
    new = call(new, "contiguous")
    return call(new, "movedim", -1, 1) if last else new


def _fills(args: Arguments, shape: tuple[int, ...]) -> bool:
    """Return whether the results of a pixel touch those of the next, and there is nothing else."""
    geometry, size = geometry_of(args, shape), shape[2:]
    none, one = [0] * len(size), [1] * len(size)
    usual = args["groups"] == 1 and [*of_each(args["output_padding"], size)] == none
    return usual and geometry == (2 * none, [*size], one) and math.prod(size) > 1


multiply_pixels = replacing(CONVOLUTIONS, _convolution)
