"""Convolutions of patches that do not overlap, as the first layer of a vision transformer, as one product.

cuDNN first converts layouts, pads channels, or has only slow kernels for so few channels and so large a kernel.
"""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from backend_kwargs.rewrites.matching import HALF, Arguments, known_true, of_each, require, values_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import method, replacing

REWRITE = Rewrite(
    "Convolutions of patches that do not overlap as a product",
    traced=f"{__name__}:multiply_patches",
    needs=("gpu",),
    applies="half precision; a stride of the kernel's size, no padding, and sizes that do not vary",
    fitting=lambda stats: stats.gpu and stats.convolutions > 0,
    order=30,
)

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
ALIGNED = 8  # numbers: fast products need rows of multiples of 16 bytes


def _convolution(node: Node, args: Arguments) -> Node:
    """Insert the product for a convolution of patches, in the layout of the convolution's result."""
    images, weight, result = values_of(args["input"], args["weight"], node)
    size = tuple(weight.shape[2:])
    require(images.dim() == weight.dim() and result.dtype in HALF)
    require(all(isinstance(each, int) for each in (*images.shape[2:], *weight.shape)) and math.prod(size) > 1)
    # Patches neither overlap nor leave gaps.
    pads, stride, dilation = geometry_of(args, tuple(weight.shape))
    require(args["groups"] == 1 and not any(pads) and stride == [*size] and {*dilation} == {1})
    channels_last = torch.channels_last_3d if len(size) == 3 else torch.channels_last
    last = len(size) > 1 and result.is_contiguous(memory_format=channels_last)
    require(last or result.is_contiguous())
    new = _product(args, images, size, weight[0].numel())
    return new if last else method(new, "contiguous")


def _product(args: Arguments, images: Tensor, size: tuple[int, ...], length: int) -> Node:
    """Insert the product of patches of this `size`; the order of the `length` numbers of one is that of the images."""
    dims, cut, weight = len(size), args["input"], args["weight"]
    for at, each in enumerate(size):
        count = images.shape[2 + at] // each
        cut = method(cut, "narrow", 2 + 2 * at, 0, count * each)
        cut = method(cut, "unflatten", 2 + 2 * at, (count, each))
    of_counts, of_size = (tuple(range(start, 2 + 2 * dims, 2)) for start in (2, 3))
    of_patch = (1, *of_size)
    if known_true(images.stride(1) == 1):  # channels last
        of_patch, weight = (*of_size, 1), method(weight, "movedim", 1, -1)
    rows = method(method(cut, "permute", (0, *of_counts, *of_patch)), "flatten", 1 + dims)
    weight = method(weight, "flatten", 1)
    if missing := -length % ALIGNED:
        rows, weight = (each.graph.call_function(F.pad, (each, (0, missing))) for each in (rows, weight))
    return method(rows.graph.call_function(F.linear, (rows, weight, args["bias"])), "movedim", -1, 1)


def has_channels_last(result: Tensor) -> bool:
    """Return whether a result has its channels last; raise if it has another layout, or sizes that are not known."""
    require(not free_unbacked_symbols(result))
    first, last = result.is_contiguous(), result.movedim(1, -1).is_contiguous()
    require(first or last)
    return not first


def geometry_of(args: Arguments, shape: tuple[int, ...]) -> tuple[list[int], ...]:
    """Return pads in the order of `F.pad`, stride and dilation of a convolution whose weights have a `shape`.

    Raise if they are not all numbers.
    """
    size = shape[2:]
    stride, dilation = ([*of_each(args[name], size)] for name in ("stride", "dilation"))
    require(all(isinstance(each, int) for each in (*shape, *stride, *dilation, args["groups"])))
    if args["padding"] == "same":
        around = [apart * (taps - 1) for apart, taps in zip(dilation, size, strict=True)]
        return [each for total in around[::-1] for each in (total // 2, total - total // 2)], stride, dilation
    padding = of_each(0 if args["padding"] == "valid" else args["padding"], size)
    require(all(isinstance(each, int) for each in padding))
    return [each for each in padding[::-1] for _ in range(2)], stride, dilation


multiply_patches = replacing(CONVOLUTIONS, _convolution)
