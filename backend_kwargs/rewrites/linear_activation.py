"""Linear with bias and ReLU or tanh-GELU as one call: cuBLASLt and oneDNN apply both before they write the product."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import (
    DTYPES,
    aten,
    calls,
    define,
    dense,
    have_one_dtype,
    input_of,
    insert,
    known_true,
    patterns_of,
    read,
    register,
    require,
    same_sizes,
    values_of,
)
from backend_kwargs.rewrites.table import NAN, Rewrite, ran
from backend_kwargs.torch_internals.pattern_matcher import Match, PatternMatcherPass
from backend_kwargs.torch_internals.tensors import OpOverload

REWRITE = Rewrite(
    "Linear with bias and ReLU or tanh-GELU, also one that is written out, as one library call",
    patterns=f"{__name__}:add_patterns",
    operators=("backend_kwargs::linear_relu", "backend_kwargs::linear_gelu"),
    applies="float32 or half precision (on a CPU not float16)",
    costs=NAN,
    fitting=lambda stats: stats.gemms > 0 and not stats.training and ran(stats, "relu", "gelu of tanh", "tanh"),
    order=40,
)

# ---- the operators


def tanh_gelu(x: Tensor) -> Tensor:
    """Return GELU by its approximation with tanh."""
    return F.gelu(x, approximate="tanh")


def define_linear(
    name: str, activation: Callable[[Tensor], Tensor], by_onednn: tuple[str, str]
) -> "OpOverload[..., Any]":
    """Define an operator of x [rows, in], w [out, in] and bias [out]; `by_onednn`: the activation and its algorithm."""
    kind, algorithm = by_onednn
    return define(
        f"{name}(Tensor x, Tensor w, Tensor bias) -> Tensor",
        lambda x, w, bias: activation(torch.addmm(bias, x, w.t())),
        cpu=lambda x, w, bias: torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), kind, [], algorithm),
        cuda=lambda x, w, bias: aten._addmm_activation(bias, x, w.t(), use_gelu=kind == "gelu"),
    )


linear_relu = define_linear("linear_relu", F.relu, ("relu", ""))
linear_gelu = define_linear("linear_gelu", tanh_gelu, ("gelu", "tanh"))


# ---- patterns


def _gelu_by_power(x: Tensor) -> Tensor:  # as in transformers' GPT-2
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_by_products(x: Tensor) -> Tensor:  # as in GPT-J and others
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns that end in ReLU or tanh-GELU, as one call of torch or written out."""
    add_linear(passes, F.relu, linear_relu)
    for spelling in (tanh_gelu, _gelu_by_power, _gelu_by_products):
        add_linear(passes, spelling, linear_gelu)


def add_linear(
    passes: PatternMatcherPass, activation: Callable[[Tensor], Tensor], operator: Callable[..., Any]
) -> None:
    """Register patterns of linear with bias and `activation`, which `operator` replaces."""
    for pattern in patterns_of(activation, DTYPES):  # in half precision the decomposed activation contains conversions
        register(passes, pattern, partial(product_of, bias=True), partial(insert_product, operator))


def product_of(match: Match, *, bias: bool) -> tuple[Node, Node]:
    """Return what the matched activation is of, and the product of which that is a view.

    The product has a bias per column; where `bias` is False, it may have none.
    """
    product = x = match.kwargs["x"]
    activation = match.output_node()
    wanted, _ = ends = values_of(activation, x)
    require(have_one_dtype(ends) and not (wanted.device.type == "cpu" and wanted.dtype == torch.float16))
    while calls(product, aten.reshape.default, aten.view.default):
        product = input_of(product)
    # The decomposed activation uses the product, or a view of it, several times; nothing else may.
    require(calls(product, aten.addmm.default, *([] if bias else [aten.mm.default])))
    require(used_by_one_pattern(product, activation))
    require(all(read(product).get(factor, 1) == 1 for factor in ("alpha", "beta")))
    added, *factors = _operands(product)
    whole, _, columns, *shift = values = values_of(product, *factors, *([] if added is None else [added]))
    require(all(each.dtype == wanted.dtype for each in values[1:]))
    require(not shift or same_sizes(shift[0].shape, whole.shape[1:]))
    require(known_true(columns.shape[0] > 0))  # cuBLASLt is wrong for a sum of nothing
    return x, product


def insert_product(
    operator: Callable[..., Any], activation: Node, parts: tuple[Node, Node], more: tuple[Argument, ...] = ()
) -> Node:
    """Insert `operator` of rows, weight, bias and `more` arguments, for the product and its activation."""
    (x, product), graph = parts, activation.graph
    bias, rows, columns = _operands(product)
    transposed = calls(columns, aten.permute.default) and [dim % 2 for dim in read(columns)["dims"]] == [1, 0]
    weight = input_of(columns) if transposed else insert(graph, aten.permute.default, columns, [1, 0])
    new = insert(graph, operator, rows, weight, bias, *more)
    if x is product:
        return new
    _, sizes = read(x).values()  # the graph's own arguments, which may be nodes of symbols
    return insert(graph, aten.reshape.default, new, sizes)


def _operands(product: Node) -> tuple[Node | None, Node, Node]:
    """Return the bias, if there is one, the rows and the columns of a product."""
    args = read(product)
    return (args["input"], args["mat1"], args["mat2"]) if "mat1" in args else (None, args["input"], args["mat2"])


def used_by_one_pattern(node: Node, activation: Node) -> bool:
    """Return whether every path from `node` ends in `activation`."""
    waiting, seen = [*node.users], set()
    while waiting:
        user = waiting.pop()
        if user is activation or user in seen:
            continue
        seen.add(user)
        if user.op == "output" or user > activation:
            return False
        waiting.extend(user.users)
    return True
