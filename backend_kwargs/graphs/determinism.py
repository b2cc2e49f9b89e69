"""Operators whose results may differ between two runs of equal code, unless torch's deterministic algorithms are on."""

import os
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.errors import BackendKwargsError
from backend_kwargs.torch_internals.tensors import OpOverload


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# From the list of torch.use_deterministic_algorithms, by the names that AOTAutograd's graphs have: those that write to
# the same place in an order that differs, or choose an algorithm.
ANYWHERE = _names(
    "index_put index_put_ _index_put_impl_ _unsafe_index_put _unsafe_masked_index_put_accumulate put put_ index_add "
    "index_add_ index_copy index_copy_ index_reduce scatter_add scatter_add_ scatter_reduce scatter_reduce_ "
    "embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward"
)
ON_CUDA = _names(
    "convolution convolution_backward cumsum bincount histc kthvalue median grid_sampler_2d_backward "
    "grid_sampler_3d_backward adaptive_avg_pool2d_backward _adaptive_avg_pool2d_backward "
    "_adaptive_avg_pool3d_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool3d_backward "
    "max_pool3d_with_indices_backward max_unpool2d max_unpool3d fractional_max_pool2d_backward "
    "fractional_max_pool3d_backward reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward upsample_linear1d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward nll_loss2d_forward "
    "_ctc_loss_backward segment_reduce _segment_reduce_backward _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward "
    "_flash_attention_backward _efficient_attention_backward"
)
TENSORS_WRITTEN = frozenset({"scatter.src", "scatter_.src"})  # a number written twice is the same number
WORKSPACES = (":4096:8", ":16:8")  # with which cuBLAS promises equal bits
ATOMIC = ("atomic_add(", "atomic_add_vec<")  # in Triton's code and in C++
ASK = "call torch.use_deterministic_algorithms(True) before compiling, which reproducible='pinned' asks for"


def check_deterministic(gm: GraphModule) -> None:
    """Raise if a lowered graph may give other bits in another run of the same code, naming what does."""
    if any(_device(node) == "cuda" for node in gm.graph.nodes):
        check_libraries()
    if torch.are_deterministic_algorithms_enabled():
        return
    if name := next(_undetermined(gm), ""):
        raise BackendKwargsError(f"{name!r} may compute in another order in each run: {ASK}.")


def check_no_atomics(code: str) -> None:
    """Raise if generated code adds atomically, in an order that differs between runs."""
    if any(each in code for each in ATOMIC):
        raise BackendKwargsError(f"The code that Inductor generates for a graph adds atomically: {ASK}.")


def check_libraries() -> None:
    """Raise if cuBLAS or cuDNN may compute otherwise in each run."""
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        raise BackendKwargsError(
            "cuBLAS may compute otherwise in each run: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts."
        )
    if torch.backends.cudnn.benchmark:
        raise BackendKwargsError("cuDNN times its kernels: set torch.backends.cudnn.benchmark = False.")


def _undetermined(gm: GraphModule) -> Iterator[str]:
    """Yield the operators of a graph and of the graphs in it that are determined only by deterministic algorithms."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            _, name, overload = str(node.target).split(".")
            written = name in ANYWHERE or f"{name}.{overload}" in TENSORS_WRITTEN
            bitwise = torch.Tag.nondeterministic_bitwise in node.target.tags
            if written or bitwise or (name in ON_CUDA and _device(node) == "cuda"):
                yield str(node.meta.get("original_aten") or node.target)  # as it was before it was decomposed
        elif node.op == "get_attr" and isinstance(inner := getattr(gm, str(node.target), None), GraphModule):
            yield from _undetermined(inner)


def _device(node: Node) -> str:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return first.device.type if isinstance(first, torch.Tensor) else ""
