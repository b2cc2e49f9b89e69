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
    NoMatchError,
    calls,
    define,
    input_of,
    known_true,
    matched,
    read,
    require,
    same_sizes,
    used_once,
    value_if_any,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import changes_meanwhile, method, replacing

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


def _sum_of_rows(node: Node, args: Arguments) -> Node:
    """Insert the operator, and the reshape to the sizes of this sum of gathered rows."""
    parts = _bag(args) if node.target is F.embedding_bag else _reduction(node, args)
    table, indices, result = values_of(parts.table, parts.indices, node)
    _require_kernel(parts, table, indices, value_if_any(parts.weights), result)
    require(not changes_meanwhile(node, [parts.table, parts.indices, parts.weights]))
    new = _call(node.graph, parts)
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
    table, weights = (each and method(each, "detach") for each in (parts.table, weights))
    return graph.call_function(gather_sum, (table, indices, weights, parts.padding, parts.mean))


def _require_kernel(parts: _Sum, table: Tensor, indices: Tensor, weights: Tensor | None, result: Tensor) -> None:
    """Raise unless the kernel can compute this result, which has no derivative."""
    require(not (table.is_cpu and torch.cuda.is_available()))  # where ATen and Inductor are faster
    require(table.device == indices.device and not result.requires_grad)
    require(table.dim() == 2 and known_true(table.stride(1) == 1))
    require(all(each is None or each.dtype in DTYPES for each in (table, weights)))
    require(indices.dtype in INDICES and result.dtype == _dtype(table, weights))
    require(all(isinstance(size, int) for size in (parts.length, table.shape[1], *result.shape[1:])))
    require(parts.padding is None or isinstance(parts.padding, int))
    require(0 < parts.length <= MOST and known_true(result.numel() > 0))


def _bag(args: Arguments) -> _Sum:
    """Return the sum of a call of `embedding_bag` whose bags all have one length."""
    require(args["mode"] in ("sum", "mean") and args["max_norm"] is None and not args["include_last_offset"])
    (bags, table), weights = values_of(args["input"], args["weight"]), args["per_sample_weights"]
    factors = value_if_any(weights)
    require(bags.dim() == 2 and (factors is None or same_sizes(factors.shape, bags.shape)))
    padding = args["padding_idx"]
    if isinstance(padding, int) and padding < 0:
        padding += table.shape[0]
    return _Sum(args["weight"], args["input"], weights, padding, bags.shape[1], args["mode"] == "mean")


def _reduction(node: Node, args: Arguments) -> _Sum:
    """Return the sum of a reduction over the last dimension but one of gathered rows."""
    (rows,) = values_of(args["input"])
    require(args["dtype"] is None and [*(args.get("dim") or ())] in ([-2], [rows.dim() - 2]))
    return _Sum(*_gathered(args["input"]), None, rows.shape[-2], SUMS[node.target])


def _gathered(node: Node) -> tuple[Node, Node, Node | None]:
    """Return the table, indices and weights of rows that are gathered, then at most reshaped and weighted."""
    weights = None
    while used_once(node):
        if (selected := matched(_selected, node)) is not None:
            return *selected, weights
        if calls(node, *RESHAPE):
            node = _rearranged(node)
        else:
            require(weights is None)
            node, weights = _weighted(node)
    raise NoMatchError


def _selected(node: Node) -> tuple[Node, Node]:
    """Return the table and the indices of the rows that `node` gathers."""
    table: Any
    index: Any
    if node.target is operator.getitem:
        table, key = node.args
        index, *others = key if isinstance(key, tuple) and key else (key,)
        require(all(each in (slice(None), Ellipsis) for each in others))
    else:
        args = read(node)
        is_embedding = calls(node, F.embedding) and args["max_norm"] is None
        require(is_embedding or (calls(node, *SELECT) and args["dim"] in (0, -2)))
        table, index = (args["weight"], args["input"]) if is_embedding else (args["input"], args["index"])
    (numbers,) = values_of(index)
    require(numbers.dim() > 0)
    return table, index


def _weighted(node: Node) -> tuple[Node, Node]:
    """Return the rows and the weights, one for each row, that `node` multiplies."""
    require(calls(node, *MUL))
    args = read(node)
    one, other = args["input"], args["other"]
    for rows, weights in ((one, other), (other, one)):
        value, factors = values_of(rows, weights)
        if rows is not weights and same_sizes(factors.shape, (*value.shape[:-1], 1)):
            return rows, weights
    raise NoMatchError


def _rearranged(node: Node) -> Node:
    """Return the tensor whose rows `node` has in another arrangement."""
    source: Node = input_of(node)
    one, other = values_of(node, source)
    require(one.dtype == other.dtype and known_true(one.shape[-1] == other.shape[-1]))  # `view` also takes a dtype
    return source


fuse_gather_sum = replacing((F.embedding_bag, *SUMS), _sum_of_rows)
