"""dynamo's guards and sources, and the context in which it traces."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, get_verbose_code_parts
from torch._dynamo.source import (
    AttrSource,
    ConstantSource,
    DictGetItemSource,
    LocalSource,
    UnspecializedNNModuleSource,
    UnspecializedParamBufferSource,
)
from torch._guards import (
    CompileContext,
    CompileId,
    Guard,
    GuardsContext,
    Source,
    TracingContext,
    compile_context,
    tracing,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from backend_kwargs.torch_internals.replacing import restored_by, undone


def compile_id() -> CompileId | None:
    """Return the number of dynamo's compile: of the function (`frame_id`), and for it (`frame_compile_id`)."""
    return CompileContext.current_compile_id()


def compiling_as(number: CompileId | None) -> AbstractContextManager[object]:
    """Let what is made meanwhile belong to that compile."""
    return compile_context(CompileContext(number))


def is_tracing() -> bool:
    """Return whether dynamo traces in this thread."""
    return TracingContext.try_get() is not None


# ---- sources


def is_parameter_source(source: Source | None) -> bool:
    """Return whether a source is a parameter or buffer of a module."""
    # `_dynamo_static_input_type` would also match tensors marked with mark_static_address() and plain tensor attributes
    # of modules; both may change in place between calls.
    return isinstance(source, DictGetItemSource) and isinstance(source.base, UnspecializedParamBufferSource)


def table_and_name(source: Any) -> tuple[Source, str]:
    """Return the source of the dictionary in which a module has a parameter, and the parameter's name there."""
    return source.base, source.index


def module_of(source: Any) -> Source:
    """Return the source of the module that has a parameter."""
    return source.base.base  # type: ignore[no-any-return]


def root_of(source: Source) -> UnspecializedNNModuleSource | None:
    """Return the source of the module in a local variable from which `source` comes, None if there is no such."""
    while hasattr(source, "base"):
        if isinstance(source.base, LocalSource):
            return source if isinstance(source, UnspecializedNNModuleSource) else None
        source = source.base
    return None


# ---- guards


def add_guard(source: Source, add: Callable[[GuardBuilder, Guard], None]) -> None:
    """Have `add` called when dynamo makes the guards of the graph that it traces."""
    TracingContext.get().guards_context.dynamo_guards.add(source.make_guard(add))


def guard_identity(builder: GuardBuilder, guard: Guard, source: Source, identity: int) -> None:
    """Guard that a source has the object with this id, without keeping it alive."""
    words = get_verbose_code_parts(f"___check_obj_id({source.name}, {identity})", guard)
    builder.get_guard_manager_from_source(source).add_id_match_guard(identity, words, guard.user_stack)


def guard_last(builder: GuardBuilder, guard: Guard, holds: Callable[[object], bool], words: str) -> None:
    """Add a guard that is checked after all others, when the modules are the guarded ones."""
    root: Any = builder.guard_manager.root  # its annotation for a function is wrong
    root.add_epilogue_lambda_guard(holds, [words], guard.user_stack)


def count_for_one_module(builder: GuardBuilder, root: UnspecializedNNModuleSource) -> None:
    """Let dynamo count towards its limit only the code for the same module."""
    builder.id_matched_objs[root.base.local_name] = weakref.ref(builder.get(root))  # type: ignore[attr-defined]


def invalidate(entry: object, manager: Any, reason: str) -> DeletedGuardManagerWrapper:
    """Free the code of an entry of dynamo's cache, if there is one; return what stands in place of its guards.

    The entry stays in dynamo's list. It counts towards the limit, unless it is for another object.
    """
    dropped = DeletedGuardManagerWrapper(reason)
    dropped.id_matched_objs = {"": weakref.ref(Guard)}  # an object that no function is called on
    if entry is not None:
        manager.extra_state.invalidate(entry, dropped)
    return dropped


def dropping_guards() -> Callable[[], None]:
    """Return a function that drops the guards that are added from now on, for when nothing was frozen after all."""
    if (context := TracingContext.try_get()) is None:
        return lambda: None
    guards = context.guards_context.dynamo_guards
    before = copy.copy(guards.inner)

    def drop() -> None:
        guards.inner = before

    return drop


def guard_count() -> int:
    """Return the number of guards of the graph that dynamo traces, 0 outside dynamo."""
    context = TracingContext.try_get()
    return len(context.guards_context.dynamo_guards) if context else 0


# ---- the context of a trace


class TracingApart:
    """A context in which another version of the graph that dynamo traces is compiled.

    Guards and AOTAutograd's entries are its own; the same inputs have the same fake tensors. What is changed in the
    shape environment is restored. `adopt` makes it the context of dynamo's trace in the end.
    """

    def __init__(self) -> None:
        self.changed = False  # whether something in the shape environment was
        self._twin = copy.copy(TracingContext.try_get())
        if self._twin is not None:
            self._twin.guards_context = GuardsContext()
            self._twin.fakify_first_call = False  # as DDPOptimizer sets for a graph it compiles again

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Compile in this context; it may be entered again, after it was left."""
        if self._twin is None:
            yield
            return
        with undone() as stack:
            stack.callback(self._keep_shape_env(stack, getattr(self._twin.fake_mode, "shape_env", None)))
            stack.enter_context(tracing(self._twin))
            yield

    def adopt(self) -> None:
        """Add to dynamo's context what was compiled in this one, once it is left."""
        context = TracingContext.try_get()
        if context is None or self._twin is None:
            return
        guards, found = context.guards_context, self._twin.guards_context
        guards.dynamo_guards.update(set(found.dynamo_guards))
        guards.aotautograd_guards += found.aotautograd_guards
        vars(context).update({name: vars(self._twin)[name] for name in vars(context) if name not in OF_THE_TRACE})

    def _keep_shape_env(self, stack: ExitStack, shape_env: ShapeEnv | None) -> Callable[[], None]:
        """Restore the shape environment at the end; return the function that then says whether it was changed."""
        if shape_env is None:
            return lambda: None
        plain = {name: value for name, value in vars(shape_env).items() if isinstance(value, dict | list | set | int)}
        kept = {name: copy.copy(value) for name, value in plain.items()}

        def put_back() -> None:
            # Its caches belong to one version: a simplification under a loser's guards must not be found again.
            vars(shape_env).update({**kept, "_version_counter": shape_env._version_counter + 1})

        def compare() -> None:
            self.changed |= any(vars(shape_env)[name] != kept[name] for name in OF_SIZES if name in kept)

        restored_by(stack, put_back)
        return compare


OF_THE_TRACE = ("guards_context", "fakify_first_call")  # what a context of another version has for itself
# What a shape environment knows of sizes: guards, and symbols with their values, ranges and replacements.
OF_SIZES = ("guards", "var_to_val", "backed_var_to_val", "unbacked_var_to_val", "var_to_range", "replacements")


def without_context() -> AbstractContextManager[object]:
    """Compile a graph that is no part of the one that dynamo traces: its inputs have fake tensors of their own."""
    return tracing(None)


def tracing_apart() -> AbstractContextManager[None]:
    """Compile other versions of the graph that dynamo traces, in a context of their own."""
    return TracingApart().entered()
