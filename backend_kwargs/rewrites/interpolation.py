"""Convolutions of single pixels before an interpolation instead of after it, where images have fewer pixels.

One mixes channels, the other pixels, so that their order does not matter. The weights of an interpolation sum to 1,
which leaves a bias as it is. A convolution of joined images is the sum of one for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from backend_kwargs.rewrites.matching import (
    Arguments,
    bytes_of,
    calls,
    have_one_dtype,
    hint,
    matched,
    of_each,
    read,
    require,
    used_once,
    values_of,
)
from backend_kwargs.rewrites.patches import CONVOLUTIONS
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing

REWRITE = Rewrite(
    "Convolutions of single pixels before an interpolation, on fewer pixels",
    traced=f"{__name__}:convolve_before",
    applies="float32 or bfloat16; images that an interpolation enlarges, also where they are joined with others",
    fitting=lambda stats: stats.convolutions > 0,
    order=32,
)

CAT = (torch.cat, torch.concat, torch.concatenate)
DTYPES = (torch.float32, torch.bfloat16)  # a term of the sum may be beyond float16
BYTES_PER_FLOP = 4.5 / 600  # what the memory of an H200 moves in the time of an operation


@dataclass(frozen=True, slots=True)
class _Part:
    """An image as it was before its `interpolation`, or without one, whose channels the weights have from `start`."""

    image: Node
    start: int
    channels: int
    pixels: int
    interpolation: Node | None


def _convolution(node: Node, args: Arguments) -> Node:
    """Insert the sum of the interpolated convolutions for a convolution of interpolated images."""
    x, _, result = values = values_of(args["input"], args["weight"], node)
    require(is_of_pixels(args, *values))
    parts = _parts(matched(_joined, args["input"]) or [args["input"]])
    small, others = ([each for each in parts if bool(each.interpolation) is has] for has in (True, False))
    layout, pixels = _layout(result), hint(result[:, 0].numel())
    require(any(each.pixels < pixels for each in small))
    require(not changes_meanwhile(node, [*(each.image for each in parts), args["weight"], args["bias"]]))
    # Neither are the interpolated images written and read, nor, where there are several, joined.
    written = sum(each.pixels for each in small) / pixels + bool(others)
    joined = sum(each.channels for each in others) / x.shape[1] if len(others) > 1 else 0.0
    flops = 2 * result.shape[1] * sum(each.channels * (pixels - each.pixels) for each in small)
    require(2 * bytes_of(x) * (1 - joined) - 2 * bytes_of(result) * written + flops * BYTES_PER_FLOP > 0)
    groups = [*([others] if others else []), *([each] for each in small)]
    last = layout is not torch.contiguous_format
    biases = [args["bias"], *[None] * (len(groups) - 1)]
    terms = [_term(node, args, *each, last=last) for each in zip(groups, biases, strict=True)]
    new = reduce(lambda one, other: node.graph.call_function(torch.add, (one, other)), terms)
    return method(new, "to", dtype=result.dtype, memory_format=layout)


def is_of_pixels(args: Arguments, x: Tensor, w: Tensor, result: Tensor) -> bool:
    """Return whether each result of a convolution is of one pixel, in the same place."""
    size = tuple(w.shape[2:])
    if x.dim() != w.dim() or not all(isinstance(each, int) for each in w.shape):
        return False
    padded = args["padding"] not in ("valid", "same") and any(each != 0 for each in of_each(args["padding"], size))
    plain = all(each == 1 for each in (*size, *of_each(args["stride"], size), args["groups"]))
    return plain and not padded and {x.dtype, w.dtype, result.dtype}.issubset(DTYPES)


def _layout(result: Tensor) -> torch.memory_format:
    """Return the layout of a result; raise if it is neither contiguous nor channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim(), torch.contiguous_format)
    layouts = [each for each in (torch.contiguous_format, last) if result.is_contiguous(memory_format=each)]
    require(bool(layouts))
    return layouts[0]


def _joined(source: Node) -> Sequence[Node]:
    """Return the images whose channels `source` joins for one reader."""
    require(calls(source, *CAT) and used_once(source))
    args = read(source)
    images: Sequence[Node] = args["tensors"]
    require(isinstance(images, list | tuple))
    whole, *parts = values = values_of(source, *images)
    require(args["dim"] in (1, 1 - whole.dim()) and have_one_dtype(values))
    require(all(each.dim() == whole.dim() and isinstance(each.shape[1], int) for each in parts))
    require(whole.requires_grad == any(each.requires_grad for each in parts))
    return images


def _parts(images: Sequence[Node]) -> list[_Part]:
    """Return what is convolved of each image, and where its weights are."""
    parts, start = list[_Part](), 0
    for each in images:
        source = matched(_enlarged, each)
        value = (source or each).meta["example_value"]
        part = _Part(source or each, start, value.shape[1], hint(value[:, 0].numel()), each if source else None)
        parts.append(part)
        start += part.channels
    return parts


def _enlarged(image: Node) -> Node:
    """Return what `image` interpolates to no fewer pixels for one reader."""
    require(calls(image, F.interpolate) and used_once(image))
    source: Node = read(image)["input"]
    before, after = values_of(source, image)
    require(before.dtype == after.dtype and before.requires_grad == after.requires_grad)
    require(hint(before.numel()) <= hint(after.numel()))
    return source


def _term(node: Node, args: Arguments, parts: Sequence[_Part], bias: Node | None, *, last: bool) -> Node:
    """Insert the convolution of some parts by their weights, and its interpolation.

    With channels last it is a linear layer: a batch of 1 may have strides by which a convolution takes it for another.
    """
    graph = node.graph
    images = [each.image for each in parts]
    weights = [method(args["weight"], "narrow", 1, each.start, each.channels) for each in parts]
    image, weight = (
        each[0] if len(each) == 1 else graph.call_function(torch.cat, (each, 1)) for each in (images, weights)
    )
    if last:
        rows, columns = method(image, "movedim", 1, -1), method(weight, "flatten", 1)
        new = method(graph.call_function(F.linear, (rows, columns, bias)), "movedim", -1, 1)
    else:
        new = graph.create_node("call_function", node.target, (image, weight, bias))
    if (interpolation := parts[0].interpolation) is None:
        return new
    call = map_arg((interpolation.args, interpolation.kwargs), lambda each: new if each is image else each)
    return graph.call_function(F.interpolate, *call)


convolve_before = replacing(CONVOLUTIONS, _convolution)
