"""Rewrites of dynamo's graph, before autograd: what one returns, and compiling with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.rewrites import find_rewrite, resolved

CompileGm = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def _as_it_is(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


@dataclass(frozen=True, slots=True)
class Change:
    """A graph that replaces dynamo's, with its inputs.

    `count` is the number of replacements and `bytes` the memory traffic that they save. `wrap` turns the compiled graph
    into a callable that takes the inputs of dynamo's graph.
    """

    gm: GraphModule
    example_inputs: Sequence[Any]
    count: int
    bytes: float = 0.0
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = field(default=_as_it_is)


def compile_rewritten(
    gm: GraphModule, example_inputs: Sequence[Any], names: Sequence[str], compile_gm: CompileGm
) -> Callable[..., Any]:
    """Compile `gm` after the rewrites `names` of dynamo's graphs."""
    wraps = []
    for name in names:
        rewrite = find_rewrite(name)
        change = resolved(rewrite.traced)(gm, example_inputs) if rewrite.traced else None
        if change is not None:
            gm, example_inputs = change.gm, change.example_inputs
            wraps.append(change.wrap)
    compiled = compile_gm(gm, example_inputs)
    for wrap in reversed(wraps):
        compiled = wrap(compiled)
    return compiled
