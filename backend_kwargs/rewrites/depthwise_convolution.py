"""Depthwise convolutions as sums of shifted products, which Inductor fuses with what is around them.

cuDNN takes many times as long for sequences, dilated windows and volumes as it takes to read and write them.
"""

import operator
from functools import reduce
from itertools import product
from math import prod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.grouped_convolution import have_kernel
from backend_kwargs.rewrites.matching import (
    DTYPES,
    Arguments,
    known_true,
    require,
    stored,
    traced_value,
    used_once,
    values_of,
)
from backend_kwargs.rewrites.patches import CONVOLUTIONS, geometry_of, has_channels_last
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import is_only_computed_with, method, replacing

REWRITE = Rewrite(
    "Depthwise convolutions as sums of shifted products",
    traced=f"{__name__}:sum_shifted",
    applies="windows of at most 32 numbers, in inference of 64 in a row; not images' on a GPU in inference in half "
    "precision, of 9 numbers or more and without gaps",
    fitting=lambda stats: ran(stats, "convolution in groups"),
    version=4,
    order=25,
)

# Numbers of a window: the gradients of a long one are as many sums, and a kernel of 128 takes 20 s to compile.
MOST_TAPS, MOST_IN_A_ROW = 32, 64
# Numbers of a window from which a kernel that reads each pixel once is faster than these sums.
FOR_A_KERNEL = 9


def _convolution(node: Node, args: Arguments) -> Node:
    """Insert the sum for a depthwise convolution, in the dtype and the layout of its result."""
    x, w, result = values = values_of(args["input"], args["weight"], node)
    pads, stride, dilation = geometry_of(args, tuple(w.shape))
    last, groups, taps = has_channels_last(result), args["groups"], prod(w.shape[2:])
    require(x.dim() == w.dim() and w.shape[1] == 1 and (groups != 1 or w.shape[0] == 1) and result.dtype in DTYPES)
    require(taps <= (MOST_TAPS if result.requires_grad or max(w.shape[2:]) < taps else MOST_IN_A_ROW))
    require(taps < FOR_A_KERNEL or not have_kernel(values, groups, dilation))
    meta = dict[str, Tensor]()
    if stride[-1] == 1 and used_once(node) and _leaves_out(pads[1], next(iter(node.users)), result):
        # Else it would be stored, since what follows has another length.
        meta["example_value"] = result.narrow(-1, 0, result.shape[-1] - pads[1])
        pads = [pads[0], 0, *pads[2:]]
    # In float32 and rounded once, as by the library; under autocast the operands have been rounded before.
    source, weight, offset = args["input"], stored_once(args["weight"]), args["bias"]
    source = stored_once(method(source, "to", result.dtype))
    source, weight, offset = (
        each and method(method(each, "to", result.dtype), "to", torch.float32) for each in (source, weight, offset)
    )
    if w.shape[0] != groups:
        source = method(source, "repeat_interleave", w.shape[0] // groups, 1)
    new = _sum(source, weight, pads, stride, dilation, tuple(w.shape[2:]))
    if offset is not None:
        new = method(new, "add", method(offset, "view", -1, *[1] * len(stride)))
    new = method(new, "to", result.dtype)
    new = stored_once(method(method(new, "movedim", 1, -1) if last else new, "contiguous"))
    new = method(new, "movedim", -1, 1) if last else new
    new.meta |= meta
    return new


def stored_once(node: Node) -> Node:
    """Insert what makes Inductor write a value to memory, which it would compute for each number of a window."""
    return node.graph.call_function(stored, (node,))


def _sum(
    source: Node, weight: Node, pads: list[int], stride: list[int], dilation: list[int], size: tuple[int, ...]
) -> Node:
    """Insert the sum over a window of padded images, shifted by its place there, times the weights [C, 1, *size]."""
    graph, whole = source.graph, slice(None)
    padded = graph.call_function(F.pad, (source, pads)) if any(pads) else source
    terms = list[Node]()
    for tap in product(*map(range, size)):
        seen = [
            slice(at * apart, (at + 1 - taps) * apart or None, step)
            for at, apart, taps, step in zip(tap, dilation, size, stride, strict=True)
        ]
        shifted = graph.call_function(operator.getitem, (padded, (whole, whole, *seen)))
        one = graph.call_function(operator.getitem, (weight, (whole, 0, *(slice(at, at + 1) for at in tap))))
        terms.append(graph.call_function(torch.mul, (shifted, one)))
    return reduce(lambda made, term: graph.call_function(torch.add, (made, term)), terms)


def _leaves_out(count: int, reader: Node, result: Tensor) -> bool:
    """Return whether the `reader` of a result leaves out its last `count` numbers, as of a causal convolution."""
    index = reader.args[1] if reader.target is operator.getitem else None
    if not count or not isinstance(index, tuple):
        return False
    *others, last = index
    stop = getattr(last, "stop", None)
    if others not in ([...], [slice(None)] * (result.dim() - 1)) or last != slice(None, stop):
        return False
    length = traced_value(stop) if isinstance(stop, Node) else stop
    left = result.shape[-1] - count
    return known_true(left >= 0) and known_true(length == left) and is_only_computed_with(reader)


sum_shifted = replacing(CONVOLUTIONS, _convolution)
