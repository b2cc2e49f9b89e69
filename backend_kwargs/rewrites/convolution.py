"""Convolution, an affine function of each channel (bias, norm in eval mode), a residual and ReLU as one call.

cuDNN and oneDNN have one kernel for it. The graph folds a norm into weights and bias at each call, in float32, so that
updates of the weights take effect.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from backend_kwargs.rewrites.folding import mark_folded
from backend_kwargs.rewrites.matching import (
    DTYPES,
    FLOATS,
    AnyNode,
    arguments_of,
    aten,
    calls,
    insert,
    known_true,
    prims,
    replace,
    same_sizes,
    used_once,
    value_of,
)
from backend_kwargs.rewrites.operators import define, dense
from backend_kwargs.torch_internals.pattern_matcher import (
    CallFunction,
    KeywordArg,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)

# ---- the operators


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Return a convolution by ATen."""
    made: Tensor = torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return made


def _conv_relu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return convolution(x, w, bias, stride, padding, dilation, groups).relu()


def _conv_relu_cpu(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise
    return pointwise(x, w, dense(bias), padding, stride, dilation, groups, "relu", [], "")  # type: ignore[no-any-return]


def _conv_relu_cuda(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Tensor:
    return torch.ops.aten.cudnn_convolution_relu(x, w, dense(bias), stride, padding, dilation, groups)  # type: ignore[no-any-return]


def _conv_add_relu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    return (convolution(x, w, bias, stride, padding, dilation, groups) + z).relu()


def _conv_add_relu_cpu(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise.binary
    return pointwise(x, z, w, dense(bias), padding, stride, dilation, groups, "add", 1.0, "relu", [], "")  # type: ignore[no-any-return]


def _conv_add_relu_cuda(
    x: Tensor, w: Tensor, z: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    fused = torch.ops.aten.cudnn_convolution_add_relu
    return fused(x, w, z, 1.0, dense(bias), stride, padding, dilation, groups)  # type: ignore[no-any-return]


GEOMETRY = "Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups) -> Tensor"

conv_relu = define(f"conv_relu(Tensor x, Tensor w, {GEOMETRY}", _conv_relu, cpu=_conv_relu_cpu, cuda=_conv_relu_cuda)
conv_add_relu = define(
    f"conv_add_relu(Tensor x, Tensor w, Tensor z, {GEOMETRY}",
    _conv_add_relu,
    cpu=_conv_add_relu_cpu,
    cuda=_conv_add_relu_cuda,
)


# ---- patterns


@dataclass(frozen=True, slots=True)
class Affine:
    """A convolution and the (operator, operand) steps applied to each channel of its result, in order."""

    convolution: AnyNode
    steps: list[tuple[Any, Any]] = field(default_factory=list)


def read(node: AnyNode) -> dict[str, Any]:
    """Return the arguments of a call of ATen's."""
    given = arguments_of(node)
    assert given is not None
    return given


def operands(node: AnyNode) -> tuple[Any, ...]:
    """Return input, weight, bias, stride, padding, dilation and groups of a convolution."""
    given = read(node)
    return tuple(given[name] for name in ("input", "weight", "bias", "stride", "padding", "dilation", "groups"))


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern that ends in a ReLU."""

    @register_graph_pattern(
        CallFunction(aten.relu.default, KeywordArg("x")),
        extra_check=lambda match: _pays(match.output_node()),
        pass_dict=passes,
    )
    def fuse(match: Match, x: AnyNode) -> None:
        relu = match.output_node()
        parsed = _parse(relu)
        assert parsed is not None
        affine, residual = parsed
        graph = relu.graph
        with graph.inserting_before(relu):
            weight, bias = folded(graph, affine)
            if residual is not None and (other := affine_convolution(residual)) is not None and may_fuse(other, relu):
                other_weight, other_bias = folded(graph, other)  # its bias joins that of the fused call
                bias = mark_folded(_sum(graph, bias, other_bias))
                given = {**read(other.convolution), "weight": other_weight, "bias": None}
                residual = insert(graph, aten.convolution.default, *given.values())
            x, _, _, *geometry = operands(affine.convolution)
            new = (
                insert(graph, conv_relu, x, weight, bias, *geometry)
                if residual is None
                else insert(graph, conv_add_relu, x, weight, residual, bias, *geometry)
            )
        replace(relu, new)


def _pays(relu: AnyNode) -> bool:
    """Return whether `relu` ends the pattern, and its call saves more traffic than folding weights takes."""
    if (parsed := _parse(relu)) is None:
        return False
    affine, _ = parsed
    folds = any(operator is aten.mul.Tensor for operator, _ in affine.steps)
    weight, made = map(value_of, (operands(affine.convolution)[1], relu))
    return not (folds and known_true(weight.numel() >= made.numel()))  # type: ignore[union-attr] # _parse saw both


def _parse(relu: AnyNode) -> tuple[Affine, AnyNode | None] | None:
    """Return the convolution that ends in `relu`, with its residual if it has one, or None."""
    inner = _unconverted(relu.args[0])
    if inner is None:
        return None
    found = affine_convolution(inner)
    if found is not None and may_fuse(found, relu):
        return found, None
    if not calls(inner, aten.add.Tensor) or not used_once(inner):
        return None
    one, other, alpha = read(inner).values()
    if alpha != 1:
        return None
    if one is other:  # a convolution that is its own residual would be computed twice
        return None
    for left, right in ((one, other), (other, one)):
        found = affine_convolution(_unconverted(left))
        if found is not None and may_fuse(found, relu) and _is_residual(right, relu):
            return found, right
    return None


def may_fuse(affine: Affine, relu: AnyNode) -> bool:
    """Return whether the library's fused call gives the size, dtype and layout of `relu`."""
    *given, groups = operands(affine.convolution)
    x, weight, made, wanted = map(value_of, (*given[:2], affine.convolution, relu))
    if x is None or weight is None or made is None or wanted is None:
        return False
    if made.dim() != 4 or not same_sizes(made.shape, wanted.shape):
        return False
    if not x.dtype == weight.dtype == made.dtype == wanted.dtype or made.dtype not in DTYPES:
        return False
    if made.device.type == "cpu":
        return made.dtype != torch.float16
    # With groups cuDNN's fused kernels are slower than its others: 1.2 to 3 times in RegNetY, on an H200.
    if made.device.type != "cuda" or groups != 1:
        return False
    last = torch.channels_last
    return all(t.is_contiguous(memory_format=last) for t in (x, made, wanted))


def _is_residual(node: Any, relu: AnyNode) -> bool:
    """Return whether the library can add `node`: it must have the result's size, dtype and layout."""
    value, wanted = value_of(node), value_of(relu)
    if value is None or wanted is None:
        return False
    return (
        value.dtype == wanted.dtype
        and same_sizes(value.shape, wanted.shape)
        and same_sizes(value.stride(), wanted.stride())
    )


def _unconverted(node: Any) -> Any:
    """Return the node before conversions of dtype that have no other user; None if one is more than a rounding."""
    while calls(node, prims.convert_element_type.default) and used_once(node):
        source, made = value_of(node.args[0]), value_of(node)
        if source is None or made is None or not {source.dtype, made.dtype}.issubset(FLOATS):
            return None
        node = node.args[0]
    return node


def affine_convolution(node: Any, *, shared: bool = False) -> Affine | None:
    """Return `node` as a convolution followed by an affine function of each channel, or None.

    Each step must have one user; only `node` itself may be `shared`.
    """
    last = node
    steps: list[tuple[Any, Any]] = []
    while True:
        node = _unconverted(node)
        if not isinstance(node, Node) or not (used_once(node) or (shared and node is last)):
            return None
        if calls(node, aten.convolution.default):
            return None if read(node)["transposed"] else Affine(node, steps[::-1])
        if not calls(node, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
            return None
        left, right, *alpha = read(node).values()
        if alpha not in ([], [1]):
            return None
        if _per_channel(right, node):
            steps.append((node.target, right))
            node = left
        elif node.target is not aten.sub.Tensor and _per_channel(left, node):
            steps.append((node.target, left))
            node = right
        else:
            return None


def _per_channel(operand: Any, node: AnyNode) -> bool:
    """Return whether `operand` is a number, or has one value for each channel of `node`."""
    if isinstance(operand, int | float):
        return True
    value, whole = value_of(operand), value_of(node)
    if value is None or whole is None or whole.dim() != 4 or not value.is_floating_point():
        return False
    sizes = (1,) * (4 - value.dim()) + tuple(value.shape)
    return value.dim() >= 3 and same_sizes(sizes, (1, whole.shape[1], 1, 1))


def folded(graph: Graph, affine: Affine) -> tuple[Any, Any]:
    """Return weights and bias with the affine function folded in, computed in float32."""
    _, weight, bias, *_ = operands(affine.convolution)
    if not affine.steps:
        return weight, bias
    dtype = weight.meta["val"].dtype
    channels = weight.meta["val"].shape[0]
    scale: Any = None
    shift = None if bias is None else _wide(graph, bias)
    for operator, operand in affine.steps:
        flat = operand if isinstance(operand, int | float) else _flat(graph, operand, channels)
        if operator is aten.mul.Tensor:
            scale = _product(graph, scale, flat)
            shift = None if shift is None else insert(graph, aten.mul.Tensor, shift, flat)
        elif shift is not None:
            shift = insert(graph, operator, shift, flat)
        else:
            shift = flat if operator is aten.add.Tensor else _negated(graph, flat)
            if not isinstance(shift, Node):
                like = {"dtype": torch.float32, "device": weight.meta["val"].device}
                shift = insert(graph, aten.full.default, [channels], shift, **like)
    if scale is not None:
        if isinstance(scale, Node):
            scale = insert(graph, aten.reshape.default, scale, [channels, 1, 1, 1])
        weight = mark_folded(_narrow(graph, insert(graph, aten.mul.Tensor, _wide(graph, weight), scale), dtype))
    return weight, None if shift is None else mark_folded(_narrow(graph, shift, dtype))


def _product(graph: Graph, one: Any, other: Any) -> Any:
    if one is None:
        return other
    if not isinstance(one, Node) and not isinstance(other, Node):
        return one * other
    return insert(graph, aten.mul.Tensor, *((one, other) if isinstance(one, Node) else (other, one)))


def _negated(graph: Graph, value: Any) -> Any:
    return insert(graph, aten.neg.default, value) if isinstance(value, Node) else -value


def _flat(graph: Graph, operand: AnyNode, channels: int) -> AnyNode:
    return _wide(graph, insert(graph, aten.reshape.default, operand, [channels]))


def _wide(graph: Graph, node: AnyNode) -> AnyNode:
    return _narrow(graph, node, torch.float32)


def _narrow(graph: Graph, node: AnyNode, dtype: torch.dtype) -> AnyNode:
    if node.meta["val"].dtype == dtype:
        return node
    return insert(graph, prims.convert_element_type.default, node, dtype)


def _sum(graph: Graph, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return insert(graph, aten.add.Tensor, one, other)
