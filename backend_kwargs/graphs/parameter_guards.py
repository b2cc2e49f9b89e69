"""Guards on the parameters that a graph's code depends on: identity, and for constants their memory and versions.

dynamo's own guard on identity has a weak reference to each parameter, which `torch.utils.swap_tensors` refuses, and a
list of parameters would keep them alive. A guard here has the parameters' ids, and the dictionaries in which modules
have them. Once one of these modules is freed, dynamo drops the guards and the graph's code.

In-place changes are noticed by version counters, and a norm's statistics by the counter of its batches. What counts no
version is not noticed: changes through `.data`, by fused optimizers, of inference tensors, and of statistics that are
given to `torch.nn.functional.batch_norm` directly. One function compares all addresses and counters, since a call into
Python for each parameter costs three times as much.
"""

import copy
import operator
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, get_verbose_code_parts
from torch._dynamo.source import DictGetItemSource, LocalSource, UnspecializedNNModuleSource
from torch._dynamo.source import UnspecializedParamBufferSource as ParameterSource
from torch._guards import CompileContext, Guard, Source, TracingContext

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
        self.versions = [parameters[source]._version for source in counted]
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
        modules = {source.base.base: builder.get(source.base.base) for source in owned}  # type: ignore[attr-defined]
        by_id = {source: id(module) for source, module in modules.items()}
        for source, identity in (by_id | dict(zip(self.sources, self.ids, strict=True))).items():
            words = get_verbose_code_parts(f"___check_obj_id({source.name}, {identity})", guard)
            builder.get_guard_manager_from_source(source).add_id_match_guard(identity, words, guard.user_stack)
        for root in filter(None, map(_root, modules)):
            # dynamo counts towards its limit only the code for the same module.
            builder.id_matched_objs[root.base.local_name] = weakref.ref(builder.get(root))  # type: ignore[attr-defined]
        self.slots = [builder.get(source.base) for source in owned], [source.index for source in owned]  # type: ignore[attr-defined]
        counted = [
            owner for owner, name in [*zip(*self.slots, strict=True)][: len(self.versions)] if name in STATISTICS
        ]
        self.norms = [owner for owner in counted if torch.is_tensor(owner.get(BATCHES))]
        self.batches = [owner[BATCHES]._version for owner in self.norms]
        if self.constants:
            words = get_verbose_code_parts(f"{len(self.ids)} parameters are unchanged", guard)
            # After all other guards, so that the modules are the guarded ones.
            root_manager: Any = builder.guard_manager.root  # its annotation for a function is wrong
            root_manager.add_epilogue_lambda_guard(self.is_unchanged, words, guard.user_stack)
        for module in modules.values():
            weakref.finalize(module, _drop, weakref.ref(self)).atexit = False
        for each in _outdated(self.current()):
            each.drop("parameters changed")
        self.manager, self.check = weakref.ref(builder.guard_manager), weakref.ref(builder.check_fn_manager)
        vars(builder.guard_manager).setdefault("codes_on_parameters", []).append(self)
        _codes[id(self)] = self

    def current(self) -> list[Any]:
        """Return what the modules have in the places of the parameters."""
        return [*map(dict.get, *self.slots)]

    def is_unchanged(self, _: object = None) -> bool:
        """Return whether the parameters are in the same memory, with the same versions."""
        # In the hot path: about 0.2 µs for each parameter, of which reading its address takes half.
        values = [*map(operator.getitem, *self.slots)]
        return (
            [*map(torch.Tensor.data_ptr, values)] == self.addresses
            and [value._version for value in values[: len(self.versions)]] == self.versions
            and [owner[BATCHES]._version for owner in self.norms] == self.batches
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
        dropped, entry, manager, check = DeletedGuardManagerWrapper(reason), self.entry(), self.manager(), self.check()
        # The entry stays in dynamo's list. It counts towards the limit, unless it is for another object.
        dropped.id_matched_objs = {"": weakref.ref(_Code)}
        _codes.pop(id(self), None)
        self.slots, self.norms, self.storages = ([], []), [], []
        if entry is not None:
            manager.extra_state.invalidate(entry, dropped)
        if check is not None:  # dynamo keeps it for each function whose identity it guards, after a reset too
            check.guard_manager = dropped


_codes: "weakref.WeakValueDictionary[int, _Code]" = weakref.WeakValueDictionary()


def guard_parameters(parameters: Mapping[Source, torch.Tensor], constants: Collection[Source] = ()) -> None:
    """Recompile if a source refers to another object; with `constants`, also if a parameter has other memory.

    In-place changes of the constants recompile too. The graph's code is freed with the first module that has one of the
    parameters.
    """
    code = _Code(parameters, constants)
    TracingContext.get().guards_context.dynamo_guards.add(code.sources[0].make_guard(code.guard))


def why_not_constants(parameters: Mapping[Source, torch.Tensor]) -> str:
    """Return why parameters should stay inputs, so that one graph serves all later calls; "" if they need not."""
    compile_id, values = CompileContext.current_compile_id(), [*parameters.values()]
    if compile_id is None:
        return ""
    outdated, limit = _outdated(values), config.recompile_limit - RESERVED
    if (changes := 1 + max((each.changes for each in outdated), default=-1)) >= limit:
        for each in outdated:
            each.drop("parameters changed")
        return f"they have changed {changes} times"
    if (compile_id.frame_compile_id or 0) >= config.accumulated_recompile_limit // 2:
        return f"dynamo has compiled {compile_id.frame_compile_id} graphs of this function"
    sharing = sum(each.function == _function() and each.entry() is not None for each in _all_codes())
    if sharing >= limit and not all(is_parameter_source(each) and _root(each.base.base) for each in parameters):  # type: ignore[attr-defined]
        return f"{sharing} other graphs of this function have constants"
    return ""


def dropping_guards() -> Callable[[], None]:
    """Return a function that drops the guards that are added from now on, for when nothing was frozen after all."""
    if (context := TracingContext.try_get()) is None:
        return lambda: None
    guards = context.guards_context.dynamo_guards
    before = copy.copy(guards.inner)

    def drop() -> None:
        guards.inner = before

    return drop


def is_parameter_source(source: Source | None) -> bool:
    """Return whether a source is a parameter or buffer of a module."""
    # `_dynamo_static_input_type` would also match tensors marked with mark_static_address() and plain tensor attributes
    # of modules; both may change in place between calls.
    return isinstance(source, DictGetItemSource) and isinstance(source.base, ParameterSource)


def _function() -> int | None:
    """Return the number of the function that dynamo compiles."""
    compile_id = CompileContext.current_compile_id()
    return compile_id.frame_id if compile_id else None


def _all_codes() -> list[_Code]:
    # A copy of the references, made in one step: other threads add codes, and a collection in any loop drops some.
    return [code for each in _codes.valuerefs() if (code := each()) is not None]


def _outdated(values: Sequence[object]) -> list[_Code]:
    return [each for each in _all_codes() if each.entry() is not None and each.is_outdated(values)]


def _root(source: Source) -> Source | None:
    """Return the source of the module in a local variable from which `source` comes, None if there is no such."""
    while hasattr(source, "base"):
        if isinstance(source.base, LocalSource):
            return source if isinstance(source, UnspecializedNNModuleSource) else None
        source = source.base
    return None


def _drop(code: "weakref.ref[_Code]") -> None:
    if (alive := code()) is not None:
        alive.drop("a module that has one of its parameters was freed")
