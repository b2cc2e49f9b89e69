"""Which operators TVM does not get."""

from collections.abc import Mapping

from torch import fx

from backend_kwargs.backends.part_compiler import work
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
    "ATen's algorithm is far better than a plain loop": (
        "avg_pool2d_backward",
        "avg_pool3d_backward",
        "convolution_backward",
        "max_pool2d_with_indices_backward",
    ),
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
MOST_FLOPS, MOST_CONVOLUTION_FLOPS = 1e6, 2.5e5


def aten_ops(node: fx.Node) -> tuple[str, ...]:
    """Return the operators that are left to ATen where `node` is, unless the user names others."""
    device, names = tensors_of(node)[0].device.type, names_of(node)
    most = MOST_CONVOLUTION_FLOPS if "convolution" in names else MOST_FLOPS
    large = device == "cpu" and not set(PRODUCTS).isdisjoint(names) and work(node) > most
    return (*ATEN_OPS.get(device, ()), *(PRODUCTS if large else ()))
