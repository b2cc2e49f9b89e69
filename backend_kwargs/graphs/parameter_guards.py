"""Guards on the parameters that a graph's code depends on: identity, and for constants their memory and versions.

dynamo's own guard on identity has a weak reference to each parameter, which `torch.utils.swap_tensors` refuses, and a
list of parameters would keep them alive. A guard here has the parameters' ids, and the dictionaries in which modules
have them. Once one of these modules is freed, dynamo drops the guards and the graph's code.

In-place changes are noticed by version counters, and a norm's statistics by the counter of its batches. What counts no
version is not noticed: changes through `.data`, by fused optimizers, of inference tensors, and of statistics that are
given to `torch.nn.functional.batch_norm` directly. One function compares all addresses and counters, since a call into
Python for each parameter costs three times as much.
"""

import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from backend_kwargs.torch_internals import guards
from backend_kwargs.torch_internals.dynamo import accumulated_recompile_limit, recompile_limit
from backend_kwargs.torch_internals.guards import Guard, GuardBuilder, Source
from backend_kwargs.torch_internals.tensors import version_of

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
        owned = [source for source in self.sources if guards.is_parameter_source(source)]
        modules = {source: builder.get(source) for source in map(guards.module_of, owned)}
        by_id = {source: id(module) for source, module in modules.items()}
        for source, identity in (by_id | dict(zip(self.sources, self.ids, strict=True))).items():
            guards.guard_identity(builder, guard, source, identity)
        for root in filter(None, map(guards.root_of, modules)):
            guards.count_for_one_module(builder, root)
        places = [*map(guards.table_and_name, owned)]
        self.slots = [builder.get(table) for table, _ in places], [name for _, name in places]
        counted = [
            owner for owner, name in [*zip(*self.slots, strict=True)][: len(self.versions)] if name in STATISTICS
        ]
        self.norms = [owner for owner in counted if torch.is_tensor(owner.get(BATCHES))]
        self.batches = [version_of(owner[BATCHES]) for owner in self.norms]
        if self.constants:
            guards.guard_last(builder, guard, self.is_unchanged, f"one of {len(self.ids)} parameters changed")
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
        dropped = guards.invalidate(entry, manager, reason)
        if check is not None:  # dynamo keeps it for each function whose identity it guards, after a reset too
            check.guard_manager = dropped


_codes: "weakref.WeakValueDictionary[int, _Code]" = weakref.WeakValueDictionary()


def guard_parameters(parameters: Mapping[Source, torch.Tensor], constants: Collection[Source] = ()) -> None:
    """Recompile if a source refers to another object; with `constants`, also if a parameter has other memory.

    In-place changes of the constants recompile too. The graph's code is freed with the first module that has one of the
    parameters.
    """
    code = _Code(parameters, constants)
    guards.add_guard(code.sources[0], code.guard)


def why_not_constants(parameters: Mapping[Source, torch.Tensor]) -> str:
    """Return why parameters should stay inputs, so that one graph serves all later calls; "" if they need not."""
    current, values = guards.compile_id(), [*parameters.values()]
    if current is None:
        return ""
    outdated, limit = _outdated(values), recompile_limit() - RESERVED
    if (changes := 1 + max((each.changes for each in outdated), default=-1)) >= limit:
        for each in outdated:
            each.drop("parameters changed")
        return f"they have changed {changes} times"
    if (current.frame_compile_id or 0) >= accumulated_recompile_limit() // 2:
        return f"dynamo has compiled {current.frame_compile_id} graphs of this function"
    sharing = sum(each.function == _function() and each.entry() is not None for each in _all_codes())
    if sharing >= limit and not all(
        guards.is_parameter_source(each) and guards.root_of(guards.module_of(each)) for each in parameters
    ):
        return f"{sharing} other graphs of this function have constants"
    return ""


def _function() -> int | None:
    """Return the number of the function that dynamo compiles."""
    current = guards.compile_id()
    return current.frame_id if current else None


def _all_codes() -> list[_Code]:
    # A copy of the references, made in one step: other threads add codes, and a collection in any loop drops some.
    return [code for each in _codes.valuerefs() if (code := each()) is not None]


def _outdated(values: Sequence[object]) -> list[_Code]:
    return [each for each in _all_codes() if each.entry() is not None and each.is_outdated(values)]


def _drop(code: "weakref.ref[_Code]") -> None:
    if (alive := code()) is not None:
        alive.drop("a module that has one of its parameters was freed")
