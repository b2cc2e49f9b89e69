"""Rewrites of dynamo's graph, before autograd sees it: what one gives, and how it joins the compile."""

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
    """Another graph in place of dynamo's, with its inputs.

    `count` is how often something was replaced, `bytes` the memory traffic that this saves, `saved_s` further seconds,
    and `wrap` makes of the compiled graph what takes the inputs of dynamo's.
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
