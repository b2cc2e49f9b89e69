"""Linear layers and convolutions with any activation that oneDNN has, as one call of its, on a CPU.

Inductor makes such calls only of frozen weights. ReLU and tanh-GELU are left to `linear_activation` and `convolution`,
which have calls of other libraries too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from backend_kwargs.rewrites.convolution import affine_convolution, folded, may_fuse, operands
from backend_kwargs.rewrites.linear import insert_product, product_before, used_by_one_pattern
from backend_kwargs.rewrites.matching import AnyNode, insert, pattern_of, replace
from backend_kwargs.rewrites.operators import define, dense
from backend_kwargs.torch_internals.pattern_matcher import Match, PatternMatcherPass, register_graph_pattern

DTYPES = (torch.float32, torch.bfloat16)
# By oneDNN's names: the activation, its numbers and its algorithm.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], str]] = {
    "gelu": (F.gelu, [], "none"),
    "swish": (F.silu, [], ""),
    "sigmoid": (torch.sigmoid, [], ""),
    "tanh": (torch.tanh, [], ""),
    "hardswish": (F.hardswish, [], ""),
    "hardsigmoid": (F.hardsigmoid, [], ""),
    "hardtanh": (F.relu6, [0.0, 6.0], ""),
}

# ---- operators


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return ACTIVATIONS[name][0](F.linear(x, w, bias))


def _linear_cpu(x: Tensor, w: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), name, *ACTIVATIONS[name][1:])  # type: ignore[no-any-return]


def _conv(x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, name: str) -> Tensor:
    made = torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return ACTIVATIONS[name][0](made)


def _conv_cpu(
    x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, name: str
) -> Tensor:
    pointwise = torch.ops.mkldnn._convolution_pointwise
    _, numbers, algorithm = ACTIVATIONS[name]
    return pointwise(x, w, dense(bias), padding, stride, dilation, groups, name, numbers, algorithm)  # type: ignore[no-any-return]


linear_onednn = define("linear_onednn(Tensor x, Tensor w, Tensor? bias, str name) -> Tensor", _linear, cpu=_linear_cpu)
conv_onednn = define(
    "conv_onednn(Tensor x, Tensor w, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups,"
    " str name) -> Tensor",
    _conv,
    cpu=_conv_cpu,
)


# ---- patterns


def add_patterns(passes: PatternMatcherPass) -> None:
    """Add what ends in one of the activations."""
    seen = set()
    for name, (activation, *_) in ACTIVATIONS.items():
        for dtype in DTYPES:
            pattern = pattern_of(partial(_call, activation), torch.empty(4, 4, dtype=dtype))
            if repr(pattern) in seen:
                continue
            seen.add(repr(pattern))
            for may, fuse in ((_may_be_linear, _fuse_linear), (_may_be_convolution, _fuse_convolution)):
                register_graph_pattern(pattern, extra_check=may, pass_dict=passes)(partial(fuse, name))


def _call(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return activation(x)


def _on_cpu(node: AnyNode) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.dtype in DTYPES


def _may_be_linear(match: Match) -> bool:
    activation = match.output_node()
    return _on_cpu(activation) and product_before(activation, match.kwargs["x"], bias=False) is not None


def _fuse_linear(name: str, match: Match, x: AnyNode) -> None:
    insert_product(linear_onednn, (name,), match, x)


def _may_be_convolution(match: Match) -> bool:
    activation, x = match.output_node(), match.kwargs["x"]
    found = affine_convolution(x, shared=True) if used_by_one_pattern(x, activation) else None
    return _on_cpu(activation) and found is not None and may_fuse(found, activation)


def _fuse_convolution(name: str, match: Match, x: AnyNode) -> None:
    activation = match.output_node()
    found = affine_convolution(x, shared=True)
    assert found is not None
    with activation.graph.inserting_before(activation):
        weight, bias = folded(activation.graph, found)
        image, _, _, *geometry = operands(found.convolution)
        new = insert(activation.graph, conv_onednn, image, weight, bias, *geometry, name)
    replace(activation, new)
