"""The results of a part: new torch tensors, with the strides that they have in eager."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.compilers.engines.engine import Run


def results_of_part(part: GraphModule) -> list[Node]:
    """Return the nodes that a part returns."""
    result: Any = part.graph.output_node().args[0]
    return list(result) if isinstance(result, tuple | list) else [result]


def finished(run: Run, part: GraphModule, observed: Collection[int]) -> Callable[..., Any]:
    """Return a callable of `run` with the results of `part`; those at `observed` get eager's strides."""
    single = not isinstance(part.graph.output_node().args[0], tuple | list)
    values = [node.meta["val"] for node in results_of_part(part)]
    orders = {i: order for i in observed if (order := _order(values[i]))}

    def call(*args: Any) -> Any:
        outputs = run(args)
        for i, (order, inverse) in orders.items():
            outputs[i] = outputs[i].permute(order).contiguous().permute(inverse)
        return outputs[0] if single else outputs

    return call


def fixed_sizes(node: Node) -> tuple[int, ...] | None:
    """Return the sizes of a node's result, or None if one is symbolic."""
    shape = node.meta["val"].shape
    return tuple(shape) if all(isinstance(size, int) for size in shape) else None


def dense(value: Any) -> Any:
    """Return an argument in the form that engines read: contiguous, detached, without a pending negation."""
    if not isinstance(value, torch.Tensor):
        return torch.tensor(int(value))
    if value.is_contiguous() and not (value.requires_grad or value.is_neg()):
        return value
    return value.detach().resolve_neg().contiguous()


def _order(value: torch.Tensor) -> tuple[list[int], list[int]] | None:
    """Return the permutation from slowest to fastest dimension in memory and its inverse; None if already in order."""
    strides = [stride if isinstance(stride, int) else int(stride.node.hint) for stride in value.stride()]
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return None if order == [*range(value.dim())] else (order, [order.index(dim) for dim in range(value.dim())])
