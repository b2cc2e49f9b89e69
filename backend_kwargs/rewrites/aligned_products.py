"""Products with sides that are no multiple of 16 bytes, with zeros up to one, for which libraries have faster kernels.

Inductor's own padding copies both operands, and pays off for few. Here whatever computes an operand writes the zeros,
and whatever reads the result leaves its last columns out, if Inductor generates their code.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.rewrites.matching import HALF, Arguments, of_each, same_sizes
from backend_kwargs.rewrites.matrix_vector import PRODUCTS, is_in_attention
from backend_kwargs.rewrites.table import Rewrite
from backend_kwargs.rewrites.traced import example, examples, replacing

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


def _product(node: Node, args: Arguments) -> Node | None:
    """Insert the product of padded operands for one of which a side is not aligned."""
    is_linear, of_bias = node.target in LINEAR, example(args.get("bias"))
    left, right, *others = (args[name] for name in args if name != "bias")
    values = examples(left, right, node)
    if values is None or others or min(values[0].dim(), values[1].dim()) < 2 or values[2].dtype not in HALF:
        return None
    if not values[2].is_contiguous() or (not is_linear and is_in_attention(node)):
        return None
    summed, columns = values[0].shape[-1], values[2].shape[-1]
    if of_bias is not None and not same_sizes(of_bias.shape, (columns,)):
        return None
    if (zeros := _zeros(summed, columns)) is None:
        return None
    if is_linear:
        return _linear(left, right, args["bias"], zeros, columns)
    of_sum, of_columns = zeros
    made = node.graph.call_function(torch.matmul, (_padded(left, 0, of_sum), _padded(right, of_sum, of_columns)))
    return _narrowed(made, columns) if of_columns else made


def _pixels(node: Node, args: Arguments) -> Node | None:
    """Insert the product of padded operands for a convolution of single pixels, channels last."""
    values = examples(args["input"], args["weight"], node)
    if values is None or values[2].dtype not in HALF or values[2].dim() != 4:
        return None
    if not values[2].movedim(1, -1).is_contiguous():
        return None
    columns, summed, *size = values[1].shape
    padding, strides, zeros = args["padding"], {*of_each(args["stride"], (1, 1))}, _zeros(summed, columns)
    if size != [1, 1] or strides != {1} or args["groups"] != 1 or zeros is None:
        return None
    if not isinstance(padding, str) and any(padding):
        return None
    rows = node.graph.call_method("movedim", (args["input"], 1, -1))
    weight = node.graph.call_method("flatten", (args["weight"], 1))
    made = _linear(rows, weight, args["bias"], zeros, columns)
    return node.graph.call_method("movedim", (made, -1, 1))


def _linear(rows: Argument, weight: Argument, bias: Argument, zeros: tuple[int, int], columns: int) -> Node:
    """Insert a linear layer of padded operands."""
    of_sum, of_columns = zeros
    operands = _padded(rows, 0, of_sum), _padded(weight, of_columns, of_sum), bias and _padded(bias, 0, of_columns)
    made = operands[0].graph.call_function(F.linear, operands)
    return _narrowed(made, columns) if of_columns else made


def _narrowed(made: Node, columns: int) -> Node:
    narrow = made.graph.call_method("narrow", (made, -1, 0, columns))
    return made.graph.call_method("clone", (narrow,), {"memory_format": torch.contiguous_format})


def _zeros(summed: object, columns: object) -> tuple[int, int] | None:
    """Return the zeros for both sides of a product, None if it needs none, or too many."""
    of_sum, of_columns = _missing(summed), _missing(columns)
    return None if of_sum is None or of_columns is None or not of_sum + of_columns else (of_sum, of_columns)


def _missing(size: object) -> int | None:
    """Return how many zeros make a side aligned, or None if its size varies or they would be too many."""
    if not isinstance(size, int):
        return None
    multiples = (TILE, ALIGNED) if size % ALIGNED and size >= SEVERAL else (ALIGNED,)
    return next((zeros for zeros in (-size % each for each in multiples) if 3 * zeros <= size), None)


def _padded(node: Argument, rows: int, columns: int) -> Node:
    """Insert zeros after the last two dimensions of an operand."""
    assert isinstance(node, Node)
    sizes = (0, columns, 0, rows) if rows else (0, columns)
    return node.graph.call_function(F.pad, (node, sizes)) if rows or columns else node


def _either(node: Node, args: Arguments) -> Node | None:
    return (_pixels if node.target is torch.conv2d else _product)(node, args)


pad_products = replacing((*LINEAR, *PRODUCTS, torch.conv2d), _either)
