"""Which nodes of a graph TVM can have, and the reasons for the others."""

import operator

from torch.fx import GraphModule, Node

from backend_kwargs.compilers.parts import op_name, tensors_of
from backend_kwargs.compilers.tvm.settings import Settings
from backend_kwargs.compilers.tvm.supported import LEFT_TO_ATEN, why_not
from backend_kwargs.errors import error_text


def reasons(gm: GraphModule, settings: Settings) -> dict[Node, str]:
    """Return, for each node that computes tensors, the reason why TVM cannot have it, "" if it can."""
    found: dict[Node, str] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and tensors_of(node):
            found[node] = _why_not(node, settings)
    return found


def unwanted(found: dict[Node, str]) -> list[tuple[str, str]]:
    """Return the operators that TVM cannot have, with reasons other than the option `aten_ops`."""
    own = {node: reason for node, reason in found.items() if reason and node.target is not operator.getitem}
    return [(op_name(node), reason) for node, reason in own.items() if reason != LEFT_TO_ATEN]


def _why_not(node: Node, settings: Settings) -> str:
    try:
        return why_not(node, settings)
    except Exception as error:  # noqa: BLE001 - TVM may raise any exception; such a node runs in eager
        return error_text(error)
