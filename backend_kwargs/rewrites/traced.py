"""Rewrites of dynamo's graph, before autograd: what one returns, and compiling with them."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backend_kwargs.backends import CapturedGraph
from backend_kwargs.errors import wrong_value
from backend_kwargs.facts import Compiled, Replacements
from backend_kwargs.graphs.writes import copy_of_graph, has_transforms, storages_of, written_between
from backend_kwargs.options.requirements import machine, unmet
from backend_kwargs.rewrites import matching
from backend_kwargs.rewrites.matching import AnyNode
from backend_kwargs.rewrites.table import Rewrite, find_rewrite, resolved
from backend_kwargs.torch_internals.modes import is_traceable_wrapper_subclass


def _as_it_is(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


@dataclass(frozen=True, slots=True)
class Change:
    """A graph that replaces dynamo's, with its inputs.

    `count` is the number of replacements and `bytes` the memory traffic that they save. `wrap` turns the compiled graph
    into a callable that takes the inputs of dynamo's graph; `costs` says in words what it adds to each call.
    """

    gm: GraphModule
    example_inputs: Sequence[Any]
    count: int
    bytes: float = 0.0
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = field(default=_as_it_is)
    costs: str = ""


def compile_rewritten(
    graph: CapturedGraph, names: Sequence[str], following: Callable[[CapturedGraph], Compiled]
) -> Compiled:
    """Compile a graph by `following`, after the rewrites `names` of dynamo's graphs."""
    changes: list[Change] = []
    counted: dict[str, Replacements] = {}
    for name in names:
        rewrite = find_rewrite(name)
        if not _works(rewrite, graph.example_inputs):
            continue
        if change := change_by(name, graph.gm, graph.example_inputs):
            graph = replace(graph, gm=change.gm, example_inputs=change.example_inputs)
            changes.append(change)
            if not rewrite.operators:  # nothing in the generated code shows them
                counted[name] = Replacements(change.count, change.costs)
    compiled = following(graph)
    call = compiled.call
    for change in reversed(changes):
        call = change.wrap(call)
    return compiled.called_by(call).knowing(rewrites=counted)


def change_by(name: str, gm: GraphModule, example_inputs: Sequence[Any]) -> Change | None:
    """Return what the rewrite `name` makes of dynamo's graph, or None if it changes nothing."""
    change = resolved(find_rewrite(name).traced)(gm, example_inputs)
    if change is not None and not isinstance(change, Change):
        raise wrong_value(f"The result of rewrite {name!r}", "a Change or None", change)
    return change


def _works(rewrite: Rewrite, example_inputs: Sequence[Any]) -> bool:
    on_gpu = any(getattr(value, "is_cuda", False) for value in example_inputs)
    return bool(rewrite.traced) and not unmet(rewrite.needs, machine()) and (on_gpu or "gpu" not in rewrite.needs)


# ---- shared by these rewrites


def changed(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    may_start: Callable[[AnyNode], bool],
    replace: Callable[[AnyNode], float | None],
) -> Change | None:
    """Return the graph after `replace` of each call that `may_start` a pattern, or None if none was replaced.

    `replace` returns the bytes of memory traffic that it saves, or None if it does not change the node. Operators of
    ours have no rules for `torch.func`'s transforms, nor for subclasses such as DTensor.
    """

    def starts(node: AnyNode) -> bool:
        return may_start(node) and not is_traceable_wrapper_subclass(example(node))

    if not any(map(starts, _calls(gm))) or has_transforms(gm):
        return None
    copied = copy_of_graph(gm)
    saved = [found for node in _calls(copied) if starts(node) and (found := replace(node)) is not None]
    if not saved:
        return None
    # Not eliminate_dead_code: it takes an in-place method whose result is unused, such as a cache's update, for dead.
    copied.graph.lint()
    copied.recompile()
    return Change(copied, example_inputs, len(saved), sum(saved))


def _calls(gm: GraphModule) -> list[AnyNode]:
    return [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


def example(node: Any) -> torch.Tensor | None:
    """Return the fake tensor with which dynamo traced a node, or None."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def changes_meanwhile(node: AnyNode, read: Sequence[AnyNode]) -> bool:
    """Return whether the pattern that ends with `node` may have read other values in `read` than `node` would."""
    pattern: set[AnyNode] = set()
    left = [node]
    while left:
        each = left.pop()
        if each not in pattern and each not in read and storages_of(each.meta.get("example_value")):  # not for sizes
            pattern.add(each)
            left += each.all_input_nodes
    first = node
    while pattern:
        pattern.discard(first)
        first = first.prev
    return written_between(first, node, read)


def replace_by_first(node: AnyNode, call: AnyNode, dtype: torch.dtype) -> None:
    """Replace `node` by the first result of `call`, which has `dtype`, cast to the node's dtype."""
    value = example(node)
    assert value is not None
    with node.graph.inserting_before(node):
        first = node.graph.call_function(operator.getitem, (call, 0))
        if value.dtype != dtype:
            first = node.graph.call_method("to", (first, value.dtype))
    matching.replace(node, first)
