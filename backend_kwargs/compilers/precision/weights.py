"""Weights in lower precision, made once of each parameter, and made again when the parameter has changed."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch._dynamo.source import AttrSource
from torch._guards import Source
from torch.fx import GraphModule, Node
from torch.utils.weak import WeakIdKeyDictionary

Make = Callable[[torch.Tensor], torch.Tensor]

# By parameter, then by precision: graphs of other shapes, and the candidates of a race, share what was made. Weak, so
# that a weight lives as long as a graph that holds it.
_made: "WeakIdKeyDictionary[dict[str, ref[Weight]]]" = WeakIdKeyDictionary()  # type: ignore[type-arg]
_lock = threading.Lock()


@dataclass(eq=False)
class Weight:
    """A parameter in another precision; `state` is where and of which version the parameter was when it was made."""

    tensor: torch.Tensor
    make: Make
    state: tuple[int, int]

    def follow(self, parameter: torch.Tensor) -> None:
        """Compute it again, in the same memory, if the parameter has changed."""
        state = parameter.data_ptr(), parameter._version
        if state == self.state:
            return
        with _lock:
            if state != self.state:
                _copy(self.tensor, _of(parameter, self.make))
                self.state = state

    @property
    def nbytes(self) -> int:
        """The bytes that it holds beside the parameter."""
        return sum(part.nbytes for part in _parts(self.tensor))


def weight_of(parameter: torch.Tensor, precision: str, make: Make) -> Weight:
    """Return the parameter in `precision`, as made before where that is alive, of the parameter's values now."""
    known: dict[str, ref[Weight]] = _made.setdefault(parameter, {})  # type: ignore[no-untyped-call]
    found = known[precision]() if precision in known else None
    if found is None:
        state = parameter.data_ptr(), parameter._version
        found = Weight(_of(parameter, make), make, state)
        known[precision] = ref(found)
    found.follow(parameter)
    return found


def _of(parameter: torch.Tensor, make: Make) -> torch.Tensor:
    # No inference tensor comes of it, which could not be changed in place later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return make(parameter.detach())


def _copy(old: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode(mode=False), torch.no_grad():
        for into, part in zip(_parts(old), _parts(new), strict=True):
            into.copy_(part)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of: a quantised one has values and scales."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


@dataclass
class Held:
    """The weights that a graph holds in place of parameters: which input each follows."""

    positions: dict[int, list[Weight]] = field(default_factory=dict)

    def add(self, position: int, weight: Weight) -> None:
        """Let `weight` follow the input at `position`."""
        known = self.positions.setdefault(position, [])
        if weight not in known:
            known.append(weight)

    def follow(self, inputs: Sequence[Any]) -> None:
        """Compute again what changed."""
        for position, weights in self.positions.items():
            parameter = inputs[position]
            for weight in weights:
                weight.follow(parameter)

    @property
    def nbytes(self) -> int:
        """The bytes of all."""
        return sum(weight.nbytes for weights in self.positions.values() for weight in weights)


def source_of(placeholder: Node, precision: str) -> Source:
    """Return a source for what is made of a parameter: AOTAutograd needs a different one for each attribute."""
    return AttrSource(placeholder._dynamo_source, f"in_{precision.replace('-', '_')}")  # type: ignore[attr-defined]


def unused_placeholders(gm: GraphModule, positions: Sequence[int]) -> list[int]:
    """Erase the placeholders at `positions` that nothing uses any more; return the positions left."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    gone = {at for at in positions if not placeholders[at].users}
    for at in gone:
        gm.graph.erase_node(placeholders[at])
    return [at for at in range(len(placeholders)) if at not in gone]
