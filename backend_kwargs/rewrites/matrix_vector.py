"""Batched products of a matrix and a vector as multiply and sum, which Inductor fuses with what is around them.

A library's kernel for such a product takes 2 µs or more, as in the scan of a state-space model, token by token.
Inductor itself does this only under `coordinate_descent_tuning`, and then tunes every kernel.
"""

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import Node

from backend_kwargs.rewrites.matching import HALF, Arguments, have_one_dtype, known_true, require, values_of
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import method, replacing

REWRITE = Rewrite(
    "Batched products of a matrix and a vector as multiply and sum, fused with what is around them",
    traced=f"{__name__}:multiply_and_sum",
    needs=("gpu",),
    applies="float32 or half precision, at most 256 summands",
    fitting=lambda stats: stats.gpu and stats.gemms > 0,
    order=150,
)

PRODUCTS = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__")
LARGEST_SUM = 256  # summands that one warp reads at once
FAR = 8  # calls between a product and a softmax, in attention that is spelt out


def _product(node: Node, args: Arguments) -> Node:
    """Insert the multiplication and the sum for a batched product of matrices and vectors."""
    a, b = args["input"], args["other"] if "other" in args else args["mat2"]
    left, right, _ = values = values_of(a, b, node)
    # Under autocast the result has another dtype.
    require(min(left.dim(), right.dim()) >= 3 and have_one_dtype(values))
    require(isinstance(left.shape[-1], int) and 1 < left.shape[-1] <= LARGEST_SUM)
    column = known_true(right.shape[-1] == 1)
    require((column or known_true(left.shape[-2] == 1)) and not is_in_attention(node))
    if left.dtype in HALF:
        a, b = (method(each, "to", torch.float32) for each in (a, b))
    # Rows of the matrix times the transposed column, or columns of the matrix times the transposed row.
    vector = method(b if column else a, "transpose", -1, -2)
    products = node.graph.call_function(torch.mul, (a, vector) if column else (vector, b))
    new = method(products, "sum", dim=-1 if column else -2, keepdim=True)
    return method(new, "to", left.dtype) if left.dtype in HALF else new


def is_in_attention(node: Node) -> bool:
    """Return whether a product is near a softmax, so that other rewrites may match all of it."""
    before, after = (lambda each: each.all_input_nodes), (lambda each: each.users)
    return _leads_to_softmax(node, after) or _leads_to_softmax(node, before)


def _leads_to_softmax(node: Node, following: Callable[[Node], Iterable[Node]]) -> bool:
    """Return whether a softmax is within `FAR` calls in one direction, and no product before it."""
    near: set[Node] = {node}
    for _ in range(FAR):
        near = {each for one in near for each in following(one) if each.op != "placeholder"}
        if any("softmax" in str(getattr(each.target, "__name__", each.target)) for each in near):
            return True
        near = {each for each in near if each.target not in PRODUCTS}
    return False


multiply_and_sum = replacing(PRODUCTS, _product)
