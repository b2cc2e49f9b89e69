"""Reductions of rows into the rows of their indices, as in layers on graphs, in the order of the indices.

ATen adds each number by an atomic operation of its own, which in half precision takes several attempts, and in its
dtype. Layers that share an index share its order.
"""

from collections.abc import Hashable
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from backend_kwargs.backends import Inputs
from backend_kwargs.graphs.writes import storages_of, written_between
from backend_kwargs.rewrites.matching import (
    Arguments,
    define,
    have_one_dtype,
    hint,
    known_true,
    require,
    same_sizes,
    values_of,
)
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import Change, Wanted, every, method, replacing
from backend_kwargs.torch_internals.dynamo import is_erased
from backend_kwargs.torch_internals.symbols import check

REWRITE = Rewrite(
    "Rows that are added, averaged or compared into rows of their indices, by our own kernels",
    traced=f"{__name__}:reduce_in_segments",
    needs=("gpu",),
    applies="float32 or half precision, without gradients; an index for each row; an index out of range makes all nan",
    fitting=lambda stats: (
        stats.gpu and not stats.training and ran(stats, "scatter_reduce", "scatter_add", "index_add", "index_reduce")
    ),
    order=165,
)

CALLS = ("scatter_reduce", "scatter_add", "index_add", "index_reduce")
IN_PLACE = tuple(f"{name}_" for name in CALLS)
REDUCTIONS = ("sum", "mean", "amax", "amin")
MOST = 2**31  # rows, which are counted in 32 bits

# ---- the operators


def _in_order(index: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(index)
    every = torch.arange(segments + 1, device=index.device, dtype=index.dtype)
    return order.to(torch.int32), torch.searchsorted(values, every, out_int32=True)


def _in_order_fake(index: Tensor, segments: int) -> tuple[Tensor, Tensor]:
    return index.new_empty(index.shape, dtype=torch.int32), index.new_empty(segments + 1, dtype=torch.int32)


def _in_order_cuda(index: Tensor, segments: int, **options: Any) -> tuple[Tensor, Tensor]:
    from backend_kwargs.rewrites.kernels.segments import rows_in_order

    check(index.shape[0] < MOST, lambda: f"Got {index.shape[0]} rows, of at most {MOST - 1}.")
    return rows_in_order(index, segments, **options)


def _reduce(own: Tensor, src: Tensor, order: Tensor, starts: Tensor, reduction: str, included: bool) -> Tensor:
    rows = torch.arange(own.shape[0], device=own.device)
    index = torch.repeat_interleave(rows, starts.diff(), output_size=src.shape[0]).unsqueeze(1).expand_as(src)
    return own.float().scatter_reduce(0, index, src[order].float(), reduction, include_self=included).to(own.dtype)


def _empty(own: Tensor, *_: object) -> Tensor:
    return torch.empty_like(own, memory_format=torch.contiguous_format)


def _reduce_cuda(
    own: Tensor, src: Tensor, order: Tensor, starts: Tensor, reduction: str, included: bool, **options: Any
) -> Tensor:
    from backend_kwargs.rewrites.kernels.segments import reduce_segments

    mean_rows = -(-hint(src.shape[0]) // hint(own.shape[0]))
    return reduce_segments(
        own, src, order, starts, _empty(own), reduction, included=included, mean_rows=mean_rows, **options
    )


# Rows are first those of index 0, then of 1; of one index they are in any order.
rows_in_order = define(
    "rows_in_order(Tensor index, SymInt segments) -> (Tensor, Tensor)",
    _in_order,
    fake=_in_order_fake,
    cuda=_in_order_cuda,
    inlined=True,
)
segment_reduce = define(
    "segment_reduce(Tensor own, Tensor src, Tensor order, Tensor starts, str reduction, bool included) -> Tensor",
    _reduce,
    fake=_empty,
    cuda=_reduce_cuda,
    inlined=True,
)


# ---- dynamo's graph


def reduce_in_segments(gm: GraphModule, example_inputs: Inputs, wanted: Wanted = every) -> Change | None:
    """Return the graph with rows reduced in the order of their indices, or None if it reduces none."""
    orders: dict[Hashable, Node] = {}

    def in_segments(node: Node, args: Arguments) -> Node:
        own, index, src = args["input"], args["index"], args["src"] if "src" in args else args["source"]
        of_own, of_index, of_src, result = values_of(own, index, src, node)
        reduction = args.get("reduce", "sum")
        require(reduction in REDUCTIONS and args.get("alpha", 1) == 1 and args["dim"] in (0, -of_src.dim()))
        _require_kernel(of_own, of_index, of_src, result)
        graph, segments = node.graph, of_own.shape[0]
        part = (of_index.storage_offset(), of_index.stride(0), of_index.dtype, of_index.shape[0], segments)
        key = (*storages_of(of_index), str(part))
        order = orders.get(key)
        if order is None or is_erased(order) or written_between(order, node, [index]):
            for _ in range(of_index.dim() - 1):
                index = method(index, "select", 1, 0)
            rows = segments if isinstance(segments, int) else method(own, "size", 0)
            order = orders[key] = graph.call_function(rows_in_order, (index, rows))
        own, src = (method(each, "detach") for each in (own, src))
        if of_src.dim() != 2:
            own, src = (method(each, "flatten", 1) for each in (own, src))
        parts = [graph.call_function(getitem, (order, at)) for at in range(2)]
        new = graph.call_function(segment_reduce, (own, src, *parts, reduction, args.get("include_self", True)))
        made = new if of_src.dim() == 2 else method(new, "view_as", args["input"])
        return method(args["input"], "copy_", made) if node.target in IN_PLACE else made

    targets = (*CALLS, *IN_PLACE, *(getattr(torch, name) for name in CALLS))
    # A place is the call alone: what makes its index stays where an order is the first, and would go with the others.
    return replacing(targets, in_segments, lambda node: [node])(gm, example_inputs, wanted)


def _require_kernel(own: Tensor, index: Tensor, src: Tensor, result: Tensor) -> None:
    """Raise unless the kernel can compute this result, which has no derivative."""
    require(len({own.device, index.device, src.device}) == 1)
    require(not (own.is_cpu and torch.cuda.is_available()))  # on a host ATen is faster
    require(src.dim() > 1 and hint(src.shape[0]) < MOST)
    require(not torch.are_deterministic_algorithms_enabled())  # rows are summed in any order
    require(have_one_dtype((own, src, result)) and not result.requires_grad)
    require(all(isinstance(size, int) for size in own.shape[1:]) and same_sizes(own.shape[1:], src.shape[1:]))
    require(same_sizes(index.shape, src.shape[: index.dim()]) and known_true(src.numel() * own.numel() > 0))
    spread = zip(index.shape[1:], index.stride()[1:], strict=True)
    require(all(known_true(size == 1) or known_true(stride == 0) for size, stride in spread))
    require(src.is_contiguous() or (src.dim() == 2 and known_true(src.stride(1) == 1)))
    require(own.is_contiguous() and result.is_contiguous())
