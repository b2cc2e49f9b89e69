"""Sums of gathered rows by one kernel: bags of embeddings, and the outputs of the experts that a token was given to.

ATen reads the rows of a bag one after another, and Inductor each column of the result by another thread's loop.
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph, Node

from backend_kwargs.rewrites.matching import (
    DTYPES,
    MUL,
    SUMS,
    Arguments,
    arguments_of,
    define,
    known_true,
    same_sizes,
    used_once,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import changes_meanwhile, example, examples, replacing

REWRITE = Rewrite(
    "Sums and means of gathered rows (bags of embeddings, the outputs of a token's experts) by our own kernel",
    traced=f"{__name__}:fuse_gather_sum",
    needs=("gpu",),
    applies="float32 or half precision, without gradients; at most 256 rows in each sum",
    fitting=lambda stats: (
        stats.gpu
        and (
            (ran(stats, "sum", "mean") and ran(stats, "index", "index_select", "embedding"))
            or ran(stats, "_embedding_bag", "_embedding_bag_forward_only")
        )
    ),
    order=160,
)

INDICES = (torch.int32, torch.int64)
MOST = 256  # rows of one sum, which one program adds up; Inductor divides longer sums among several
RESHAPE = (torch.reshape, torch.unflatten, "view", "reshape", "unflatten")
SELECT = (torch.index_select, "index_select")

# ---- the operator


def _gather_sum(table: Tensor, indices: Tensor, weights: Tensor | None, padding: int | None, mean: bool) -> Tensor:
    rows = table[indices].to(torch.float32)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1).to(torch.float32)
    if padding is None:
        total = rows.mean(1) if mean else rows.sum(1)
    else:
        counts = (indices != padding).unsqueeze(-1)
        total = torch.where(counts, rows, 0.0).sum(1)
        total = total / counts.sum(1).clamp(min=1) if mean else total
    return total.to(_dtype(table, weights))


def _dtype(table: Tensor, weights: Tensor | None) -> torch.dtype:
    """Return the dtype of the result."""
    return table.dtype if weights is None else torch.promote_types(table.dtype, weights.dtype)


def _empty(table: Tensor, indices: Tensor, weights: Tensor | None, *_: object) -> Tensor:
    return table.new_empty((indices.shape[0], table.shape[1]), dtype=_dtype(table, weights))


def _gather_sum_cuda(
    table: Tensor, indices: Tensor, weights: Tensor | None, padding: int | None, mean: bool, **options: Any
) -> Tensor:
    from backend_kwargs.rewrites.kernels.gather_sum import sum_of_rows

    return sum_of_rows(table, indices, weights, padding, _empty(table, indices, weights), mean=mean, **options)


gather_sum = define(
    "gather_sum(Tensor table, Tensor indices, Tensor? weights, int? padding, bool mean) -> Tensor",
    _gather_sum,
    fake=_empty,
    cuda=_gather_sum_cuda,
    inlined=True,
)


# ---- dynamo's graph


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum, or a mean, of `length` gathered rows; `indices` and `weights` have a number for each row, in any shape."""

    table: Node
    indices: Node
    weights: Node | None
    padding: int | None
    length: int
    mean: bool


def _sum_of_rows(node: Node, args: Arguments) -> Node | None:
    """Insert the operator, and the reshape to the sizes of this sum of gathered rows."""
    parts = _bag(args) if node.target is F.embedding_bag else _reduction(node, args)
    values = examples(parts.table, parts.indices, node) if parts else None
    if parts is None or values is None or not _has_kernel(parts, *values):
        return None
    if changes_meanwhile(node, [parts.table, parts.indices, parts.weights]):
        return None
    result, new = values[-1], _call(node.graph, parts)
    if result.dim() != 2:
        new = node.graph.call_function(torch.reshape, (new, (-1, *result.shape[1:])))
    return new


def _call(graph: Graph, parts: _Sum) -> Node:
    """Insert the operator."""
    indices, weights = (
        each and graph.call_function(torch.reshape, (each, (-1, parts.length)))
        for each in (parts.indices, parts.weights)
    )
    # A sum without gradients may be of rows that were gathered under `no_grad`, from a table that has them.
    table, weights = (each and graph.call_method("detach", (each,)) for each in (parts.table, weights))
    return graph.call_function(gather_sum, (table, indices, weights, parts.padding, parts.mean))


def _has_kernel(parts: _Sum, table: Tensor, indices: Tensor, result: Tensor) -> bool:
    """Return whether the kernel can compute this result, which has no derivative."""
    on_host = table.is_cpu and torch.cuda.is_available()  # where ATen and Inductor are faster
    if on_host or table.device != indices.device or result.requires_grad:
        return False
    if table.dim() != 2 or not known_true(table.stride(1) == 1):
        return False
    weights = example(parts.weights)
    floats = {table.dtype, table.dtype if weights is None else weights.dtype}
    if not floats.issubset(DTYPES) or indices.dtype not in INDICES or result.dtype != _dtype(table, weights):
        return False
    static = all(isinstance(size, int) for size in (parts.length, table.shape[1], *result.shape[1:]))
    constant = parts.padding is None or isinstance(parts.padding, int)
    return static and constant and 0 < parts.length <= MOST and known_true(result.numel() > 0)


def _bag(args: Arguments) -> _Sum | None:
    """Return the sum of a call of `embedding_bag` whose bags all have one length, or None."""
    if args["mode"] not in ("sum", "mean") or args["max_norm"] is not None or args["include_last_offset"]:
        return None
    values, weights = examples(args["input"], args["weight"]), args["per_sample_weights"]
    if values is None or values[0].dim() != 2:
        return None
    bags, table = values
    factors = example(weights)
    if weights is not None and (factors is None or not same_sizes(factors.shape, bags.shape)):
        return None
    padding = args["padding_idx"]
    if isinstance(padding, int) and padding < 0:
        padding += table.shape[0]
    return _Sum(args["weight"], args["input"], weights, padding, bags.shape[1], args["mode"] == "mean")


def _reduction(node: Node, args: Arguments) -> _Sum | None:
    """Return the sum of a reduction over the last dimension but one of gathered rows, or None."""
    rows = example(args["input"])
    if rows is None or args["dtype"] is not None or [*(args.get("dim") or ())] not in ([-2], [rows.dim() - 2]):
        return None
    parts = _gathered(args["input"])
    return parts and _Sum(*parts, None, rows.shape[-2], SUMS[node.target])


def _gathered(node: object) -> tuple[Node, Node, Node | None] | None:
    """Return the table, indices and weights of rows that are gathered, then at most reshaped and weighted, or None."""
    weights = None
    while isinstance(node, Node) and used_once(node) and example(node) is not None:
        if (selected := _selected(node)) is not None:
            return *selected, weights
        if node.target in RESHAPE and node.args and _has_rows_of(node, node.args[0]):
            node = node.args[0]
        elif node.target in MUL and weights is None and (factors := _weighted(node)):
            node, weights = factors
        else:
            return None
    return None


def _selected(node: Node) -> tuple[Node, Node] | None:
    """Return the table and the indices of the rows that `node` gathers, or None."""
    table: Any = None
    index: Any = None
    args = arguments_of(node) or {}
    if node.target is operator.getitem:
        table, key = node.args
        index, *others = key if isinstance(key, tuple) and key else (key,)
        index = index if all(each in (slice(None), Ellipsis) for each in others) else None
    elif node.target is F.embedding and args and args["max_norm"] is None:
        table, index = args["weight"], args["input"]
    elif node.target in SELECT and args and args["dim"] in (0, -2):
        table, index = args["input"], args["index"]
    numbers = example(index)
    return (table, index) if numbers is not None and numbers.dim() else None


def _weighted(node: Node) -> tuple[Node, Node] | None:
    """Return the rows and the weights, one for each row, that `node` multiplies, or None."""
    args = arguments_of(node) or {}
    one, other = args.get("input"), args.get("other")
    rows: Any
    weights: Any
    for rows, weights in ((one, other), (other, one)):
        values = examples(rows, weights)
        if rows is weights or values is None:
            return None
        if same_sizes(values[1].shape, (*values[0].shape[:-1], 1)):
            return rows, weights
    return None


def _has_rows_of(node: Node, other: object) -> bool:
    """Return whether `node` has the rows of `other` in another arrangement."""
    values = examples(node, other)
    if values is None or values[0].dtype != values[1].dtype:  # `view` also takes a dtype
        return False
    return known_true(values[0].shape[-1] == values[1].shape[-1])


fuse_gather_sum = replacing((F.embedding_bag, *SUMS), _sum_of_rows)
