"""Products and convolutions of single pixels of a tensor that is scaled for each sample, by scaled weights.

So a global response norm, or squeeze and excitation, writes no scaled copy of its input. The weights of a sample, of
which there are fewer, are multiplied in float32 and rounded once; what is added becomes part of the bias.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph, Node

from backend_kwargs.rewrites.interpolation import is_of_pixels
from backend_kwargs.rewrites.matching import (
    ADD,
    MUL,
    Arguments,
    known,
    known_true,
    read,
    require,
    same_sizes,
    used_once,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing

REWRITE = Rewrite(
    "Linear layers and 1x1 convolutions of an input scaled for each sample, with the scale in the weights",
    traced=f"{__name__}:scale_weights",
    needs=("gpu",),
    applies="bfloat16; linear layers, 1x1 convolutions in channels last; two positions for each result channel",
    fitting=lambda stats: stats.gpu and stats.gemms + stats.convolutions > 0,
    order=34,
)

FEW = 2  # positions for each output channel: with fewer, scaling the weights costs as much as scaling the input
FUNCTIONS: dict[object, Callable[..., Any]] = {
    **dict.fromkeys(ADD, operator.add),
    **dict.fromkeys((operator.sub, torch.sub, "sub"), operator.sub),
    **dict.fromkeys(MUL, operator.mul),
    **dict.fromkeys((operator.truediv, torch.div, "div"), operator.truediv),
}
ADDCMUL = (torch.addcmul, "addcmul")
Expression: TypeAlias = "float | Node | tuple[Callable[..., Any], Expression, Expression]"


@dataclass(frozen=True, slots=True)
class _Affine:
    """`large * scale + shift`, of which only `large` varies over the positions of a sample; None if nothing does."""

    large: Node | None
    scale: Expression
    shift: Expression


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads `inner` calls that compute a tensor with channels in the dimension `channel`, and notes what is `small`.

    Unless `in_no_grad`, as the result is computed, each call must be recorded for gradients.
    """

    whole: Tensor
    channel: int
    in_no_grad: bool
    inner: list[Node] = field(default_factory=list)
    small: dict[Node, int] = field(default_factory=dict)

    def affine(self, value: Any) -> _Affine:
        """Return a value as an affine function of one large tensor; raise if it is not known to be one."""
        if isinstance(value, int | float):
            return _Affine(None, 0.0, float(value))
        (tensor,) = values_of(value)
        require(tensor.is_floating_point() and tensor.device == self.whole.device)  # not a number in the host's memory
        sizes = (*[1] * (self.whole.dim() - tensor.dim()), *tensor.shape)
        if all(known_true(size == 1) for at, size in enumerate(sizes) if at not in (0, self.channel)):
            self.small[value] = sizes[self.channel]
            return _Affine(None, 0.0, value)
        require(same_sizes(sizes, self.whole.shape))
        return self._computed(value, tensor) if used_once(value) else _Affine(value, 1.0, 0.0)

    def _computed(self, node: Node, tensor: Tensor) -> _Affine:
        """Return what a sum, a difference, a product or a quotient is by what its operands are."""
        args = read(node)
        require(args.pop("alpha", 1) == 1 and args.pop("value", 1) == 1 and not args.pop("rounding_mode", None))
        self.inner.append(node)
        operands = [self.affine(value) for value in args.values()]
        require(self.in_no_grad or tensor.requires_grad == _require_grad(args))
        if node.target in ADDCMUL:
            return _applied(operator.add, operands[0], _applied(operator.mul, *operands[1:]))
        require(node.target in FUNCTIONS)
        return _applied(FUNCTIONS[node.target], *operands)


def _require_grad(args: Arguments) -> bool:
    return any(each.requires_grad for value in args.values() if (each := value_of(value)) is not None)


def _applied(function: Callable[..., Any], one: _Affine, other: _Affine) -> _Affine:
    """Return a function of two affine functions; raise if that is not affine."""
    if function in (operator.add, operator.sub):
        require(not (one.large and other.large) or one.large is other.large)
        scale = _folded(function, one.scale, other.scale)
        return _Affine(one.large or other.large, scale, _folded(function, one.shift, other.shift))
    if function is operator.mul and other.large:
        one, other = other, one
    # What is shifted before it is scaled may cancel, as a mean that is subtracted: after a product it would be rounded.
    require(not other.large and other.shift != 0.0 and (not one.large or one.shift == 0.0))
    return _Affine(one.large, *(_folded(function, each, other.shift) for each in (one.scale, one.shift)))


def _folded(function: Callable[..., Any], one: Expression, other: Expression) -> Expression:
    """Return an expression without the numbers that change nothing: 0 times an infinity, say, would."""
    if function in (operator.add, operator.sub):
        return one if other == 0.0 else other if one == 0.0 and function is operator.add else (function, one, other)
    if one == 0.0 or other == 1.0:
        return one
    return other if one == 1.0 and function is operator.mul else (function, one, other)


def _product(node: Node, args: Arguments) -> Node:
    """Insert the batched product by a sample's weights for a product of a tensor that is scaled for each sample."""
    whole, weight, result = values = values_of(args["input"], args["weight"], node)
    require(all(isinstance(size, int) for value in values for size in value.shape))
    is_linear = node.target is F.linear
    require(weight.dim() >= 2 and (is_linear or is_of_pixels(args, *values)))
    reader = _Reader(whole, whole.dim() - 1 if is_linear else 1, _require_grad(args) and not result.requires_grad)
    found = reader.affine(args["input"])
    source = known(found.large)
    (large,) = values_of(source)
    require(_varies(found.scale) and {large.dtype, result.dtype} == {torch.bfloat16})
    require(any(user not in (node, *reader.inner) for user in source.users))  # so it is written anyway
    require(0 < FEW * weight.shape[0] * whole.shape[0] * weight.shape[1] <= whole.numel())
    require(all(each.movedim(reader.channel, -1).is_contiguous() for each in (large, result)))
    require(not changes_meanwhile(node, [source, *reader.small, args["weight"], args["bias"]]))
    return _scaled(node, args, found, reader)


def _scaled(node: Node, args: Arguments, found: _Affine, reader: _Reader) -> Node:
    """Insert the product of what is not scaled by the weights of each sample, [samples, columns, channels]."""
    graph, result = node.graph, node.meta["example_value"]
    batch, channels = reader.whole.shape[0], reader.whole.shape[reader.channel]
    rows = method(method(known(found.large), "movedim", reader.channel, -1), "reshape", (batch, -1, channels))
    weight = method(method(args["weight"], "flatten", 1), "float")
    scaled = graph.call_function(torch.mul, (weight, _inserted(graph, found.scale, reader.small)))
    scaled = method(method(scaled, "to", result.dtype), "expand", batch, -1, -1)
    made = graph.call_function(torch.bmm, (rows, method(scaled, "transpose", 1, 2)))
    if found.shift != 0.0:
        shifted = graph.call_function(torch.mul, (weight, _inserted(graph, found.shift, reader.small)))
        shift = method(graph.call_function(torch.sum, (shifted, -1, True)), "transpose", -1, -2)
        made = graph.call_function(torch.add, (made, shift))
    if args["bias"] is not None:
        made = graph.call_function(torch.add, (made, args["bias"]))
    made = method(made, "reshape", tuple(result.movedim(reader.channel, -1).shape))
    return method(method(made, "movedim", -1, reader.channel), "to", result.dtype)


def _varies(scale: Expression) -> bool:
    """Return whether a tensor is in an expression."""
    return isinstance(scale, Node) or (isinstance(scale, tuple) and any(map(_varies, scale[1:])))


def _inserted(graph: Graph, expression: Expression, small: dict[Node, int]) -> Node | float:
    """Insert an expression, of shape [samples or 1, 1, channels or 1], in float32."""
    if isinstance(expression, tuple):
        function, *operands = expression
        return graph.call_function(function, tuple(_inserted(graph, each, small) for each in operands))
    if isinstance(expression, Node):
        return method(method(expression, "reshape", (-1, 1, small[expression])), "float")
    return expression


scale_weights = replacing((F.linear, torch.conv2d), _product)
