"""Inductor's results for a graph, found in the closures of the callable that it returned."""

import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from backend_kwargs.rewrites.table import find_rewrite

# Comments have line numbers of the model and a running graph number, which differ between equal codes.
COMMENT = re.compile(r"^\s*(?:#(?!include|define|pragma|if|endif|else)|//).*\n", re.MULTILINE)


def compiled_graphs(compiled: Callable[..., Any] | None) -> list[Any]:
    """Return the CompiledFxGraphs in the result of `compile_fx`, none if another compiler made it."""
    from torch._inductor.output_code import CompiledFxGraph

    return [each for each in _held(compiled) if isinstance(each, CompiledFxGraph)]


def autograd_functions(compiled: Callable[..., Any]) -> list[type[Any]]:
    """Return the autograd functions that AOTAutograd made for a result of `compile_fx`; no other result uses them."""
    import torch

    return [each for each in _held(compiled) if isinstance(each, type) and issubclass(each, torch.autograd.Function)]


def rewritten_in(compiled: Callable[..., Any] | None, names: Iterable[str]) -> dict[str, int]:
    """Return how often each of the rewrites `names` replaced something, less those that did nothing.

    They are found as calls of its operators in the code, or as attributes of wrappers of Inductor's result.
    """
    if not (names := tuple(names)):
        return {}
    text = "\n".join(comparable(graph.source_code) for graph in compiled_graphs(compiled))
    found = {}
    for name in names:
        # Python code calls an operator, C++ code names it to the dispatcher.
        calls = [each.split("::") for each in find_rewrite(name).operators]
        spelled = [rf'torch\.ops\.{space}\.{name}(?:\.\w+)?\(|"{space}::{name}"' for space, name in calls]
        found[name] = len(re.findall("|".join(spelled), text)) if spelled else 0
    for each in _held(compiled):
        found |= getattr(each, "rewritten", {})
    return {name: count for name, count in found.items() if count}


def rewrite_costs_in(compiled: Callable[..., Any] | None) -> dict[str, str]:
    """Return the memory and time that rewrites take in addition, for those that tell."""
    found: dict[str, str] = {}
    for each in _held(compiled):
        found |= getattr(each, "rewrite_costs", {})
    return found


def comparable(source: str) -> str:
    """Return generated code without the parts that differ between equal codes."""
    return COMMENT.sub("", source)


def _held(root: Any) -> Iterator[Any]:
    """Yield the callables that make up a compiled one: closures, attributes, bound and partial arguments.

    A backward graph that was compiled lazily is found in its autograd function.
    """
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not callable(each):
            continue
        seen[id(each)] = each
        yield each
        waiting.extend(reversed([*_parts(each)]))


def _parts(each: Any) -> Iterable[Any]:
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


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
