"""Sorts of indices below 256, such as the experts that `topk` gives each token, as uint8.

A radix sort on a GPU makes one pass for each byte, and int64 has eight.
"""

import operator

import torch
from torch import Tensor
from torch.fx import Node

from backend_kwargs.graphs.writes import written_between
from backend_kwargs.rewrites.matching import Arguments, calls, define, input_of, read, require, value_of, values_of
from backend_kwargs.rewrites.table import Rewrite, ran
from backend_kwargs.rewrites.traced import replacing

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


def _sort(node: Node, args: Arguments) -> Node:
    """Insert the sort of bytes for one of indices."""
    _chain(node)
    made = node.graph.call_function(sorted_bytes, (args["input"], args["dim"], args["descending"], args.get("stable")))
    return made if node.target in SORT else node.graph.call_function(operator.getitem, (made, 1))


def _place(node: Node) -> list[Node]:
    """Return the nodes from what gives the indices to their sort, and those that take one of several results."""
    chain = _chain(node)
    return [*chain, *(user for each in (chain[0], node) for user in each.users if user.target is operator.getitem)]


def _chain(node: Node) -> list[Node]:
    """Return the nodes from what gives indices below 256 to their sort `node`; raise if it sorts something else."""
    chain = [node, read(node)["input"]]
    while calls(chain[-1], *MOVED) and _is_long(chain[-1]):
        chain.append(read(chain[-1])["input"])
    require(_is_long(chain[-1]))
    if calls(chain[-1], operator.getitem):
        chain.append(input_of(chain[-1]))
        require(chain[-2].args[1] == 1 and calls(chain[-1], *TOPK))
    first = chain[-1]
    require(calls(first, *TOPK, *PLACES))
    args = read(first)
    (of,), dim = values_of(args["input"]), args["dim"]
    size = of.numel() if dim is None else of.shape[dim] if of.dim() else 1
    require(isinstance(size, int) and size <= MOST and not written_between(first, node, chain[1:]))
    return chain[::-1]


def _is_long(node: object) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.int64  # `view` also takes a dtype


sort_bytes = replacing((*SORT, *ARGSORT), _sort, _place)
