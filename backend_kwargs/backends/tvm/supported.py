"""Which operators TVM does not get."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import fx

from backend_kwargs.graphs.parts import names_of, tensors_of

REASONS: dict[str, tuple[str, ...]] = {
    "reads memory by strides": ("as_strided", "as_strided_copy", "as_strided_scatter", "view.dtype", "view_copy.dtype"),
    "its memory is uninitialised": (
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    ),
    "several sources may meet in one element": (
        "embedding_dense_backward",
        "index_add",
        "index_put",
        "index_reduce",
        "masked_scatter",
        "scatter",
        "scatter_add",
        "scatter_reduce",
    ),
    "TVM's sort orders equal elements and nan differently": (
        "kthvalue",
        "median",
        "mode",
        "nanmedian",
        "sort",
        "topk",
        "unique_consecutive",
    ),
    "a running result has no parallel loop": ("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp"),
    "eager raises if an index is out of bounds": ("embedding", "gather", "index", "index_select"),
    "ATen's algorithm is far better than a plain loop": ("convolution_backward",),
}
DENIED = {op: reason for reason, ops in REASONS.items() for op in ops}
PRODUCTS = ("mm", "addmm", "bmm", "convolution")
# If 'aten_ops' is None: TVM has no library for these, and a vendor's is much faster than generated loops.
ATEN_OPS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("_scaled_dot_product_flash_attention_for_cpu",),
    "cuda": (
        *PRODUCTS,
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
    ),
}
# Of a product on a CPU, beyond which oneDNN is better; a smaller one is fused with its neighbours.
MOST_FLOPS, MOST_CONVOLUTION_FLOPS = 4e6, 2.5e5


def aten_ops(node: fx.Node) -> tuple[str, ...]:
    """Return the operators that are left to ATen where `node` is, unless the user names others."""
    result = tensors_of(node)[0]
    left = ATEN_OPS.get(result.device.type, ())
    most = MOST_CONVOLUTION_FLOPS if "convolution" in names_of(node) else MOST_FLOPS
    return (*left, *PRODUCTS) if result.device.type == "cpu" and _flops(node, result) > most else left


def _flops(node: fx.Node, result: torch.Tensor) -> float:
    """Return the operations of a product or a convolution, and 0 for other nodes."""
    name = next((name for name in names_of(node) if name in PRODUCTS), None)
    if name is None:
        return 0.0
    shapes = [each.meta["val"].shape for each in node.all_input_nodes]
    if name == "convolution":
        return 2.0 * _size(result.shape) * _size(shapes[1][1:])
    return 2.0 * _size(result.shape) * _size(shapes[-2 if len(shapes) > 1 else -1][-1:])


def _size(shape: Iterable[int | torch.SymInt]) -> int:
    """Return the number of elements of a shape."""
    # The hint of a symbol, since a comparison of the symbol would guard, and recompile for other sizes.
    return math.prod(size if isinstance(size, int) else int(size.node.hint or 1) for size in shape)
