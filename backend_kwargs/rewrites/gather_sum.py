"""Sums of gathered rows by one kernel: bags of embeddings, and the outputs of the experts that a token was given to.

ATen reads the rows of a bag one after another, and Inductor each column of the result by another thread's loop.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from backend_kwargs.rewrites.matching import (
    DTYPES,
    MUL,
    AnyNode,
    arguments_of,
    hint,
    known_true,
    replace,
    same_sizes,
    used_once,
)
from backend_kwargs.rewrites.operators import define
from backend_kwargs.rewrites.traced import Change, changed, changes_meanwhile, example

INDICES = (torch.int32, torch.int64)
MOST = 256  # rows of one sum, which one program adds up; Inductor divides longer sums among several
REDUCTIONS = {"sum": False, "mean": True, torch.sum: False, torch.mean: True}  # and whether it is the mean
RESHAPE = (torch.reshape, torch.unflatten, "view", "reshape", "unflatten")
SELECT = (torch.index_select, "index_select")

# ---- the operator


def _gather_sum(table: Tensor, indices: Tensor, weights: Tensor | None, padding: int | None, mean: bool) -> Tensor:
    rows = table[indices].to(torch.float32)
    if weights is not None:
        rows = rows * weights.unsqueeze(-1).to(torch.float32)
    if padding is None:
        made = rows.mean(1) if mean else rows.sum(1)
    else:
        kept = (indices != padding).unsqueeze(-1)
        made = torch.where(kept, rows, 0.0).sum(1)
        made = made / kept.sum(1).clamp(min=1) if mean else made
    return made.to(_dtype(table, weights))


def _dtype(table: Tensor, weights: Tensor | None) -> torch.dtype:
    return table.dtype if weights is None else torch.promote_types(table.dtype, weights.dtype)


def _empty(table: Tensor, indices: Tensor, weights: Tensor | None, *_: Any) -> Tensor:
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

    table: AnyNode
    indices: AnyNode
    weights: AnyNode | None
    padding: Any
    length: Any
    mean: bool


def fuse_gather_sum(gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return the graph with each sum of gathered rows as one operator, or None if it has none."""
    return changed(gm, example_inputs, lambda node: node.target in (F.embedding_bag, *REDUCTIONS), _replace)


def _replace(node: AnyNode) -> float | None:
    found = _bag(node) if node.target is F.embedding_bag else _reduction(node)
    if found is None or not _fits(found, example(node)):
        return None
    read = [each for each in (found.table, found.indices, found.weights) if each is not None]
    if changes_meanwhile(node, read):
        return None
    table, indices, made = (each.meta["example_value"] for each in (found.table, found.indices, node))
    with node.graph.inserting_before(node):
        new = _call(node.graph, found)
        if made.dim() != 2:
            new = node.graph.call_function(torch.reshape, (new, (-1, *made.shape[1:])))
    replace(node, new)
    # ATen and Inductor take at least twice as long as it takes to read the rows.
    return float(hint(indices.numel()) * hint(table.shape[1]) * table.element_size())


def _call(graph: Graph, found: _Sum) -> AnyNode:
    indices, weights = (
        each and graph.call_function(torch.reshape, (each, (-1, found.length)))
        for each in (found.indices, found.weights)
    )
    # A sum without gradients may be of rows that were gathered under `no_grad`, from a table that has them.
    table, weights = (each and graph.call_method("detach", (each,)) for each in (found.table, weights))
    return graph.call_function(gather_sum, (table, indices, weights, found.padding, found.mean))


def _fits(found: _Sum, made: Tensor | None) -> bool:
    """Return whether the kernel can compute this result, which has no derivative."""
    table, indices, weights = map(example, (found.table, found.indices, found.weights))
    if table is None or indices is None or made is None or made.requires_grad:
        return False
    on_host = table.is_cpu and torch.cuda.is_available()  # where ATen and Inductor are faster
    if on_host or table.device != indices.device:
        return False
    if table.dim() != 2 or not known_true(table.stride(1) == 1):
        return False
    floats = {table.dtype, table.dtype if weights is None else weights.dtype}
    if not floats.issubset(DTYPES) or indices.dtype not in INDICES or made.dtype != _dtype(table, weights):
        return False
    static = all(isinstance(size, int) for size in (found.length, table.shape[1], *made.shape[1:]))
    constant = found.padding is None or isinstance(found.padding, int)
    return static and constant and 0 < found.length <= MOST and known_true(made.numel() > 0)


def _bag(node: AnyNode) -> _Sum | None:
    """Return the sum of a call of `embedding_bag` whose bags all have one length, or None."""
    given = arguments_of(node)
    if given is None or given["mode"] not in ("sum", "mean") or given["max_norm"] is not None:
        return None
    bags, table, weights = map(example, (given["input"], given["weight"], given["per_sample_weights"]))
    if bags is None or table is None or bags.dim() != 2 or given["include_last_offset"]:
        return None
    if given["per_sample_weights"] is not None and (weights is None or not same_sizes(weights.shape, bags.shape)):
        return None
    padding, weights = given["padding_idx"], given["per_sample_weights"]
    if isinstance(padding, int) and padding < 0:
        padding += table.shape[0]
    return _Sum(given["weight"], given["input"], weights, padding, bags.shape[1], given["mode"] == "mean")


def _reduction(node: AnyNode) -> _Sum | None:
    """Return the sum of a reduction over the last dimension but one of gathered rows, or None."""
    given = arguments_of(node)
    rows = example(given["input"]) if given else None
    if given is None or rows is None or given["dtype"] is not None:
        return None
    if [*(given.get("dim") or ())] not in ([-2], [rows.dim() - 2]):
        return None
    table, indices, weights = _gathered(given["input"]) or (None, None, None)
    return table and _Sum(table, indices, weights, None, rows.shape[-2], REDUCTIONS[node.target])


def _gathered(node: Any) -> tuple[AnyNode, AnyNode, AnyNode | None] | None:
    """Return the table, indices and weights of rows that are gathered, then at most reshaped and weighted, or None."""
    weights = None
    while isinstance(node, Node) and used_once(node) and example(node) is not None:
        if (selected := _selected(node)) is not None:
            return *selected, weights
        if node.target in RESHAPE and node.args and _are_rows_of(node, node.args[0]):
            node = node.args[0]
        elif node.target in MUL and weights is None and (factors := _weighted(node)):
            node, weights = factors
        else:
            return None
    return None


def _selected(node: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """Return the table and the indices of the rows that `node` gathers, or None."""
    table, index = None, None
    if node.target is operator.getitem:
        table, given = node.args
        index, *others = given if isinstance(given, tuple) and given else (given,)
        index = index if all(each in (slice(None), Ellipsis) for each in others) else None
    elif node.target is F.embedding:
        given = arguments_of(node)
        if given is not None and given["max_norm"] is None:
            table, index = given["weight"], given["input"]
    elif node.target in SELECT:
        given = arguments_of(node)
        if given is not None and given["dim"] in (0, -2):
            table, index = given["input"], given["index"]
    numbers = example(index)
    return (table, index) if numbers is not None and numbers.dim() else None


def _weighted(node: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """Return the rows and the weights, one for each row, that `node` multiplies, or None."""
    given = arguments_of(node)
    if given is None:
        return None
    one, other = given["input"], given["other"]
    for rows, weights in ((one, other), (other, one)):
        many, each = example(rows), example(weights)
        if rows is weights or many is None or each is None:
            return None
        if same_sizes(each.shape, (*many.shape[:-1], 1)):
            return rows, weights
    return None


def _are_rows_of(node: AnyNode, other: Any) -> bool:
    """Return whether `node` has the rows of `other` in another arrangement."""
    made, given = example(node), example(other)
    if made is None or given is None or made.dtype != given.dtype:  # `view` also takes a dtype
        return False
    return known_true(made.shape[-1] == given.shape[-1])
