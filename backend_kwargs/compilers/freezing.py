"""Give Inductor parameters to freeze: dynamo passes them as inputs, and Inductor freezes only attributes."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._dynamo.source import DictGetItemSource, UnspecializedParamBufferSource
from torch._guards import Guard, Source, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from backend_kwargs.compilers.graphs import STAYS_INPUT, copy_of_graph, may_be_written, origin, written_memory

CompileGm = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

# The key of the FX-graph cache has only the shape of most frozen tensors, while Inductor writes 0-dimensional ones into
# the code as numbers, and its C++ GEMM keeps packed weights in the entry. So a hit gave one module another's weights
# (observed on 2.13, also with plain Inductor and a global `freezing`; the code is the same from 2.11 to 2.15).
UNCACHED: Mapping[str, bool] = MappingProxyType({"fx_graph_cache": False, "fx_graph_remote_cache": False})


def compile_frozen(gm: GraphModule, example_inputs: Sequence[Any], compile_gm: CompileGm) -> Callable[..., Any]:
    """Call `compile_gm` on `gm` with its parameters as attributes; return a callable that takes all of `gm`'s inputs.

    For use inside dynamo's call of a backend, with grad disabled; `compile_gm` sets Inductor's `freezing` and UNCACHED.
    Each parameter is guarded by identity and by its memory: another module, a replaced parameter or a replaced `.data`
    recompiles. In-place changes of a frozen tensor outside this graph go unnoticed, as with Inductor's own freezing.
    """
    frozen_gm, kept = reattach_parameters(gm, example_inputs)
    if frozen_gm is gm:
        return compile_gm(gm, example_inputs)
    return _taking_all_inputs(compile_gm(frozen_gm, [example_inputs[i] for i in kept]), kept)


def noting_constants(inner_compile: Callable[..., Any], constants: list[torch.Tensor]) -> Callable[..., Any]:
    """Append to `constants` those that a frozen graph returns directly: each call returns the same memory."""

    def compile_one(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        sources = [
            origin(node, lambda node: getattr(node.target, "is_view", False))
            for node in gm.graph.output_node().all_input_nodes
        ]
        constants.extend(attrgetter(str(node.target))(gm) for node in sources if node.op == "get_attr")
        return inner_compile(gm, example_inputs, **kwargs)

    return compile_one


def reattach_parameters(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, list[int]]:
    """Return a copy of `gm` with the lifted parameters as attributes, and the positions of the remaining inputs.

    Returns `gm` itself if there are none.
    """
    lifted = freezable_parameters(gm, example_inputs)
    if not lifted:
        return gm, list(range(len(example_inputs)))
    frozen_gm = copy_of_graph(gm)
    placeholders = frozen_gm.graph.find_nodes(op="placeholder")
    sources = [_replace_by_attribute(frozen_gm, placeholders[position], value) for position, value in lifted.items()]
    _guard(sources[0].make_guard(_same_memory(list(lifted.values()))))
    frozen_gm.recompile()
    return frozen_gm, [i for i in range(len(placeholders)) if i not in lifted]


def freezable_parameters(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the lifted parameters that can become constants, by position.

    There are none outside dynamo, where nothing guards their identity, and if inputs share memory that the graph
    writes, which Inductor's own freezing handles wrongly.
    """
    lifted = lifted_parameters(gm, example_inputs) if TracingContext.try_get() else {}
    return {} if lifted and _writes_shared_memory(gm, example_inputs) else lifted


def lifted_parameters(gm: GraphModule, example_inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Return the parameters and buffers that dynamo made inputs of `gm`, by position."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return {
        position: value
        for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if _is_parameter_source(getattr(node, "_dynamo_source", None))
        and _can_freeze(value)
        and STAYS_INPUT not in node.meta
    }


def _is_parameter_source(source: Source | None) -> bool:
    # `_dynamo_static_input_type` would also match tensors marked with mark_static_address() and plain tensor attributes
    # of modules; both may change in place between calls.
    return isinstance(source, DictGetItemSource) and isinstance(source.base, UnspecializedParamBufferSource)


def _can_freeze(value: Any) -> bool:
    # The exact types exclude fake tensors (DDPOptimizer: nothing to freeze yet) and subclasses (DTensor, quantized).
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta


def _writes_shared_memory(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    # AOTAutograd puts a common base before all inputs, while Inductor's freeze() counts parameters from the front.
    sharing = defaultdict(list)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided:
            sharing[value.untyped_storage()._cdata].append((node, value))
    several = [shared for shared in sharing.values() if len(shared) > 1]
    written = written_memory(gm.graph) if several else ()
    return any(_any_written(shared, written) for shared in several)


def _any_written(shared: Sequence[tuple[Node, torch.Tensor]], written: Collection[int]) -> bool:
    mode = FakeTensorMode()
    fresh = [(node, mode.from_tensor(value)) for node, value in shared]  # all alive, so that shared memory is detected
    return any(may_be_written(node, written, fake._version) for node, fake in fresh)


def _replace_by_attribute(gm: GraphModule, placeholder: Node, value: torch.Tensor) -> Source:
    source: Source = placeholder._dynamo_source  # type: ignore[attr-defined]
    name = _unused_name(gm, placeholder.name)
    if isinstance(value, torch.nn.Parameter):
        gm.register_parameter(name, value)
    else:
        gm.register_buffer(name, value)
    sources: dict[str, Source] = gm._param_name_to_source  # type: ignore[assignment]
    sources[name] = source
    first: Node = next(node for node in gm.graph.nodes if node.op != "placeholder")
    with gm.graph.inserting_before(first):
        attribute = gm.graph.get_attr(name)
    attribute.meta = {key: value for key, value in placeholder.meta.items() if key != "grapharg"}
    placeholder.replace_all_uses_with(attribute)
    gm.graph.erase_node(placeholder)
    guard_identity(source)
    return source


def _unused_name(gm: GraphModule, name: str) -> str:
    while hasattr(gm, name):
        name += "_"
    return name


def guard_identity(source: Source) -> None:
    """Recompile if `source` refers to another object."""
    _guard(source.make_guard(GuardBuilder.ID_MATCH))


def guard_versions(source: Source, parameters: list[torch.Tensor]) -> None:
    """Recompile once one of `parameters` was changed in place, or its memory replaced."""
    _guard(source.make_guard(_same_memory(parameters, versions=True)))


def _guard(guard: Guard) -> None:
    TracingContext.get().guards_context.dynamo_guards.add(guard)


def dropping_guards() -> Callable[[], None]:
    """Return a function that drops the guards that are added from now on, for when nothing was frozen after all."""
    if (context := TracingContext.try_get()) is None:
        return lambda: None
    guards = context.guards_context.dynamo_guards
    before = copy.copy(guards.inner)

    def drop() -> None:
        guards.inner = before

    return drop


def _same_memory(parameters: list[torch.Tensor], *, versions: bool = False) -> Callable[[GuardBuilder, Guard], None]:
    """Return a guard function that fails once the `.data` of one of `parameters` is replaced.

    With `versions`, also once one is changed in place. One guard for all, since one call into Python per parameter
    would cost three times as much.
    """
    addresses = [parameter.data_ptr() for parameter in parameters]
    counts = [parameter._version for parameter in parameters] if versions else []

    def same_memory(_: Any) -> bool:
        same = [*map(torch.Tensor.data_ptr, parameters)] == addresses
        return same and (not versions or [parameter._version for parameter in parameters] == counts)

    # Kept alive, since new memory could get the old address.
    same_memory.storages = [parameter.untyped_storage() for parameter in parameters]  # type: ignore[attr-defined]

    def frozen_memory(builder: GuardBuilder, guard: Guard) -> None:
        words = get_verbose_code_parts(f"the memory of {len(parameters)} frozen parameters is the same", guard)
        builder.get_guard_manager(guard).add_lambda_guard(same_memory, words, guard.user_stack)

    return frozen_memory


def _taking_all_inputs(compiled: Callable[..., Any], kept: Sequence[int]) -> Callable[..., Any]:
    # This wrapper is in the hot path. Unused placeholders instead would lose their static status in Inductor's
    # freeze(): CUDA graphs would copy every weight at each replay, and Inductor would process them in Python at each
    # call.
    @functools.wraps(compiled)
    def call(*inputs: Any) -> Any:
        return compiled(*[inputs[i] for i in kept])

    return call
