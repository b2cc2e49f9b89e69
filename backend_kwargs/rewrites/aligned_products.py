"""Products with sides that are no multiple of 16 bytes, with zeros up to one, for which libraries have faster kernels.

Inductor's own padding copies both operands, and pays off for few. Here whatever computes an operand writes the zeros,
and whatever reads the result leaves its last columns out, if Inductor generates their code.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import (
    HALF,
    Arguments,
    NoMatchError,
    known,
    of_each,
    require,
    same_sizes,
    values_of,
)
from backend_kwargs.rewrites.matrix_vector import PRODUCTS, is_in_attention
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import method, replacing

REWRITE = Rewrite(
    "Products of unaligned sides, and convolutions of single pixels, with zeros in both operands",
    traced=f"{__name__}:pad_products",
    needs=("gpu",),
    applies="half precision; sizes that do not vary and grow by at most a third",
    costs="memory for the zeros",
    fitting=lambda stats: stats.gpu and stats.gemms + stats.convolutions > 0,
    version=2,
    order=155,
)

LINEAR = (F.linear,)
ALIGNED, TILE = 8, 64  # numbers: rows of 16 bytes; whole tiles are faster where there are several
SEVERAL = 128


def _product(node: Node, args: Arguments) -> Node:
    """Insert the product of padded operands for one of which a side is not aligned."""
    is_linear, bias = node.target in LINEAR, args.pop("bias", None)
    require(len(args) == 2)
    one, other = args.values()
    left, right, result = values_of(one, other, node)
    require(min(left.dim(), right.dim()) >= 2 and result.dtype in HALF and result.is_contiguous())
    require(is_linear or not is_in_attention(node))
    columns = result.shape[-1]
    require(bias is None or same_sizes(values_of(bias)[0].shape, (columns,)))
    zeros = of_sum, of_columns = _zeros(left.shape[-1], columns)
    if is_linear:
        return _linear(one, other, bias, zeros, columns)
    made = node.graph.call_function(torch.matmul, (_padded(one, 0, of_sum), _padded(other, of_sum, of_columns)))
    return _narrowed(made, columns) if of_columns else made


def _pixels(node: Node, args: Arguments) -> Node:
    """Insert the product of padded operands for a convolution of single pixels, channels last."""
    _, weight, result = values_of(args["input"], args["weight"], node)
    require(result.dtype in HALF and result.dim() == 4 and result.movedim(1, -1).is_contiguous())
    columns, summed, *size = weight.shape
    padding, zeros = args["padding"], _zeros(summed, columns)
    require(size == [1, 1] and {*of_each(args["stride"], (1, 1))} == {1} and args["groups"] == 1)
    require(isinstance(padding, str) or not any(padding))
    rows = method(args["input"], "movedim", 1, -1)
    made = _linear(rows, method(args["weight"], "flatten", 1), args["bias"], zeros, columns)
    return method(made, "movedim", -1, 1)


def _linear(rows: Argument, weight: Argument, bias: Argument, zeros: tuple[int, int], columns: int) -> Node:
    """Insert a linear layer of padded operands."""
    of_sum, of_columns = zeros
    operands = _padded(rows, 0, of_sum), _padded(weight, of_columns, of_sum), bias and _padded(bias, 0, of_columns)
    made = operands[0].graph.call_function(F.linear, operands)
    return _narrowed(made, columns) if of_columns else made


def _narrowed(made: Node, columns: int) -> Node:
    return method(method(made, "narrow", -1, 0, columns), "clone", memory_format=torch.contiguous_format)


def _zeros(summed: object, columns: object) -> tuple[int, int]:
    """Return the zeros for both sides of a product; raise if it needs none, or too many."""
    of_sum, of_columns = _missing(summed), _missing(columns)
    require(of_sum + of_columns > 0)
    return of_sum, of_columns


def _missing(size: object) -> int:
    """Return how many zeros make a side aligned; raise if its size varies or they would be too many."""
    if not isinstance(size, int):
        raise NoMatchError
    multiples = (TILE, ALIGNED) if size % ALIGNED and size >= SEVERAL else (ALIGNED,)
    return known(next((zeros for zeros in (-size % each for each in multiples) if 3 * zeros <= size), None))


def _padded(node: Argument, rows: int, columns: int) -> Node:
    """Insert zeros after the last two dimensions of an operand."""
    assert isinstance(node, Node)
    sizes = (0, columns, 0, rows) if rows else (0, columns)
    return node.graph.call_function(F.pad, (node, sizes)) if rows or columns else node


def _either(node: Node, args: Arguments) -> Node:
    return (_pixels if node.target is torch.conv2d else _product)(node, args)


pad_products = replacing((*LINEAR, *PRODUCTS, torch.conv2d), _either)
