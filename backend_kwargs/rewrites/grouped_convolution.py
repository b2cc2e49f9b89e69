"""Convolutions in groups by kernels of our own, channels last, where cuDNN's are slow.

The kernel of depthwise ones applies a norm in eval mode, and an activation, before it stores: what follows would read
and write the whole result again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.convolution import (
    GEOMETRY,
    Affine,
    Ints,
    affine_convolution,
    convolution,
    filled,
    in_channels_last,
    operands,
    scale_and_shift,
)
from backend_kwargs.rewrites.folding import mark_folded
from backend_kwargs.rewrites.matching import (
    HALF,
    aten,
    calls,
    define,
    dense,
    have_one_dtype,
    input_of,
    insert,
    patterns_of,
    prims,
    read,
    register,
    require,
    same_sizes,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass
from backend_kwargs.torch_internals.tensors import OpOverload

REWRITE = Rewrite(
    "Convolutions in groups by our own kernels, depthwise ones with a norm and an activation",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::grouped_convolution", "backend_kwargs::depthwise_norm"),
    needs=("gpu",),
    applies="half precision in channels last, at most 512 channels in a group",
    fitting=lambda stats: stats.gpu and ran(stats, "convolution in groups") and not stats.training,
    version=2,
    order=20,
)

MOST_CHANNELS = 512  # of a group; cuDNN copies the slices of a few wide groups, in kernels that take most of the time
LONGEST = 7  # of a depthwise window: a program keeps all results that a number of its input is part of
READERS_OF_STRIDES = (
    aten.as_strided.default, aten.as_strided_scatter.default, aten.view.dtype, aten.view_as_complex.default,
)  # fmt: skip
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "": lambda x: x,
}

# ---- the operators


def result_of(x: Tensor, w: Tensor, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """Return an empty result of a convolution."""
    sizes = [
        (size + 2 * pad - apart * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, apart in zip(x.shape[2:], w.shape[2:], stride, padding, dilation, strict=True)
    ]
    shape = (x.shape[0], w.shape[0], *sizes)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _grouped_cuda(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    from backend_kwargs.rewrites.kernels.convolution import convolution_in_groups

    out, x = result_of(x, w, stride, padding, dilation), in_channels_last(x)
    return convolution_in_groups(x, w, dense(bias), out, stride, padding, dilation, groups) if out.numel() else out


grouped_convolution = define(f"grouped_convolution(Tensor x, Tensor w, {GEOMETRY}", convolution, cuda=_grouped_cuda)


def with_norm(
    x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, stride: Ints, padding: Ints, dilation: Ints,
    activation: str,
) -> Tensor:  # fmt: skip
    """Return a convolution, times `scale`, plus `shift`, after an activation."""
    result = convolution(x, w, None, stride, padding, dilation, x.shape[1] // w.shape[1]).float()
    result = result if scale is None else result * scale.view(-1, 1, 1)
    result = result if shift is None else result + shift.view(-1, 1, 1)
    return ACTIVATIONS[activation](result).to(x.dtype)


def _depthwise_cuda(x: Tensor, w: Tensor, scale: Tensor | None, shift: Tensor | None, *rest: Any) -> Tensor:
    from backend_kwargs.rewrites.kernels.convolution import convolution_by_channel

    out, x = result_of(x, w, *rest[:3]), in_channels_last(x)
    return convolution_by_channel(x, w, dense(scale), dense(shift), out, *rest) if out.numel() else out


NORMED = (
    "(Tensor x, Tensor w, Tensor? scale, Tensor? shift, SymInt[] stride, SymInt[] padding, SymInt[] dilation,"
    " str activation) -> Tensor"
)
depthwise_norm = define(f"depthwise_norm{NORMED}", with_norm, cuda=_depthwise_cuda)

# ---- patterns


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns."""
    register_norms(passes, depthwise_norm, partial(_require_kernel, depthwise=True))
    register(passes, CallFunctionVarArgs(aten.convolution.default), _in_groups, _insert)


def register_norms(passes: PatternMatcherPass, operator: Any, check: Callable[[Node, Node], None]) -> None:
    """Register what `operator` computes: what ends in an activation, in a norm, or in a convolution, the longest first.

    `check(convolution, end)` raises where it may not.
    """

    def before(match: Match) -> Affine:
        """Return the convolution, with what is applied to its channels, before an activation or a rounding."""
        end = match.output_node()
        affine = affine_convolution(match.kwargs.get("x", input_of(end)))
        check(affine.convolution, end)
        return affine

    def alone(match: Match) -> Affine:
        node = match.output_node()
        check(node, node)
        return Affine(node)

    for name, activation in ACTIVATIONS.items():
        ends = patterns_of(activation, HALF) if name else [CallFunctionVarArgs(prims.convert_element_type.default)]
        for pattern in ends:
            register(passes, pattern, before, partial(_fuse, operator, name))
    register(passes, CallFunctionVarArgs(aten.convolution.default), alone, partial(_fuse, operator, ""))


def _in_groups(match: Match) -> Node:
    node = match.output_node()
    _require_kernel(node, node, depthwise=False)
    return node


def _insert(node: Node, _: Node) -> Node:
    return insert(node.graph, grouped_convolution, *operands(node))


def _fuse(operator: Any, activation: str, end: Node, affine: Affine) -> Node:
    """Insert the call for a convolution, what is applied to its channels, and an activation."""
    graph = end.graph
    image, weight, _, *geometry, _ = operands(affine.convolution)
    scale, shift = scale_and_shift(graph, affine)
    if scale is not None and not isinstance(scale, Node):
        scale = filled(graph, weight, scale)
    made = insert(graph, operator, image, weight, mark_folded(scale), mark_folded(shift), *geometry, activation)
    if has_channels_last(end.meta["val"]) or not _are_strides_read(end):
        return made
    return insert(graph, aten.clone.default, made, memory_format=torch.contiguous_format)


def _are_strides_read(end: Node) -> bool:
    """Return whether the strides of a value are read: torch gives fake values of all that follows it those of ours."""
    return any(user.op == "output" for user in end.users) or any(map(_reads_strides, end.graph.nodes))


def _reads_strides(node: Node) -> bool:
    """Return whether what a call computes, or is called with, follows from the strides of what it reads."""
    if isinstance(node.target, OpOverload) and node.target.namespace not in ("aten", "prims"):
        return torch.Tag.needs_fixed_stride_order in node.target.tags
    return calls(node, *READERS_OF_STRIDES)


def _require_kernel(node: Node, end: Node, *, depthwise: bool) -> None:
    """Raise unless a kernel computes a convolution, and what ends in `end`."""
    args = read(node)
    x, w, result, wanted = values = values_of(args["input"], args["weight"], node, end)
    require((w.shape[1] == 1) is depthwise and not args["transposed"] and have_one_dtype(values, HALF))
    require(same_sizes(result.shape, wanted.shape) and has_channels_last(wanted))
    *_, dilation, groups = operands(node)
    require(_fit(x, w, result, groups, dilation))


def _fit(x: Tensor, w: Tensor, result: Tensor, groups: object, dilation: Sequence[Any]) -> bool:
    """Return whether a kernel computes a convolution, by its layout and groups."""
    if result.dim() != 4 or not isinstance(groups, int) or groups == 1:
        return False
    if not all(isinstance(size, int) for size in w.shape) or max(w.shape[1], w.shape[0] // groups) > MOST_CHANNELS:
        return False
    if not all(isinstance(apart, int) for apart in dilation):
        return False
    reach = [apart * (taps - 1) for apart, taps in zip(dilation, w.shape[2:], strict=True)]
    return (w.shape[1] > 1 or max(reach) < LONGEST) and has_channels_last(x) and has_channels_last(result)


def has_channels_last(value: Tensor) -> bool:
    """Return whether a tensor has channels last, and no other layout, as images of one pixel or none have."""
    return value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def have_kernel(values: Sequence[Tensor], groups: object, dilation: Sequence[Any]) -> bool:
    """Return whether a convolution in dynamo's graph, given input, weight and result, is left to a kernel.

    To one here: a rewrite of that graph comes first, and `auto` may choose both. Or to cuDNN's, of images by channel
    without gaps: in whole graphs Inductor gives it channels last, and FocalNet's 5x5 took half of the sum's time.
    """
    x, w, result = values
    infers = result.is_cuda and not result.requires_grad and result.dtype in HALF
    return infers and ((w.shape[1] == 1 and dilation == [1, 1]) or _fit(x, w, result, groups, dilation))
