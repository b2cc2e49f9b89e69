"""Sorts of indices below 256, such as the experts that `topk` gives each token, as uint8.

A radix sort on a GPU makes one pass for each byte, and int64 has eight.
"""

import operator

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import Argument

from backend_kwargs.graphs.writes import written_between
from backend_kwargs.rewrites.matching import Arguments, arguments_of, define
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import example, replacing

REWRITE = Rewrite(
    "Sorts of indices below 256, as of a token's experts, as uint8",
    traced=f"{__name__}:sort_bytes",
    needs=("gpu",),
    applies="sort and argsort of the indices that topk, argmax or argmin returns, also reshaped",
    fitting=lambda stats: stats.gpu and ran(stats, "sort", "argsort") and ran(stats, "topk", "argmax", "argmin"),
    order=162,
)

MOST = 256  # indices that one byte tells apart
SORT, ARGSORT = (torch.sort, "sort"), (torch.argsort, "argsort")
TOPK, PLACES = (torch.topk, "topk"), (torch.argmax, torch.argmin, "argmax", "argmin")
MOVED = (
    torch.reshape, torch.flatten, torch.ravel, torch.squeeze, torch.unsqueeze, torch.transpose, torch.t, torch.permute,
    torch.clone, torch.detach, "reshape", "view", "flatten", "ravel", "squeeze", "unsqueeze", "transpose", "t",
    "permute", "contiguous", "clone", "detach",
)  # fmt: skip


def _sorted_bytes(indices: Tensor, dim: int, descending: bool, stable: bool | None) -> tuple[Tensor, Tensor]:
    values, order = torch.sort(indices.to(torch.uint8), dim=dim, descending=descending, stable=stable)
    return values.to(indices.dtype), order


sorted_bytes = define(
    "sorted_bytes(Tensor indices, int dim, bool descending, bool? stable) -> (Tensor, Tensor)",
    _sorted_bytes,
    inlined=True,
)


def _sort(node: Node, args: Arguments) -> Node | None:
    """Insert the sort of bytes for one of indices."""
    if not _chain(node):
        return None
    made = node.graph.call_function(sorted_bytes, (args["input"], args["dim"], args["descending"], args.get("stable")))
    return made if node.target in SORT else node.graph.call_function(operator.getitem, (made, 1))


def _place(node: Node) -> list[Node]:
    """Return the nodes from what gives the indices to their sort, and those that take one of several results."""
    chain = _chain(node)
    return [*chain, *(user for each in (chain[0], node) for user in each.users if user.target is operator.getitem)]


def _chain(node: Node) -> list[Node]:
    """Return the nodes from what gives indices below 256 to their sort `node`, [] if it sorts something else."""
    chain, each = [node], _input(node)
    while isinstance(each, Node) and each.target in MOVED and _is_long(each):
        chain.append(each)
        each = _input(each)
    if not isinstance(each, Node) or not _is_long(each):
        return []
    chain.append(each)
    if each.target is operator.getitem and each.args[1] == 1 and isinstance(each.args[0], Node):
        chain.append(each := each.args[0])
        if each.target not in TOPK:
            return []
    elif each.target not in PLACES:
        return []
    is_few = _size(each) <= MOST
    return chain[::-1] if is_few and not written_between(each, node, chain[1:]) else []


def _size(node: Node) -> float:
    """Return of how many numbers `node` gives indices, infinity where that is not known."""
    args = arguments_of(node) or {}
    of = example(args.get("input"))
    if of is None:
        return torch.inf
    dim = args["dim"]
    size = of.numel() if dim is None else of.shape[dim] if of.dim() else 1
    return size if isinstance(size, int) else torch.inf


def _is_long(node: Node) -> bool:
    value = example(node)
    return value is not None and value.dtype == torch.int64  # `view` also takes a dtype


def _input(node: Node) -> Argument:
    return (arguments_of(node) or {}).get("input")


sort_bytes = replacing((*SORT, *ARGSORT), _sort, _place)
