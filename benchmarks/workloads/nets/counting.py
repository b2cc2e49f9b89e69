"""The minimum work of a network: operations, counted on the meta device, and bytes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.workloads.case import Unit

UNITS: dict[torch.dtype, Unit] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def unit(dtype: torch.dtype) -> Unit:
    """Return the unit that multiplies matrices of `dtype`."""
    return UNITS.get(dtype, "fp32")


def made(make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Make a network where it will run, ready for inference."""
    with device:
        return make().to(dtype).eval()


@torch.no_grad()
def traced(make: Callable[[], nn.Module], args: tuple[Any, ...]) -> tuple[float, int]:
    """Return the operations of one call's matrix products and convolutions, and the bytes of its result.

    Nothing is computed. Attention counts in full, whatever its mask.
    """
    shapes = pytree.tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), args)
    dtype = next(
        (leaf.dtype for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_floating_point()),
        torch.bfloat16,
    )
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        outputs = make().to(dtype).eval()(*shapes)
    return float(counter.get_total_flops()), nbytes(outputs)


def nbytes(*trees: Any) -> int:
    """Return the bytes of the tensors of pytrees and of modules' parameters, each tensor once."""
    leaves = (tree.parameters() if isinstance(tree, nn.Module) else pytree.tree_leaves(tree) for tree in trees)
    tensors = {id(leaf): leaf for some in leaves for leaf in some if isinstance(leaf, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())
