"""A lowered graph as bytes that a worker can read, or the reason why it cannot be sent."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from backend_kwargs.backends import Inputs
from backend_kwargs.errors import error_text
from backend_kwargs.rewrites.table import find_rewrite, list_rewrites
from backend_kwargs.torch_internals.lowered_graphs import UnportableError, sent_graph

OURS = "backend_kwargs::"  # operators that the modules of our rewrites define


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """A lowered graph as bytes, with the rewrites whose operators it calls; or why it cannot be sent."""

    data: bytes = b""
    rewrites: tuple[str, ...] = ()
    refused: str = ""


def packed(
    gm: GraphModule, example_inputs: Inputs, kwargs: Mapping[str, Any], rewrites: Sequence[str] = ()
) -> PackedGraph:
    """Make bytes of what `compile_fx_inner(gm, example_inputs, **kwargs)` gets, before that call changes the graph.

    `rewrites` have changed dynamo's graph: a worker needs their operators. It takes some hundredths of a second,
    changes nothing, and never raises: `refused` says why a graph stays here.
    """
    owners = {operator: name for name in list_rewrites() for operator in find_rewrite(name).operators}
    called = dict.fromkeys(rewrites)

    def known(operator: str) -> bool:
        if name := owners.get(operator):
            called[name] = None
        return operator in owners or (bool(rewrites) and operator.startswith(OURS))

    try:
        data = sent_graph(gm, example_inputs, kwargs, known)
    except UnportableError as error:
        return PackedGraph(refused=str(error))
    except Exception as error:  # noqa: BLE001 - torch may raise anything, and the race goes on without workers
        return PackedGraph(refused=f"it cannot be sent: {error_text(error)}")
    return PackedGraph(data, tuple(called))
