"""Convolution, an affine function of each channel (bias, norm in eval mode), a residual and ReLU as one call.

cuDNN and oneDNN have one kernel for it. The graph folds a norm into weights and bias at each call, in float32, so that
updates of the weights take effect.

Not by Inductor's `efficient_conv_bn_eval_fx_passes`, which computes in the weights' dtype, and mixes dtypes if a norm
is in float32.
"""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Graph, Node

from backend_kwargs.rewrites.folding import mark_folded
from backend_kwargs.rewrites.matching import (
    NoMatchError,
    aten,
    calls,
    converts_floats,
    define,
    dense,
    have_one_dtype,
    input_of,
    insert,
    known,
    known_true,
    matched,
    of_each,
    orders_of_terms,
    prims,
    read,
    register,
    require,
    same_sizes,
    used_once,
    value_of,
    values_of,
)
from backend_kwargs.rewrites.table import NAN, Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass

REWRITE = Rewrite(
    "Convolution, bias or a norm in eval mode (or any scale and shift of channels), a residual and ReLU as one "
    "library call",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::conv_relu", "backend_kwargs::conv_add_relu"),
    applies="float32 or half precision (on a CPU not float16); on a GPU channels last, without groups",
    costs=f"a norm is folded into weights at each call, rounded to their dtype; {NAN}",
    fitting=lambda stats: stats.convolutions > 0 and not stats.training and ran(stats, "relu"),
    order=10,
)

# ---- the operators

Ints: TypeAlias = list[int]

GEOMETRY = "Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Tensor:
    """Return a convolution by ATen."""
    result: Tensor = aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return result


def by_onednn(overload: str, tensors: tuple[Tensor, ...], geometry: tuple[Any, ...], *attributes: object) -> Any:
    """Return a convolution of `tensors`, and what the attributes name, as one call of oneDNN."""
    bias, stride, padding, dilation, groups = geometry
    pointwise = getattr(torch.ops.mkldnn._convolution_pointwise, overload)
    return pointwise(*tensors, dense(bias), padding, stride, dilation, groups, *attributes)


def in_channels_last(x: Tensor) -> Tensor:
    """Return images in the layout that the graph says: Inductor may hand others to operators that a pattern inserts."""
    return x.contiguous(memory_format=torch.channels_last)


conv_relu = define(
    f"conv_relu(Tensor x, Tensor w, {GEOMETRY}",
    lambda x, w, *geometry: convolution(x, w, *geometry).relu(),
    cpu=lambda x, w, *geometry: by_onednn("default", (x, w), geometry, "relu", [], ""),
    cuda=lambda x, w, bias, *geometry: aten.cudnn_convolution_relu(in_channels_last(x), w, dense(bias), *geometry),
)
conv_add_relu = define(
    f"conv_add_relu(Tensor x, Tensor w, Tensor z, {GEOMETRY}",
    lambda x, w, z, *geometry: (convolution(x, w, *geometry) + z).relu(),
    cpu=lambda x, w, z, *geometry: by_onednn("binary", (x, z, w), geometry, "add", 1.0, "relu", [], ""),
    cuda=lambda x, w, z, bias, *geometry: aten.cudnn_convolution_add_relu(
        in_channels_last(x), w, in_channels_last(z), 1.0, dense(bias), *geometry
    ),
)


# ---- patterns


Step: TypeAlias = tuple[Any, Node | float]  # an operator and its operand


@dataclass(frozen=True, slots=True)
class Affine:
    """A convolution and the (operator, operand) steps applied to each channel of its result, in order."""

    convolution: Node
    steps: list[Step] = field(default_factory=list)


def operands(node: Node) -> tuple[Any, ...]:
    """Return input, weight, bias, stride, padding, dilation and groups of a convolution."""
    args = read(node)
    size = args["weight"].meta["val"].shape[2:]
    geometry = ([*of_each(args[name], size)] for name in ("stride", "padding", "dilation"))
    return (args["input"], args["weight"], args["bias"], *geometry, args["groups"])


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern that ends in a ReLU."""
    register(passes, CallFunction(aten.relu.default, KeywordArg("x")), lambda match: _pays(match.output_node()), _fuse)


def _fuse(relu: Node, parts: tuple[Affine, Node | None]) -> Node:
    """Insert the library's call, and the convolution of a residual that is one."""
    (affine, residual), graph = parts, relu.graph
    weight, bias = folded(graph, affine)
    if residual is not None and (other := matched(_fusible, residual, relu)) is not None:
        other_weight, other_bias = folded(graph, other)  # its bias joins that of the fused call
        biases = [each for each in (bias, other_bias) if each is not None]
        bias = mark_folded(insert(graph, aten.add.Tensor, *biases) if len(biases) > 1 else next(iter(biases), None))
        args = {**read(other.convolution), "weight": other_weight, "bias": None}
        residual = insert(graph, aten.convolution.default, *args.values())
    image, _, _, *geometry = operands(affine.convolution)
    operator, added = (conv_relu, []) if residual is None else (conv_add_relu, [residual])
    return insert(graph, operator, image, weight, *added, bias, *geometry)


def _pays(relu: Node) -> tuple[Affine, Node | None]:
    """Return the parts of what ends in `relu`; raise if folding weights takes more traffic than its call saves."""
    affine, residual = _parts(relu)
    folds = any(operator is aten.mul.Tensor for operator, _ in affine.steps)
    weight, result = values_of(operands(affine.convolution)[1], relu)
    require(not (folds and known_true(weight.numel() >= result.numel())))
    return affine, residual


def _parts(relu: Node) -> tuple[Affine, Node | None]:
    """Return the convolution that ends in `relu`, with its residual if it has one."""
    inner = _unconverted(input_of(relu))
    if (affine := matched(_fusible, inner, relu)) is not None:
        return affine, None
    require(used_once(inner))
    for left, right in orders_of_terms(inner):
        # A convolution that is its own residual would be computed twice.
        if left is not right and (affine := matched(_fusible, left, relu)) and _is_residual(right, relu):
            return affine, right
    raise NoMatchError


def _fusible(node: Node, relu: Node) -> Affine:
    """Return the convolution with which the library's call can compute `relu`, or a residual of it."""
    affine = affine_convolution(node)
    require_fusible(affine, relu)
    return affine


def require_fusible(affine: Affine, activation: Node) -> None:
    """Raise unless the library's fused call gives the size, dtype and layout of `activation`."""
    image, kernel, *_, groups = operands(affine.convolution)
    x, _, result, wanted = values = values_of(image, kernel, affine.convolution, activation)
    require(have_one_dtype(values) and result.dim() == 4 and same_sizes(result.shape, wanted.shape))
    if result.device.type == "cpu":
        require(result.dtype != torch.float16)
        return
    # With groups cuDNN's fused kernels are slower than its others: 1.2 to 3 times in RegNetY, on an H200.
    require(result.device.type == "cuda" and groups == 1)
    require(all(each.is_contiguous(memory_format=torch.channels_last) for each in (x, result, wanted)))


def _is_residual(node: Node, relu: Node) -> bool:
    """Return whether the library can add `node`: it must have the result's size, dtype and layout."""
    value, wanted = values_of(node, relu)
    same = same_sizes((*value.shape, *value.stride()), (*wanted.shape, *wanted.stride()))
    return same and value.dtype == wanted.dtype


def _unconverted(node: Any) -> Node:
    """Return the node before conversions of dtype that have no other user; raise if one is more than a rounding."""
    while calls(node, prims.convert_element_type.default) and used_once(node):
        require(converts_floats(node))
        node = input_of(node)
    return known(node if isinstance(node, Node) else None)


def affine_convolution(node: object, *, shared: bool = False) -> Affine:
    """Return `node` as a convolution followed by an affine function of each channel.

    Each step must have one user; only `node` itself may be `shared`.
    """
    last = node
    steps: list[Step] = []
    while True:
        node = _unconverted(node)
        require(used_once(node) or (shared and node is last))
        if calls(node, aten.convolution.default):
            require(not read(node)["transposed"])
            return Affine(node, steps[::-1])
        require(calls(node, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor))
        left, right, *alpha = read(node).values()
        require(alpha in ([], [1]))
        if not _is_per_channel(right, node):
            require(node.target is not aten.sub.Tensor and _is_per_channel(left, node))
            left, right = right, left
        steps.append((node.target, right))
        node = left


def _is_per_channel(operand: object, node: Node) -> bool:
    """Return whether `operand` is a number, or has one value for each channel of `node`."""
    if isinstance(operand, int | float):
        return True
    value, whole = value_of(operand), value_of(node)
    if value is None or whole is None or whole.dim() != 4 or not value.is_floating_point():
        return False
    return value.dim() >= 3 and same_sizes((1,) * (4 - value.dim()) + (*value.shape,), (1, whole.shape[1], 1, 1))


def folded(graph: Graph, affine: Affine) -> tuple[Node, Node | None]:
    """Return weights and bias with the affine function folded in, computed in float32."""
    _, weight, bias, *_ = operands(affine.convolution)
    if not affine.steps:
        return weight, bias
    value = weight.meta["val"]
    scale, shift = scale_and_shift(graph, affine)
    if scale is not None:
        if isinstance(scale, Node):
            scale = insert(graph, aten.reshape.default, scale, [value.shape[0], 1, 1, 1])
        wide = insert(graph, aten.mul.Tensor, _converted(graph, weight, torch.float32), scale)
        weight = mark_folded(_converted(graph, wide, value.dtype))
    return weight, None if shift is None else mark_folded(_converted(graph, shift, value.dtype))


def scale_and_shift(graph: Graph, affine: Affine) -> tuple[Node | float | None, Node | None]:
    """Return by what each channel is multiplied, and what is added to it then, the bias included, in float32."""
    _, weight, bias, *_ = operands(affine.convolution)
    channels = weight.meta["val"].shape[0]
    scale: Node | float | None = None
    shift = None if bias is None else _converted(graph, bias, torch.float32)
    for operator, operand in affine.steps:
        flat = operand
        if isinstance(operand, Node):
            flat = _converted(graph, insert(graph, aten.reshape.default, operand, [channels]), torch.float32)
        if operator is aten.mul.Tensor:
            scale = flat if scale is None else _product(graph, scale, flat)
            shift = None if shift is None else insert(graph, operator, shift, flat)
        elif shift is not None:
            shift = insert(graph, operator, shift, flat)
        else:
            flat = flat if isinstance(flat, Node) else filled(graph, weight, flat)
            shift = flat if operator is aten.add.Tensor else insert(graph, aten.neg.default, flat)
    return scale, shift


def filled(graph: Graph, weight: Node, number: float) -> Node:
    """Return a number for each channel of a result, in float32."""
    value = weight.meta["val"]
    return insert(graph, aten.full.default, [value.shape[0]], number, dtype=torch.float32, device=value.device)


def _product(graph: Graph, one: Node | float, other: Node | float) -> Node | float:
    """Return the product of two nodes or numbers, as a node unless both are numbers."""
    if isinstance(one, Node) or isinstance(other, Node):
        return insert(graph, aten.mul.Tensor, *((one, other) if isinstance(one, Node) else (other, one)))
    return one * other


def _converted(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    """Return `node` in `dtype`, inserting a conversion if it has another."""
    if node.meta["val"].dtype == dtype:
        return node
    return insert(graph, prims.convert_element_type.default, node, dtype)
