"""Inductor's results for a graph, found in the closures of the callable that it returned.

They are not facts that a compile returns: a graph that AOTAutograd's cache has passes no function of ours, and a
backward graph may be compiled long after the forward one.
"""

import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from backend_kwargs.facts import Call, CompileFacts

if TYPE_CHECKING:
    from backend_kwargs.torch_internals.inductor_code import CompiledFxGraph

Operators = Mapping[str, Collection[str]]

# Comments have line numbers of the model and a running graph number, which differ between equal codes.
COMMENT = re.compile(r"^\s*(?:#(?!include|define|pragma|if|endif|else)|//).*\n", re.MULTILINE)


def compiled_graphs(compiled: Call | None) -> "list[CompiledFxGraph]":
    """Return the CompiledFxGraphs in the result of `compile_fx`, none if another compiler made it."""
    from backend_kwargs.torch_internals.inductor_code import CompiledFxGraph

    return [each for each in _held(compiled) if isinstance(each, CompiledFxGraph)]


def autograd_functions(compiled: Call) -> list[type[Any]]:
    """Return the autograd functions that AOTAutograd made for a result of `compile_fx`; no other result uses them."""
    from backend_kwargs.torch_internals.functorch import is_autograd_function

    return [each for each in _held(compiled) if isinstance(each, type) and is_autograd_function(each)]


def rewrites_made(compiled: Call | None, facts: CompileFacts, operators: Operators) -> dict[str, int]:
    """Return how often each rewrite replaced something, less those that did nothing.

    Those of dynamo's graph are facts of the compile; those of lowered graphs are found as calls of their `operators`,
    the names of each rewrite's as "namespace::name".
    """
    text = "\n".join(comparable(graph.source_code) for graph in compiled_graphs(compiled)) if operators else ""
    counts = {name: len(re.findall("|".join(map(_call, names)), text)) for name, names in operators.items() if names}
    counts |= {name: each.count for name, each in facts.rewrites.items()}
    return {name: count for name, count in counts.items() if count}


def _call(operator: str) -> str:
    """Return a pattern of a call of an operator: Python code calls it, C++ code names it to the dispatcher."""
    space, name = operator.split("::")
    return rf'torch\.ops\.{space}\.{name}(?:\.\w+)?\(|"{space}::{name}"'


def comparable(source: str) -> str:
    """Return generated code without the parts that differ between equal codes."""
    return COMMENT.sub("", source)


def _held(root: object) -> Iterator[object]:
    """Yield the callables that make up a compiled one: closures, attributes, bound and partial arguments.

    A backward graph that was compiled lazily is found in its autograd function.
    """
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not callable(each):
            continue
        seen[id(each)] = each
        yield each
        waiting.extend(reversed([*_parts(each)]))


def _parts(each: object) -> Iterable[object]:
    import torch

    if isinstance(each, functools.partial):
        return [each.func, *each.args]
    if isinstance(each, types.MethodType | types.BuiltinMethodType):  # such as apply() of an autograd function
        return [each.__self__, getattr(each, "__func__", None)]
    if isinstance(each, torch.fx.GraphModule):  # with compiled regions, or not compiled at all
        return [node.target for node in each.graph.nodes if isinstance(node.target, types.FunctionType)]
    if isinstance(each, torch.nn.Module | torch.Tensor | types.ModuleType):
        return []
    if isinstance(each, types.FunctionType):
        return [*map(_content, each.__closure__ or ()), *vars(each).values()]
    of_torch = type(each).__module__.startswith("torch.") and hasattr(each, "__dict__")
    return list(vars(each).values()) if of_torch else []


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
