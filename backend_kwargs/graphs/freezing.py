"""Give Inductor parameters to freeze: dynamo passes them as inputs, and Inductor freezes only attributes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch.fx import GraphModule, Node
from torch.nn import Parameter

from backend_kwargs.errors import warn_once
from backend_kwargs.graphs.parameter_guards import guard_parameters, why_not_constants
from backend_kwargs.graphs.writes import (
    STAYS_INPUT,
    by_memory,
    copy_of_graph,
    is_plain,
    may_be_written,
    replace_by_attribute,
    written_inputs,
    written_memory,
)
from backend_kwargs.torch_internals.fx import source_of, sources_of_attributes
from backend_kwargs.torch_internals.guards import Source, is_parameter_source, is_tracing

CompileGm = Callable[[GraphModule, Sequence[object]], Callable[..., object]]

# The key of the FX-graph cache has only the shape of most frozen tensors, while Inductor writes 0-dimensional ones into
# the code as numbers, and its C++ GEMM keeps packed weights in the entry. So a hit gave one module another's weights
# (observed on 2.13, also with plain Inductor and a global `freezing`; the code is the same from 2.11 to 2.15).
UNCACHED: Mapping[str, bool] = MappingProxyType({"fx_graph_cache": False, "fx_graph_remote_cache": False})


def compile_frozen(gm: GraphModule, example_inputs: Sequence[object], compile_gm: CompileGm) -> Callable[..., object]:
    """Call `compile_gm` on `gm` with its parameters as attributes; return a callable that takes all of `gm`'s inputs.

    For use inside dynamo's call of a backend, with grad disabled; `compile_gm` sets Inductor's `freezing` and UNCACHED.
    Each parameter is guarded by identity, memory and version: another module, and any change but a write through
    `.data`, recompiles. After several changes parameters stay inputs, so that one graph serves all values.
    """
    frozen_gm, kept = reattach_parameters(gm, example_inputs)
    if frozen_gm is gm:
        return compile_gm(gm, example_inputs)
    return taking_all_inputs(compile_gm(frozen_gm, [example_inputs[i] for i in kept]), kept)


def reattach_parameters(gm: GraphModule, example_inputs: Sequence[object]) -> tuple[GraphModule, list[int]]:
    """Return a copy of `gm` with the lifted parameters as attributes, and the positions of the remaining inputs.

    Returns `gm` itself if there are none.
    """
    lifted = freezable_parameters(gm, example_inputs)
    if lifted and (why := why_not_constants(by_source(gm, lifted))):
        warn_once(f"Parameters stay inputs of a graph, so nothing in it is frozen: {why}.")
        lifted = {}
    if not lifted:
        return gm, list(range(len(example_inputs)))
    only_read = only_read_parameters(gm, lifted)
    guard_parameters(by_source(gm, lifted), constants=by_source(gm, only_read))
    frozen_gm = copy_of_graph(gm)
    placeholders = frozen_gm.graph.find_nodes(op="placeholder")
    for position, value in lifted.items():
        # The code keeps another tensor of the same memory and version counter, so that the parameter can be freed, and
        # swapped by `torch.utils.swap_tensors`.
        aliased = position in only_read and not value.is_inference()
        kept = value.detach().requires_grad_(value.requires_grad) if aliased else value
        _make_attribute(frozen_gm, placeholders[position], kept, isinstance(value, Parameter))
    frozen_gm.recompile()
    return frozen_gm, [i for i in range(len(placeholders)) if i not in lifted]


def freezable_parameters(gm: GraphModule, example_inputs: Sequence[object]) -> dict[int, torch.Tensor]:
    """Return the lifted parameters that can become constants, by position.

    There are none outside dynamo, where nothing guards their identity, and if inputs share memory that the graph
    writes, which Inductor's own freezing handles wrongly.
    """
    lifted = lifted_parameters(gm, example_inputs) if is_tracing() else {}
    return {} if lifted and _writes_shared_memory(gm, example_inputs) else lifted


def only_read_parameters(gm: GraphModule, lifted: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return those of the parameters that the graph does not write."""
    placeholders, written = gm.graph.find_nodes(op="placeholder"), written_memory(gm.graph)
    return {at: value for at, value in lifted.items() if not may_be_written(placeholders[at], written)}


def by_source(gm: GraphModule, lifted: Mapping[int, torch.Tensor]) -> dict[Source, torch.Tensor]:
    """Return inputs by dynamo's sources in place of positions, without those that have none."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    sources = ((source_of(placeholders[position]), value) for position, value in lifted.items())
    return {source: value for source, value in sources if source is not None}


def lifted_parameters(gm: GraphModule, example_inputs: Sequence[object]) -> dict[int, torch.Tensor]:
    """Return the parameters and buffers that dynamo made inputs of `gm`, by position."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {
        position: value
        for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if is_parameter_source(source_of(node)) and _can_freeze(value) and STAYS_INPUT not in node.meta
    }


def _can_freeze(value: object) -> TypeGuard[torch.Tensor]:
    # Not fake tensors (DDPOptimizer: nothing to freeze yet), nor subclasses (DTensor, quantized).
    return is_plain(value) and not value.is_meta


def _writes_shared_memory(gm: GraphModule, example_inputs: Sequence[object]) -> bool:
    # AOTAutograd puts a common base before all inputs, while Inductor's freeze() counts parameters from the front.
    several = [shared for shared in by_memory(example_inputs) if len(shared) > 1]
    written = written_inputs(gm, example_inputs) if several else set()
    return any(shared & written for shared in several)


def _make_attribute(gm: GraphModule, placeholder: Node, value: torch.Tensor, is_parameter: bool) -> None:
    """Make an input an attribute of `gm` with this value, for which dynamo's source of it holds."""
    name = unused_name(gm, placeholder.name)
    if is_parameter:
        gm.register_parameter(name, value if isinstance(value, Parameter) else Parameter(value, value.requires_grad))
    else:
        gm.register_buffer(name, value)
    source = source_of(placeholder)
    assert source is not None  # it is a parameter's
    sources_of_attributes(gm)[name] = source
    replace_by_attribute(placeholder, name)


def unused_name(gm: GraphModule, name: str) -> str:
    """Return a name that no attribute of a graph has."""
    while hasattr(gm, name):
        name += "_"
    return name


def taking_all_inputs(compiled: Callable[..., object], kept: Sequence[int]) -> Callable[..., object]:
    """Return `compiled`, which takes the inputs at the positions `kept`, as a callable that takes all of them."""

    # This wrapper is in the hot path. Unused placeholders instead would lose their static status in Inductor's
    # freeze(): CUDA graphs would copy every weight at each replay, and Inductor would process them in Python at each
    # call.
    @functools.wraps(compiled)
    def call(*inputs: object) -> object:
        return compiled(*[inputs[i] for i in kept])

    return call
