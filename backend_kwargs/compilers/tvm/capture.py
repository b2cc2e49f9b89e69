"""Capture dynamo's graph as AOTAutograd's forward, backward and inference graphs, in core ATen."""

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import BufferAOTInput, InputMutationAOTOutput, ParamAOTInput
from torch.fx import GraphModule

from backend_kwargs.compilers.layouts import with_eagers_layouts

aten = torch.ops.aten
# Core ATen keeps these whole; they are decomposed, since TVM fuses the parts.
DECOMPOSED = (
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


def capture(
    compile_captured: Callable[..., Any],
    aten_ops: Collection[str],
    freezes: bool,
    gm: GraphModule,
    example_inputs: Sequence[Any],
) -> Callable[..., Any]:
    """Compile each graph of AOTAutograd's with `compile_captured(kind, gm, example_inputs, attributes=None)`.

    `aten_ops` are not decomposed. With `freezes`, an inference graph may use the attributes of `gm` as constants.
    """
    trains = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in example_inputs)
    return aot_autograd(
        fw_compiler=partial(compile_captured, "forward"),
        bw_compiler=partial(compile_captured, "backward"),
        inference_compiler=partial(compile_captured, "inference", attributes=gm if freezes else None),
        decompositions=with_eagers_layouts(
            decompositions({*aten_ops, *RANDOM, *(WRONG_IN_TRAINING if trains else ())})
        ),
        partition_fn=min_cut_rematerialization_partition,
    )(gm, example_inputs)


def decompositions(kept: Collection[str] = ()) -> dict[Any, Callable[..., Any]]:
    """Return the decompositions, except for operators in `kept`, by name, and those that TVM gets whole."""
    kept = {*kept, *WITHIN_BOUNDS, *ADDS_UP}
    table = {**core_aten_decompositions(), **get_decompositions(DECOMPOSED)}
    table[ATTENTION] = partial(_attention, table[ATTENTION])
    return {op: rule for op, rule in table.items() if op._schema.name.removeprefix("aten::") not in kept}


def _attention(rule: Callable[..., Any], query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Decompose attention, with the strides of the query for the result, as in eager: users view it."""
    result, *rest = rule(query, *args, **kwargs)
    if query.stride(1) < query.stride(2):
        return result.transpose(1, 2).contiguous().transpose(1, 2), *rest
    return result.contiguous(), *rest


def constants_of(gm: GraphModule, attributes: GraphModule | None) -> dict[str, torch.Tensor]:
    """Return, by placeholder, the parameters and buffers in `attributes` that the graph does not mutate."""
    if attributes is None:
        return {}
    outputs = gm.graph.output_node().meta.get("desc", ())
    written = {desc.mutated_input for desc in outputs if isinstance(desc, InputMutationAOTOutput)}
    described = {node.name: node.meta.get("desc") for node in gm.graph.find_nodes(op="placeholder")}
    return {
        name: operator.attrgetter(desc.target)(attributes).detach()
        for name, desc in described.items()
        if isinstance(desc, ParamAOTInput | BufferAOTInput) and desc not in written
    }
