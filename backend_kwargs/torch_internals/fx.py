"""What dynamo attaches to its graphs, and how a graph takes its arguments."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch.fx import GraphModule, Node, _lazy_graph_module
from torch.fx.graph import _BoxedCodeGen

if TYPE_CHECKING:
    from torch._guards import Source

# AOTAutograd recognizes a graph of dynamo's by the first two and `meta`; without them it fails, or forgets static
# inputs.
ATTACHED = ("_param_name_to_source", "_source_to_user_stacks", "compile_subgraph_reason")


def source_of(placeholder: Node) -> "Source | None":
    """Return the source of one of dynamo's inputs, None for a node that is no input of dynamo's."""
    return getattr(placeholder, "_dynamo_source", None)


def sources_of_attributes(gm: GraphModule) -> "dict[str, Source]":
    """Return the sources of a graph's attributes by name, which AOTAutograd reads; a new attribute needs one."""
    return gm._param_name_to_source  # type: ignore[return-value]


def hand_on(gm: GraphModule, copied: GraphModule) -> None:
    """Give a copy of one of dynamo's graphs what dynamo attached to the graph and to its inputs."""
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in ATTACHED:
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))


def is_erased(node: Node) -> bool:
    """Return whether a node was erased from its graph."""
    return node._erased


def boxed_forward(gm: GraphModule) -> Callable[[list[object]], object]:
    """Return a graph's call on one list of its arguments, which it empties; the graph itself is changed to it."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return gm.forward


def mark_boxed(call: Callable[..., object]) -> None:
    """Tell AOTAutograd that a callable takes its arguments as one list, and empties it."""
    call._boxed_call = True  # type: ignore[attr-defined]


def dynamos_graph_class() -> AbstractContextManager[None]:
    """Make graphs of the class that dynamo makes, whose code is generated when they are called."""
    return _lazy_graph_module._use_lazy_graph_module(True)
