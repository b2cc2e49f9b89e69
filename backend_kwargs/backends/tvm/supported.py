"""Which operators TVM gets: which are decomposed, to those of core ATen but for a few, and which stay in eager."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import fx

from backend_kwargs.backends.part_compiler import work
from backend_kwargs.graphs.layouts import Decompositions
from backend_kwargs.graphs.parts import names_of, tensors_of
from backend_kwargs.torch_internals.decompositions import core_aten_decompositions, get_decompositions
from backend_kwargs.torch_internals.operators import name_of

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


# ---- decompositions

aten = torch.ops.aten
# Core ATen keeps these whole; they are decomposed, since TVM fuses the parts.
DECOMPOSED = (
    aten.elu,
    aten.gelu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten._log_softmax,
    aten.native_layer_norm,
    aten.native_group_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.slice_scatter,
    aten._softmax,
)
# Decomposed, these read by indices, which TVM does not get: some may be out of bounds.
WITHIN_BOUNDS = frozenset({"_unsafe_index", "roll"})
# Decomposed, it adds one element after the other.
ADDS_UP = frozenset({"index_add"})
# Decomposed, these draw other random numbers than eager.
RANDOM = frozenset({"bernoulli", "native_dropout", "rrelu_with_noise", "rrelu_with_noise_functional"})
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
# Decomposed, its logsumexp is wrong, which the backward pass reads.
WRONG_IN_TRAINING = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})


def decompositions(kept: Collection[str] = (), trains: bool = False) -> Decompositions:
    """Return the decompositions, except for operators in `kept`, by name, and those that TVM gets whole."""
    kept = {*kept, *WITHIN_BOUNDS, *ADDS_UP, *RANDOM, *(WRONG_IN_TRAINING if trains else ())}
    table = {**core_aten_decompositions(), **get_decompositions(DECOMPOSED)}
    table[ATTENTION] = partial(_attention, table[ATTENTION])
    return {op: rule for op, rule in table.items() if name_of(op).removeprefix("aten::") not in kept}


def _attention(
    rule: Callable[..., tuple[torch.Tensor, ...]], query: torch.Tensor, *args: object, **kwargs: object
) -> tuple[torch.Tensor, ...]:
    """Decompose attention, with the strides of the query for the result, as in eager: users view it."""
    result, *rest = rule(query, *args, **kwargs)
    if query.stride(1) < query.stride(2):
        return result.transpose(1, 2).contiguous().transpose(1, 2), *rest
    return result.contiguous(), *rest
