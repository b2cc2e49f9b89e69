"""Linear with bias and ReLU or tanh-GELU as one call: cuBLASLt and oneDNN apply both before they write the product."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from backend_kwargs.rewrites.matching import (
    DTYPES,
    AnyNode,
    arguments_of,
    aten,
    calls,
    insert,
    known_true,
    pattern_of,
    replace,
    same_sizes,
    used_once,
    value_of,
)
from backend_kwargs.rewrites.operators import define, dense
from backend_kwargs.torch_internals.pattern_matcher import Match, PatternMatcherPass, register_graph_pattern

# ---- the operators


def _linear_relu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, w.t()).relu()


def _linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.addmm(bias, x, w.t()), approximate="tanh")


def _linear_relu_cpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), "relu", [], "")  # type: ignore[no-any-return]


def _linear_gelu_cpu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, dense(bias), "gelu", [], "tanh")  # type: ignore[no-any-return]


def _linear_relu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=False)  # type: ignore[no-any-return]


def _linear_gelu_cuda(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return torch.ops.aten._addmm_activation(bias, x, w.t(), use_gelu=True)  # type: ignore[no-any-return]


linear_relu = define(
    "linear_relu(Tensor x, Tensor w, Tensor bias) -> Tensor", _linear_relu, cpu=_linear_relu_cpu, cuda=_linear_relu_cuda
)
# The same kernels under another name, so that generated code shows which rewrite inserted the call.
linear_approximated_gelu = define(
    "linear_approximated_gelu(Tensor x, Tensor w, Tensor bias) -> Tensor",
    _linear_gelu,
    cpu=_linear_gelu_cpu,
    cuda=_linear_gelu_cuda,
)
linear_gelu = define(
    "linear_gelu(Tensor x, Tensor w, Tensor bias) -> Tensor", _linear_gelu, cpu=_linear_gelu_cpu, cuda=_linear_gelu_cuda
)


# ---- patterns


def _relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_by_power(x: torch.Tensor) -> torch.Tensor:  # as in transformers' GPT-2
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_by_products(x: torch.Tensor) -> torch.Tensor:  # as in GPT-J and others
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def add_patterns(passes: PatternMatcherPass) -> None:
    """Register the patterns that end in ReLU or tanh-GELU, as one call of torch or written out."""
    _add(passes, _relu, linear_relu)
    for spelling in (_tanh_gelu, _gelu_by_power, _gelu_by_products):
        _add(passes, spelling, linear_gelu)


def add_approximate_patterns(passes: PatternMatcherPass) -> None:
    """Register the pattern that ends in exact GELU, which tanh-GELU replaces."""
    _add(passes, _gelu, linear_approximated_gelu)


def _add(passes: PatternMatcherPass, activation: Callable[..., Any], operator: Any) -> None:
    seen = set()
    for dtype in DTYPES:  # in half precision the decomposed activation contains conversions
        pattern = pattern_of(activation, torch.empty(4, 4, dtype=dtype))
        if repr(pattern) in seen:
            continue
        seen.add(repr(pattern))
        register_graph_pattern(
            pattern,
            extra_check=lambda match: product_before(match.output_node(), match.kwargs["x"]) is not None,
            pass_dict=passes,
        )(partial(insert_product, operator, ()))


def insert_product(operator: Any, more: tuple[Any, ...], match: Match, x: AnyNode) -> None:
    """Put `operator`, with `more` arguments after rows, weight and bias, in place of product and activation."""
    activation = match.output_node()
    product = product_before(activation, x, bias=False)
    assert product is not None
    bias, rows, columns = operands(product)
    graph = activation.graph
    with graph.inserting_before(activation):
        weight = insert(graph, aten.permute.default, columns, [1, 0])
        if calls(columns, aten.permute.default) and [dim % 2 for dim in columns.args[1]] == [1, 0]:
            weight = columns.args[0]
        new = insert(graph, operator, rows, weight, bias, *more)
        if x is not product:  # its sizes are the graph's own arguments, which may be nodes of symbols
            new = insert(graph, aten.reshape.default, new, x.args[1])
    replace(activation, new)


def operands(product: AnyNode) -> tuple[AnyNode | None, AnyNode, AnyNode]:
    """Return the bias, if there is one, the rows and the columns of a product."""
    given = arguments_of(product)
    assert given is not None
    if calls(product, aten.mm.default):
        return None, given["input"], given["mat2"]
    return given["input"], given["mat1"], given["mat2"]


def product_before(activation: AnyNode, x: Any, *, bias: bool = True) -> AnyNode | None:
    """Return the product of which `x` is the result, possibly reshaped, or None.

    It has a bias per column; where `bias` is False, it may have none.
    """
    wanted, given = value_of(activation), value_of(x)
    if wanted is None or given is None or wanted.dtype != given.dtype:
        return None
    while calls(x, aten.reshape.default, aten.view.default):
        # The decomposed activation uses it several times; nothing else may.
        if not used_by_one_pattern(x, activation):
            return None
        x = x.args[0]
        if not used_once(x):
            return None
    targets = (aten.addmm.default,) if bias else (aten.addmm.default, aten.mm.default)
    if not calls(x, *targets) or x.kwargs or not used_by_one_pattern(x, activation):
        return None
    made, (added, *factors) = value_of(x), operands(x)
    shift = value_of(added)
    if made is None or wanted.dtype not in DTYPES:
        return None
    if any(value is None or value.dtype != wanted.dtype for value in map(value_of, factors)):
        return None
    if added is not None and (
        shift is None or shift.dtype != wanted.dtype or not same_sizes(shift.shape, made.shape[1:])
    ):
        return None
    if wanted.device.type == "cpu" and wanted.dtype == torch.float16:
        return None
    return x if known_true(factors[-1].meta["val"].shape[0] > 0) else None  # cuBLASLt is wrong for a sum of nothing


def used_by_one_pattern(node: AnyNode, activation: AnyNode) -> bool:
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
