"""Linear layers and convolutions with any activation that oneDNN has, as one call of its, on a CPU.

Inductor makes such calls only of frozen weights. ReLU and tanh-GELU are left to `linear_activation` and `convolution`,
which have calls of other libraries too.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node

from backend_kwargs.rewrites.convolution import (
    Affine,
    affine_convolution,
    by_onednn,
    convolution,
    folded,
    operands,
    require_fusible,
)
from backend_kwargs.rewrites.linear_activation import insert_product, product_of, used_by_one_pattern
from backend_kwargs.rewrites.matching import define, dense, insert, patterns_of, register, require, values_of
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import Match, PatternMatcherPass

REWRITE = Rewrite(
    "Linear or convolution and another activation (GELU, SiLU, ...) as one call of oneDNN, on a CPU",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::linear_onednn", "backend_kwargs::conv_onednn"),
    applies="a CPU, float32 or bfloat16",
    costs="a norm is folded into weights at each call, rounded to their dtype; nan may be lost",
    fitting=lambda stats: (
        not stats.gpu
        and not stats.training
        and stats.gemms + stats.convolutions > 0
        and ran(stats, "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh")
    ),
    order=50,
)

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


linear_onednn = define(
    "linear_onednn(Tensor x, Tensor w, Tensor? bias, str name) -> Tensor",
    lambda x, w, bias, name: ACTIVATIONS[name][0](F.linear(x, w, bias)),
    cpu=lambda x, w, bias, name: torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), name, *ACTIVATIONS[name][1:]),
)
conv_onednn = define(
    "conv_onednn(Tensor x, Tensor w, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups,"
    " str name) -> Tensor",
    lambda *args: ACTIVATIONS[args[-1]][0](convolution(*args[:-1])),
    cpu=lambda x, w, *rest: by_onednn("default", (x, w), rest[:-1], rest[-1], *ACTIVATIONS[rest[-1]][1:]),
)


# ---- patterns


def add_patterns(passes: PatternMatcherPass) -> None:
    """Add what ends in one of the activations."""
    for name, (activation, *_) in ACTIVATIONS.items():
        for pattern in patterns_of(activation, DTYPES):
            register(passes, pattern, _linear_before, partial(insert_product, linear_onednn, more=(name,)))
            register(passes, pattern, _convolution_before, partial(_fuse_convolution, name))


def _require_on_cpu(activation: Node) -> None:
    (value,) = values_of(activation)
    require(value.device.type == "cpu" and value.dtype in DTYPES)


def _linear_before(match: Match) -> tuple[Node, Node]:
    _require_on_cpu(match.output_node())
    return product_of(match, bias=False)


def _convolution_before(match: Match) -> Affine:
    """Return the convolution, with what is folded into it, that the activation follows."""
    activation, x = match.output_node(), match.kwargs["x"]
    _require_on_cpu(activation)
    require(used_by_one_pattern(x, activation))
    affine = affine_convolution(x, shared=True)
    require_fusible(affine, activation)
    return affine


def _fuse_convolution(name: str, activation: Node, affine: Affine) -> Node:
    weight, bias = folded(activation.graph, affine)
    image, _, _, *geometry = operands(affine.convolution)
    return insert(activation.graph, conv_onednn, image, weight, bias, *geometry, name)
