"""Convolutions of patches that do not overlap, as the first layer of a vision transformer, as one product.

cuDNN first converts layouts, pads channels, or has only slow kernels for so few channels and so large a kernel.
"""

import math
import operator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import HALF, Arguments, known_true, of_each
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import examples, replacing

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


@dataclass(frozen=True, slots=True)
class _Patches:
    """Images [batch, channels, *sizes], cut into `counts` patches of the weights' size in each dimension."""

    images: Node
    weight: Node
    bias: Node | None
    counts: tuple[int, ...]
    size: tuple[int, ...]


def _convolution(node: Node, args: Arguments) -> Node | None:
    """Insert the product for a convolution of patches, in the layout of the convolution's result."""
    patches, values = _patches(args), examples(args["input"], args["weight"], node)
    if patches is None or values is None or values[2].dtype not in HALF:
        return None
    images, weight, result = values
    dims = len(patches.size)
    channels_last = torch.channels_last_3d if dims == 3 else torch.channels_last
    last = dims > 1 and result.is_contiguous(memory_format=channels_last)
    if not last and not result.is_contiguous():
        return None
    new = _product(patches, channels_last=known_true(images.stride(1) == 1), length=weight[0].numel())
    new = _method("movedim", new, -1, 1)
    return new if last else _method("contiguous", new)


def _product(patches: _Patches, *, channels_last: bool, length: int) -> Node:
    """Insert the product, [batch, *counts, channels]; the order of a patch's `length` numbers is that of the images."""
    dims = len(patches.size)
    cut, weight = patches.images, patches.weight
    for at, (count, size) in enumerate(zip(patches.counts, patches.size, strict=True)):
        cut = _method("narrow", cut, 2 + 2 * at, 0, count * size)
        cut = _method("unflatten", cut, 2 + 2 * at, (count, size))
    of_counts, of_size = (tuple(range(start, 2 + 2 * dims, 2)) for start in (2, 3))
    cut = _method("permute", cut, (0, *of_counts, *((*of_size, 1) if channels_last else (1, *of_size))))
    if channels_last:
        weight = _method("movedim", weight, 1, -1)
    rows, weight = _method("flatten", cut, 1 + dims), _method("flatten", weight, 1)
    if missing := -length % ALIGNED:
        rows, weight = (each.graph.call_function(F.pad, (each, (0, missing))) for each in (rows, weight))
    return rows.graph.call_function(F.linear, (rows, weight, patches.bias))


def _method(name: str, node: Node, *args: Argument) -> Node:
    return node.graph.call_method(name, (node, *args))


def _patches(args: Arguments) -> _Patches | None:
    """Return the patches of a convolution, or None if they overlap, leave gaps, or have sizes that vary."""
    values = examples(args["input"], args["weight"])
    if values is None or values[0].dim() != values[1].dim():
        return None
    images, weight = values
    sizes, size = images.shape[2:], tuple(weight.shape[2:])
    if not all(isinstance(each, int) for each in (*sizes, *weight.shape)) or math.prod(size) == 1:
        return None
    if args["groups"] != 1 or (args["padding"] != "valid" and any(of_each(args["padding"], size))):
        return None
    if of_each(args["stride"], size) != size or any(each != 1 for each in of_each(args["dilation"], size)):
        return None
    counts = tuple(map(operator.floordiv, sizes, size))
    return _Patches(args["input"], args["weight"], args["bias"], counts, size)


def has_channels_last(result: Tensor) -> bool | None:
    """Return whether a result has its channels last, None if it has another layout, or sizes that are not known."""
    if free_unbacked_symbols(result):
        return None
    first, last = result.is_contiguous(), result.movedim(1, -1).is_contiguous()
    return not first if first or last else None


def geometry_of(args: Arguments, shape: tuple[int, ...]) -> tuple[list[int], ...] | None:
    """Return pads in the order of `F.pad`, stride and dilation of a convolution whose weights have a `shape`."""
    size = shape[2:]
    stride, dilation = ([*of_each(args[name], size)] for name in ("stride", "dilation"))
    if not all(isinstance(each, int) for each in (*shape, *stride, *dilation, args["groups"])):
        return None
    if args["padding"] == "same":
        around = [apart * (taps - 1) for apart, taps in zip(dilation, size, strict=True)]
        return [each for total in around[::-1] for each in (total // 2, total - total // 2)], stride, dilation
    padding = of_each(0 if args["padding"] == "valid" else args["padding"], size)
    if not all(isinstance(each, int) for each in padding):
        return None
    return [each for each in padding[::-1] for _ in range(2)], stride, dilation


multiply_patches = replacing(CONVOLUTIONS, _convolution)
