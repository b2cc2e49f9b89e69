"""The decompositions of ATen under TVM: those to core ATen, but for a few operators."""

from collections.abc import Callable, Collection
from functools import partial

import torch

from backend_kwargs.graphs.layouts import Decompositions
from backend_kwargs.torch_internals.decompositions import core_aten_decompositions, get_decompositions
from backend_kwargs.torch_internals.operators import name_of

aten = torch.ops.aten
# Core ATen keeps these whole; they are decomposed, since TVM fuses the parts.
DECOMPOSED = (
    aten.elu,
    aten.gelu,
    aten.hardtanh,
    aten.leaky_relu,
    aten.linalg_vector_norm,
    aten.native_layer_norm,
    aten.native_group_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
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
