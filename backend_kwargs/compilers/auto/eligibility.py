"""Whether a graph may be raced: run many times, by one rank alone, on copies of its inputs."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule

COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"})
# Of operators in other namespaces, and functions of other modules, nobody knows whether other ranks take part.
OPERATORS = {"aten", "inductor", "mkldnn", "prims", "profiler", "quantized", "quantized_decomposed", "rngprims"}
LOCAL = frozenset({"", "torch", "torch_attn", "higher_order", "_operator", "builtins", "math", *OPERATORS})


def communicates(gm: GraphModule) -> bool:
    """Tell whether other ranks take part in the graph, so that one rank alone cannot run it."""
    return any(_namespace(node.target) in COLLECTIVES for node in _nodes(gm))


def may_communicate(gm: GraphModule) -> bool:
    """Tell whether the graph holds operators that are not torch's own, within which other ranks may take part."""
    return any(_namespace(node.target) not in LOCAL | COLLECTIVES for node in _nodes(gm))


def has_side_effects(gm: GraphModule) -> bool:
    """Tell whether the graph holds operators with a registered effect, printing say: these must run once."""
    from torch._higher_order_ops.effects import has_effects

    return any(has_effects(operator) for node in _nodes(gm) for operator in _overloads(node.target))


def _overloads(target: Any) -> list[Any]:
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]  # type: ignore[no-untyped-call]
    return [target]


def recomputes(gm: GraphModule) -> bool:
    """Tell whether the graph checkpoints activations: in eager its backward pass draws other random numbers."""
    return any(node.target is torch.ops.higher_order.tag_activation_checkpoint for node in _nodes(gm))


def holds_state(gm: GraphModule) -> bool:
    """Tell whether the graph has modules or tensors that are no inputs of it; graphs within it are neither."""
    held = [node for node in _nodes(gm) if node.op in ("call_module", "get_attr")]
    return any(node.op == "call_module" or isinstance(_attribute(node), torch.Tensor) for node in held)


def _attribute(node: Any) -> Any:
    return attrgetter(node.target)(node.graph.owning_module)


def _namespace(target: Any) -> str:
    packet: Any = getattr(target, "overloadpacket", target)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        return packet._qualified_op_name.partition("::")[0]
    module = str(getattr(target, "__module__", None) or "")
    return "c10d" if module.startswith("torch.distributed") else module.partition(".")[0]


def _nodes(gm: GraphModule) -> Iterator[Any]:
    for module in gm.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes
