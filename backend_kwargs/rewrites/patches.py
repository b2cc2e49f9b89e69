"""Convolutions of patches that do not overlap, as the first layer of a vision transformer, as one product.

cuDNN first converts layouts, pads channels, or has only slow kernels for so few channels and so large a kernel.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import GraphModule

from backend_kwargs.rewrites.matching import (
    HALF,
    AnyNode,
    arguments_of,
    bytes_of,
    hint,
    known_true,
    replace,
)
from backend_kwargs.rewrites.traced import Change, changed, example

CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
ALIGNED = 8  # numbers: fast products need rows of multiples of 16 bytes
FEW = 8  # channels, for which cuDNN reaches 40e12 operations a second on an H200, and 160e12 for more
BYTES_PER_FLOP = 4.5e12 / 40e12, 4.5e12 / 160e12  # that the memory moves meanwhile


@dataclass(frozen=True, slots=True)
class _Patches:
    """Images [batch, channels, *sizes], cut into `counts` patches of the weights' size in each dimension."""

    images: AnyNode
    weight: AnyNode
    bias: AnyNode | None
    counts: tuple[int, ...]
    size: tuple[int, ...]


def multiply_patches(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each convolution of patches as one product, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in CONVOLUTIONS, _replace)


def _replace(node: AnyNode) -> float | None:
    found, made = _patches(node), example(node)
    if found is None or made is None:
        return None
    images, dims = example(found.images), len(found.size)
    assert images is not None
    channels_last = torch.channels_last_3d if dims == 3 else torch.channels_last
    last = dims > 1 and made.is_contiguous(memory_format=channels_last)
    if not last and not made.is_contiguous():
        return None
    with node.graph.inserting_before(node):
        new = _product(found, channels_last=known_true(images.stride(1) == 1))
        new = _method("movedim", new, -1, 1)
        replace(node, new if last else _method("contiguous", new))
    flops = 2 * hint(made.numel()) * hint(images.shape[1]) * math.prod(found.size)
    converted = 0.0 if last else bytes_of(images) + bytes_of(made)
    return flops * BYTES_PER_FLOP[hint(images.shape[1]) >= FEW] + 2 * converted


def _product(found: _Patches, *, channels_last: bool) -> AnyNode:
    """Insert the product, [batch, *counts, channels]; the order of a patch's numbers is that of the images."""
    dims = len(found.size)
    patches, weight = found.images, found.weight
    for at, (count, size) in enumerate(zip(found.counts, found.size, strict=True)):
        patches = _method("narrow", patches, 2 + 2 * at, 0, count * size)
        patches = _method("unflatten", patches, 2 + 2 * at, (count, size))
    of_counts, of_size = (tuple(range(start, 2 + 2 * dims, 2)) for start in (2, 3))
    inside = (*of_size, 1) if channels_last else (1, *of_size)
    patches = _method("permute", patches, (0, *of_counts, *inside))
    if channels_last:
        weight = _method("movedim", weight, 1, -1)
    patches, weight = _method("flatten", patches, 1 + dims), _method("flatten", weight, 1)
    value = example(found.weight)
    assert value is not None
    if missing := -value[0].numel() % ALIGNED:
        patches, weight = (each.graph.call_function(F.pad, (each, (0, missing))) for each in (patches, weight))
    return patches.graph.call_function(F.linear, (patches, weight, found.bias))


def _method(name: str, node: AnyNode, *args: Any) -> AnyNode:
    return node.graph.call_method(name, (node, *args))


def _patches(node: AnyNode) -> _Patches | None:
    """Return the patches of a convolution, or None if they overlap, leave gaps, or have sizes that vary."""
    given = arguments_of(node)
    if given is None:
        return None
    images, weight, made = example(given["input"]), example(given["weight"]), example(node)
    if images is None or weight is None or made is None or made.dtype not in HALF or images.dim() != weight.dim():
        return None
    sizes, size = images.shape[2:], tuple(weight.shape[2:])
    if not all(isinstance(each, int) for each in (*sizes, *weight.shape)) or math.prod(size) == 1:
        return None
    if given["groups"] != 1 or (given["padding"] != "valid" and any(_each(given["padding"], size))):
        return None
    if _each(given["stride"], size) != size or any(each != 1 for each in _each(given["dilation"], size)):
        return None
    counts = tuple(map(operator.floordiv, sizes, size))
    return _Patches(given["input"], given["weight"], given["bias"], counts, size)


def _each(value: Any, size: tuple[int, ...]) -> tuple[Any, ...]:
    """Return an option for each dimension."""
    given = tuple(value) if isinstance(value, tuple | list) else (value,)
    return given * len(size) if len(given) == 1 else given
