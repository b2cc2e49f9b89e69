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
from backend_kwargs.rewrites.matching import DTYPES, Arguments, known_true, stored, used_once
from backend_kwargs.rewrites.patches import CONVOLUTIONS, geometry_of, has_channels_last
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import example, examples, is_only_computed_with, replacing

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


def _convolution(node: Node, args: Arguments) -> Node | None:
    """Insert the sum for a depthwise convolution, in the dtype and the layout of its result."""
    values, bias = examples(args["input"], args["weight"], node), example(args["bias"])
    if values is None or (bias is None) != (args["bias"] is None):
        return None
    x, w, result = values
    geometry = geometry_of(args, tuple(w.shape))
    last = has_channels_last(result)
    groups = args["groups"]
    if geometry is None or x.dim() != w.dim() or w.shape[1] != 1 or (groups == 1 and w.shape[0] != 1):
        return None
    most = MOST_TAPS if result.requires_grad or max(w.shape[2:]) < prod(w.shape[2:]) else MOST_IN_A_ROW
    if prod(w.shape[2:]) > most or result.dtype not in DTYPES or last is None:
        return None
    pads, stride, dilation = geometry
    if prod(w.shape[2:]) >= FOR_A_KERNEL and have_kernel(values, groups, dilation):
        return None
    call, meta = node.graph.call_method, dict[str, Tensor]()
    if stride[-1] == 1 and used_once(node) and _leaves_out(pads[1], next(iter(node.users)), result):
        # Else it would be stored, since what follows has another length.
        meta["example_value"] = result.narrow(-1, 0, result.shape[-1] - pads[1])
        pads = [pads[0], 0, *pads[2:]]
    # In float32 and rounded once, as by the library; under autocast the operands have been rounded before.
    source, weight, offset = args["input"], stored_once(args["weight"]), args["bias"]
    source = stored_once(call("to", (source, result.dtype)))
    source, weight, offset = (
        each and reduce(lambda made, dtype: call("to", (made, dtype)), (result.dtype, torch.float32), each)
        for each in (source, weight, offset)
    )
    if w.shape[0] != groups:
        source = call("repeat_interleave", (source, w.shape[0] // groups, 1))
    new = _sum(source, weight, pads, stride, dilation, tuple(w.shape[2:]))
    if offset is not None:
        new = call("add", (new, call("view", (offset, -1, *[1] * len(stride)))))
    new = call("to", (new, result.dtype))
    new = stored_once(call("contiguous", (call("movedim", (new, 1, -1)) if last else new,)))
    new = call("movedim", (new, -1, 1)) if last else new
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
    length = stop.meta.get("example_value") if isinstance(stop, Node) else stop
    left = result.shape[-1] - count
    return known_true(left >= 0) and known_true(length == left) and is_only_computed_with(reader)


sum_shifted = replacing(CONVOLUTIONS, _convolution)
