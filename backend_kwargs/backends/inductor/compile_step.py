"""The function that compiles a graph once options are final: Inductor's `compile_fx`, or a replacement set here."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Called like compile_fx, with compile_fx itself as the first argument.
stand_in: ContextVar[Callable[..., Any] | None] = ContextVar("stand_in", default=None)

_lowered: ContextVar[tuple[list[Any], Callable[[], None]] | None] = ContextVar("_lowered", default=None)


@contextmanager
def noting_lowered(then: Callable[[], None] = lambda: None) -> Iterator[list[Any]]:
    """Yield a list to which each graph that Inductor lowers meanwhile is added, as a copy; `then` is called then."""
    found: list[Any] = []
    token = _lowered.set((found, then))
    try:
        yield found
    finally:
        _lowered.reset(token)


def noted(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """Return `inner_compile`, which records its graphs inside `noting_lowered`."""
    if (noting := _lowered.get()) is None:
        return inner_compile
    found, then = noting

    def compile_one(gm: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch.fx import GraphModule

        spare = GraphModule(gm, copy.deepcopy(gm.graph))
        spare.meta = dict(gm.meta)
        found.append(spare)
        then()
        return inner_compile(gm, example_inputs, **kwargs)

    return compile_one
