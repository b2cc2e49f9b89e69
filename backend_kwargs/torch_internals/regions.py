"""Regions of a graph that Inductor compiles, each with its own options; torch 2.11 has no names for them.

Options of `torch.compiler.nested_compile_region` would do the same, but torch 2.14 raises without a flag for its tests.
"""

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

from torch.fx import GraphModule


def regional_inductor(argument: str) -> ModuleType | None:
    """Return torch's module for regions, None if it does not read `argument` of a region's annotation."""
    try:
        regional = import_module("torch.fx.passes.regional_inductor")
        known = argument in inspect.getsource(regional)
        return regional if known and hasattr(import_module("torch.fx.traceback"), "annotate_fn") else None
    except ImportError:
        return None


def compile_marked(regional: Any, gm: GraphModule) -> GraphModule:
    """Return a lowered graph with its annotated regions compiled, and the rest as in eager."""
    gm = regional._create_inductor_marked_regions(gm)
    # torch compiles a region with the first annotation that it finds in it; an input has its own region's annotation.
    for module in gm.modules():
        graph = getattr(module, "graph", None)
        for node in graph.find_nodes(op="placeholder") if graph is not None else ():
            node.meta = {key: value for key, value in node.meta.items() if key != "custom"}
    return regional._compile_inductor_marked_regions(gm)  # type: ignore[no-any-return]
