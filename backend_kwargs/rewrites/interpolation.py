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

from backend_kwargs.rewrites.matching import Arguments, arguments_of, bytes_of, have_one_dtype, hint, of_each, used_once
from backend_kwargs.rewrites.patches import CONVOLUTIONS
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, examples, replacing

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


def _convolution(node: Node, args: Arguments) -> Node | None:
    """Insert the sum of the interpolated convolutions for a convolution of interpolated images."""
    values = examples(args["input"], args["weight"], node)
    if values is None or not is_of_pixels(args, *values):
        return None
    x, _, result = values
    parts = _parts(_joined(args["input"]))
    small, others = ([each for each in parts if bool(each.interpolation) is has] for has in (True, False))
    layout = _layout(result)
    pixels = hint(result[:, 0].numel())
    if layout is None or not any(each.pixels < pixels for each in small):
        return None
    if changes_meanwhile(node, [*(each.image for each in parts), args["weight"], args["bias"]]):
        return None
    # Neither are the interpolated images written and read, nor, where there are several, joined.
    written = sum(each.pixels for each in small) / pixels + bool(others)
    joined = sum(each.channels for each in others) / x.shape[1] if len(others) > 1 else 0.0
    flops = 2 * result.shape[1] * sum(each.channels * (pixels - each.pixels) for each in small)
    saved = 2 * bytes_of(x) * (1 - joined) - 2 * bytes_of(result) * written + flops * BYTES_PER_FLOP
    if saved <= 0:
        return None
    groups = [*([others] if others else []), *([each] for each in small)]
    last = layout is not torch.contiguous_format
    biases = [args["bias"], *[None] * (len(groups) - 1)]
    terms = [_term(node, args, *each, last=last) for each in zip(groups, biases, strict=True)]
    new = reduce(lambda one, other: node.graph.call_function(torch.add, (one, other)), terms)
    return node.graph.call_method("to", (new,), {"dtype": result.dtype, "memory_format": layout})


def is_of_pixels(args: Arguments, x: Tensor, w: Tensor, result: Tensor) -> bool:
    """Return whether each result of a convolution is of one pixel, in the same place."""
    size = tuple(w.shape[2:])
    if x.dim() != w.dim() or not all(isinstance(each, int) for each in w.shape):
        return False
    padded = args["padding"] not in ("valid", "same") and any(each != 0 for each in of_each(args["padding"], size))
    plain = all(each == 1 for each in (*size, *of_each(args["stride"], size), args["groups"]))
    return plain and not padded and {x.dtype, w.dtype, result.dtype}.issubset(DTYPES)


def _layout(result: Tensor) -> torch.memory_format | None:
    """Return the layout of a result, or None if it is neither contiguous nor channels last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim(), torch.contiguous_format)
    return next((each for each in (torch.contiguous_format, last) if result.is_contiguous(memory_format=each)), None)


def _joined(source: Node) -> Sequence[Node]:
    """Return the images whose channels `source` joins for one reader, or `source`."""
    args = arguments_of(source) if source.target in CAT and used_once(source) else None
    if args is None or not isinstance(args["tensors"], list | tuple):
        return [source]
    values = examples(source, *args["tensors"])
    if values is None or args["dim"] not in (1, 1 - values[0].dim()) or not have_one_dtype(values):
        return [source]
    whole, *images = values
    alike = all(each.dim() == whole.dim() and isinstance(each.shape[1], int) for each in images)
    return args["tensors"] if alike and whole.requires_grad == any(each.requires_grad for each in images) else [source]


def _parts(images: Sequence[Node]) -> list[_Part]:
    """Return what is convolved of each image, and where its weights are."""
    parts, start = list[_Part](), 0
    for each in images:
        source = _enlarged(each)
        value = (source or each).meta["example_value"]
        part = _Part(source or each, start, value.shape[1], hint(value[:, 0].numel()), each if source else None)
        parts.append(part)
        start += part.channels
    return parts


def _enlarged(image: Node) -> Node | None:
    """Return what `image` interpolates to no fewer pixels for one reader, or None."""
    args = arguments_of(image) if image.target is F.interpolate and used_once(image) else None
    values = examples(args["input"], image) if args else None
    if args is None or values is None:
        return None
    before, after = values
    same = before.dtype == after.dtype and before.requires_grad == after.requires_grad
    return args["input"] if same and hint(before.numel()) <= hint(after.numel()) else None


def _term(node: Node, args: Arguments, parts: Sequence[_Part], bias: Node | None, *, last: bool) -> Node:
    """Insert the convolution of some parts by their weights, and its interpolation.

    With channels last it is a linear layer: a batch of 1 may have strides by which a convolution takes it for another.
    """
    graph = node.graph
    images = [each.image for each in parts]
    weights = [graph.call_method("narrow", (args["weight"], 1, each.start, each.channels)) for each in parts]
    image, weight = (
        each[0] if len(each) == 1 else graph.call_function(torch.cat, (each, 1)) for each in (images, weights)
    )
    if last:
        rows, columns = graph.call_method("movedim", (image, 1, -1)), graph.call_method("flatten", (weight, 1))
        new = graph.call_method("movedim", (graph.call_function(F.linear, (rows, columns, bias)), -1, 1))
    else:
        new = graph.create_node("call_function", node.target, (image, weight, bias))
    if (interpolation := parts[0].interpolation) is None:
        return new
    call = map_arg((interpolation.args, interpolation.kwargs), lambda each: new if each is image else each)
    return graph.call_function(F.interpolate, *call)


convolve_before = replacing(CONVOLUTIONS, _convolution)
