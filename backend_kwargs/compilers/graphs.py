"""Graphs of dynamo: copying one for a compiler to take over, and which of its inputs it may change."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def may_be_written(placeholder: Node, version: int = 0) -> bool:
    """Tell whether the graph may change this input in place.

    `version` is that of a new fake of the input: above 0 where one of another input has the same memory.
    """
    # Dynamo has run the graph on this fake tensor, and an in-place operator counts up its version. Inference tensors
    # have no version, and a higher-order operator (a Triton kernel) may write without counting.
    fake = placeholder.meta.get("example_value")
    if not isinstance(fake, torch.Tensor) or fake.is_inference() or fake._version > version:
        return True
    return any(isinstance(user.target, torch._ops.HigherOrderOperator) for user in placeholder.users)


def exposes_data(placeholder: Node) -> bool:
    """Tell whether the graph takes `.data` of this input or of a view of it, whose changes no version counts."""
    taken = placeholder.graph.find_nodes(op="call_function", target=torch._C._autograd._get_data_attr)  # type: ignore[attr-defined]
    return any(origin(node) is placeholder for node in taken)


def origin(node: Node, passes: Callable[[Node], bool] = lambda node: True) -> Node:
    """Follow first arguments for as long as `passes` holds."""
    while node.args and isinstance(node.args[0], Node) and passes(node):
        node = node.args[0]
    return node


def copy_of_graph(gm: GraphModule) -> GraphModule:
    """Return a copy that a compiler may take over, with what dynamo hangs on the graph; its attributes are shared."""
    # Dynamo reads the placeholders of its own graph once more after the backend, to generate the call.
    graph: Graph = copy.deepcopy(gm.graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    copied = GraphModule(gm, graph)
    copied.meta = dict(gm.meta)
    # AOTAutograd takes a graph for dynamo's own by these two (beside `meta`), and fails or forgets what is static.
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(copied, name, copy.copy(getattr(gm, name)))
    return copied


def has_memory(value: Any) -> bool:
    """Tell whether `value` is a plain tensor with memory of its own: no fake, no subclass, no sparse one."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_meta
