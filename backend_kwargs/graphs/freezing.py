"""Give Inductor parameters to freeze: dynamo passes them as inputs, and Inductor freezes only attributes.

The parameters that a graph's code depends on are guarded: their identity, and for constants their memory and versions.
A step of a fused optimizer changes no version, so that guards miss it; `CopyOfParameters` is told by a hook.
"""

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from backend_kwargs.errors import warn_once
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
from backend_kwargs.torch_internals.dynamo import (
    Guard,
    GuardBuilder,
    Source,
    add_guard,
    compile_id,
    config,
    count_for_one_module,
    guard_identity,
    guard_last,
    invalidate,
    is_parameter_source,
    is_tracing,
    module_of,
    root_of,
    source_of,
    sources_of_attributes,
    table_and_name,
)
from backend_kwargs.torch_internals.tensors import version_of

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


# dynamo compiles a function `recompile_limit` times. So many graphs remain for code with parameters as inputs, which
# serves all modules: one, and another once sizes vary.
RESERVED = 2
# A norm in training moves its statistics without counting versions, but counts its batches in another buffer.
STATISTICS, BATCHES = ("running_mean", "running_var"), "num_batches_tracked"


class _Code:
    """The code of a graph that depends on parameters; dynamo's guards of the graph keep this object alive."""

    def __init__(self, parameters: Mapping[Source, torch.Tensor], constants: Collection[Source]) -> None:
        # Those with versions first. All is read before the values are, since another thread may change these meanwhile.
        counted = [source for source in parameters if source in constants and not parameters[source].is_inference()]
        self.sources = [*dict.fromkeys([*counted, *parameters])]
        values = [parameters[source] for source in self.sources]
        self.constants, self.function, self.ids = bool(constants), _function(), [*map(id, values)]
        self.addresses = [value.data_ptr() for value in values]
        self.versions = [version_of(parameters[source]) for source in counted]
        # Kept alive, since new memory could get the old address.
        self.storages = [value.untyped_storage() for value in values] if constants else []
        self.changes: int = 1 + max((each.changes for each in _outdated(values)), default=-1)
        self.norms, self.batches = [], []  # type: list[dict[str, Any]], list[int]
        self.slots: tuple[list[dict[str, Any]], list[str]] = [], []
        self.manager: Callable[[], Any] = lambda: None
        self.check: Callable[[], Any] = lambda: None

    def guard(self, builder: GuardBuilder, guard: Guard) -> None:
        """Add all guards to those that `builder` makes, and drop the code of the parameters' former values."""
        owned = [source for source in self.sources if is_parameter_source(source)]
        modules = {source: builder.get(source) for source in map(module_of, owned)}
        by_id = {source: id(module) for source, module in modules.items()}
        for source, identity in (by_id | dict(zip(self.sources, self.ids, strict=True))).items():
            guard_identity(builder, guard, source, identity)
        for root in filter(None, map(root_of, modules)):
            count_for_one_module(builder, root)
        places = [*map(table_and_name, owned)]
        self.slots = [builder.get(table) for table, _ in places], [name for _, name in places]
        counted = [
            owner for owner, name in [*zip(*self.slots, strict=True)][: len(self.versions)] if name in STATISTICS
        ]
        self.norms = [owner for owner in counted if torch.is_tensor(owner.get(BATCHES))]
        self.batches = [version_of(owner[BATCHES]) for owner in self.norms]
        if self.constants:
            guard_last(builder, guard, self.is_unchanged, f"one of {len(self.ids)} parameters changed")
        for module in modules.values():
            weakref.finalize(module, _drop, weakref.ref(self)).atexit = False
        for each in _outdated(self.current()):
            each.drop("parameters changed")
        self.manager, self.check = weakref.ref(builder.guard_manager), weakref.ref(builder.check_fn_manager)
        vars(builder.guard_manager).setdefault("codes_on_parameters", []).append(self)
        _codes[id(self)] = self

    def current(self) -> list[object]:
        """Return what the modules have in the places of the parameters."""
        return [*map(dict.get, *self.slots)]

    def is_unchanged(self, _: object = None) -> bool:
        """Return whether the parameters are in the same memory, with the same versions."""
        # In the hot path: about 0.2 µs for each parameter, of which reading its address takes half.
        values = [*map(operator.getitem, *self.slots)]
        return (
            [*map(torch.Tensor.data_ptr, values)] == self.addresses
            and [*map(version_of, values[: len(self.versions)])] == self.versions
            and [version_of(owner[BATCHES]) for owner in self.norms] == self.batches
        )

    def is_outdated(self, values: Sequence[object]) -> bool:
        """Return whether the code is for the function and modules of `values`, but for other values of theirs."""
        current = [*map(id, self.current())]
        if self.function != _function() or {*current} != {*map(id, values)}:
            return False
        return current != self.ids or (self.constants and not self.is_unchanged())

    def entry(self) -> Any:
        """Return the entry of dynamo's cache that has the code, None if there is none (any more)."""
        manager = self.manager()
        return None if manager is None else manager.cache_entry

    def drop(self, reason: str) -> None:
        """Make dynamo free the code and its guards."""
        entry, manager, check = self.entry(), self.manager(), self.check()
        _codes.pop(id(self), None)
        self.slots, self.norms, self.storages = ([], []), [], []
        dropped = invalidate(entry, manager, reason)
        if check is not None:  # dynamo keeps it for each function whose identity it guards, after a reset too
            check.guard_manager = dropped


_codes: "weakref.WeakValueDictionary[int, _Code]" = weakref.WeakValueDictionary()


def guard_parameters(parameters: Mapping[Source, torch.Tensor], constants: Collection[Source] = ()) -> None:
    """Recompile if a source refers to another object; with `constants`, also if a parameter has other memory.

    In-place changes of the constants recompile too. The graph's code is freed with the first module that has one of the
    parameters.
    """
    code = _Code(parameters, constants)
    add_guard(code.sources[0], code.guard)


def why_not_constants(parameters: Mapping[Source, torch.Tensor]) -> str:
    """Return why parameters should stay inputs, so that one graph serves all later calls; "" if they need not."""
    current, values = compile_id(), [*parameters.values()]
    if current is None:
        return ""
    outdated, limit = _outdated(values), config.recompile_limit - RESERVED
    if (changes := 1 + max((each.changes for each in outdated), default=-1)) >= limit:
        for each in outdated:
            each.drop("parameters changed")
        return f"they have changed {changes} times"
    if (current.frame_compile_id or 0) >= config.accumulated_recompile_limit // 2:
        return f"dynamo has compiled {current.frame_compile_id} graphs of this function"
    sharing = sum(each.function == _function() and each.entry() is not None for each in _all_codes())
    if sharing >= limit and not all(is_parameter_source(each) and root_of(module_of(each)) for each in parameters):
        return f"{sharing} other graphs of this function have constants"
    return ""


def _function() -> int | None:
    """Return the number of the function that dynamo compiles."""
    current = compile_id()
    return current.frame_id if current else None


def _all_codes() -> list[_Code]:
    # A copy of the references, made in one step: other threads add codes, and a collection in any loop drops some.
    return [code for each in _codes.valuerefs() if (code := each()) is not None]


def _outdated(values: Sequence[object]) -> list[_Code]:
    return [each for each in _all_codes() if each.entry() is not None and each.is_outdated(values)]


def _drop(code: "weakref.ref[_Code]") -> None:
    if (alive := code()) is not None:
        alive.drop("a module that has one of its parameters was freed")


_lock = threading.Lock()
_copies: "weakref.WeakSet[CopyOfParameters]" = weakref.WeakSet()
_hooks: list[object] = []


class CopyOfParameters:
    """Something made of parameters, which is `stale` once a fused optimizer has changed one of them."""

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch the steps of fused optimizers of these parameters, instead of others."""
        self.stale = False
        self.ids = frozenset(map(id, parameters))
        with _lock:
            _copies.add(self)
            if not _hooks:
                _hooks.append(register_optimizer_step_post_hook(_note_step))


@torch.compiler.disable  # type: ignore[untyped-decorator,unused-ignore]
def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    fused = (group["params"] for group in optimizer.param_groups if group.get("fused"))
    changed = {id(parameter) for parameters in fused for parameter in parameters}
    if changed:
        with _lock:
            for each in _copies:
                each.stale = each.stale or not changed.isdisjoint(each.ids)
